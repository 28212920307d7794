"""Coefficients from losses alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aniso.experiments.methods.composing import ComposingMethod
from aniso.experiments.options import option
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session


@final
@METHODS.register("gradient-free")
class GradientFree(ComposingMethod):
    """Learn coefficients from losses alone, with an evolution strategy."""

    evaluations: int = option(
        500, help="Gradient-free: how many times the loss is evaluated.", group="Method", ge=1
    )
    parallel: int = option(
        1, help="Gradient-free: evaluations at once, each in its own thread.", group="Method", ge=1
    )

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan

        return MethodPlan.of_composition(session, self.planned_composition(session))

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult
        from aniso.learn import evolve
        from aniso.records import Metrics

        composition, options = self.composition(session), session.options
        done = evolve(
            composition,
            session.objective,
            evaluations=self.evaluations,
            parallel=self.parallel,
            keep=session.keep,
            start=session.start,
            seed=session.setting.seed,
            workers=options.workers,
            progress=options.progress,
            look_done=options.epoch_done,
        )
        metrics = Metrics(
            kept_look=done.kept,
            evaluations=done.history[-1].evaluations,
            history=done.history,
            trainable=composition.values.numel(),
        )
        return MethodResult(lambda task: composition, metrics, composition.coefficients)

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import COEFFICIENTS

        return (COEFFICIENTS, *self.start_outputs())
