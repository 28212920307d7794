"""A task from a share of its training pictures: parameter-efficient fine-tuning."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from aniso.experiments.settings.setting import BaseSetting, Job, Tasks, others, require_split, tested
from aniso.learn import Best, CrossEntropy, Last, Schedule
from aniso.learn.search import POINTS


class Peft(BaseSetting):
    """As many coefficients as the data can feed: ``partition: random:1200`` has that many for each block."""

    setting: Literal["peft"] = "peft"
    task: str
    fraction: float = Field(default=1.0, gt=0, le=1)
    keep: Literal["last", "best"] = "best"
    view: Literal["few_shot", "train", "eval"] = "few_shot"
    """few_shot crops and mirrors; train crops a little, for digits, letters and the like."""
    leave_out: tuple[str, ...] = Field(default=(), strict=False)

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=1e-1, warmup=0, least_batches=10)

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        train = require_split(task, "train", "pictures are taken from")
        part = train if self.fraction == 1 else train.fraction(self.fraction, self.seed)
        last = self.keep == "last" and self.method != "search"
        return Job(
            tests=tested(task, self.method),
            vectors=lambda names: others(names, task.name, self.leave_out),
            objective=CrossEntropy(part, view=self.view) * 1.0,
            keep=Last() if last else Best(require_split(task, "val", "epochs are chosen by")),
            points=POINTS,
            notes=task.notes,
        )
