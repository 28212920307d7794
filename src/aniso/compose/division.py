"""How one block is divided: which of its elements a coefficient scales, and the arithmetic that follows.

A tile is some elements of a block, of all vectors at once: ``(vectors, elements)``, ``start`` elements into
the block. Adding scaled tiles to the weights, and taking products of tiles with the gradient, is all that the
method ever does with task vectors; a division does both without an index or a mask per element.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy
import torch
from torch import Tensor

from aniso.vectors import Block

_RUN = 1 << 14  # elements; shorter runs cost more in calls than in arithmetic
_LONG = 1 << 17  # elements; from here on several threads are faster with one vector after the other


class Division(ABC):
    """One block's parts. Coefficients of a block are a matrix, vectors by parts."""

    numel: int

    @property
    @abstractmethod
    def count(self) -> int:
        """Parts, and so coefficients for each vector."""

    @property
    def alignment(self) -> int:
        """Tiles begin and end at multiples of it."""
        return 1

    @abstractmethod
    def part_of(self) -> Tensor:
        """The part of every element, as a flat tensor: what the arithmetic below never needs."""

    @abstractmethod
    def describe(self, part: int) -> str:
        """What the coefficient of a part scales."""

    def spread(self, coefficients: Tensor) -> Tensor:
        """Coefficients in the form that ``add`` wants; once for all tiles."""
        return coefficients

    @abstractmethod
    def add(self, out: Tensor, tile: Tensor, spread: Tensor, start: int) -> None:
        """``out += sum over vectors of coefficient * tile``."""

    def zeros(self, tile: Tensor) -> Tensor:
        """Where products are collected."""
        return tile.new_zeros(tile.shape[0], self.count)

    @abstractmethod
    def collect(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        """``total += <tile, gradient>`` for every vector and part."""

    def folded(self, total: Tensor) -> Tensor:
        """What was collected, as vectors by parts."""
        return total


@final
@dataclass(frozen=True)
class Undivided(Division):
    """One coefficient for the whole block."""

    numel: int

    @property
    def count(self) -> int:
        return 1

    def part_of(self) -> Tensor:
        return torch.zeros(self.numel, dtype=torch.int64)

    def describe(self, part: int) -> str:
        return "the whole block"

    def add(self, out: Tensor, tile: Tensor, spread: Tensor, start: int) -> None:
        if goes_in_turn(out):
            for vector, coefficient in zip(tile, spread[:, 0].tolist(), strict=True):
                out.add_(vector, alpha=coefficient)
        else:
            out.addmv_(tile.T, spread[:, 0])

    def collect(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        if goes_in_turn(gradient):
            total[:, 0] += torch.stack([vector.dot(gradient) for vector in tile])
        else:
            total[:, 0] += tile.mv(gradient)


def goes_in_turn(flat: Tensor) -> bool:
    """Whether torch's product of a matrix and a vector would leave a part of its threads idle."""
    return flat.numel() >= _LONG and flat.device.type == "cpu" and torch.get_num_threads() > 1


@final
@dataclass(frozen=True)
class Rows(Division):
    """One coefficient for each row, that is for each output of a weight matrix."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.rows * self.columns

    @property
    def count(self) -> int:
        return self.rows

    @property
    def alignment(self) -> int:
        return max(1, self.columns)

    def part_of(self) -> Tensor:
        return torch.arange(self.rows).repeat_interleave(self.columns)

    def describe(self, part: int) -> str:
        return f"row {part}"

    def add(self, out: Tensor, tile: Tensor, spread: Tensor, start: int) -> None:
        rows = self._span(out, start)
        matrices = tile.reshape(len(tile), -1, self.columns).transpose(0, 1)
        out.view(-1, 1, self.columns).baddbmm_(spread[:, rows].T.unsqueeze(1), matrices)

    def collect(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        matrices = tile.reshape(len(tile), -1, self.columns).transpose(0, 1)
        total[:, self._span(gradient, start)] += matrices.bmm(gradient.view(-1, self.columns, 1))[..., 0].T

    def _span(self, flat: Tensor, start: int) -> slice:
        return slice(start // self.columns, (start + flat.numel()) // self.columns)


@final
@dataclass(frozen=True)
class Columns(Division):
    """One coefficient for each column, that is for each input of a weight matrix."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.rows * self.columns

    @property
    def count(self) -> int:
        return self.columns

    @property
    def alignment(self) -> int:
        return max(1, self.columns)

    def part_of(self) -> Tensor:
        return torch.arange(self.columns).repeat(self.rows)

    def describe(self, part: int) -> str:
        return f"column {part}"

    def add(self, out: Tensor, tile: Tensor, spread: Tensor, start: int) -> None:
        for row, scale in zip(tile, spread, strict=True):
            out.view(-1, self.columns).addcmul_(row.view(-1, self.columns), scale)

    def collect(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        for sums, row in zip(total, tile, strict=True):
            sums += (row * gradient).view(-1, self.columns).sum(0)


@final
@dataclass(frozen=True)
class Scattered(Division):
    """Elements dealt out at random to ``count`` parts whose sizes differ by one at most.

    The block is cut into runs. Along a run, parts follow each other in the order of one random sequence,
    the same for all runs but entered at a random point. So a run of coefficients is a window of that
    sequence, read as it lies: no index per element, and the cost does not depend on how many parts there
    are. Two elements of different runs share a part with the probability 1 / count, as they would if every
    element drew its part by itself. What is left at the end has a random sequence of its own.
    """

    numel: int
    parts: int
    key: int

    @property
    def count(self) -> int:
        return min(self.parts, self.numel)

    @cached_property
    def length(self) -> int:
        """Elements of a run: whole rounds through the parts, so that runs are balanced by themselves."""
        rounds = -(-_RUN // self.count)
        return rounds * self.count if rounds * self.count < self.numel else self.numel

    @cached_property
    def _sequence(self) -> Tensor:
        """Slots of a run in random order; slot ``s`` belongs to part ``sequence[s] % count``."""
        return torch.from_numpy(_permutation(self.key, self.length))

    @cached_property
    def _order(self) -> Tensor:
        """Slots in the order of the sequence, in which parts follow each other."""
        return self._sequence.argsort()

    @cached_property
    def _tail(self) -> Tensor:
        return torch.from_numpy(_permutation(self.key ^ 1, self.numel % self.length))

    @cached_property
    def _tail_order(self) -> Tensor:
        return self._tail.argsort()

    @cached_property
    def _shifts(self) -> list[int]:
        """Where each run enters the sequence."""
        runs = self.numel // self.length
        return [int(h) for h in _hashes(self.key ^ 2, runs) % numpy.uint64(self.length)]

    def part_of(self) -> Tensor:
        sequence = (self._sequence % self.count).repeat(2)
        runs = [sequence[shift : shift + self.length] for shift in self._shifts]
        return torch.cat([*runs, self._tail % self.count])

    def describe(self, part: int) -> str:
        size = self.numel // self.count + (part < self.numel % self.count)
        return f"part {part} of {self.count}: {size} elements at random"

    def spread(self, coefficients: Tensor) -> Tensor:
        # index_select takes a sixth of the time of an index in brackets
        window, tail = (
            coefficients.index_select(1, (slots % self.count).to(coefficients.device))
            for slots in (self._sequence, self._tail)
        )
        return torch.cat([window, window, tail], dim=1)

    def add(self, out: Tensor, tile: Tensor, spread: Tensor, start: int) -> None:
        for span, window in self._segments(start, out.numel()):
            out[span] += (tile[:, span] * spread[:, window]).sum(0)

    def zeros(self, tile: Tensor) -> Tensor:
        return tile.new_zeros(tile.shape[0], 2 * self.length + len(self._tail))

    def collect(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        for span, window in self._segments(start, gradient.numel()):
            total[:, window].addcmul_(tile[:, span], gradient[span])

    def folded(self, total: Tensor) -> Tensor:
        window = total[:, : self.length] + total[:, self.length : 2 * self.length]
        tail = total[:, 2 * self.length :]
        return self._by_part(window, self._order) + self._by_part(tail, self._tail_order)

    def _by_part(self, slots: Tensor, order: Tensor) -> Tensor:
        """Sums over the slots of each part, in a fixed order: scattering would add in any order on a GPU."""
        ordered = slots.index_select(1, order.to(slots.device))
        short = -ordered.shape[1] % self.count
        return torch.nn.functional.pad(ordered, (0, short)).view(len(slots), -1, self.count).sum(1)

    def _segments(self, start: int, size: int) -> list[tuple[slice, slice]]:
        """Pieces of a tile that lie in one run each, with the window of the sequence over each."""
        out = []
        at = start
        while at < start + size:
            run, into = divmod(at, self.length)
            is_tail = run == len(self._shifts)
            window = 2 * self.length if is_tail else self._shifts[run]
            stop = min(start + size, (run + 1) * self.length)
            first = window + into
            out.append((slice(at - start, stop - start), slice(first, first + stop - at)))
            at = stop
        return out


def scattered(block: Block, parts: int, seed: int) -> Division:
    """The random division of a block, made from the seed and the block's name alone."""
    if min(parts, block.numel) <= 1:
        return Undivided(block.numel)
    if parts >= block.numel:
        return Columns(1, block.numel)  # a part for each element: there is nothing to deal out
    digest = hashlib.sha256(f"{seed}\0{block.name}\0{parts}".encode()).digest()
    return Scattered(block.numel, parts, int.from_bytes(digest[:8], "big") & ~3)


def rows_of(block: Block) -> Division:
    rows, columns = block.matrix_shape
    if rows <= 1 or columns == 0:
        return Undivided(block.numel)
    # one coefficient for each element of a vector: a single row, by columns
    return Columns(1, rows) if columns == 1 else Rows(rows, columns)


def columns_of(block: Block) -> Division:
    rows, columns = block.matrix_shape
    return Columns(rows, columns) if columns > 1 else Undivided(block.numel)


def _permutation(key: int, size: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
    """A random order, the same in every version of every library: sorted hashes."""
    return numpy.argsort(_hashes(key, size), kind="stable").astype(numpy.int64)


def _hashes(key: int, size: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]]:
    """64 random bits for each number from zero on (SplitMix64, Steele et al. 2014)."""
    steps = numpy.arange(1, size + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    x = steps + numpy.uint64(key)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))
