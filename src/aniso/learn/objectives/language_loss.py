"""The loss of a language model on texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from aniso.data import TextDataset
from aniso.data.batches import View
from aniso.data.text_dataset import Padded
from aniso.errors import UsageError, printable
from aniso.learn.objectives.objective import DataTerm
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.unwrap import language_model_of
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES


@OBJECTIVES.register("language")
@final
@dataclass(frozen=True)
class LanguageLoss(DataTerm):
    """The mean over rows of each row's mean -log p(token): every row counts the same, however long it is."""

    needs_labels = True

    split: TextDataset

    def __post_init__(self) -> None:
        if not isinstance(self.split, TextDataset):
            raise UsageError(
                "OBJECTIVE",
                "LanguageLoss needs a text dataset",
                found=printable(self.split),
                fix="text_dataset(…)",
            )
        if self.split.role == "test":
            raise UsageError(
                "LEARN-TEST", f"{self.split.name} is for testing: it cannot be trained on", fix="--train"
            )

    @property
    def name(self) -> str:
        return self.split.name

    def identity(self) -> dict[str, JsonValue]:
        return {"loss": "language", "split": self.split.manifest, "length": self.split.length}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        language_model_of(model)
        return (Padded(self.split.length),)

    def loss(self, inputs: TermInputs) -> Tensor:
        losses, tokens, _ = inputs.features[0].unbind(1)
        return (losses / tokens).mean()
