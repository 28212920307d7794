"""A task taken out of a model, while the rest stays."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from aniso.experiments.settings.setting import Job, PictureSetting, Tasks, require_split
from aniso.learn import CrossEntropy, Lowest, Schedule
from aniso.learn.search import POINTS

_PAPER = {  # learning rate and epochs
    "cars": (5e-3, 20),
    "dtd": (1e-2, 20),
    "eurosat": (5e-3, 3),
    "gtsrb": (5e-3, 5),
    "mnist": (3e-3, 7),
    "resisc45": (2e-3, 10),
    "sun397": (3e-3, 10),
    "svhn": (5e-3, 2),
}


class Negation(PictureSetting):
    """The target's own vector, scaled so that the target is forgotten and the control is not."""

    setting: Literal["negation"] = "negation"
    target: str
    control: str
    floor: float = Field(default=0.95, ge=0, le=1)
    """The control keeps this share of its zero-shot accuracy, on validation data."""

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=5e-3)
    """For tasks that are not the paper's."""

    @model_validator(mode="after")
    def _moves_one_vector(self) -> Self:
        if self.method == "vector":
            raise ValueError("adding the target's vector does not take it out: search, or learn coefficients")
        return self

    def resolved_schedule(self) -> Schedule:
        found = super().resolved_schedule()
        lr, epochs = _PAPER.get(self.target, (None, None))
        if lr is None or epochs is None or self.method == "weights":
            return found
        said = self.schedule
        return replace(found, lr=said.lr or lr, epochs=said.epochs or epochs)

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
