"""Task addition: several tasks in one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from aniso.errors import UsageError
from aniso.experiments.options import option
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.settings.setting import MERGES
from aniso.registry import SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session


@final
@SETTINGS.register("addition")
class Addition(ImageSetting):
    """Compose the vectors of several tasks into one model that does them all."""

    tasks: tuple[str, ...] = option(
        help="A task, named like its vector; repeatable.",
        group="Task",
        flags=("--task",),
        min_length=1,
        strict=False,
    )
    norm: float = option(
        0.0,
        help="Weight of the coefficients' 1-norm in the objective; the paper: 0.5.",
        group="Objective",
        ge=0,
    )
    fraction: float = option(1.0, help="Share of each validation split; 1 is all.", group="Task", gt=0, le=1)

    excluded: ClassVar[Mapping[str, str]] = {
        name: reason for name, reason in ImageSetting.excluded.items() if name not in MERGES
    }

    @property
    def schedule(self) -> Schedule:
        return Schedule(epochs=20, lr=1e-3, warmup_steps=0, lr_schedule="constant", epoch_of="smallest")

    def input_files(self) -> dict[str, str]:
        return {**super().input_files(), **{f"task {i}": task for i, task in enumerate(self.tasks)}}

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.evaluation import LabelledEvaluation
        from aniso.experiments.problem import Problem, require_split
        from aniso.learn import Best, CoefficientNorm, CrossEntropy, Objective
        from aniso.learn.search import POINTS

        found = [session.task(ref) for ref in self.tasks]
        names = [task.name for task in found]
        if len(set(names)) < len(names):
            raise UsageError("USAGE", "a task is named twice", found=", ".join(names), fix="name each once")
        val = {task.name: require_split(task, "val", "coefficients are learned on") for task in found}
        if self.fraction < 1:
            val = {
                name: replace(s.fraction(self.fraction, self.seed), name=s.name) for name, s in val.items()
            }
        test = {task.name: require_split(task, "test", "results are measured on") for task in found}
        objective = Objective(tuple((1.0, CrossEntropy(split)) for split in val.values()))
        if self.norm and self.method.needs_bank and self.method.minimises:
            objective += self.norm * CoefficientNorm(1)
        return Problem(
            objective=objective,
            keep=Best(*val.values()),
            evaluation=LabelledEvaluation(test),
            vectors=lambda present: names,
            scales=POINTS,
            has_own_vectors=self.bank is not None,
            notes=tuple(note for task in found for note in task.notes),
        )
