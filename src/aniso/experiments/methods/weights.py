"""Fine-tuning: the model's own weights, or a LoRA adapter in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from aniso.experiments.methods.method import TrainingMethod, training_metrics
from aniso.experiments.options import OptionInfo, option
from aniso.registry import METHODS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.learn import Adapter


@final
@METHODS.register("weights")
class FineTunedWeights(TrainingMethod):
    """Fine-tune the weights themselves, or a LoRA adapter: what coefficients are compared with."""

    lora: int | None = option(
        None, help="With --method weights: train a LoRA adapter of this rank instead.", group="Method", ge=1
    )
    targets: Literal["attention", "mlp", "both"] = option(
        "both", help="Layers that the LoRA adapter is trained for.", group="Method"
    )

    decay: Literal["weights", "change"] = option(
        "weights",
        help="With --linearised: weight decay acts on the weights, or on their change only.",
        group="Method",
    )

    column = "fine-tuned"

    @classmethod
    def options_for(cls, setting: type[Setting]) -> dict[str, OptionInfo]:
        found = super().options_for(setting)
        linearised = "linearised" in setting.model_fields
        return found if linearised else {k: v for k, v in found.items() if k != "decay"}

    def default_schedule(self, setting: Setting) -> Schedule:
        return setting.fine_tuning_schedule if self.lora is None else setting.lora_schedule

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.lora is not None and setting.is_linearised:
            raise ValueError("a LoRA is trained on the model itself, not on its linearisation")
        if self.lora is not None and setting.head_name is not None:
            raise ValueError("a head knows features of checkpoints and compositions: leave lora or head out")
        if self.targets != "both" and self.lora is None:
            raise ValueError("targets are layers of a LoRA adapter: add lora, its rank")
        if self.decay != "weights" and not setting.is_linearised:
            raise ValueError("decay of the change is for linearised models: add linearised")

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan

        if self.lora is not None:
            return MethodPlan(trainable=self._adapter(session).trained.count)
        return MethodPlan(trainable=sum(block.numel for block in session.model.layout.blocks))

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult
        from aniso.learn import Trainable, tuned_weights

        adapter = None if self.lora is None else self._adapter(session)
        if adapter is not None:
            trained = adapter.trained
        else:
            linearised = session.setting.is_linearised
            trained = Trainable.weights(session.model, linearised=linearised, decay=self.decay)
        done = session.fit(trained)
        return MethodResult(
            lambda task: trained.model,
            training_metrics(done, trained),
            weights=tuned_weights(session.model, trained) if adapter is None else None,
            adapter=adapter,
            fit=done,
        )

    def _adapter(self, session: Session) -> Adapter:
        from aniso.learn import adapter

        assert self.lora is not None
        return adapter(session.model, self.lora, layers=self.targets, seed=session.setting.seed)

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import ADAPTER, METRICS, WEIGHTS

        return (METRICS, WEIGHTS if self.lora is None else ADAPTER)
