"""Scores of cells as arrays, and the cells that are kept within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from aniso.sizes import Budget


@final
@dataclass(frozen=True)
class CellTable:
    """Cells by vector and block, in order: of equal scores the first is kept."""

    vectors: tuple[str, ...]
    blocks: tuple[str, ...]
    vector: NDArray[np.int64]
    """Position of each cell's vector; those of one vector follow each other."""
    block: NDArray[np.int64]
    score: NDArray[np.float64]

    @classmethod
    def of(cls, cells: Sequence[tuple[str, str]], scores: Sequence[float] | NDArray[np.float64]) -> Self:
        """Return the table of cells, given as names of vectors and blocks, with their scores."""
        vectors, blocks = (tuple(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
        own = {name: i for i, name in enumerate(vectors)}
        places = {name: i for i, name in enumerate(blocks)}
        return cls(
            vectors,
            blocks,
            np.array([own[name] for name, _ in cells], np.int64),
            np.array([places[block] for _, block in cells], np.int64),
            np.asarray(scores, np.float64),
        )

    @property
    def totals(self) -> NDArray[np.float64]:
        """Sum of the absolute scores of every vector's cells."""
        return np.bincount(self.vector, np.abs(self.score), len(self.vectors)).astype(np.float64)

    def kept(self, budget: Budget, size: Callable[[int], int], *, whole: bool) -> dict[str, list[str]]:
        """Return the blocks that are kept of each vector.

        ``whole`` keeps vectors by the sum of their scores, otherwise cells: the best of every block, or of
        all blocks together if the budget is in bytes. ``size`` returns the bytes of the cell at a position;
        it is called for such budgets only.
        """
        chosen = self._whole(budget, size) if whole else self._cells(budget, size)
        found: dict[str, list[str]] = {}
        for cell in np.flatnonzero(chosen):
            found.setdefault(self.vectors[self.vector[cell]], []).append(self.blocks[self.block[cell]])
        return found

    def _whole(self, budget: Budget, size: Callable[[int], int]) -> NDArray[np.bool_]:
        order = np.argsort(-self.totals, kind="stable")
        if budget.count is not None:
            kept = order[: budget.count]
        else:
            starts = np.append(np.searchsorted(self.vector, np.arange(len(self.vectors))), len(self.vector))

            def total(vector: int) -> int:
                return sum(size(cell) for cell in range(starts[vector], starts[vector + 1]))

            kept = _fitting(order, total, budget)
        return np.isin(self.vector, kept)

    def _cells(self, budget: Budget, size: Callable[[int], int]) -> NDArray[np.bool_]:
        chosen = np.zeros(len(self.score), bool)
        best = np.argsort(-np.abs(self.score), kind="stable")
        if budget.count is None:
            chosen[_fitting(best, size, budget)] = True
            return chosen
        by_block = best[np.argsort(self.block[best], kind="stable")]
        starts = np.searchsorted(self.block[by_block], np.arange(len(self.blocks)))
        rank = np.arange(len(by_block)) - starts[self.block[by_block]]
        chosen[by_block[rank < budget.count]] = True
        return chosen


def _fitting(order: NDArray[np.int64], size: Callable[[int], int], budget: Budget) -> NDArray[np.int64]:
    """Positions in order, each of those that still fits into the budget."""
    left, kept = budget.nbytes or 0, []
    for position in order.tolist():
        own = size(position)
        if own <= left:
            left -= own
            kept.append(position)
    return np.array(kept, np.int64)
