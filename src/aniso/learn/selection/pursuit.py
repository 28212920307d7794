"""Selection by orthogonal matching pursuit on the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from aniso.learn.selection.gradient import Gradient
from aniso.learn.selection.selection_rule import Scores, cell_bytes, gathered
from aniso.registry import SELECTION_RULES
from aniso.vectors import Bank, LowRank

_CHUNK = 1 << 18
_DEPENDENT = 1e-9  # of a cell's square that is left once others have been taken out of it
_EQUAL = 1e-6  # of a gain: what 32-bit gradients cannot tell apart


@SELECTION_RULES.register("pursuit")
@final
class Pursuit(Gradient):
    """Select cells one by one, each for the gradient that the cells before it do not explain.

    Greedy within each block: take the cell along which most of the gradient remains, then project the
    gradient onto the complement of all cells taken so far. Of two parallel vectors only one is taken. Beside
    the gradients this needs the cells' inner products, of one block at a time.
    """

    whole = False
    compares_vectors = True

    def cells(self, bank: Bank, scores: Scores) -> dict[str, list[str]]:
        blocks = [b.name for b in bank.layout.blocks]
        searches = {}
        for i, block in enumerate(blocks, 1):
            own = {name: scores[name][block] for name in bank if block in bank[name]}
            if own:
                gram = _gram(bank, block)
                size = (
                    gram.diagonal().clamp(min=1e-300).sqrt()
                )  # all scaled to length one, so that small cells count as much
                gradients = torch.tensor(list(own.values()), dtype=torch.float64) / size
                searches[block] = _Block(tuple(own), gradients, gram / size[:, None] / size)
            if self.progress:
                self.progress("inner products of vectors", i, len(blocks))
        return gathered(
            bank, self._by_count(searches) if self.budget.count else self._by_bytes(bank, searches)
        )

    def _by_count(self, searches: Mapping[str, _Block]) -> list[tuple[str, str]]:
        kept = []
        for block, search in searches.items():
            for _ in range(self.budget.count or 0):
                best = search.best()
                if best is None:
                    break
                kept.append((search.take(best[1]), block))
        return kept

    def _by_bytes(self, bank: Bank, searches: Mapping[str, _Block]) -> list[tuple[str, str]]:
        """Take the best next cell over all blocks that still fits, again and again."""
        kept, left = [], self.budget.nbytes or 0
        found = {block: search.best() for block, search in searches.items()}
        while any(found.values()):
            block, (_, place) = max(
                ((block, best) for block, best in found.items() if best), key=lambda one: one[1][0]
            )
            search = searches[block]
            size = cell_bytes(bank, search.names[place], block)
            if size > left:
                search.leave(place)
            else:
                left -= size
                kept.append((search.take(place), block))
            found[block] = search.best()  # those of other blocks have not changed
        return kept


@final
@dataclass
class _Block:
    """The search in one block."""

    names: tuple[str, ...]
    gradients: Tensor
    gram: Tensor
    taken: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)

    def best(self) -> tuple[float, int] | None:
        """Return the largest decrease of the gradient's norm and the cell that gives it, or None."""
        rest, square = self._remaining()
        usable = square > _DEPENDENT * self.gram.diagonal()
        usable[[*self.taken, *self.left_out]] = False
        gain = torch.where(usable, rest.abs() / square.clamp(min=1e-300).sqrt(), -1.0).nan_to_num(-1.0)
        # of cells that are equally good, as all of a scalar block are, the first: rounding must not decide
        most = gain.max()
        place = int((gain >= most - _EQUAL * most.abs()).nonzero()[0])
        value = float(gain[place])
        return (value, place) if value >= 0 and math.isfinite(value) else None

    def _remaining(self) -> tuple[Tensor, Tensor]:
        """Every cell's inner product with the remaining gradient, and its squared norm, after projecting out
        the cells that are taken."""
        if not self.taken:
            return self.gradients, self.gram.diagonal().clone()
        among = self.gram[self.taken][:, self.taken]
        across = self.gram[:, self.taken]
        solved = torch.linalg.lstsq(
            among, torch.cat([self.gradients[self.taken, None], across.T], 1)
        ).solution
        return self.gradients - across @ solved[:, 0], self.gram.diagonal() - (across * solved[:, 1:].T).sum(
            1
        )

    def take(self, place: int) -> str:
        self.taken.append(place)
        return self.names[place]

    def leave(self, place: int) -> None:
        self.left_out.add(place)


def _gram(bank: Bank, block: str) -> Tensor:
    """Inner products of all cells of a block, which are in memory together."""
    deltas = list(bank.read_block(block, exact=False).values())
    dense = [i for i, delta in enumerate(deltas) if not isinstance(delta, LowRank)]
    out = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    if dense:
        out[torch.tensor(dense)[:, None], dense] = _products([deltas[i].dense().reshape(-1) for i in dense])
    for i, one in enumerate(deltas):
        for j, other in enumerate(deltas[: i + 1]):
            if isinstance(one, LowRank) or isinstance(other, LowRank):
                out[i, j] = out[j, i] = one.dot(other)
    return out


def _products(rows: list[Tensor]) -> Tensor:
    """Inner products in double precision, a piece of all rows at a time."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, rows[0].numel(), _CHUNK):
        piece = torch.stack([row[start : start + _CHUNK] for row in rows]).double()
        total += piece @ piece.T
    return total
