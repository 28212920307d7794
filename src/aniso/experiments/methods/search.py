"""One scale for all task vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aniso.experiments.methods.method import Method
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session


@final
@METHODS.register("search")
class Search(Method):
    """Search one scale for the sum of all vectors on validation data: task arithmetic."""

    column = "one scale"
    needs_bank = True
    chooses = True

    @property
    def composes(self) -> bool:
        return True

    @property
    def shares_work(self) -> bool:
        return True

    def plan(self, session: Session) -> MethodPlan:
        from aniso.compose import Partition
        from aniso.experiments.result import MethodPlan

        return MethodPlan.of_composition(session, session.compose(session.bank, Partition.whole()))

    def run(self, session: Session) -> MethodResult:
        from aniso.compose import Partition
        from aniso.experiments.result import MethodResult
        from aniso.learn import search
        from aniso.records import Metrics

        options = session.options
        composition = session.compose(session.bank, Partition.whole())
        found = search(
            composition,
            session.keep,
            session.problem.scales,
            workers=options.workers,
            progress=options.progress,
        )
        metrics = Metrics(scale=found.scale, history=found.history)
        return MethodResult(lambda task: composition, metrics, found.coefficients)

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import COEFFICIENTS

        return (COEFFICIENTS,)
