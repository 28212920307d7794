"""A task from a share of its training pictures: parameter-efficient fine-tuning."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from aniso.experiments.settings.setting import BaseSetting, Job, Tasks, require_split
from aniso.learn import Best, CrossEntropy, Last, Schedule


class Fraction(BaseSetting):
    """As many coefficients as the data can feed: ``partition: random:1200`` has that many for each block."""

    setting: Literal["fraction"] = "fraction"
    task: str
    fraction: float = Field(default=1.0, gt=0, le=1)
    keep: Literal["last", "best"] = "best"
    leave_out: tuple[str, ...] = Field(default=(), strict=False)

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=1e-1, warmup=0, least_batches=10)

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        train = require_split(task, "train", "pictures are taken from")
        part = train if self.fraction == 1 else train.fraction(self.fraction, self.seed)
        last = self.keep == "last" and self.method != "search"
        absent = {task.name, *self.leave_out}
        return Job(
            tests={task.name: require_split(task, "test", "results are measured on")},
            vectors=lambda names: [name for name in names if name not in absent],
            objective=CrossEntropy(part, view="few_shot") * 1.0,
            keep=Last() if last else Best(require_split(task, "val", "epochs are chosen by")),
            points=tuple(i / 20 for i in range(21)),
            notes=task.notes,
        )
