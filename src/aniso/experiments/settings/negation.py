"""A task taken out of a model, while the rest stays."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from aniso.experiments.settings.setting import BaseSetting, Job, Tasks, require_split
from aniso.learn import CrossEntropy, Lowest, Schedule
from aniso.learn.search import POINTS


class Negation(BaseSetting):
    """The target's own vector, scaled so that the target is forgotten and the control is not."""

    setting: Literal["negation"] = "negation"
    target: str
    control: str
    floor: float = Field(default=0.95, ge=0, le=1)
    """The control keeps this share of its zero-shot accuracy, on validation data."""

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=5e-3)

    def job(self, tasks: Tasks) -> Job:
        target, control = tasks(self.target), tasks(self.control)
        val = [require_split(task, "val", "scales are learned on") for task in (target, control)]
        test = {t.name: require_split(t, "test", "results are measured on") for t in (target, control)}
        return Job(
            tests=test,
            vectors=lambda present: [name for name in (target.name,) if name in present],
            objective=CrossEntropy(val[1]) - CrossEntropy(val[0]),
            # a search tries all its scales; learning that has once gone too far is not going to return
            keep=Lowest(val[0], val[1], self.floor, stop=self.method != "search"),
            points=tuple(0.0 - point for point in POINTS),
            notes=(*target.notes, *control.notes),
        )
