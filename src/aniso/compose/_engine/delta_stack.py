"""Stacks hold the deltas of several vectors over one block as they are stored: dense or packed.

A stack adds itself, scaled, to weights, and multiplies itself with a gradient. It is never expanded to the
size of all vectors: what is not stored in the dtype of the sums is expanded a tile at a time, into a scratch
buffer. Low-rank stacks are in ``low_rank_stack``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import (
    BlockPartition,
    ElementPartition,
    WholeBlock,
    one_vector_at_a_time,
)
from aniso.compose._engine.scratch import scratch
from aniso.compose._kernels import dispatch
from aniso.vectors import Packing
from aniso.vectors.packing import GROUP

_TILE = 1 << 20  # elements of all vectors together: stays in cache, and is worth a call


class DeltaStack(ABC):
    """The deltas of some vectors over ``numel`` elements of a block, starting at ``offset``."""

    vectors: tuple[int, ...]
    """Each vector's row in the matrix of the block's coefficients."""
    numel: int
    offset: int = 0
    fast: bool = True
    """Use compiled kernels where they are installed."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield tiles, vectors by elements, each with its first element; a tile is valid until the next."""

    @abstractmethod
    def cut(self, start: int, stop: int) -> DeltaStack:
        """Return a range of elements, which starts and stops at multiples of ``GROUP`` or with the block."""

    @abstractmethod
    def to(self, device: torch.device) -> DeltaStack: ...

    @cached_property
    def rows(self) -> slice | Tensor:
        """The index of the stack's rows in the block's coefficients, on the stack's device."""
        first, last = self.vectors[0], self.vectors[-1]
        if self.vectors == tuple(range(first, last + 1)):
            return slice(first, last + 1)
        return torch.tensor(self.vectors, device=self.device)

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    def add_to(
        self, out: Tensor, coefficients: Tensor, partition: BlockPartition, host: Tensor | None = None
    ) -> None:
        """Compute ``out += sum of coefficient * delta``.

        ``out`` is flat; ``coefficients`` has a row for every vector of the block. ``host`` is a copy of them
        on the CPU, which saves waiting for the device.
        """
        if self._adds_something(coefficients if host is None else host):
            self._add(out, coefficients[self.rows], partition)

    def write_to(
        self,
        out: Tensor,
        base: Tensor | None,
        coefficients: Tensor,
        partition: BlockPartition,
        host: Tensor | None = None,
    ) -> None:
        """Compute ``out = base + sum of coefficient * delta``, in one pass over memory where possible.

        ``base`` may be ``out`` itself; None stands for zeros.
        """
        adds = self._adds_something(coefficients if host is None else host)
        own = coefficients[self.rows]
        if adds and partition.scales_ranks and self._try_write(out, base, own):
            return
        if base is None:
            out.zero_()
        elif base.data_ptr() != out.data_ptr():
            out.copy_(base)
        if adds:
            self._add(out, own, partition)

    def write_and_dots(
        self,
        out: Tensor,
        base: Tensor,
        coefficients: Tensor,
        gradient: Tensor,
        partition: BlockPartition,
        host: Tensor | None = None,
    ) -> Tensor:
        """Do ``write_to`` and return ``dots``, reading the deltas once where possible."""
        if isinstance(partition, WholeBlock) and self._adds_something(coefficients if host is None else host):
            products = self._try_write_and_dots(out, base, coefficients[self.rows], gradient)
            if products is not None:
                return products
        self.write_to(out, base, coefficients, partition, host)
        return self.dots(gradient, partition)

    def _adds_something(self, host: Tensor) -> bool:
        """Return False if all coefficients are zero.

        Adding zeros would turn -0.0 into 0.0, and zero must give the base bit for bit.
        """
        rows = self.rows if isinstance(self.rows, slice) else list(self.vectors)
        return bool(self.numel) and bool(host[rows].any())

    def _try_write_and_dots(self, out: Tensor, base: Tensor, own: Tensor, gradient: Tensor) -> Tensor | None:
        """Do both in one pass and return the products, or None if there is no such kernel."""
        return None

    def _try_write(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        """Write base plus sum in one pass; return False if there is no such kernel."""
        return False

    def dots(self, gradient: Tensor, partition: BlockPartition) -> Tensor:
        """Return ``<delta, gradient>`` as vectors by parts; the gradient is flat."""
        if not self.numel:
            return gradient.new_zeros(len(self.vectors), partition.count)
        partition = _by_element(partition)
        total = partition.accumulator(gradient.expand(len(self.vectors), -1))
        for start, tile in self.tiles(partition.alignment, gradient.dtype):
            piece = gradient[start : start + tile.shape[1]]
            partition.accumulate(total, tile, piece, self.offset + start)
        return partition.sum_by_part(total)

    def _add(self, out: Tensor, own: Tensor, partition: BlockPartition) -> None:
        partition = _by_element(partition)
        expanded = partition.expand(own)
        for start, tile in self.tiles(partition.alignment, out.dtype):
            partition.add(out[start : start + tile.shape[1]], tile, expanded, self.offset + start)

    def _has_kernel(self, stored: Tensor, *work: Tensor) -> bool:
        return self.fast and dispatch.has_kernel(stored, *work)

    def _steps(self, alignment: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of about ``_TILE`` elements of all vectors together."""
        unit = math.lcm(alignment, GROUP)
        size = max(1, _TILE // (len(self.vectors) * unit)) * unit
        for start in range(0, self.numel, size):
            yield start, min(start + size, self.numel)


def _by_element(partition: BlockPartition) -> ElementPartition:
    assert isinstance(partition, ElementPartition)  # components scale low-rank stacks, which add ranks
    return partition


@final
class DenseStack(DeltaStack):
    """Deltas with one float per element."""

    def __init__(self, vectors: tuple[int, ...], values: Tensor, offset: int = 0) -> None:
        """``values`` has a row of elements for each vector."""
        self.vectors = vectors
        self.values = values
        self.numel = values.shape[1]
        self.offset = offset

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    @property
    def device(self) -> torch.device:
        return self.values.device

    def cut(self, start: int, stop: int) -> DenseStack:
        return DenseStack(self.vectors, self.values[:, start:stop].clone(), self.offset + start)

    def to(self, device: torch.device) -> DenseStack:
        return DenseStack(self.vectors, self.values.to(device), self.offset)

    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        if self.values.dtype == dtype:
            yield 0, self.values
            return
        for start, stop in self._steps(alignment):
            source = self.values[:, start:stop]
            yield start, scratch("tile", source.shape, dtype, source.device).copy_(source)

    def _add(self, out: Tensor, own: Tensor, partition: BlockPartition) -> None:
        if isinstance(partition, WholeBlock) and self._has_kernel(self.values, out):
            dispatch.add(out, out, self.values, own[:, 0])
        else:
            super()._add(out, own, partition)

    def _try_write(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        if self._has_kernel(self.values, out, *([] if base is None else [base])):
            dispatch.add(out, base, self.values, own[:, 0])
            return True
        if base is None or one_vector_at_a_time(out):
            return False
        if self.values.dtype == out.dtype == base.dtype:
            torch.addmv(base, self.values.T, own[:, 0], out=out)
            return True
        return False

    def _try_write_and_dots(self, out: Tensor, base: Tensor, own: Tensor, gradient: Tensor) -> Tensor | None:
        if not self._has_kernel(self.values, out, base, gradient):
            return None
        return dispatch.add_and_dots(out, base, self.values, own[:, 0], gradient)

    def dots(self, gradient: Tensor, partition: BlockPartition) -> Tensor:
        if isinstance(partition, WholeBlock) and self._has_kernel(self.values, gradient):
            return dispatch.dots(self.values, gradient)
        return super().dots(gradient, partition)


@final
class PackedStack(DeltaStack):
    """Deltas with few bits per element, unpacked a tile at a time."""

    def __init__(
        self,
        vectors: tuple[int, ...],
        numel: int,
        packing: Packing,
        codes: Tensor,
        scales: Tensor,
        mean: Tensor | None,
        factors: Tensor,
        offset: int = 0,
    ) -> None:
        """``codes`` and ``scales`` have a row for each vector; ``factors`` scale whole vectors."""
        self.vectors = vectors
        self.numel = numel
        self.packing = packing
        self.codes = codes
        self.scales = scales
        self.mean = mean
        self.factors = factors
        self.offset = offset

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        tensors = [self.codes, self.scales, *([] if self.mean is None else [self.mean])]
        return sum(t.numel() * t.element_size() for t in tensors)

    def cut(self, start: int, stop: int) -> PackedStack:
        codes = slice(start // self.packing.per_byte, self.packing.code_bytes(stop))
        groups = slice(start // GROUP, self.packing.groups(stop))
        return PackedStack(
            self.vectors,
            stop - start,
            self.packing,
            self.codes[:, codes].clone(),
            self.scales[:, groups].clone(),
            None if self.mean is None else self.mean[start:stop].clone(),
            self.factors,
            self.offset + start,
        )

    def to(self, device: torch.device) -> PackedStack:
        mean = None if self.mean is None else self.mean.to(device)
        moved = (self.codes.to(device), self.scales.to(device), mean, self.factors.to(device))
        return PackedStack(self.vectors, self.numel, self.packing, *moved, self.offset)

    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        bits, each = self.packing.bits, self.packing.per_byte
        for start, stop in self._steps(alignment):
            groups = self.packing.groups(stop - start)
            codes = self.codes[:, start // each : start // each + groups * GROUP // each]
            shape = (len(self.vectors), groups, GROUP)
            tile = scratch("tile", shape, dtype, codes.device)
            columns = tile.view(*codes.shape, each)
            for i in range(each):
                # the first code of a byte is in its lowest bits
                columns[..., i].copy_((codes >> (i * bits)) & (2**bits - 1) if each > 1 else codes)
            tile -= self.packing.middle
            tile *= self.scales[:, start // GROUP : start // GROUP + groups].unsqueeze(-1).to(dtype)
            flat = tile.view(len(self.vectors), -1)[:, : stop - start]
            if self.mean is not None:
                flat += self.mean[start:stop].to(dtype)
            flat *= self.factors.to(dtype).unsqueeze(1)
            yield start, flat

    def _add(self, out: Tensor, own: Tensor, partition: BlockPartition) -> None:
        if not (isinstance(partition, WholeBlock) and self._has_kernel(self.codes, out)):
            super()._add(out, own, partition)
        else:
            self._write(out, out, own)

    def _try_write(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        if not self._has_kernel(self.codes, out, *([] if base is None else [base])):
            return False
        self._write(out, base, own)
        return True

    def _write(self, out: Tensor, base: Tensor | None, own: Tensor) -> None:
        scaled = own[:, 0] * self.factors.to(own.dtype)
        dispatch.add(out, base, self.codes, scaled, self.packing, self.scales)
        self._add_mean(out, scaled)

    def dots(self, gradient: Tensor, partition: BlockPartition) -> Tensor:
        if not (isinstance(partition, WholeBlock) and self._has_kernel(self.codes, gradient)):
            return super().dots(gradient, partition)
        return self._vector_dots(dispatch.dots(self.codes, gradient, self.packing, self.scales), gradient)

    def _try_write_and_dots(self, out: Tensor, base: Tensor, own: Tensor, gradient: Tensor) -> Tensor | None:
        if not self._has_kernel(self.codes, out, base, gradient):
            return None
        scaled = own[:, 0] * self.factors.to(own.dtype)
        products = dispatch.add_and_dots(out, base, self.codes, scaled, gradient, self.packing, self.scales)
        self._add_mean(out, scaled)
        return self._vector_dots(products, gradient)

    def _add_mean(self, out: Tensor, scaled: Tensor) -> None:
        if self.mean is not None:
            dispatch.add(out, out, self.mean.unsqueeze(0), scaled.sum().unsqueeze(0))

    def _vector_dots(self, products: Tensor, gradient: Tensor) -> Tensor:
        """Return the products of the vectors, given those of their codes."""
        if self.mean is not None:
            # not torch's product, which depends on the number of threads
            products += dispatch.dots(self.mean.unsqueeze(0), gradient)
        return products * self.factors.to(products.dtype).unsqueeze(1)
