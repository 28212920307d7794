"""What settings share that learn a new task with the vectors of other tasks."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from aniso.errors import InputError, printable
from aniso.experiments.options import option
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.settings.setting import Setting
from aniso.registry import SELECTION_RULES
from aniso.schedule import Schedule
from aniso.sizes import Budget

if TYPE_CHECKING:
    from aniso.data import Labelled, Task
    from aniso.experiments.problem import Problem


def _as_count(value: object) -> object:
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def _is_resnet(model: str) -> bool:
    """True for CLIP's ResNets by name: RN50, RN50x4, timm/resnet50_clip.openai."""
    return re.search(r"(^|[^a-z])(rn\d|resnet)", PurePath(model).name.casefold()) is not None


class AdaptingSetting(Setting, ABC):
    """Settings that learn something new from the vectors of other things."""

    leave_out: tuple[str, ...] = option(
        (), help="A vector to leave out, beside the task's own; repeatable.", group="Selection", strict=False
    )
    only: tuple[str, ...] = option(
        (), help="A vector to use; all others are left out; repeatable.", group="Selection", strict=False
    )
    select: str | None = option(
        None,
        help="Rule that selects vectors, or cells of them, before anything is learned; needs --budget.",
        group="Selection",
        registry=SELECTION_RULES,
    )
    budget: Annotated[int | str | None, BeforeValidator(_as_count)] = option(
        None, help="How many vectors, or cells of each block, to select; or bytes: 200MB.", group="Selection"
    )

    excluded_rules: ClassVar[Mapping[str, str]] = {}
    """Selection rules that do not fit, each with the reason."""

    @property
    def selection(self) -> tuple[str, Budget] | None:
        if self.select is None or self.budget is None:
            return None
        return self.select, Budget.of(self.budget)

    def check(self) -> None:
        if self.select is not None:
            SELECTION_RULES.require(self.select, option="--select")
        super().check()
        if (self.select is None) != (self.budget is None):
            raise ValueError("select and budget go together: the rule, and how many vectors it selects")
        if self.select is None:
            return
        if self.select in self.excluded_rules:
            raise ValueError(f"selection rule '{self.select}': {self.excluded_rules[self.select]}")
        if not self.method.needs_bank or not self.method.chooses:
            raise ValueError(f"method '{self.method.name}' has no vectors to select from")
        _ = self.selection


class SingleTaskSetting(AdaptingSetting, ImageSetting, ABC):
    """Settings that learn one task from some of its own training items."""

    task: str = option(help="Task: a known name, a folder with a directory per class, a table.", group="Task")
    keep: Literal["last", "best"] = option(
        "last", help="Epoch to keep: the last, or the best on the validation split.", group="Task"
    )
    view: Literal["few_shot", "train", "eval"] = option(
        "few_shot",
        help="Augmentation: few_shot (crop and flip), train (slight crop, for digits and letters), eval.",
        group="Task",
    )

    @property
    def schedule(self) -> Schedule:
        epochs = 30 if _is_resnet(self.model) else 10  # as in the paper
        return Schedule(epochs=epochs, lr=1e-1, warmup_steps=0, min_steps_per_epoch=10)

    def input_files(self) -> dict[str, str]:
        return {**super().input_files(), "task": self.task}

    def single_task_problem(
        self,
        task: Task,
        part: Labelled,
        *,
        shots: Labelled | None = None,
        out_of_domain: Mapping[str, Labelled] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Problem:
        """Return the problem of learning a task from ``part`` of it, without its own vector."""
        from aniso.experiments.evaluation import LabelledEvaluation
        from aniso.experiments.problem import Problem, other_vectors, require_split
        from aniso.learn import Best, CrossEntropy, Last
        from aniso.learn.search import POINTS

        if len(task.classes) < 2 and (self.method.minimises or self.method.chooses):
            only = printable(task.classes.names[0])
            raise InputError(
                "DATA-CLASS",
                f"{printable(task.name)} has one class, '{only}', so there is nothing to learn",
                expected="at least two classes",
                fix=f"add {part.item_kind} of another class; aniso eval needs no second one",
            )
        # a search has nothing else to choose its scale by
        chosen = self.keep == "best" or (self.method.chooses and not self.method.minimises)
        return Problem(
            objective=CrossEntropy(part, view=self.view) * 1.0,
            keep=Best(require_split(task, "val", "epochs are chosen by")) if chosen else Last(),
            evaluation=LabelledEvaluation(test_splits(task, self), out_of_domain or {}),
            vectors=lambda names: other_vectors(names, task.name, self.leave_out, self.only),
            scales=POINTS,
            shots=shots,
            notes=(*task.notes, *notes),
        )


def test_splits(task: Task, setting: Setting) -> dict[str, Labelled]:
    """Return what results are measured on; a task without a test split can be learned all the same."""
    from aniso.experiments.problem import require_split

    learns = setting.method.minimises or setting.method.chooses
    if "test" not in task.splits and learns:
        return {}
    return {task.name: require_split(task, "test", "results are measured on")}


test_splits.__test__ = False  # type: ignore[attr-defined]  # not one of pytest's
