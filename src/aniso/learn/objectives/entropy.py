"""The entropy of predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from aniso.data import Unlabelled
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.registry import OBJECTIVES


@OBJECTIVES.register("entropy")
@final
@dataclass(frozen=True)
class Entropy(UnlabelledTerm):
    """The mean entropy of predictions. Simple, but it can collapse into one class for all images."""

    loss_name = "entropy"

    split: Unlabelled

    def __post_init__(self) -> None:
        self._require_unlabelled()

    def loss(self, inputs: TermInputs) -> Tensor:
        return prediction_entropy(inputs.logits[0]).mean()


def prediction_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of every item's predicted distribution, -sum p log p."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
