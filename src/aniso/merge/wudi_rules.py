"""ASWUDI and SWUDI: closed forms of WUDI, which lets every vector act on its own inputs as if it were alone.

WUDI minimises the sum over vectors of |(x - t_i) t_i'|^2 / |t_i|^2. With w_i = 1 / |t_i|^2, C = sum of
w_i t_i' t_i and D = sum of w_i t_i t_i' t_i, the minimum is D C^-1, which noise in the small
eigenvalues of C spoils. Both rules keep the sum of the vectors in those directions.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Unpack, final

import torch
from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import MergeRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector

_NOTHING = 1e-14
"""An eigenvalue of C below this share of the largest is zero: the square of float32's precision."""


@dataclass(frozen=True)
class WudiRule(MergeRule):
    """(sum of vectors)(1 - Q f Q') + D Q (f / L) Q' for eigenvalues L and eigenvectors Q of C."""

    @abstractmethod
    def filtered(self, eigenvalues: Tensor) -> Tensor:
        """Return f for eigenvalues in descending order, none of them negative: 1 solves, 0 keeps the sum."""

    def matrix(self, deltas: Deltas) -> Tensor:
        columns = deltas.shape[1]
        total = torch.zeros(deltas.shape, dtype=torch.float64)
        gram = torch.zeros(columns, columns, dtype=torch.float64)
        product = torch.zeros_like(total)
        for values in deltas:
            total += values
            square = float(values.square().sum())
            own = values.T @ values
            product.addmm_(values, own, alpha=1 / square)
            gram.add_(own, alpha=1 / square)
        del own
        eigenvalues, vectors = torch.linalg.eigh(gram)  # ascending
        known = int((eigenvalues > _NOTHING * eigenvalues[-1]).sum())
        eigenvalues, vectors = eigenvalues[-known:], vectors[:, -known:]
        solved = self.filtered(eigenvalues.flip(0)).flip(0)
        change = (product @ vectors) * (solved / eigenvalues) - (total @ vectors) * solved
        return total.addmm_(change, vectors.T)

    def workspace(self, rows: int, columns: int) -> int:
        return 6 * rows * columns + 6 * columns**2


@MERGE_RULES.register("aswudi")
@final
@dataclass(frozen=True)
class Aswudi(WudiRule):
    """Make every vector act on its own inputs as if alone, without anything to tune (ASWUDI)."""

    def filtered(self, eigenvalues: Tensor) -> Tensor:
        """Return 1 for the first ceil((sum of roots)^2 / sum) eigenvalues."""
        count = float(eigenvalues.sqrt().sum()) ** 2 / float(eigenvalues.sum())
        solved = torch.zeros_like(eigenvalues)
        # rounding may carry a count of equal eigenvalues a hair over a whole number
        solved[: math.ceil(count * (1 - 1e-12))] = 1
        return solved


@MERGE_RULES.register("swudi")
@final
@dataclass(frozen=True)
class Swudi(WudiRule):
    """Make every vector act on its own inputs as if alone, as far as a time and a share allow (SWUDI)."""

    time: float = 1300.0
    """How long the gradient flow runs from the sum of the vectors; longer solves smaller eigenvalues."""
    top: float = 0.65
    """Share of the eigenvalues that are solved for; 1 is SWUDI-soft."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("time", 0 < self.time < float("inf"), "more than 0")
        self.require("top", 0 < self.top <= 1, "more than 0, up to 1")

    def filtered(self, eigenvalues: Tensor) -> Tensor:
        """Return 1 - exp(-L time) for the first eigenvalues."""
        solved = -torch.expm1(-eigenvalues * self.time)
        solved[math.ceil(self.top * len(eigenvalues)) :] = 0
        return solved


def aswudi(bank: Bank, *, scale: float = 1.0, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Merge by ASWUDI; keywords are those of ``merge``."""
    return merge(bank, Aswudi(scale), **how)


def swudi(
    bank: Bank, *, scale: float = 1.0, time: float = 1300.0, top: float = 0.65, **how: Unpack[MergeKeywords]
) -> TaskVector:
    """Merge by SWUDI; keywords are those of ``merge``."""
    return merge(bank, Swudi(scale, time, top), **how)
