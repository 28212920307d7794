"""Mean and task arithmetic: sums of scaled vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack, final

from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import ElementwiseRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector


@MERGE_RULES.register("mean")
@final
@dataclass(frozen=True)
class Mean(ElementwiseRule):
    """Average the vectors, all with the same weight."""

    linear: ClassVar[bool] = True

    def elements(self, deltas: Deltas) -> Tensor:
        return deltas.mean()

    def coefficient(self, vectors: int) -> float:
        return self.scale / vectors


@MERGE_RULES.register("task-arithmetic")
@final
@dataclass(frozen=True)
class TaskArithmetic(ElementwiseRule):
    """Add the vectors, scaled by one number (task arithmetic)."""

    scale: float = 0.3
    linear: ClassVar[bool] = True

    def elements(self, deltas: Deltas) -> Tensor:
        return deltas.total()

    def coefficient(self, vectors: int) -> float:
        return self.scale


def mean(bank: Bank, *, scale: float = 1.0, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Return scale * mean of the vectors; keywords are those of ``merge``."""
    return merge(bank, Mean(scale), **how)


def task_arithmetic(bank: Bank, *, scale: float = 0.3, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Return scale * sum of the vectors; keywords are those of ``merge``."""
    return merge(bank, TaskArithmetic(scale), **how)
