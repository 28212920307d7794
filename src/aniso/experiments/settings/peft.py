"""A task from a share of its training pictures: parameter-efficient fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aniso.experiments.settings.setting import Job, OneTask, Tasks, one_task, require_split


class Peft(OneTask):
    """As many coefficients as the data can feed: ``partition: random:1200`` has that many for each block."""

    setting: Literal["peft"] = "peft"
    fraction: float = Field(default=1.0, gt=0, le=1)
    keep: Literal["last", "best"] = "best"

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        train = require_split(task, "train", "pictures are taken from")
        return one_task(self, task, train if self.fraction == 1 else train.fraction(self.fraction, self.seed))
