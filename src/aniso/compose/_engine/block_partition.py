"""Partitions of one block: what each coefficient scales, and the arithmetic of that.

Coefficients scale some of a block's elements, or some of the ranks of low-rank vectors. A tile is a range of
elements of a block for all vectors, ``(vectors, elements)``, that starts at element ``start`` of the block.
A composition does two things with task vectors: it adds scaled tiles to the weights and multiplies tiles with
the gradient. A partition of elements does both without an index or a mask per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy
import torch
from torch import Tensor

_RUN = 1 << 14  # elements; shorter runs cost more in calls than in arithmetic
_LONG = 1 << 17  # elements; from here on several threads are faster with one vector after the other


class BlockPartition(ABC):
    """The parts of one block. The block's coefficients are a matrix, vectors by parts."""

    numel: int
    scales_ranks: bool = False
    """True if each rank of a low-rank vector has one coefficient, so that factors stay factors."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of parts, and so of coefficients for each vector."""

    @property
    def alignment(self) -> int:
        """Tiles start and stop at multiples of this."""
        return 1

    @abstractmethod
    def describe(self, part: int) -> str:
        """Return a phrase for what a part's coefficient scales."""


@final
@dataclass(frozen=True)
class ComponentParts(BlockPartition):
    """One coefficient for each singular component of a low-rank vector, the last for all smaller ones.

    A vector of lower rank has coefficients that scale nothing.
    """

    numel: int
    parts: int
    scales_ranks = True

    @property
    def count(self) -> int:
        return self.parts

    def describe(self, part: int) -> str:
        return f"singular component {part}" + (" and all smaller ones" if part == self.parts - 1 else "")

    def part_of_rank(self, rank: int) -> Tensor:
        """Return the part of each rank of a vector whose ranks are its components in descending order."""
        return torch.arange(rank).clamp_(max=self.parts - 1)


class ElementPartition(BlockPartition):
    """A partition of the elements of a block."""

    @abstractmethod
    def part_of(self) -> Tensor:
        """Return the part of every element as a flat tensor; the arithmetic below never needs it."""

    def expand(self, coefficients: Tensor) -> Tensor:
        """Return the coefficients in the form that ``add`` takes; called once for all tiles."""
        return coefficients

    @abstractmethod
    def add(self, out: Tensor, tile: Tensor, expanded: Tensor, start: int) -> None:
        """Compute ``out += sum over vectors of coefficient * tile``."""

    def accumulator(self, tile: Tensor) -> Tensor:
        """Return the zero tensor that ``accumulate`` adds products to."""
        return tile.new_zeros(tile.shape[0], self.count)

    @abstractmethod
    def accumulate(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        """Compute ``total += <tile, gradient>`` for every vector and part."""

    def sum_by_part(self, total: Tensor) -> Tensor:
        """Return the accumulated products as vectors by parts."""
        return total


@final
@dataclass(frozen=True)
class WholeBlock(ElementPartition):
    """One coefficient for the whole block."""

    numel: int
    scales_ranks = True

    @property
    def count(self) -> int:
        return 1

    def part_of(self) -> Tensor:
        return torch.zeros(self.numel, dtype=torch.int64)

    def describe(self, part: int) -> str:
        return "the whole block"

    def add(self, out: Tensor, tile: Tensor, expanded: Tensor, start: int) -> None:
        if one_vector_at_a_time(out):
            for vector, coefficient in zip(tile, expanded[:, 0].tolist(), strict=True):
                out.add_(vector, alpha=coefficient)
        else:
            out.addmv_(tile.T, expanded[:, 0])

    def accumulate(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        if one_vector_at_a_time(gradient):
            total[:, 0] += torch.stack([vector.dot(gradient) for vector in tile])
        else:
            total[:, 0] += tile.mv(gradient)


def one_vector_at_a_time(flat: Tensor) -> bool:
    """Return True where torch's matrix-vector product would leave some of its threads idle."""
    return flat.numel() >= _LONG and flat.device.type == "cpu" and torch.get_num_threads() > 1


@final
@dataclass(frozen=True)
class RowParts(ElementPartition):
    """One coefficient for each row, which is an output of a weight matrix."""

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

    def add(self, out: Tensor, tile: Tensor, expanded: Tensor, start: int) -> None:
        rows = self._span(out, start)
        matrices = tile.reshape(len(tile), -1, self.columns).transpose(0, 1)
        out.view(-1, 1, self.columns).baddbmm_(expanded[:, rows].T.unsqueeze(1), matrices)

    def accumulate(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        matrices = tile.reshape(len(tile), -1, self.columns).transpose(0, 1)
        total[:, self._span(gradient, start)] += matrices.bmm(gradient.view(-1, self.columns, 1))[..., 0].T

    def _span(self, flat: Tensor, start: int) -> slice:
        return slice(start // self.columns, (start + flat.numel()) // self.columns)


@final
@dataclass(frozen=True)
class ColumnParts(ElementPartition):
    """One coefficient for each column, which is an input of a weight matrix."""

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

    def add(self, out: Tensor, tile: Tensor, expanded: Tensor, start: int) -> None:
        for row, scale in zip(tile, expanded, strict=True):
            out.view(-1, self.columns).addcmul_(row.view(-1, self.columns), scale)

    def accumulate(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        for sums, row in zip(total, tile, strict=True):
            sums += (row * gradient).view(-1, self.columns).sum(0)


@final
@dataclass(frozen=True)
class RandomParts(ElementPartition):
    """Elements assigned at random to ``count`` parts whose sizes differ by at most one.

    The block is cut into runs. Along a run, parts follow one random sequence, the same for all runs but
    entered at a random offset. The coefficients of a run are therefore a contiguous window of that sequence:
    no index per element is needed, and the cost does not depend on the number of parts. Two elements of
    different runs share a part with probability 1 / count, as under independent draws. The remainder at the
    end of the block has a random sequence of its own.
    """

    numel: int
    parts: int
    key: int

    @property
    def count(self) -> int:
        return min(self.parts, self.numel)

    @cached_property
    def length(self) -> int:
        """Elements of a run: a multiple of the number of parts, so that every run is balanced."""
        rounds = -(-_RUN // self.count)
        return rounds * self.count if rounds * self.count < self.numel else self.numel

    @cached_property
    def _sequence(self) -> Tensor:
        """A random order of a run's positions; position ``s`` belongs to part ``sequence[s] % count``."""
        return torch.from_numpy(_permutation(self.key, self.length))

    @cached_property
    def _parts(self) -> _OnDevices:
        """The parts along a run, and along the remainder."""
        return _OnDevices(self._sequence % self.count, self._tail % self.count)

    @cached_property
    def _orders(self) -> _OnDevices:
        """Positions of a run and of the remainder in an order in which parts follow each other."""
        return _OnDevices(self._sequence.argsort(), self._tail.argsort())

    @cached_property
    def _tail(self) -> Tensor:
        return torch.from_numpy(_permutation(self.key ^ 1, self.numel % self.length))

    @cached_property
    def _shifts(self) -> list[int]:
        """The offset at which each run enters the sequence."""
        runs = self.numel // self.length
        return [int(h) for h in _hashes(self.key ^ 2, runs) % numpy.uint64(self.length)]

    def part_of(self) -> Tensor:
        sequence = (self._sequence % self.count).repeat(2)
        runs = [sequence[shift : shift + self.length] for shift in self._shifts]
        return torch.cat([*runs, self._tail % self.count])

    def describe(self, part: int) -> str:
        size = self.numel // self.count + (part < self.numel % self.count)
        return f"part {part} of {self.count}: {size} elements at random"

    def expand(self, coefficients: Tensor) -> Tensor:
        # index_select takes a sixth of the time of an index in brackets
        parts = self._parts[coefficients.device]
        window, tail = (coefficients.index_select(1, own) for own in parts)
        return torch.cat([window, window, tail], dim=1)

    def add(self, out: Tensor, tile: Tensor, expanded: Tensor, start: int) -> None:
        for span, window in self._segments(start, out.numel()):
            out[span] += (tile[:, span] * expanded[:, window]).sum(0)

    def accumulator(self, tile: Tensor) -> Tensor:
        return tile.new_zeros(tile.shape[0], 2 * self.length + len(self._tail))

    def accumulate(self, total: Tensor, tile: Tensor, gradient: Tensor, start: int) -> None:
        for span, window in self._segments(start, gradient.numel()):
            total[:, window].addcmul_(tile[:, span], gradient[span])

    def sum_by_part(self, total: Tensor) -> Tensor:
        window = total[:, : self.length] + total[:, self.length : 2 * self.length]
        tail = total[:, 2 * self.length :]
        order, tail_order = self._orders[total.device]
        return self._by_part(window, order) + self._by_part(tail, tail_order)

    def _by_part(self, sums: Tensor, order: Tensor) -> Tensor:
        """Return the sums of each part, in a fixed order: scattering would add in any order on a GPU."""
        ordered = sums.index_select(1, order)
        short = -ordered.shape[1] % self.count
        return torch.nn.functional.pad(ordered, (0, short)).view(len(sums), -1, self.count).sum(1)

    def _segments(self, start: int, size: int) -> list[tuple[slice, slice]]:
        """Return the pieces of a tile that lie in one run each, with the window of the sequence over each."""
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


@final
class _OnDevices(dict[torch.device, tuple[Tensor, Tensor]]):
    """Two tensors on every device that they were needed on: copied there once, not in every step."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self._tensors = tensors

    def __missing__(self, device: torch.device) -> tuple[Tensor, Tensor]:
        first, second = (tensor.to(device) for tensor in self._tensors)
        self[device] = first, second
        return first, second


def _permutation(key: int, size: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
    """Return a random permutation by sorting hashes, the same with every version of every library."""
    return numpy.argsort(_hashes(key, size), kind="stable").astype(numpy.int64)


def _hashes(key: int, size: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]]:
    """Return 64 random bits for each of 0, 1, 2, ... (SplitMix64, Steele et al. 2014)."""
    steps = numpy.arange(1, size + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    x = steps + numpy.uint64(key)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))
