"""A delta in which most rows are zero: the vocabulary rows of an embedding that fine-tuning changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.vectors.delta import Delta, Dense, Exact

_FEWEST = 64  # rows of a block; below it, nothing is gained
_MOST_CHANGED = 0.5  # share of rows; above it, a dense delta is as small and faster


@final
@dataclass(frozen=True, eq=False)
class SparseRows(Delta):
    """Differences in some rows of a matrix; all other rows are the base's, bit for bit."""

    shape: tuple[int, ...]
    rows: Tensor
    """Numbers of the rows, ascending."""
    values: Tensor
    """A row of differences for each."""
    exact: Exact | None = None
    """Tuned values that base + difference misses by a rounding; indices count elements of ``values``."""

    @property
    def nbytes(self) -> int:
        extra = 0 if self.exact is None else 12 * self.exact.index.numel()
        return self.values.numel() * self.values.element_size() + 8 * self.rows.numel() + extra

    def dense(self) -> Tensor:
        out = torch.zeros(self.shape)
        out[self.rows] = self.values.float()
        return out

    def scaled(self, factor: float) -> SparseRows:
        return self if factor == 1 else SparseRows(self.shape, self.rows, self.values.float() * factor)

    def plus(self, other: Delta) -> Delta:
        if not isinstance(other, SparseRows):
            return super().plus(other)
        rows = torch.unique(torch.cat([self.rows, other.rows]))
        values = torch.zeros(len(rows), self.shape[1])
        for delta in (self, other):
            values[torch.searchsorted(rows, delta.rows)] += delta.values.float()
        return SparseRows(self.shape, rows, values)

    def along(self, direction: Tensor) -> float:
        return Dense(self.values).along(direction.reshape(self.shape)[self.rows.to(direction.device)])

    def norm(self) -> float:
        return Dense(self.values).norm()

    def vanishes(self, norm: float) -> bool:
        return norm == 0 and self.exact is None

    def without_exact(self) -> SparseRows:
        return SparseRows(self.shape, self.rows, self.values)

    def applied_to(self, base: Tensor, coefficient: float) -> Tensor:
        out = base.to(torch.float32, copy=True)
        out[self.rows] = Dense(self.values, self.exact).applied_to(out[self.rows], coefficient)
        return out


def sparse_rows(delta: Dense) -> Delta:
    """Return a delta as its changed rows, if it is a matrix in which at most half of the rows changed."""
    if len(delta.shape) != 2 or delta.shape[0] < _FEWEST:
        return delta
    changed = (delta.values != 0).any(1)
    width = delta.shape[1]
    if delta.exact is not None:
        changed[delta.exact.index // width] = True
    rows = changed.nonzero().reshape(-1)
    if not len(rows) or len(rows) > _MOST_CHANGED * delta.shape[0]:
        return delta
    exact = delta.exact
    if exact is not None:
        place = torch.searchsorted(rows, exact.index // width)
        exact = Exact(place * width + exact.index % width, exact.value)
    return SparseRows(delta.shape, rows, delta.values[rows], exact)
