"""A new task from a few labelled pictures of each class."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aniso.experiments.settings.setting import Job, OneTask, Tasks, one_task, require_split


class FewShot(OneTask):
    """k pictures of every class; the task's own vector, and others that are named, are left out."""

    setting: Literal["few-shot"] = "few-shot"
    shots: int = Field(default=16, ge=1)
    allow_fewer_shots: bool = False

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        train = require_split(task, "train", "shots are taken from")
        shots = train.shots(self.shots, self.seed, allow_fewer=self.allow_fewer_shots)
        short = [name for name, count in shots.counts.items() if count < self.shots]
        fewer = [f"fewer than {self.shots} shots of {len(short)} classes, first: {short[0]}"] if short else []
        return one_task(self, task, shots, *fewer)
