"""The base of losses on images without labels."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from aniso.data import Unlabelled
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.objectives.objective import DataTerm
from aniso.learn.unwrap import encoder_of
from aniso.records import JsonValue

STRONG_VIEWS = ("few_shot", "strong", "train")


class UnlabelledTerm(DataTerm):
    """A loss on images that have no labels by type, so that none can be read by mistake."""

    needs_labels = False
    split: Unlabelled
    loss_name: ClassVar[str]

    def _require_unlabelled(self) -> None:
        if not isinstance(self.split, Unlabelled) or len(self.split) < 2:
            raise UsageError(
                "OBJECTIVE",
                f"{self.loss_name} needs a split of at least two images without labels",
                found=printable(self.split),
                fix="task.test.unlabelled()",
            )

    def _require_strong(self, view: str) -> None:
        if view not in STRONG_VIEWS:
            raise UsageError(
                "OBJECTIVE",
                f"there is no view '{printable(view)}' to compare with",
                expected=", ".join(STRONG_VIEWS),
                fix="strong='few_shot'",
            )

    @property
    def name(self) -> str:
        return f"{self.split.name}, {self.loss_name}"

    def identity(self) -> dict[str, JsonValue]:
        own = {"split": self.split.manifest, "classes": self.split.classes.key}
        return {"loss": self.loss_name, **own, **self.settings()}

    def settings(self) -> dict[str, JsonValue]:
        """The term's options, as JSON data."""
        return {}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        return (encoder_of(model).transforms.eval,)
