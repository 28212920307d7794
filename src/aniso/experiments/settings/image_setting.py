"""What settings about classification tasks share."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from aniso.experiments.options import option
from aniso.experiments.settings.setting import Setting

if TYPE_CHECKING:
    from aniso.data import Split, TextDataset
    from aniso.experiments.content import Content
    from aniso.experiments.session import Session
    from aniso.models import Encoder
    from aniso.records import Inputs


def _as_number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class ImageSetting(Setting, ABC):
    """Settings about tasks, whose items belong to classes."""

    split_seed: int = option(
        0, help="Seeds the splits that a data set does not come with.", group="Task", ge=0
    )
    on_bad_image: Annotated[Literal["error", "skip"] | int, BeforeValidator(_as_number)] = option(
        "error",
        help="Images that cannot be read: error, skip, or the number that may be skipped.",
        group="Task",
    )

    linearised: bool = option(False, help="The model and its vectors are linearised ones.", group="Method")

    @property
    def is_linearised(self) -> bool:
        return self.linearised

    def load_model(self) -> Encoder:
        from aniso.models import load_model

        return load_model(self.model, self.weights)

    def content(self, session: Session) -> Content:
        from aniso.experiments.content import Content

        problem, method = session.problem, self.method
        learned: list[Split | TextDataset] = []
        if method.minimises:
            learned += [term.split for _, term in problem.objective.data_terms]
        if method.chooses or self.head_name is not None:
            learned += problem.keep.splits
        if self.head_name is not None and problem.shots is not None:
            learned.append(problem.shots)
        learned += problem.calibration.values()
        return Content(_distinct(learned), _distinct(problem.evaluation.splits))

    def inputs(self, session: Session) -> Inputs:
        from aniso.records import Inputs
        from aniso.weights.fingerprint import combined_hash

        data, classes = session.problem.evaluation.identity()
        for task in session.tasks.values():
            data[task.name] = combined_hash({role: split.manifest for role, split in task.splits.items()})
            classes[task.name] = task.classes.key
        return Inputs(model=session.encoder.fingerprint, data=data, classes=classes)

    def public_names(self, session: Session) -> dict[str, str]:
        return {ref: task.name for ref, task in session.tasks.items()}


def _distinct(splits: Sequence[Split | TextDataset]) -> tuple[Split, ...]:
    """Splits of images by name; the hash of texts is part of their manifest already."""
    from aniso.data import TextDataset

    return tuple({s.name: s for s in splits if not isinstance(s, TextDataset)}.values())
