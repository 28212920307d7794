"""The contrastive loss of SimCLR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Unlabelled
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.learn.unwrap import encoder_of
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES


@OBJECTIVES.register("contrastive")
@final
@dataclass(frozen=True)
class Contrastive(UnlabelledTerm):
    """SimCLR's loss: the two views of an image should be nearer to each other than to any other image.

    Cross-entropy over cosine similarities / ``temperature`` of all views in the batch.
    """

    loss_name = "contrast"
    whole_batch = True

    split: Unlabelled
    temperature: float = 0.2
    strong: str = "few_shot"
    """Transform of the second view: few_shot, strong or train; texts have one, which drops tokens."""
    on: str = "features"
    """Compare features, or logits."""

    def __post_init__(self) -> None:
        self._require_unlabelled()
        self._require_strong(self.strong)
        if not 0 < self.temperature < math.inf or self.on not in ("features", "logits"):
            raise UsageError(
                "OBJECTIVE",
                f"Contrastive cannot compare {printable(self.on)} at temperature {self.temperature}",
                expected="features or logits, at a temperature above 0",
                fix="on='features', temperature=0.2",
            )

    def settings(self) -> dict[str, JsonValue]:
        return {"temperature": self.temperature, "strong": self.strong, "on": self.on}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        transforms = encoder_of(model).transforms
        return transforms.eval, transforms.augmented(self.strong)

    def loss(self, inputs: TermInputs) -> Tensor:
        one, other = inputs.features if self.on == "features" else inputs.logits
        both = functional.normalize(torch.cat([one, other]), dim=-1)
        similarity = both @ both.T / self.temperature
        similarity.fill_diagonal_(-math.inf)  # nothing is compared with itself
        count = len(one)
        partner = torch.arange(2 * count, device=similarity.device).roll(count)
        return functional.cross_entropy(similarity, partner)
