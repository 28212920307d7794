"""Class weights: what image features are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional


@final
@dataclass(frozen=True, eq=False)
class ClassWeights:
    """One row per class, frozen. A CLIP's are compared by angle; a classifier's own are a linear layer."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None = None
    by_angle: bool = True
    notes: tuple[str, ...] = ()

    def logits(self, features: Tensor) -> Tensor:
        """Scores of every class; rows of ``weight`` carry the logit scale already."""
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
