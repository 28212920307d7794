"""Learned coefficients: the method of the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from aniso.experiments.methods.composing import ComposingMethod
from aniso.experiments.methods.method import TrainingMethod, training_metrics
from aniso.experiments.options import OptionInfo, option
from aniso.json_value import JsonObject
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.compose import Composition, FactorComposition
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.learn import Fit
    from aniso.records import Metrics
    from aniso.schedule import Schedule


_FACTOR_PARTITIONS = ("blocks", "rows", "columns", "random")


@final
@METHODS.register("coefficients")
class LearnedCoefficients(TrainingMethod, ComposingMethod):
    """Learn one coefficient per vector and block by gradients (aTLAS)."""

    factors: bool = option(
        False,
        help="Learn separate coefficients for the factors A and B of LoRA adapters; writes one adapter.",
        group="Method",
    )
    limit_lr: bool | None = option(
        None,
        help="Lower the learning rate for long vectors; on unless --lr is given.",
        group="Optimiser",
        flags=("--limit-lr/--no-limit-lr",),
        without=False,
    )
    rounds: int = option(
        1,
        help="Learn in rounds: after each, the composed model's difference to the base joins the bank.",
        group="Method",
        ge=1,
        without=1,
    )
    joint: bool = option(
        False,
        help="Learn coefficients and the head tip together, in twice as many epochs by default.",
        group="Head",
    )

    @classmethod
    def options_for(cls, setting: type[Setting]) -> dict[str, OptionInfo]:
        found = super().options_for(setting)
        return found if "head" in setting.model_fields else {k: v for k, v in found.items() if k != "joint"}

    @property
    def learns_head(self) -> bool:
        return self.joint

    @property
    def composes(self) -> bool:
        return not self.factors

    @property
    def shares_work(self) -> bool:
        return not self.factors

    def check(self, setting: Setting) -> None:
        super().check(setting)
        rule = self.partition.partition(":")[0]
        if self.factors and (rule not in _FACTOR_PARTITIONS or setting.is_linearised):
            raise ValueError(
                "factors take partition blocks, rows, columns or random:K, and no linearised model"
            )
        if self.rounds > 1 and (self.factors or self.joint or setting.is_online):
            raise ValueError("rounds are not supported with factors, joint or online")
        if self.rounds > 1 and rule == "components":
            raise ValueError(
                "rounds are not supported with partition components: differences to the base are not stored "
                "as factors"
            )
        if self.joint and setting.head_name != "tip":
            raise ValueError("joint learning is for the head tip: add head tip, or leave joint out")
        if self.start is not None and (self.factors or self.joint):
            raise ValueError("a start is not supported with factors or joint: leave one of them out")
        if self.rounds > 1 and (self.start is not None or self.stay_near):
            raise ValueError("rounds are not supported with start or stay_near: leave one of them out")
        if self.stay_near and self.factors:
            raise ValueError("stay_near is not supported with factors: leave one of them out")

    @property
    def _limits_rate(self) -> bool:
        return self.schedule.lr is None if self.limit_lr is None else self.limit_lr

    def spec(self, setting: Setting) -> JsonObject:
        return {**super().spec(setting), "limit_lr": self._limits_rate}

    def session_schedule(self, session: Session) -> tuple[Schedule, str | None]:
        from aniso.learn import limit_learning_rate

        schedule = self.resolved_schedule(session.setting)
        if not self._limits_rate:
            return schedule, None
        return limit_learning_rate(schedule, session.composed_bank, session.model)

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan

        planned = self._composition(session)[0] if self.factors else self.planned_composition(session)
        plan = MethodPlan.of_composition(session, planned)
        if self.rounds == 1:
            return plan
        return replace(plan, notes=(*plan.notes, f"{self.rounds} rounds, each with all of these steps"))

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult

        if self.joint:
            return self._with_head(session)
        stored = session.stored_coefficients()
        if stored is not None:
            return stored
        composition, factors = self._composition(session)
        done, metrics = self._fitted(session, composition)
        if factors is not None:
            return MethodResult(lambda task: composition, metrics, adapter=factors.adapter(), fit=done)
        return MethodResult(lambda task: composition, metrics, composition.coefficients, fit=done)

    def _fitted(self, session: Session, composition: Composition) -> tuple[Fit, Metrics]:
        """Learn the coefficients in one round or several; the metrics have the rows of all of them."""
        from aniso.learn import Trainable, rounds_of

        fits: list[Fit] = []
        for number, model in enumerate(rounds_of(composition, self.rounds), 1):
            trained = Trainable.coefficients(model.prepare())  # damaged vectors are found before training
            fits.append(session.fit(trained, round_number=number))
            metrics = training_metrics(fits[-1], trained)
        if self.rounds == 1:
            return fits[0], metrics
        rows = [row.with_values(round=number) for number, one in enumerate(fits, 1) for row in one.history]
        notes = tuple(note for one in fits for note in one.notes)
        if len(fits) < self.rounds:
            notes += (f"{len(fits)} of {self.rounds} rounds: no coefficient differs from 0",)
        return replace(fits[-1], notes=notes), metrics.with_values(history=tuple(rows))

    def _composition(self, session: Session) -> tuple[Composition, FactorComposition | None]:
        """A composition of whole updates, or of adapters' factors, which becomes an adapter."""
        if not self.factors:
            return self.composition(session), None
        from aniso.compose import FactorComposition

        partition = self.resolved_partition(session.setting.seed)
        factors = FactorComposition.of(
            session.model, session.bank, partition, runtime=session.options.runtime
        )
        return factors.composition, factors

    def _with_head(self, session: Session) -> MethodResult:
        """Coefficients and a head that starts from the base's features of the shots, learned together."""
        from aniso.experiments.head_fitting import joint_head
        from aniso.experiments.result import MethodResult
        from aniso.learn import Trainable
        from aniso.records import HeadSummary

        composition, factors = self._composition(session)
        head = joint_head(session)
        trained = Trainable.coefficients(composition).with_head(head)
        done = session.fit(trained)
        summary = HeadSummary(kind=head.kind, trainable=head.count)
        metrics = training_metrics(done, trained).model_copy(update={"head": summary})
        return MethodResult(
            lambda task: composition,
            metrics,
            None if factors is not None else composition.coefficients,
            adapter=None if factors is None else factors.adapter(),
            head=head,
            fit=done,
        )

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import ADAPTER, COEFFICIENTS, METRICS

        return (METRICS, ADAPTER if self.factors else COEFFICIENTS, *self.start_outputs())
