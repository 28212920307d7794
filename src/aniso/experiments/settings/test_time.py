"""Test-time adaptation: learning from the very pictures that are to be answered, without a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from aniso.data import Labelled, Unlabelled, unlabelled_images
from aniso.experiments.settings.setting import (
    BudgetSaid,
    Job,
    PictureSetting,
    Tasks,
    chooses,
    others,
    require_split,
    selected,
)
from aniso.learn import SAR, Contrastive, Entropy, FixMatch, Last, Objective, Schedule
from aniso.learn.objectives import DataTerm
from aniso.learn.selection import Budget


class TestTime(PictureSetting):
    """The test pictures without their labels; the last epoch is kept, for there is nothing to choose by."""

    __test__: ClassVar[bool] = False  # not one of pytest's

    setting: Literal["test-time"] = "test-time"
    task: str | None = None
    """Its test pictures are learned from, without their labels, which are for measuring alone."""
    images: str | None = None
    """Or a folder of pictures that nobody has sorted."""
    classes: tuple[str, ...] = Field(default=(), strict=False)
    """What those may show."""
    prompts: tuple[str, ...] = Field(default=(), strict=False)
    objective: Literal["fixmatch", "sar", "entropy", "contrastive"] = "fixmatch"
    train: Literal["coefficients", "layernorm"] = "coefficients"
    """What is learned: a composition, or the weights and biases of the model's layer norms."""
    online: bool = False
    """One pass over the pictures as they come; each batch is answered before anything is learned from it."""
    power: float = Field(default=0.5, gt=0)
    """FixMatch: what flattens answers before they are compared with the threshold."""
    threshold: float = Field(default=0.9, ge=0, le=1)
    """FixMatch: how sure an answer has to be at the start; 1 at the end."""
    trusted: int = Field(default=100, ge=1)
    """FixMatch: pictures of a class that are trusted, at most."""
    leave_out: tuple[str, ...] = Field(default=(), strict=False)
    select: Literal["random", "features"] | None = None
    """How vectors are chosen; without labels there is no gradient to choose by."""
    budget: BudgetSaid = None

    usual: ClassVar[Schedule] = Schedule(epochs=10, lr=1e-3, warmup=0)

    @model_validator(mode="after")
    def _learns_without_labels(self) -> Self:
        if (self.task is None) == (self.images is None):
            raise ValueError("name a task, or images and their possible classes")
        if (self.images is None) != (not self.classes):
            raise ValueError("images need a list of classes; a task has its own")
        if len(self.classes) == 1:
            raise ValueError(
                f"one class, '{self.classes[0]}', leaves nothing to choose: name more, or a file"
            )
        if self.trains_norms and self.linearised:
            raise ValueError("layer norms are trained in the model itself, not in its linearisation")
        if self.prompts and self.images is None:
            raise ValueError("prompts are for images; a task has its own")
        if self.method not in ("coefficients", "none"):
            raise ValueError("method is coefficients, or none for zero-shot; train says what is learned")
        return self

    @model_validator(mode="after")
    def _chooses(self) -> Self:
        return chooses(self, self.select, self.budget)

    @property
    def selection(self) -> tuple[str, Budget] | None:
        return selected(self.select, self.budget)

    @property
    def needs_bank(self) -> bool:
        return self.method == "coefficients" and self.train == "coefficients"

    @property
    def trains_norms(self) -> bool:
        return self.train == "layernorm"

    @property
    def is_online(self) -> bool:
        return self.online

    def resolved_schedule(self) -> Schedule:
        found = super().resolved_schedule()
        sgd = self.objective == "sar" and self.schedule.optimiser is None
        if sgd:  # as its authors have it
            found = replace(found, optimiser="sgd", weight_decay=self.schedule.weight_decay or 0.0)
        return replace(found, epochs=1, least_batches=1) if self.online else found

    def job(self, tasks: Tasks) -> Job:
        if self.images is not None:
            split, notes = unlabelled_images(
                self.images, self.classes, self.prompts, on_bad_image=self.on_bad_image
            )
            return self._job(split, {}, notes)
        assert self.task is not None
        task = tasks(self.task)
        test = require_split(task, "test", "is learned from, without its labels")
        return self._job(test.unlabelled(), {task.name: test}, task.notes)

    def _job(self, split: Unlabelled, tests: Mapping[str, Labelled], notes: tuple[str, ...]) -> Job:
        own = next(iter(tests), split.name)
        return Job(
            tests=tests,
            vectors=lambda names: others(names, own, self.leave_out),
            objective=self._objective(split),
            keep=Last(),
            unlabelled=split,
            notes=notes,
        )

    def _objective(self, split: Unlabelled) -> Objective:
        if self.objective == "fixmatch":
            return FixMatch(split, power=self.power, threshold=self.threshold, most=self.trusted) * 1.0
        plain = {"sar": SAR, "entropy": Entropy, "contrastive": Contrastive}[self.objective]
        term: DataTerm = plain(split)
        return term * 1.0
