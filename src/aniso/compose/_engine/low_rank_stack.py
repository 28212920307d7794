"""The low-rank deltas of several vectors over one block, never multiplied out for a vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import BlockPartition, ComponentParts
from aniso.compose._engine.delta_stack import DeltaStack
from aniso.compose._engine.scratch import scratch
from aniso.vectors import LowRank


@final
class StackedFactors:
    """The concatenated low-rank factors of several vectors over rows ``start:stop`` of a block.

    ``b`` and ``a`` have one column and one row for each rank; ``owner`` is the vector that a rank belongs to,
    and ``part`` the part of the vector's coefficients that scales it. Ranks are sorted by both.
    """

    def __init__(
        self,
        start: int,
        b: Tensor,
        a: Tensor,
        scale: Tensor,
        owner: Tensor,
        part: Tensor,
        ranks_of: dict[int, slice] | None = None,
    ) -> None:
        """``ranks_of`` are each vector's ranks; default: as ``owner``, which is on the CPU, has them."""
        self.start = start
        self.stop = start + b.shape[0]
        self.b = b
        self.a = a
        self.scale = scale
        self.owner = owner
        self.part = part
        self.ranks_of = _ranks_of(owner) if ranks_of is None else ranks_of

    def cut(self, first: int, last: int) -> StackedFactors:
        """Return the factors of rows ``first:last`` of the block, counted from ``first``."""
        low, high = max(first, self.start), min(last, self.stop)
        b = self.b[low - self.start : high - self.start]
        return StackedFactors(low - first, b, self.a, self.scale, self.owner, self.part, self.ranks_of)

    def to(self, device: torch.device) -> StackedFactors:
        b, a, scale, owner, part = (t.to(device) for t in (self.b, self.a, self.scale, self.owner, self.part))
        return StackedFactors(self.start, b, a, scale, owner, part, self.ranks_of)

    def scaled(self, coefficients: Tensor) -> Tensor:
        """Return one number for each rank: its coefficient, of vectors by parts, times its scale."""
        return coefficients[self.owner, self.part] * self.scale.to(coefficients.dtype)

    def by_part(self, products: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the sums over the ranks of each vector and part; these are sorted: nothing is scattered."""
        vectors, parts = shape
        running = (products.double() * self.scale).cumsum(0)  # in double, where differences lose nothing
        every = torch.arange(vectors * parts + 1, device=self.owner.device)
        ends = torch.searchsorted(self.owner * parts + self.part, every)
        return torch.nn.functional.pad(running, (1, 0))[ends].diff().view(shape).to(products.dtype)

    def fill(self, tile: Tensor, rows: slice) -> None:
        """Add each vector's product ``b @ a`` to its row of a tile over the block's rows ``rows``."""
        low, high = max(rows.start, self.start), min(rows.stop, self.stop)
        if low >= high:
            return
        b = self.b[low - self.start : high - self.start].to(tile.dtype) * self.scale.to(tile.dtype)
        a = self.a.to(tile.dtype)
        for vector, own in self.ranks_of.items():
            tile[vector][low - rows.start : high - rows.start].addmm_(b[:, own], a[own])


@final
class LowRankStack(DeltaStack):
    """Deltas ``b @ a`` that are never multiplied out for a vector; all vectors' factors are concatenated.

    Factors over the same rows of the block are concatenated; a block whose query, key and value have adapters
    of their own has three ``StackedFactors``. Coefficients scale ranks, or elements in tiles.
    """

    def __init__(
        self,
        vectors: tuple[int, ...],
        shape: tuple[int, int],
        factors: Sequence[StackedFactors],
        offset: int = 0,
    ) -> None:
        """``shape`` is that of the block's rows which the stack covers."""
        self.vectors = vectors
        self.shape = shape
        self.factors = tuple(factors)
        self.numel = shape[0] * shape[1]
        self.offset = offset

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for f in self.factors for t in (f.a, f.b))

    def cut(self, start: int, stop: int) -> LowRankStack:
        columns = self.shape[1]
        first, last = start // columns, stop // columns
        kept = [f.cut(first, last) for f in self.factors if f.start < last and f.stop > first]
        return LowRankStack(self.vectors, (last - first, columns), kept, self.offset + start)

    @property
    def device(self) -> torch.device:
        return self.factors[0].a.device if self.factors else torch.device("cpu")

    def to(self, device: torch.device) -> LowRankStack:
        return LowRankStack(self.vectors, self.shape, [f.to(device) for f in self.factors], self.offset)

    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        columns = self.shape[1]
        for start, stop in self._steps(math.lcm(alignment, max(1, columns))):
            rows = slice(start // columns, stop // columns)
            tile = scratch("tile", (len(self.vectors), stop - start), dtype, self.device)
            tile.zero_()
            for factors in self.factors:
                factors.fill(tile.view(len(self.vectors), -1, columns), rows)
            yield start, tile

    def _add(self, out: Tensor, own: Tensor, partition: BlockPartition) -> None:
        if not partition.scales_ranks:
            return super()._add(out, own, partition)
        matrix = out.view(self.shape)
        for factors in self.factors:
            b = factors.b.to(out.dtype) * factors.scaled(own)
            matrix[factors.start : factors.stop].addmm_(b, factors.a.to(out.dtype))
        return None

    def _try_write(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        if len(self.factors) != 1 or self.factors[0].b.shape[0] != self.shape[0]:
            return False
        if base is None or base.dtype != out.dtype:
            return False
        b = self.factors[0].b.to(out.dtype) * self.factors[0].scaled(own)
        torch.addmm(base.view(self.shape), b, self.factors[0].a.to(out.dtype), out=out.view(self.shape))
        return True

    def dots(self, gradient: Tensor, partition: BlockPartition) -> Tensor:
        if not partition.scales_ranks:
            return super().dots(gradient, partition)
        matrix, shape = gradient.view(self.shape), (len(self.vectors), partition.count)
        total = gradient.new_zeros(shape)
        for factors in self.factors:
            rows = matrix[factors.start : factors.stop]
            products = (factors.b.to(gradient.dtype).T @ rows).mul_(factors.a.to(gradient.dtype)).sum(1)
            total += factors.by_part(products, shape)
        return total


def _ranks_of(owner: Tensor) -> dict[int, slice]:
    """Return the range of each vector's ranks, which follow each other."""
    vectors, counts = torch.unique_consecutive(owner, return_counts=True)
    ends = counts.cumsum(0)
    spans = zip(vectors.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return {vector: slice(start, end) for vector, start, end in spans}


def stacked_factors(deltas: list[LowRank], components: ComponentParts | None = None) -> list[StackedFactors]:
    """Return the stacked factors for each range of rows that the vectors' factors fill.

    If the deltas are singular components, ``components`` divides their ranks.
    """
    by_rank = components or ComponentParts(0, 1)
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
                torch.cat([by_rank.part_of_rank(rank) for rank in ranks.tolist()]),
            )
        )
    return out
