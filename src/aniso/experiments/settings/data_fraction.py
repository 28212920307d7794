"""A task from a share of its training data, with few or many coefficients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

from aniso.experiments.options import option
from aniso.experiments.settings.adapting import SingleTaskSetting
from aniso.registry import SETTINGS

if TYPE_CHECKING:
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session


@final
@SETTINGS.register("data-fraction")
class DataFraction(SingleTaskSetting):
    """Learn a task from a share of its training data, with as many coefficients as it supports (random:K)."""

    fraction: float = option(1.0, help="Share of the training data; 1 is all.", group="Task", gt=0, le=1)
    keep: Literal["last", "best"] = option(
        "best", help="Epoch to keep: the last, or the best on the validation split.", group="Task"
    )

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.problem import require_split

        task = session.task(self.task)
        train = require_split(task, "train", "training data are taken from")
        part = train if self.fraction == 1 else train.fraction(self.fraction, self.seed)
        return self.single_task_problem(task, part)
