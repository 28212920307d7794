"""What all settings share: a model, a bank, a method, and the problem that the setting poses."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import field_validator

from aniso.errors import UsageError
from aniso.experiments.methods.method import Method
from aniso.experiments.options import Options, option, without_values
from aniso.json_value import JsonObject
from aniso.registry import MERGE_RULES, METHODS, SETTINGS
from aniso.schedule import Schedule, without_field_values

if TYPE_CHECKING:
    from aniso.experiments.content import Content
    from aniso.experiments.problem import Problem
    from aniso.experiments.result import MethodResult
    from aniso.experiments.session import Session
    from aniso.learn.heads import HeadOption
    from aniso.models import Wrapped
    from aniso.records import Inputs
    from aniso.sizes import Budget

FINE_TUNING = Schedule(epochs=10, lr=1e-5)
"""The paper's recipe for fine-tuning CLIP; epochs differ by data set, see ``epochs`` in the cards."""


MERGES: dict[str, str] = dict.fromkeys(
    MERGE_RULES.names, "a merge is one model of several tasks: fit addition; to learn from it: --start"
)
"""Merge rules as methods, with the reason why they do not fit settings of one task."""


class Setting(Options, ABC):
    """A question: which data, vectors, objective and keep rule. It holds everything that decides a result.

    Devices, workers and places on disk are no part of it (``RunOptions``). Subclasses are registered by name.
    Constructors only store values; ``check`` says whether they fit each other.
    """

    model: str = option(help="Base model: an open_clip name, a directory, a hub id, or mini.", group="Task")
    bank: str | None = option(
        None, help="Task vectors: a directory, mini, or random:N for N random ones.", group="Task"
    )
    weights: str | None = option(
        None, help="Weights of the base: a tag such as openai, a file or a directory.", group="Task"
    )
    method: Method = option(
        "coefficients",
        help="What is trained or searched.",
        group="Method",
        registry=METHODS,
        validate_default=True,
    )
    seed: int = option(0, help="Seeds shots, batches, augmentation and random parts.", group="Method", ge=0)
    compare: bool = option(
        True, help="Evaluate the base, too.", group="Output", flags=("--compare/--no-compare",)
    )

    summary: ClassVar[str] = ""
    """One sentence for the command's help; the class's docstring if empty."""
    excluded: ClassVar[Mapping[str, str]] = {
        "setfit": "it learns from pairs of shots: fit few-shot",
        **MERGES,
    }
    """Methods that do not fit, each with the reason."""

    @field_validator("method", mode="plain")
    @classmethod
    def _method_by_name(cls, value: object) -> Method:
        if isinstance(value, Method):
            return value
        if not isinstance(value, str):
            raise ValueError("a method's name, or a method")
        found: Method = METHODS.get(value)()
        return found

    @classmethod
    def methods(cls) -> tuple[str, ...]:
        """Return the names of the methods that fit."""
        return tuple(name for name in METHODS.names if name not in cls.excluded)

    @classmethod
    def require_method(cls, name: str) -> None:
        """Raise an error that says why a method does not fit, if it does not."""
        METHODS.require(name, option="--method")
        if name not in cls.methods():
            raise UsageError(
                "SPEC",
                f"method '{name}' does not fit {SETTINGS.name_of(cls)}",
                reason=cls.excluded.get(name, ""),
                expected=", ".join(cls.methods()),
                fix="choose one of these",
            )

    @property
    def name(self) -> str:
        """The name it is registered with."""
        return SETTINGS.name_of(type(self))

    # schedules, if no option says otherwise

    @property
    def schedule(self) -> Schedule:
        """Schedule for learning coefficients: the paper's recipe."""
        raise NotImplementedError

    @property
    def fine_tuning_schedule(self) -> Schedule:
        """Schedule for training all weights."""
        return FINE_TUNING

    @property
    def lora_schedule(self) -> Schedule:
        """Schedule for training a LoRA adapter."""
        return replace(self.fine_tuning_schedule, lr=1e-3)

    @property
    def layer_norm_schedule(self) -> Schedule:
        """Schedule for training layer norms."""
        return replace(self.fine_tuning_schedule, lr=1e-3)

    def constrained(self, schedule: Schedule) -> Schedule:
        """Return the schedule with what this setting does not leave to options."""
        return schedule

    # parts that only some settings have

    @property
    def head_name(self) -> str | None:
        """The head that is learned on features, if one is."""
        return None

    @property
    def head_settings(self) -> dict[str, HeadOption]:
        """The options of that head."""
        return {}

    @property
    def head_view(self) -> str:
        """The augmentation of images that a head learns from."""
        return "eval"

    @property
    def is_linearised(self) -> bool:
        """True if the model and its vectors are linearised ones."""
        return False

    @property
    def is_online(self) -> bool:
        """True if each item is seen once, and predicted before anything is learned from it."""
        return False

    @property
    def selection(self) -> tuple[str, Budget] | None:
        """The rule that makes the bank smaller, and its budget, if there is one."""
        return None

    def check(self) -> None:
        """Raise ValueError, or an AnisoError, if the options do not fit each other."""
        self.require_method(self.method.name)
        if self.method.needs_bank and self.bank is None:
            raise UsageError(
                "SPEC", f"method '{self.method.name}' needs a bank", fix="--bank DIRECTORY, or --bank mini"
            )
        self.method.check(self)

    # after the method

    @property
    def calibrates(self) -> bool:
        """True if the method's result is calibrated before it is evaluated."""
        return False

    def finished(self, session: Session, result: MethodResult) -> MethodResult:
        """Return a method's result after what the setting adds to it."""
        return result

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the files that a run's result leaves beside its record."""
        return self.method.outputs()

    # what a session asks

    @abstractmethod
    def load_model(self) -> Wrapped:
        """Load the base model."""

    @abstractmethod
    def problem(self, session: Session) -> Problem:
        """Load the data and pose the problem."""

    @abstractmethod
    def content(self, session: Session) -> Content:
        """Return the files that the result depends on; needs no model."""

    @abstractmethod
    def inputs(self, session: Session) -> Inputs:
        """Return hashes of model and data."""

    @abstractmethod
    def public_names(self, session: Session) -> dict[str, str]:
        """Return what records call the data that options name by their place on disk."""

    def input_files(self) -> dict[str, str]:
        """Return files and directories that must exist, by option; checked before anything is loaded."""
        given = {"model": self.model, "bank": self.bank, "weights": self.weights}
        return {key: value for key, value in given.items() if value is not None} | self.method.input_files()

    # identity

    def spec(self) -> JsonObject:
        """Return all options as plain data, with nothing left to a default."""
        own = self.model_dump(mode="json", exclude={"method"})
        return {"setting": self.name, **own, "method": self.method.name, **self.method.spec(self)}

    @property
    def id(self) -> str:
        """A hash that changes with anything that decides the result, and with nothing else."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()

    def _identity(self) -> JsonObject:
        """The spec without values that mean the same as a version without these options."""
        absent = {**without_values(type(self)), **without_values(type(self.method))}
        found = {k: v for k, v in self.spec().items() if k not in absent or v != absent[k]}
        schedule, fields = found.get("schedule"), without_field_values()
        if isinstance(schedule, dict):
            found["schedule"] = {k: v for k, v in schedule.items() if k not in fields or v != fields[k]}
        return found

    @property
    def coefficients_id(self) -> str:
        """The id of the run that learns the same coefficients."""
        return self.id
