"""Few-shot recognition: a new task from k labelled images of each class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import BeforeValidator

from aniso.errors import UsageError, printable
from aniso.experiments.options import option
from aniso.experiments.settings.adapting import SingleTaskSetting
from aniso.experiments.settings.setting import MERGES
from aniso.json_value import JsonObject
from aniso.registry import HEADS, SETTINGS
from aniso.schedule import Schedule

if TYPE_CHECKING:
    from aniso.data import Labelled, Task
    from aniso.experiments.problem import Problem
    from aniso.experiments.session import Session
    from aniso.learn.heads import HeadOption


def _text(value: HeadOption) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_pairs(value: object) -> object:
    """A mapping or a list, as specs have them, as a tuple of pairs NAME=VALUE."""
    if isinstance(value, dict):
        return tuple(f"{key}={_text(item)}" for key, item in value.items())
    return tuple(value) if isinstance(value, list) else value


@final
@SETTINGS.register("few-shot")
class FewShot(SingleTaskSetting):
    """Learn a new task from a few labelled images of each class."""

    shots: int = option(16, help="Labelled images of each class.", group="Task", ge=1)
    allow_fewer_shots: bool = option(
        False, help="Take all images of a class that has fewer than --shots.", group="Task"
    )
    head: str | None = option(
        None, help="Also learn a classifier on the features.", group="Head", registry=HEADS
    )
    head_options: Annotated[tuple[str, ...], BeforeValidator(_as_pairs)] = option(
        (),
        help="Option of the head, NAME=VALUE, such as momentum=0 for lpp; repeatable.",
        group="Head",
        flags=("--head-option",),
        strict=False,
    )
    out_of_domain: tuple[str, ...] = option(
        (),
        help="Also evaluate on this task, which has the same classes or some of them; repeatable.",
        group="Output",
        strict=False,
    )

    excluded: ClassVar[Mapping[str, str]] = MERGES

    @property
    def schedule(self) -> Schedule:
        found = super().schedule
        return replace(found, epochs=2 * found.epochs) if self.method.learns_head else found

    @property
    def head_name(self) -> str | None:
        return self.head

    @property
    def head_view(self) -> str:
        return self.view

    @property
    def coefficients_id(self) -> str:
        if self.method.learns_head:
            return self.id
        return self.model_copy(update={"head": None, "head_options": (), "out_of_domain": ()}).id

    def check(self) -> None:
        if self.head is not None:
            HEADS.require(self.head, option="--head")
        super().check()
        if self.head_options and self.head is None:
            raise ValueError("head_options are options of a head: add head, or leave them out")
        if self.head_options:
            _ = self.head_settings

    @property
    def head_settings(self) -> dict[str, HeadOption]:
        """All options of the head, defaults included."""
        from aniso.learn.heads import head_options

        return {} if self.head is None else head_options(self.head, self.head_options)

    def spec(self) -> JsonObject:
        pairs = [f"{key}={_text(value)}" for key, value in self.head_settings.items()]
        return {**super().spec(), "head_options": pairs}

    def problem(self, session: Session) -> Problem:
        from aniso.experiments.problem import require_split

        task = session.task(self.task)
        train = require_split(task, "train", "shots are taken from")
        shots = train.shots(self.shots, self.seed, allow_fewer=self.allow_fewer_shots)
        short = [name for name, count in shots.counts.items() if count < self.shots]
        fewer = [f"fewer than {self.shots} shots of {len(short)} classes, first: {short[0]}"] if short else []
        return self.single_task_problem(
            task,
            shots,
            shots=shots,
            out_of_domain=self._out_of_domain(session, task),
            notes=tuple(fewer),
        )

    def _out_of_domain(self, session: Session, task: Task) -> dict[str, Labelled]:
        from aniso.experiments.problem import require_split
        from aniso.learn.heads.head import require_known

        found = [session.task(name) for name in self.out_of_domain]
        names = [other.name for other in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(
                "USAGE", f"two out-of-domain tasks are called '{printable(twice)}'", fix="rename a directory"
            )
        for other in found:
            require_known(other.classes.names, task.classes.names)
        return {task.name: require_split(task, "test", "results are measured on") for task in found}
