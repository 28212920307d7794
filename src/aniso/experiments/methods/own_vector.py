"""Each task with its own vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aniso.experiments.methods.method import Method
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.vectors import Bank


@final
@METHODS.register("vector")
class OwnVector(Method):
    """Add each task's own vector, as fine-tuned: what a composition is compared with."""

    column = "with own vector"
    needs_bank = True

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan

        return MethodPlan(vectors=self.vectors_used(session).names)

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult

        return MethodResult(session.with_own_vector)

    def vectors_used(self, session: Session) -> Bank:
        return session.whole_bank.only(*session.problem.evaluation.tests)
