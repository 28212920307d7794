"""TSV-M: the largest singular components of every vector, with directions made orthogonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack, final

from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import MergeRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.merge.spectral import joined, polar
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector
from aniso.vectors.singular import components


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
        own = deltas.rank // len(deltas)
        kept = joined((components(values, own) for values in deltas), deltas.shape, own * len(deltas))
        return (polar(kept.u) * kept.s) @ polar(kept.v).T

    def workspace(self, rows: int, columns: int) -> int:
        return 5 * rows * columns + 4 * min(rows, columns) ** 2


def tsv(bank: Bank, *, scale: float = 1.0, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Merge by TSV-M; keywords are those of ``merge``."""
    return merge(bank, TSV(scale), **how)
