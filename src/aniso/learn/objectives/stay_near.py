"""The distance of the coefficients to their start, to stay near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.compose import CoefficientIndex, Coefficients
from aniso.errors import UsageError
from aniso.learn.objectives.objective import ValueTerm
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES


@OBJECTIVES.register("stay-near")
@final
@dataclass(frozen=True, eq=False)
class StayNear(ValueTerm):
    """Half the squared distance of the coefficients to a start, as a mean over blocks and their parts.

    The gradient of one coefficient is its distance divided by the number of blocks and parts. Weight it like
    any term: ``CrossEntropy(split) + 0.1 * StayNear(start.coefficients)``.
    """

    start: Coefficients

    @property
    def name(self) -> str:
        return "distance to the start"

    def identity(self) -> dict[str, JsonValue]:
        return {"loss": "stay near", "start": self.start.content_hash}

    def loss(self, values: Tensor, index: CoefficientIndex) -> Tensor:
        if index.partition != self.start.partition or index.vectors != self.start.vectors:
            raise UsageError(
                "OBJECTIVE",
                "the start to stay near belongs to other vectors or another partition",
                expected=f"{', '.join(index.vectors)}; {index.partition}",
                found=f"{', '.join(self.start.vectors)}; {self.start.partition}",
                fix="StayNear(start.coefficients) of the start that fit begins at",
            )
        distance = values - self.start.values.to(values)
        groups = [own.T for own in index.divided(distance)]  # for each block: parts x vectors
        return torch.cat([group.square().sum(-1) for group in groups]).mean() / 2
