"""What all methods share.

A setting says which data, vectors, objective and keep rule a question needs; a method says what is trained or
searched to answer it. A method is a frozen set of options with ``plan`` and ``run``, both over a session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, ClassVar

from aniso.experiments.options import OptionInfo, Options, options_of
from aniso.experiments.schedule_options import ScheduleOptions, overridden
from aniso.json_value import JsonObject
from aniso.registry import METHODS

if TYPE_CHECKING:
    from aniso.experiments.result import MethodPlan, MethodResult
    from aniso.experiments.session import Session
    from aniso.experiments.settings.setting import Setting
    from aniso.learn import Fit, Objective, Start, Trainable
    from aniso.records import Metrics
    from aniso.schedule import Schedule
    from aniso.vectors import Bank


class Method(Options, ABC):
    """What is trained or searched. Subclasses are final and registered by name."""

    column: ClassVar[str]
    """Heading of its column in tables."""
    changes_model: ClassVar[bool] = True
    """Whether the result can differ from the base."""
    needs_bank: ClassVar[bool] = False
    minimises: ClassVar[bool] = False
    """Whether it minimises the objective, so that the objective's data decide the result."""
    chooses: ClassVar[bool] = False
    """Whether the keep rule, and so its data, decide the result."""
    resumes: ClassVar[bool] = False
    """Whether an interrupted run can be resumed."""

    @property
    def composes(self) -> bool:
        """Whether the result is one composition of the bank's vectors, the same for all tasks."""
        return False

    @classmethod
    def options_for(cls, setting: type[Setting]) -> dict[str, OptionInfo]:
        """Return the options that make sense in a setting."""
        return options_of(cls)

    @property
    def shares_work(self) -> bool:
        """Whether several processes can share a run, each with its part of the bank and of every batch."""
        return False

    @property
    def uses_keep_data(self) -> bool:
        """Whether the keep rule's data decide something, as these options are."""
        return self.chooses

    @property
    def learns_head(self) -> bool:
        """Whether a head is learned together with the rest, and not afterwards."""
        return False

    @property
    def name(self) -> str:
        """The name it is registered with."""
        return METHODS.name_of(type(self))

    def check(self, setting: Setting) -> None:
        """Raise ValueError if the options do not fit each other or the setting."""

    def spec(self, setting: Setting) -> JsonObject:
        """Return the options as plain data, with nothing left to a default."""
        return self.model_dump(mode="json")

    def objective(self, session: Session) -> Objective:
        """Return the objective that is minimised: the problem's, unless the method has its own."""
        return session.problem.objective

    @abstractmethod
    def plan(self, session: Session) -> MethodPlan:
        """Return what will be read, trained and needed; fails where ``run`` would."""

    @abstractmethod
    def run(self, session: Session) -> MethodResult:
        """Return a model for every task, and what holds it."""

    def composed_bank(self, session: Session) -> Bank:
        """Return the vectors that are composed: the bank's, with a merged one that learning starts at."""
        return session.bank if session.start is None else session.start.bank

    def start_of(self, session: Session) -> Start | None:
        """Return where coefficients start; None for zero, or if there are none."""
        return None

    def input_files(self) -> dict[str, str]:
        """Return files that must exist, by option, beside those of the setting."""
        return {}

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the files that a run leaves beside its record."""
        return ()

    def vectors_used(self, session: Session) -> Bank | None:
        """Return the vectors that the result depends on."""
        return session.composed_bank if self.needs_bank else None


class TrainingMethod(Method, ABC):
    """Methods that minimise the objective by gradients."""

    schedule: ScheduleOptions = ScheduleOptions()

    minimises = True
    chooses = True
    resumes = True

    def default_schedule(self, setting: Setting) -> Schedule:
        """Return the schedule for a setting when no option says otherwise."""
        return setting.schedule

    def resolved_schedule(self, setting: Setting) -> Schedule:
        """Return the schedule, options included."""
        return setting.constrained(overridden(self.default_schedule(setting), self.schedule))

    def session_schedule(self, session: Session) -> tuple[Schedule, str | None]:
        """Return the schedule for the session's model and bank, and a note if these have changed it."""
        return self.resolved_schedule(session.setting), None

    def check(self, setting: Setting) -> None:
        super().check(setting)
        self.resolved_schedule(setting)

    def spec(self, setting: Setting) -> JsonObject:
        return {**super().spec(setting), "schedule": asdict(self.resolved_schedule(setting))}


def training_metrics(done: Fit, trained: Trainable) -> Metrics:
    """Return what a record says about a training run."""
    from aniso.records import Metrics

    return Metrics(
        learning_rate=done.lr,
        kept_epoch=done.history[done.kept].epoch,
        epochs=done.history[-1].epoch,
        history=done.history,
        trainable=trained.count,
    )


def recipe_notes(setting: Setting, known: str | None, *values: str) -> tuple[str, ...]:
    """Return a note on which recipe the schedule comes from, unless options give these ``values`` of it.

    ``known`` is the task that the paper has a recipe for, or None.
    """
    method = setting.method
    if not isinstance(method, TrainingMethod):
        return ()
    given = method.schedule.model_dump()
    if given["steps"] is not None or all(given[name] is not None for name in values):
        return ()
    found = asdict(method.resolved_schedule(setting))
    text = ", ".join(f"{name} {found[name]:g}" for name in values)
    if known is None:
        return (f"schedule: the paper has no recipe for this task; {text} by default",)
    return (f"schedule: the paper's recipe for {known}, {text}",)
