"""The deltas of one block, of several vectors at once, as they are stored: dense, packed or low-rank.

A stack adds itself, scaled, to weights, and multiplies itself with a gradient. Nothing is ever expanded to
the size of all vectors: what is not stored in the precision that is computed in is expanded a tile at a time
into a buffer that is kept.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from aniso.compose import fast
from aniso.compose.division import Division, Undivided, goes_in_turn
from aniso.compose.stacked_factors import StackedFactors, stacked_factors
from aniso.vectors import Delta, Dense, LowRank, Packed, Packing
from aniso.vectors.packing import GROUP

_TILE = 1 << 20  # elements of all vectors together: stays in cache, and is worth a call


class Stack(ABC):
    """Deltas of some vectors over ``numel`` elements of a block, from ``offset`` on."""

    vectors: tuple[int, ...]
    """Which rows of the block's coefficients are these vectors'."""
    numel: int
    offset: int = 0
    fast: bool = True
    """Whether compiled code may be used where it is installed."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Where in the stack a tile begins, and the tile: valid until the next one."""

    @abstractmethod
    def cut(self, start: int, stop: int) -> Stack:
        """The elements of a range, which begins and ends at multiples of ``GROUP``, or with the block."""

    @abstractmethod
    def to(self, device: torch.device) -> Stack: ...

    def add_to(self, out: Tensor, coefficients: Tensor, division: Division) -> None:
        """``out += sum of coefficient * delta``; ``out`` is flat, coefficients are all the block's."""
        own = coefficients[list(self.vectors)]
        if not self.numel or not bool(own.any()):
            return  # adding zeros would turn -0.0 into 0.0, and zero must give the base bit for bit
        self._add(out, own, division)

    def write_to(self, out: Tensor, base: Tensor | None, coefficients: Tensor, division: Division) -> None:
        """``out = base + sum of coefficient * delta``, in one pass where that can be.

        The base may be ``out``; none is zero.
        """
        own = coefficients[list(self.vectors)]
        if self.numel and isinstance(division, Undivided) and bool(own.any()) and self._wrote(out, base, own):
            return
        if base is None:
            out.zero_()
        elif base.data_ptr() != out.data_ptr():
            out.copy_(base)
        self.add_to(out, coefficients, division)

    def write_and_dots(
        self, out: Tensor, base: Tensor, coefficients: Tensor, gradient: Tensor, division: Division
    ) -> Tensor:
        """``write_to`` and ``dots``, reading the vectors once where that can be."""
        own = coefficients[list(self.vectors)]
        if self.numel and isinstance(division, Undivided) and bool(own.any()):
            found = self._wrote_and_multiplied(out, base, own, gradient)
            if found is not None:
                return found
        self.write_to(out, base, coefficients, division)
        return self.dots(gradient, division)

    def _wrote_and_multiplied(
        self, out: Tensor, base: Tensor, own: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """Do both at once, if there is a way."""
        return None

    def _wrote(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        """Write base and sum at once, if there is a way."""
        return False

    def dots(self, gradient: Tensor, division: Division) -> Tensor:
        """``<delta, gradient>`` for these vectors and every part; the gradient is flat."""
        if not self.numel:
            return gradient.new_zeros(len(self.vectors), division.count)
        total = division.zeros(gradient.expand(len(self.vectors), -1))
        for start, tile in self.tiles(division.alignment, gradient.dtype):
            piece = gradient[start : start + tile.shape[1]]
            division.collect(total, tile, piece, self.offset + start)
        return division.folded(total)

    def _add(self, out: Tensor, own: Tensor, division: Division) -> None:
        spread = division.spread(own)
        for start, tile in self.tiles(division.alignment, out.dtype):
            division.add(out[start : start + tile.shape[1]], tile, spread, self.offset + start)

    def _is_fast(self, stored: Tensor, *work: Tensor) -> bool:
        return self.fast and fast.can_read(stored, *work)

    def _steps(self, alignment: int) -> Iterator[tuple[int, int]]:
        """Ranges of about ``_TILE`` elements of all vectors together."""
        unit = math.lcm(alignment, GROUP)
        size = max(1, _TILE // (len(self.vectors) * unit)) * unit
        for start in range(0, self.numel, size):
            yield start, min(start + size, self.numel)


@final
class DenseStack(Stack):
    """One number per element, in any float format."""

    def __init__(self, vectors: tuple[int, ...], values: Tensor, offset: int = 0) -> None:
        """``values`` are vectors by elements."""
        self.vectors = vectors
        self.values = values
        self.numel = values.shape[1]
        self.offset = offset

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()

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

    def _add(self, out: Tensor, own: Tensor, division: Division) -> None:
        if isinstance(division, Undivided) and self._is_fast(self.values, out):
            fast.add(out, out, self.values, own[:, 0])
        else:
            super()._add(out, own, division)

    def _wrote(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        if self._is_fast(self.values, out, *_given(base)):
            fast.add(out, base, self.values, own[:, 0])
            return True
        if base is None or goes_in_turn(out):
            return False
        if self.values.dtype == out.dtype == base.dtype:
            torch.addmv(base, self.values.T, own[:, 0], out=out)
            return True
        return False

    def _wrote_and_multiplied(
        self, out: Tensor, base: Tensor, own: Tensor, gradient: Tensor
    ) -> Tensor | None:
        if not self._is_fast(self.values, out, base, gradient):
            return None
        return fast.add_and_dots(out, base, self.values, own[:, 0], gradient)

    def dots(self, gradient: Tensor, division: Division) -> Tensor:
        if isinstance(division, Undivided) and self._is_fast(self.values, gradient):
            return fast.dots(self.values, gradient)
        return super().dots(gradient, division)


@final
class PackedStack(Stack):
    """Few bits per element; unpacked tile by tile."""

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
        """``codes`` and ``scales`` are vectors first; ``factors`` scale whole vectors."""
        self.vectors = vectors
        self.numel = numel
        self.packing = packing
        self.codes = codes
        self.scales = scales
        self.mean = mean
        self.factors = factors
        self.offset = offset

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

    def _add(self, out: Tensor, own: Tensor, division: Division) -> None:
        if not (isinstance(division, Undivided) and self._is_fast(self.codes, out)):
            super()._add(out, own, division)
        else:
            self._write(out, out, own)

    def _wrote(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        if not self._is_fast(self.codes, out, *_given(base)):
            return False
        self._write(out, base, own)
        return True

    def _write(self, out: Tensor, base: Tensor | None, own: Tensor) -> None:
        scaled = own[:, 0] * self.factors.to(own.dtype)
        fast.add(out, base, self.codes, scaled, self.packing, self.scales)
        self._add_mean(out, scaled)

    def dots(self, gradient: Tensor, division: Division) -> Tensor:
        if not (isinstance(division, Undivided) and self._is_fast(self.codes, gradient)):
            return super().dots(gradient, division)
        return self._whole(fast.dots(self.codes, gradient, self.packing, self.scales), gradient)

    def _wrote_and_multiplied(
        self, out: Tensor, base: Tensor, own: Tensor, gradient: Tensor
    ) -> Tensor | None:
        if not self._is_fast(self.codes, out, base, gradient):
            return None
        scaled = own[:, 0] * self.factors.to(own.dtype)
        found = fast.add_and_dots(out, base, self.codes, scaled, gradient, self.packing, self.scales)
        self._add_mean(out, scaled)
        return self._whole(found, gradient)

    def _add_mean(self, out: Tensor, scaled: Tensor) -> None:
        if self.mean is not None:
            out.add_(self.mean, alpha=float(scaled.sum()))

    def _whole(self, products: Tensor, gradient: Tensor) -> Tensor:
        """Products of the vectors, from those of their codes."""
        if self.mean is not None:
            # not torch's product, which depends on the number of threads
            products += fast.dots(self.mean.unsqueeze(0), gradient)
        return products * self.factors.to(products.dtype).unsqueeze(1)


@final
class LowRankStack(Stack):
    """Products ``b @ a`` that are never formed for a vector; all vectors' factors lie side by side.

    Factors that fill the same rows of the block are stacked; a block whose query, key and value have adapters
    of their own has three such stacks.
    """

    def __init__(
        self,
        vectors: tuple[int, ...],
        shape: tuple[int, int],
        factors: Sequence[StackedFactors],
        offset: int = 0,
    ) -> None:
        """``shape`` is that of the rows the stack is over."""
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

    def to(self, device: torch.device) -> LowRankStack:
        return LowRankStack(self.vectors, self.shape, [f.to(device) for f in self.factors], self.offset)

    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        columns = self.shape[1]
        for start, stop in self._steps(math.lcm(alignment, max(1, columns))):
            rows = slice(start // columns, stop // columns)
            device = self.factors[0].a.device if self.factors else torch.device("cpu")
            tile = scratch("tile", (len(self.vectors), stop - start), dtype, device)
            tile.zero_()
            for factors in self.factors:
                factors.fill(tile.view(len(self.vectors), -1, columns), rows)
            yield start, tile

    def _add(self, out: Tensor, own: Tensor, division: Division) -> None:
        if not isinstance(division, Undivided):
            return super()._add(out, own, division)
        matrix = out.view(self.shape)
        for factors in self.factors:
            b = factors.b.to(out.dtype) * factors.scaled(own[:, 0])
            matrix[factors.start : factors.stop].addmm_(b, factors.a.to(out.dtype))
        return None

    def _wrote(self, out: Tensor, base: Tensor | None, own: Tensor) -> bool:
        if len(self.factors) != 1 or self.factors[0].b.shape[0] != self.shape[0]:
            return False
        if base is None or base.dtype != out.dtype:
            return False
        b = self.factors[0].b.to(out.dtype) * self.factors[0].scaled(own[:, 0])
        torch.addmm(base.view(self.shape), b, self.factors[0].a.to(out.dtype), out=out.view(self.shape))
        return True

    def dots(self, gradient: Tensor, division: Division) -> Tensor:
        if not isinstance(division, Undivided):
            return super().dots(gradient, division)
        matrix = gradient.view(self.shape)
        total = gradient.new_zeros(len(self.vectors))
        for factors in self.factors:
            rows = matrix[factors.start : factors.stop]
            products = (factors.b.to(gradient.dtype).T @ rows).mul_(factors.a.to(gradient.dtype)).sum(1)
            total += factors.by_vector(products, len(self.vectors))
        return total.unsqueeze(1)


def stacks_of(deltas: Mapping[str, Delta], index: Mapping[str, int]) -> list[Stack]:
    """The deltas of a block as few stacks; ``index`` is each vector's row in the block's coefficients."""
    groups: dict[object, list[tuple[int, Delta]]] = {}
    for name, delta in deltas.items():
        groups.setdefault(_kind(delta), []).append((index[name], delta))
    return [_stack(tuple(i for i, _ in group), [d for _, d in group]) for group in groups.values()]


def _kind(delta: Delta) -> object:
    """Deltas with the same answer can lie in one stack."""
    if isinstance(delta, Dense):
        return ("dense", delta.values.dtype)
    if isinstance(delta, Packed):
        return ("packed", delta.packing, None if delta.mean is None else delta.mean.data_ptr())
    return "low-rank"


def _stack(vectors: tuple[int, ...], deltas: list[Delta]) -> Stack:
    dense = [d for d in deltas if isinstance(d, Dense)]
    if dense:
        return DenseStack(vectors, _joined([d.values.reshape(-1) for d in dense]))
    packed = [d for d in deltas if isinstance(d, Packed)]
    if packed:
        first = packed[0]
        return PackedStack(
            vectors,
            math.prod(first.shape),
            first.packing,
            _joined([d.codes for d in packed]),
            _joined([d.scales for d in packed]),
            None if first.mean is None else first.mean.reshape(-1),
            torch.tensor([d.factor for d in packed], dtype=torch.float64),
        )
    low_rank = [d for d in deltas if isinstance(d, LowRank)]
    shape = low_rank[0].shape
    rows = shape[0] if shape else 1
    return LowRankStack(vectors, (rows, math.prod(shape) // max(1, rows)), stacked_factors(low_rank))


def _given(base: Tensor | None) -> list[Tensor]:
    return [] if base is None else [base]


def _joined(rows: list[Tensor]) -> Tensor:
    """Rows as one matrix; not copied when they already follow each other in memory, as those of a file do."""
    first = rows[0]
    step = first.numel()
    adjacent = all(
        row.is_contiguous()
        and row.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and row.storage_offset() == first.storage_offset() + k * step
        for k, row in enumerate(rows)
    )
    if adjacent:
        return first.as_strided((len(rows), step), (step, 1), first.storage_offset())
    return torch.stack(rows)


_kept = threading.local()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer of this thread that is used again: fresh memory costs more than what is done with it."""
    buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = _kept.__dict__.setdefault("buffers", {})
    size = math.prod(shape)
    found = buffers.get((name, dtype, device))
    if found is None or found.numel() < size:
        with torch.inference_mode(False):  # it outlives the call
            found = torch.empty(size, dtype=dtype, device=device)
        buffers[name, dtype, device] = found
    return found[:size].view(tuple(shape))
