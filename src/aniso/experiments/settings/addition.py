"""Task addition: several tasks in one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, final

from aniso.errors import InputError, UsageError
from aniso.experiments.options import option
from aniso.experiments.settings.calibration_options import calibration_settings, check_calibration
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.settings.setting import MERGES
from aniso.experiments.settings.unlabelled_objectives import (
    TAUGHT,
    unlabelled_objectives,
    unlabelled_term,
)
from aniso.json_value import JsonObject
from aniso.registry import OBJECTIVES, SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.data import Labelled, Task, Unlabelled
    from aniso.experiments.problem import Problem
    from aniso.experiments.result import MethodResult
    from aniso.experiments.session import Session
    from aniso.learn import Keep, Objective, Teacher

_LABELS = "cross-entropy"


def _objectives() -> tuple[str, ...]:
    return (_LABELS, *TAUGHT, *unlabelled_objectives())


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
    objective: str = option(
        _LABELS,
        help="Loss on every task; all but cross-entropy need no labels, distil learns from own vectors.",
        group="Objective",
        choices=_objectives,
        without=_LABELS,
    )
    match: Literal["kl", "features", "cosine", "labels"] = option(
        "kl",
        help="Distil: what to match of the teachers, predictions, features (squared error or cosine), or "
        "their confident labels.",
        group="Objective",
        without="kl",
    )
    temperature: float = option(
        1.0, help="Distil: temperature of predictions with kl.", group="Objective", gt=0, without=1.0
    )
    confidence: float = option(
        0.0,
        help="Distil: least confidence of a teacher with labels.",
        group="Objective",
        ge=0,
        le=1,
        without=0.0,
    )
    choose_by: Literal["labels", "teachers", "last"] | None = option(
        None,
        help="What chooses the epoch or scale: labels, agreement with the tasks' own vectors (teachers), or "
        "nothing (the last epoch). Default: labels with cross-entropy, else teachers.",
        group="Task",
        without=None,
    )
    inputs_from: Literal["val", "train", "test"] = option(
        "val", help="Split whose items are used without their labels.", group="Task", without="val"
    )
    held_out: float = option(
        0.2,
        help="Share of the items without labels by which teachers choose the epoch; not learned from.",
        group="Task",
        gt=0,
        lt=1,
        without=0.2,
    )

    calibrate: Literal["featcal", "regmean", "regmean++"] | None = option(
        None,
        help="Calibrate the result layer by layer in closed form, on items without labels, by the tasks' own "
        "vectors: featcal; regmean and regmean++ with --method mean.",
        group="Method",
        without=None,
    )
    calibrate_items: int = option(
        64, help="Items of each task that are calibrated on.", group="Method", ge=1, without=64
    )
    calibrate_options: tuple[str, ...] = option(
        (),
        help="Option of the calibration, NAME=VALUE, such as ridge=0.1; repeatable.",
        group="Method",
        flags=("--calibrate-option",),
        strict=False,
        without=[],
    )

    excluded: ClassVar[Mapping[str, str]] = {
        name: reason for name, reason in ImageSetting.excluded.items() if name not in MERGES
    }

    @property
    def schedule(self) -> Schedule:
        return Schedule(epochs=20, lr=1e-3, warmup_steps=0, lr_schedule="constant", epoch_of="smallest")

    def input_files(self) -> dict[str, str]:
        return {**super().input_files(), **{f"task {i}": task for i, task in enumerate(self.tasks)}}

    @property
    def _chosen_by(self) -> str:
        return self.choose_by or ("labels" if self.objective == _LABELS else "teachers")

    def check(self) -> None:
        OBJECTIVES.require(self.objective, option="--objective")
        if self.objective not in _objectives():
            raise ValueError(f"objective '{self.objective}' does not fit: {', '.join(_objectives())}")
        super().check()
        if self.objective != _LABELS and self.choose_by == "labels":
            raise ValueError(f"objective '{self.objective}' uses no labels: choose_by teachers or last")
        if self.choose_by == "last" and self.method.chooses and not self.method.minimises:
            raise ValueError("a search has no last epoch: choose_by labels or teachers")
        if self.method.chooses and not self.method.minimises and self.objective != _LABELS:
            raise ValueError("a search minimises nothing: leave objective out, and use choose_by teachers")
        if self.objective not in TAUGHT and (self.match, self.temperature, self.confidence) != ("kl", 1, 0):
            raise ValueError("match, temperature and confidence are options of objective distil")
        unlabelled = self.objective != _LABELS or self._chosen_by == "teachers" or self.calibrates
        if self.inputs_from != "val" and not unlabelled:
            raise ValueError(
                "inputs_from is for items without labels: add objective, choose_by teachers or calibrate"
            )
        check_calibration(self)
        self._check_teachers()

    def _check_teachers(self) -> None:
        taught = self.method.minimises and self.objective in TAUGHT
        taught = taught or (self.method.chooses and self._chosen_by == "teachers") or self.calibrates
        if taught and self.bank is None:
            raise UsageError(
                "SPEC",
                "teachers are the bank's own vectors, and there is no bank",
                fix="--bank DIRECTORY, or --choose-by last with an objective that needs no teacher",
            )

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.evaluation import LabelledEvaluation
        from aniso.experiments.problem import Problem, require_split
        from aniso.learn import CoefficientNorm
        from aniso.learn.search import POINTS

        found = [session.task(ref) for ref in self.tasks]
        names = [task.name for task in found]
        if len(set(names)) < len(names):
            raise UsageError("USAGE", "a task is named twice", found=", ".join(names), fix="name each once")
        test = {task.name: require_split(task, "test", "results are measured on") for task in found}
        objective, keep = self._objective_and_keep(session, found)
        if self.norm and self.method.needs_bank and self.method.minimises:
            objective += self.norm * CoefficientNorm(1)
        return Problem(
            objective=objective,
            keep=keep,
            evaluation=LabelledEvaluation(test),
            vectors=lambda present: names,
            scales=POINTS,
            calibration=self._calibration(found),
            has_own_vectors=self.bank is not None,
            notes=tuple(note for task in found for note in task.notes),
        )

    def _objective_and_keep(self, session: Session, tasks: list[Task]) -> tuple[Objective, Keep]:
        """The objective and the keep rule; splits with labels are made only if labels are used."""
        from aniso.learn import Agreement, Best, CrossEntropy, Last, Objective

        taught = self._chosen_by == "teachers"
        by_labels = self._chosen_by == "labels"
        learns_labels = self.objective == _LABELS and self.method.minimises
        labelled = self._labelled(tasks) if by_labels or learns_labels else {}
        learned, held_out = self._unlabelled(tasks) if taught or self.objective != _LABELS else ({}, {})
        keep: Keep = Best(*labelled.values()) if by_labels else Last()
        if taught:
            keep = Agreement(*((split, session.teacher(name)) for name, split in held_out.items()))
        if self.objective == _LABELS:
            return Objective(tuple((1.0, CrossEntropy(split)) for split in labelled.values())), keep
        terms = [self._term(split, session.teacher(name)) for name, split in learned.items()]
        return Objective(tuple(part for term in terms for part in term.parts)), keep

    def _term(self, split: Unlabelled, teacher: Teacher) -> Objective:
        if self.objective not in TAUGHT:
            return unlabelled_term(self.objective, split, {})
        given: dict[str, float | str | Teacher] = {"teacher": teacher, "match": self.match}
        given |= {"temperature": self.temperature, "confidence": self.confidence}
        return unlabelled_term(self.objective, split, given)

    # calibration

    @property
    def calibrates(self) -> bool:
        return self.calibrate is not None

    def spec(self) -> JsonObject:
        return {**super().spec(), "calibrate_options": calibration_settings(self)}

    def outputs(self) -> tuple[str, ...]:
        from aniso.experiments.run_files import MERGED

        known = super().outputs()
        return (*known, MERGED) if self.calibrates and MERGED not in known else known

    def _calibration(self, tasks: list[Task]) -> Mapping[str, Unlabelled]:
        from aniso.learn import calibration_items

        splits = self._unlabelled(tasks)[0] if self.calibrates else {}
        return {
            name: calibration_items(split, self.calibrate_items, self.seed) for name, split in splits.items()
        }

    def finished(self, session: Session, result: MethodResult) -> MethodResult:
        from aniso.experiments.calibrating import calibrated

        return calibrated(session, self, result) if self.calibrates else result

    # data

    def _labelled(self, tasks: list[Task]) -> dict[str, Labelled]:
        from aniso.experiments.problem import require_split

        val = {task.name: require_split(task, "val", "coefficients are learned on") for task in tasks}
        if self.fraction == 1:
            return val
        return {name: replace(s.fraction(self.fraction, self.seed), name=s.name) for name, s in val.items()}

    def _unlabelled(self, tasks: list[Task]) -> tuple[Mapping[str, Unlabelled], Mapping[str, Unlabelled]]:
        """The items to learn from and those to choose by, without labels, by task.

        Nothing is held out if nothing is learned from these items, or if nothing is chosen by them.
        """
        from aniso.experiments.problem import require_split

        learned, chosen = {}, {}
        for task in tasks:
            split = require_split(task, self.inputs_from, "has the items to learn from").unlabelled()
            if self.fraction < 1:
                split, _ = split.carve("fraction", self.seed, share=self.fraction)
            learned[task.name] = chosen[task.name] = split
            if self.method.minimises and self.objective != _LABELS and self._chosen_by == "teachers":
                carved = split.carve("held out", self.seed, share=self.held_out, what="held out")
                chosen[task.name], learned[task.name] = carved
                self._require_enough(split, min(map(len, carved)))
        return learned, chosen

    def _require_enough(self, split: Unlabelled, fewest: int) -> None:
        if fewest < 1:
            raise InputError(
                "DATA-SHOTS",
                f"holding out {self.held_out:g} of {split.name} leaves no {split.item_kind} on one side",
                found=f"{len(split)} {split.item_kind}",
                fix="--held-out 0.5, or --choose-by last, which needs none",
            )
