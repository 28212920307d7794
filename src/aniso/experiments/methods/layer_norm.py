"""LayerNorm tuning: the baseline of test-time adaptation."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aniso.experiments.methods.method import TrainingMethod, training_metrics
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.schedule import Schedule


@final
@METHODS.register("layernorm")
class LayerNormTuning(TrainingMethod):
    """Train weights and biases of the layer norms, but for those of the last three layers."""

    column = "layer norms"

    def default_schedule(self, setting: Setting) -> Schedule:
        return setting.layer_norm_schedule

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.is_linearised:
            raise ValueError("layer norms are trained in the model itself, not in its linearisation")

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan
        from aniso.learn import Trainable

        return MethodPlan(trainable=Trainable.layer_norms(session.model).count)

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult
        from aniso.learn import Trainable, tuned_weights

        trained = Trainable.layer_norms(session.model)
        done = session.fit(trained)
        weights = tuned_weights(session.model, trained)
        return MethodResult(
            lambda task: trained.model, training_metrics(done, trained), weights=weights, fit=done
        )

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import METRICS, WEIGHTS

        return (METRICS, WEIGHTS)
