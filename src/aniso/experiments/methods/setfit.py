"""SetFit: contrastive fine-tuning of the whole encoder on pairs of shots, then logistic regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from aniso.experiments.methods.method import TrainingMethod, training_metrics
from aniso.experiments.options import option
from aniso.registry import METHODS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.learn import Objective

RECIPE = Schedule(epochs=1, lr=2e-5, batch_size=16, weight_decay=0.01)
"""SetFit's optimiser (Tunstall et al., 2022): one epoch over the pairs, 16 pairs in a batch, AdamW, warm-up
for a tenth of the steps. Its learning rate then falls linearly; ours follows a cosine."""


@final
@METHODS.register("setfit")
class SetFit(TrainingMethod):
    """Fine-tune the encoder on pairs of shots, then fit logistic regression on its features (SetFit)."""

    iterations: int = option(
        20,
        help="SetFit: pairs of each kind, of one class and of two, that are drawn for every shot.",
        group="Method",
        ge=1,
    )
    pairs: Literal["iterations", "oversampling"] = option(
        "iterations",
        help="SetFit: draw pairs at random, or take every pair and repeat those of the rarer kind.",
        group="Method",
    )

    column = "SetFit"

    def default_schedule(self, setting: Setting) -> Schedule:
        return RECIPE

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.is_linearised:
            raise ValueError("SetFit fine-tunes the model itself, not its linearisation")
        if setting.head_name is not None:
            raise ValueError("SetFit has a head of its own, logistic regression: leave head out")
        if self.pairs == "oversampling" and self.iterations != 20:
            raise ValueError("iterations have no effect where every pair is taken: leave one of them out")

    def objective(self, session: Session) -> Objective:
        from aniso.data.pairs import pairs
        from aniso.learn import CosinePairs

        shots, seed = session.shots, session.setting.seed
        drawn = pairs(shots, self.pairs, iterations=self.iterations, seed=seed)
        return CosinePairs(drawn, view=session.setting.head_view) * 1.0

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan

        trainable = sum(block.numel for block in session.model.layout.blocks)
        return MethodPlan(trainable=trainable, notes=("head: logistic regression on the tuned features",))

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.head_fitting import fit_logistic_regression
        from aniso.experiments.result import MethodResult
        from aniso.learn import Last, Trainable, tuned_weights

        trained = Trainable.weights(session.model)
        done = session.fit(trained, keep=Last())
        result = MethodResult(
            lambda task: trained.model,
            training_metrics(done, trained),
            weights=tuned_weights(session.model, trained),
            fit=done,
        )
        return fit_logistic_regression(session, result)

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import HEAD, METRICS, WEIGHTS

        return (METRICS, WEIGHTS, HEAD)
