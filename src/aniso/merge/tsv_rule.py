"""TSV-M: the largest singular components of every vector, with directions made orthogonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack, final

import torch
from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import MergeRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.merge.spectral import components, polar
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector


@MERGE_RULES.register("tsv")
@final
@dataclass(frozen=True)
class TSV(MergeRule):
    """Add each vector's largest singular components, made orthogonal across vectors (TSV-M)."""

    distinct: ClassVar[bool] = True

    def has_room(self, rank: int, vectors: int) -> bool:
        return vectors <= rank

    def matrix(self, deltas: Deltas) -> Tensor:
        """U S V' with the polar factors U and V of the kept directions of all vectors."""
        kept = [components(values, deltas.rank // len(deltas)) for values in deltas]
        u, v = (polar(torch.cat(sides, 1)) for sides in ([c.u for c in kept], [c.v for c in kept]))
        return (u * torch.cat([c.s for c in kept])) @ v.T

    def workspace(self, rows: int, columns: int) -> int:
        rank = min(rows, columns)
        # kept directions and a polar factor's three matrices; a delta, its copy and a Gram matrix before that
        return (rows + columns) * rank + max(4 * max(rows, columns) * rank, 2 * rows * columns + 3 * rank**2)


def tsv(bank: Bank, *, scale: float = 1.0, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Merge by TSV-M; keywords are those of ``merge``."""
    return merge(bank, TSV(scale), **how)
