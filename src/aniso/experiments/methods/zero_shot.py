"""The base model as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aniso.experiments.methods.method import Method
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session


@final
@METHODS.register("none")
class ZeroShot(Method):
    """Change nothing: zero-shot, or a head on the base's features."""

    column = "accuracy"
    changes_model = False

    def plan(self, session: Session) -> MethodPlan:
        from aniso.experiments.result import MethodPlan

        return MethodPlan()

    def run(self, session: Session) -> MethodResult:
        from aniso.experiments.result import MethodResult

        return MethodResult(lambda task: session.model)
