"""A norm of the coefficients, to keep them few and small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.compose import CoefficientIndex
from aniso.errors import UsageError
from aniso.learn.objectives.objective import ValueTerm
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES


@OBJECTIVES.register("coefficient-norm")
@final
@dataclass(frozen=True)
class CoefficientNorm(ValueTerm):
    """The p-norm of the coefficients over vectors, as a mean over blocks and their parts."""

    p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.p) and self.p >= 1):
            raise UsageError("OBJECTIVE", f"there is no {self.p}-norm", expected="1 or more", fix="p=1")

    @property
    def name(self) -> str:
        return f"coefficients' {self.p:g}-norm"

    def identity(self) -> dict[str, JsonValue]:
        return {"loss": "coefficient norm", "p": self.p}

    def loss(self, values: Tensor, index: CoefficientIndex) -> Tensor:
        groups = [own.T for own in index.divided(values)]  # for each block: parts x vectors
        norms = [torch.linalg.vector_norm(group, self.p, dim=-1) for group in groups]
        return torch.cat(norms).mean()
