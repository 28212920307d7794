"""Several tasks in one model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from aniso.errors import UsageError
from aniso.experiments.settings.setting import Job, PictureSetting, Tasks, require_split
from aniso.learn import Best, CoefficientNorm, CrossEntropy, Objective, Schedule
from aniso.learn.search import POINTS


class Addition(PictureSetting):
    """The tasks' own vectors, composed so that the sum of the tasks' losses on validation data is least."""

    setting: Literal["addition"] = "addition"
    tasks: tuple[str, ...] = Field(min_length=1, strict=False)
    norm: float = Field(default=0.0, ge=0)
    """Weight of the coefficients' 1-norm; the paper's figures use 0.5."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Of each validation split, to learn and to choose by."""

    usual: ClassVar[Schedule] = Schedule(epochs=20, lr=1e-3)

    def job(self, tasks: Tasks) -> Job:
        found = [tasks(ref) for ref in self.tasks]
        names = [task.name for task in found]
        if len(set(names)) < len(names):
            raise UsageError("USAGE", "a task is named twice", found=", ".join(names), fix="name each once")
        val = {task.name: require_split(task, "val", "scales are learned on") for task in found}
        if self.fraction < 1:
            val = {
                name: replace(s.fraction(self.fraction, self.seed), name=s.name) for name, s in val.items()
            }
        test = {task.name: require_split(task, "test", "results are measured on") for task in found}
        objective = Objective(tuple((1.0, CrossEntropy(split)) for split in val.values()))
        if self.norm and self.method == "coefficients":
            objective += self.norm * CoefficientNorm(1)
        return Job(
            tests=test,
            vectors=lambda present: names,
            objective=objective,
            keep=Best(*val.values()),
            points=POINTS,
            own_vectors=self.bank is not None,
            notes=tuple(note for task in found for note in task.notes),
        )
