"""Few-shot recognition: a new task from k pictures of each class."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from aniso.data import Labelled, Task
from aniso.errors import UsageError, printable
from aniso.experiments.settings.setting import Job, OneTask, Tasks, one_task, require_split
from aniso.learn import Schedule
from aniso.learn.heads.head import require_known


class FewShot(OneTask):
    """k pictures of every class; the task's own vector, and others that are named, are left out."""

    setting: Literal["few-shot"] = "few-shot"
    shots: int = Field(default=16, ge=1)
    allow_fewer_shots: bool = False
    head: Literal["tip", "lpp", "linear"] | None = None
    """Learned on features of the same pictures, once the rest is learned."""
    joint: bool = False
    """Coefficients and head are learned together, in twice as many epochs."""
    out_of_domain: tuple[str, ...] = Field(default=(), strict=False)
    """Tasks with the same classes, or some of them, that are measured with what was learned."""

    @model_validator(mode="after")
    def _learns_heads(self) -> Self:
        if self.joint and (self.head != "tip" or self.method != "coefficients"):
            raise ValueError("joint learning is for coefficients and the head 'tip'")
        if self.lora is not None and self.head is not None:
            raise ValueError("a head knows features of checkpoints and compositions: leave lora or head out")
        if self.factors and self.head is not None:
            raise ValueError("a head is learned on compositions of whole updates: leave factors or head out")
        return self

    @property
    def head_kind(self) -> str | None:
        return self.head

    @property
    def is_joint(self) -> bool:
        return self.joint

    @property
    def head_view(self) -> str:
        return self.view

    def headless(self) -> FewShot:
        return self.model_copy(update={"head": None, "out_of_domain": ()})

    def resolved_schedule(self) -> Schedule:
        found = super().resolved_schedule()
        said = self.schedule.epochs is not None
        return replace(found, epochs=2 * found.epochs) if self.joint and not said else found

    def job(self, tasks: Tasks) -> Job:
        task = tasks(self.task)
        train = require_split(task, "train", "shots are taken from")
        shots = train.shots(self.shots, self.seed, allow_fewer=self.allow_fewer_shots)
        short = [name for name, count in shots.counts.items() if count < self.shots]
        fewer = [f"fewer than {self.shots} shots of {len(short)} classes, first: {short[0]}"] if short else []
        job = one_task(self, task, shots, *fewer)
        return replace(job, shots=shots, out_of_domain=self._elsewhere(tasks, task))

    def _elsewhere(self, tasks: Tasks, task: Task) -> dict[str, Labelled]:
        found = [tasks(name) for name in self.out_of_domain]
        names = [other.name for other in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(
                "USAGE", f"two out-of-domain tasks are called '{printable(twice)}'", fix="rename a directory"
            )
        for other in found:
            require_known(other.classes.names, task.classes.names)
        return {task.name: require_split(task, "test", "results are measured on") for task in found}
