"""Class weights: the vectors that image features are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional


@final
@dataclass(frozen=True, eq=False)
class ClassWeights:
    """One frozen row per class: cosine similarity for a CLIP, a linear layer for a classifier."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None = None
    by_angle: bool = True
    notes: tuple[str, ...] = ()

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of every class; ``weight`` already includes the logit scale."""
        weight = self.weight.to(features.device, features.dtype)
        if self.by_angle:
            return functional.normalize(features, dim=-1) @ weight.T
        bias = None if self.bias is None else self.bias.to(features.device, features.dtype)
        return functional.linear(features, weight, bias)


def of_prompts(
    features: Tensor, names: tuple[str, ...], scale: float, notes: tuple[str, ...] = ()
) -> ClassWeights:
    """From text features, classes x prompts x width: normalise, mean over prompts, normalise, scale."""
    mean = functional.normalize(features.float(), dim=-1).mean(1)
    return ClassWeights(names, functional.normalize(mean, dim=-1) * torch.tensor(scale), notes=notes)
