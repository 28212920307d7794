"""A new task from a few labelled pictures of each class."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from aniso.experiments.settings.setting import BaseSetting, Job, Tasks, others, require_split, tested
from aniso.learn import Best, CrossEntropy, Last, Schedule
from aniso.learn.search import POINTS


class FewShot(BaseSetting):
    """k pictures of every class; the task's own vector, and others that are named, are left out."""

    setting: Literal["few-shot"] = "few-shot"
    task: str
    shots: int = Field(default=16, ge=1)
    allow_fewer_shots: bool = False
    keep: Literal["last", "best"] = "last"
    """best chooses the epoch on the validation split, as the paper's tables do."""
    view: Literal["few_shot", "train", "eval"] = "few_shot"
    """few_shot crops and mirrors; train crops a little, for digits, letters and the like."""
    leave_out: tuple[str, ...] = Field(default=(), strict=False)

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=1e-1, warmup=0, least_batches=10)

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        train = require_split(task, "train", "shots are taken from")
        shots = train.shots(self.shots, self.seed, allow_fewer=self.allow_fewer_shots)
        short = [name for name, count in shots.counts.items() if count < self.shots]
        fewer = [f"fewer than {self.shots} shots of {len(short)} classes, first: {short[0]}"] if short else []
        last = self.keep == "last" and self.method != "search"
        return Job(
            tests=tested(task, self.method),
            vectors=lambda names: others(names, task.name, self.leave_out),
            objective=CrossEntropy(shots, view=self.view) * 1.0,
            keep=Last() if last else Best(require_split(task, "val", "epochs are chosen by")),
            points=POINTS,
            notes=(*task.notes, *fewer),
        )
