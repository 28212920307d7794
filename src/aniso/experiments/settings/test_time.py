"""Test-time adaptation: learning from the very images that are to be classified, without a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, final

from aniso.experiments.methods.method import TrainingMethod
from aniso.experiments.options import option
from aniso.experiments.settings.adapting import AdaptingSetting
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.settings.setting import MERGES
from aniso.experiments.settings.unlabelled_objectives import (
    LABELLED,
    TAUGHT,
    unlabelled_objectives,
    unlabelled_term,
)
from aniso.registry import OBJECTIVES, SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.data import Labelled, Unlabelled
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session
    from aniso.learn import Objective, Teacher

_LABELS = "it trains on labels, or evaluates them: coefficients, layernorm, or none for zero-shot"
_GRADIENT = "without labels there is no gradient to select by: random, or features"


@final
@SETTINGS.register("test-time")
class TestTime(AdaptingSetting, ImageSetting):
    """Adapt to images without a single label: a task's test images, or a folder of your own."""

    __test__: ClassVar[bool] = False  # not one of pytest's

    task: str | None = option(
        None, help="Task: its test images are learned from, without their labels.", group="Task"
    )
    images: str | None = option(None, help="Or a folder of unsorted images.", group="Task")
    classes: tuple[str, ...] = option(
        (),
        help="Classes of these images: a text file with a name per line, or names; repeatable.",
        group="Task",
        strict=False,
    )
    prompts: tuple[str, ...] = option(
        (),
        help="Prompt with {} for the class; repeatable.",
        group="Task",
        flags=("--prompt",),
        strict=False,
    )
    objective: str = option(
        "fixmatch", help="Loss without labels.", group="Objective", choices=unlabelled_objectives
    )
    online: bool = option(
        False,
        help="One pass over the images in their order; each batch is classified before it is learned from.",
        group="Objective",
    )
    power: float = option(
        0.5, help="FixMatch: power that flattens predictions before the threshold.", group="Objective", gt=0
    )
    threshold: float = option(
        0.9,
        help="FixMatch: confidence that counts at the start; 1 at the end.",
        group="Objective",
        ge=0,
        le=1,
    )
    trusted: int = option(100, help="FixMatch: most trusted images of each class.", group="Objective", ge=1)

    trusted_by: Literal["score", "prediction"] = option(
        "score",
        help="FixMatch: rank all images by each class's score, or only those that are predicted as it.",
        group="Objective",
    )
    mean_over: Literal["reliable", "batch"] = option(
        "reliable", help="SAR: images that the mean of the loss is over.", group="Objective"
    )

    excluded = dict.fromkeys(("weights", "search", "vector", "gradient-free", "setfit"), _LABELS) | MERGES
    excluded_rules = dict.fromkeys(("gradient", "blockwise-gradient", "pursuit"), _GRADIENT)

    @property
    def schedule(self) -> Schedule:
        found = Schedule(epochs=10, lr=1e-3, warmup_steps=0)
        # SGD at SAR's own rate moves coefficients by less than 0.01
        return replace(found, weight_decay=0.0) if self.objective == "sar" else found

    @property
    def layer_norm_schedule(self) -> Schedule:
        chosen = isinstance(self.method, TrainingMethod) and self.method.schedule.optimiser is not None
        if self.objective == "sar" and not chosen:
            return replace(self.schedule, optimiser="sgd")  # as its authors have it
        return self.schedule

    def constrained(self, schedule: Schedule) -> Schedule:
        if not self.online:
            return schedule
        return replace(schedule, epochs=1, min_steps_per_epoch=1, steps=None, validate_every=None)

    @property
    def is_online(self) -> bool:
        return self.online

    def check(self) -> None:
        if (self.task is None) == (self.images is None):
            raise ValueError("name a task, or images and their possible classes")
        if (self.images is None) != (not self.classes):
            raise ValueError("images need a list of classes; a task has its own")
        if len(self.classes) == 1:
            raise ValueError(
                f"one class, '{self.classes[0]}', leaves nothing to choose: name more, or a file"
            )
        if self.prompts and self.images is None:
            raise ValueError("prompts are for images; a task has its own")
        OBJECTIVES.require(self.objective, option="--objective")
        if self.objective in LABELLED:
            raise ValueError(f"objective '{self.objective}' needs labels")
        if self.objective in TAUGHT:
            raise ValueError(
                f"objective '{self.objective}' learns from the task's own vector, which is left out here: "
                "fit addition has it"
            )
        super().check()

    def input_files(self) -> dict[str, str]:
        given = {"task": self.task, "images": self.images}
        return {**super().input_files(), **{key: value for key, value in given.items() if value is not None}}

    def problem(self, session: Session) -> Problem:
        if self.images is not None:
            from aniso.data import unlabelled_images

            split, notes = unlabelled_images(
                self.images, self.classes, self.prompts, on_bad_image=self.on_bad_image
            )
            return self._problem(split, {}, notes)
        from aniso.experiments.problem import require_split

        assert self.task is not None
        task = session.task(self.task)
        test = require_split(task, "test", "is learned from, without its labels")
        return self._problem(test.unlabelled(), {task.name: test}, task.notes)

    def _problem(self, split: Unlabelled, tests: Mapping[str, Labelled], notes: tuple[str, ...]) -> Problem:
        from aniso.experiments.evaluation import UnlabelledEvaluation
        from aniso.experiments.problem import Problem, other_vectors
        from aniso.learn import Last

        own = next(iter(tests), split.name)
        return Problem(
            objective=self._objective(split),
            keep=Last(),
            evaluation=UnlabelledEvaluation(split, tests),
            vectors=lambda names: other_vectors(names, own, self.leave_out, self.only),
            notes=notes,
        )

    def _objective(self, split: Unlabelled) -> Objective:
        given: dict[str, float | str | Teacher] = {"power": self.power, "threshold": self.threshold}
        given |= {"most": self.trusted, "trusted_by": self.trusted_by, "mean_over": self.mean_over}
        return unlabelled_term(self.objective, split, given)
