"""How badly a language model guesses texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from aniso.data import TextDataset
from aniso.data.batches import View
from aniso.data.text_dataset import Padded
from aniso.errors import UsageError, printable
from aniso.learn.objectives.objective import DataTerm, Seen
from aniso.learn.unwrap import language_model_of


@final
@dataclass(frozen=True)
class LanguageLoss(DataTerm):
    """The mean over rows of each one's mean -log p(token): every row counts the same, however long it is."""

    split: TextDataset

    def __post_init__(self) -> None:
        if not isinstance(self.split, TextDataset):
            raise UsageError(
                "OBJECTIVE",
                "a language loss is one on texts",
                found=printable(self.split),
                fix="text_dataset(…)",
            )
        if self.split.role == "test":
            raise UsageError(
                "LEARN-TEST", f"{self.split.name} is for testing: nothing is learned from it", fix="--train"
            )

    @property
    def name(self) -> str:
        return self.split.name

    def identity(self) -> dict[str, Any]:
        return {"loss": "language", "split": self.split.manifest, "length": self.split.length}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        language_model_of(model)
        return (Padded(self.split.length),)

    def loss(self, seen: Seen) -> Tensor:
        lost, guessed, _ = seen.features[0].unbind(1)
        return (lost / guessed).mean()
