"""Iso-C and Iso-CTS: merged vectors whose singular values are all equal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Unpack, final

from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import MergeRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.merge.spectral import joined, polar
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector
from aniso.vectors.singular import components

_SCALE = 1.5
"""FusionBench's scale; the published numbers search it on labelled validation data."""


@MERGE_RULES.register("iso-c")
@final
@dataclass(frozen=True)
class IsoC(MergeRule):
    """Set all singular values of the sum to their mean (Iso-C)."""

    scale: float = _SCALE

    def matrix(self, deltas: Deltas) -> Tensor:
        """mean(S) U V' of the sum U S V'."""
        whole = components(deltas.total())
        return _flattened(whole.u, whole.s, whole.v)

    def workspace(self, rows: int, columns: int) -> int:
        return 5 * rows * columns + 4 * min(rows, columns) ** 2


@MERGE_RULES.register("iso-cts")
@final
@dataclass(frozen=True)
class IsoCTS(MergeRule):
    """Iso-C with room for directions of single vectors that the sum lacks (Iso-CTS)."""

    scale: float = _SCALE
    common: float = 0.8
    """Share of the directions that are those of the sum; the others belong to single vectors."""

    least_vectors: ClassVar[int] = 2
    distinct: ClassVar[bool] = True
    reads: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("common", 0 <= self.common < 1, "from 0 to less than 1")

    def own_directions(self, rank: int, vectors: int) -> int:
        """Return how many directions every vector gets: (rank - floor(common rank)) / vectors, rounded."""
        own = round((rank - int(self.common * rank)) / vectors)
        return own if own * vectors <= rank else own - 1

    def has_room(self, rank: int, vectors: int) -> bool:
        # without any direction of single vectors this would be Iso-C under another name
        return self.own_directions(rank, vectors) > 0

    def matrix(self, deltas: Deltas) -> Tensor:
        own = self.own_directions(deltas.rank, len(deltas))
        common = components(deltas.total(), deltas.rank - own * len(deltas))
        kept = (components(values - common.u @ (common.u.T @ values), own) for values in deltas)
        whole = joined(chain(kept, [common]), deltas.shape, deltas.rank)
        return _flattened(polar(whole.u), whole.s, polar(whole.v))

    def workspace(self, rows: int, columns: int) -> int:
        return 7 * rows * columns + 4 * min(rows, columns) ** 2


def _flattened(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return (u @ v.T).mul_(s.mean() if len(s) else 0.0)


def iso_c(bank: Bank, *, scale: float = _SCALE, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Merge by Iso-C; keywords are those of ``merge``."""
    return merge(bank, IsoC(scale), **how)


def iso_cts(
    bank: Bank, *, scale: float = _SCALE, common: float = 0.8, **how: Unpack[MergeKeywords]
) -> TaskVector:
    """Merge by Iso-CTS; keywords are those of ``merge``."""
    return merge(bank, IsoCTS(scale, common), **how)
