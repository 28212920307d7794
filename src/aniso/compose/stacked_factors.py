"""Low-rank factors of several vectors over the same rows of a block, side by side."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from aniso.vectors import LowRank


@final
class StackedFactors:
    """Concatenated low-rank factors over rows ``start`` to ``stop``; ``owner`` is the vector of each rank."""

    def __init__(self, start: int, b: Tensor, a: Tensor, scale: Tensor, owner: Tensor) -> None:
        self.start = start
        self.stop = start + b.shape[0]
        self.b = b
        self.a = a
        self.scale = scale
        self.owner = owner

    def cut(self, first: int, last: int) -> StackedFactors:
        low, high = max(first, self.start), min(last, self.stop)
        return StackedFactors(
            low - first, self.b[low - self.start : high - self.start], self.a, self.scale, self.owner
        )

    def to(self, device: torch.device) -> StackedFactors:
        moved = (t.to(device) for t in (self.b, self.a, self.scale, self.owner))
        return StackedFactors(self.start, *moved)

    def scaled(self, coefficients: Tensor) -> Tensor:
        """One number for each rank: its vector's coefficient times its scale."""
        return coefficients[self.owner] * self.scale.to(coefficients.dtype)

    def by_vector(self, products: Tensor, vectors: int) -> Tensor:
        """Sums over the ranks of each vector; ranks are sorted by vector, so no scattering is needed."""
        running = (products.double() * self.scale).cumsum(0)  # in double, where differences lose nothing
        ends = torch.searchsorted(self.owner, torch.arange(vectors + 1, device=self.owner.device))
        return torch.nn.functional.pad(running, (1, 0))[ends].diff().to(products.dtype)

    def fill(self, tile: Tensor, rows: slice) -> None:
        """Add each vector's product to its row of a tile, which has the block's rows ``rows``."""
        low, high = max(rows.start, self.start), min(rows.stop, self.stop)
        if low >= high:
            return
        b = self.b[low - self.start : high - self.start].to(tile.dtype) * self.scale.to(tile.dtype)
        a = self.a.to(tile.dtype)
        for vector, target in enumerate(tile):
            own = self.owner == vector
            target[low - rows.start : high - rows.start].addmm_(b[:, own], a[own])


def stacked_factors(deltas: list[LowRank]) -> list[StackedFactors]:
    """One for each range of rows that vectors' factors fill."""
    places: dict[tuple[int, int], list[tuple[int, Tensor, Tensor, float]]] = {}
    for i, delta in enumerate(deltas):
        for term in delta.terms:
            places.setdefault((term.start, term.stop), []).append((i, term.b, term.a, term.scale))
    out = []
    for (start, _), terms in sorted(places.items()):
        ranks = torch.tensor([a.shape[0] for _, _, a, _ in terms])
        out.append(
            StackedFactors(
                start,
                torch.cat([b for _, b, _, _ in terms], dim=1),
                torch.cat([a for _, _, a, _ in terms]),
                torch.tensor([scale for *_, scale in terms], dtype=torch.float64).repeat_interleave(ranks),
                torch.tensor([i for i, *_ in terms]).repeat_interleave(ranks),
            )
        )
    return out
