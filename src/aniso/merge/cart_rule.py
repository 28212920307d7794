"""CART: the mean of the vectors, and low-rank parts of every vector's difference to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack, final

from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import MergeRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector
from aniso.vectors.singular import components


@MERGE_RULES.register("cart")
@final
@dataclass(frozen=True)
class Cart(MergeRule):
    """Add to the mean the largest singular components of every vector's difference to it (CART)."""

    rank: float = 0.12
    """Share of the singular components that are kept."""
    factor: float = 2.0
    """Factor of the kept components; the mean has ``scale`` alone."""

    reads: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rank", 0 < self.rank <= 1, "more than 0, up to 1")
        self.require("factor", abs(self.factor) < float("inf"), "a finite number")

    def has_room(self, rank: int, vectors: int) -> bool:
        # one vector is its own mean, whatever the rank
        return vectors == 1 or int(self.rank * rank) > 0

    def matrix(self, deltas: Deltas) -> Tensor:
        mean = deltas.mean()
        kept = int(self.rank * deltas.rank)
        out = mean.clone()
        for values in deltas:
            out.add_(components(values - mean, kept).matrix(), alpha=self.factor)
        absent = deltas.vectors - len(deltas)
        if absent:  # vectors that do not change the block differ from the mean by minus the mean
            out.sub_(components(mean, kept).matrix(), alpha=self.factor * absent)
        return out

    def workspace(self, rows: int, columns: int) -> int:
        return 7 * rows * columns + 4 * min(rows, columns) ** 2


def cart(
    bank: Bank, *, scale: float = 1.0, rank: float = 0.12, factor: float = 2.0, **how: Unpack[MergeKeywords]
) -> TaskVector:
    """Merge by CART; keywords are those of ``merge``."""
    return merge(bank, Cart(scale, rank, factor), **how)
