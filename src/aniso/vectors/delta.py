"""Deltas: what fine-tuning changed in one block, stored dense, low-rank or packed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy
import torch
from torch import Tensor

from aniso.vectors.packing import Packing, unpack

_CHUNK = 1 << 18  # elements; small enough to stay in cache, large enough to be fast


class Delta(ABC):
    """A difference to the base in one block. Immutable; arithmetic is in float32."""

    shape: tuple[int, ...]

    @abstractmethod
    def dense(self) -> Tensor:
        """Return a new float32 tensor of the block's shape."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory it takes in its stored form."""

    @abstractmethod
    def scaled(self, factor: float) -> Delta:
        """Return ``factor`` times this delta."""

    def plus(self, other: Delta) -> Delta:
        return Dense(self.dense().add_(other.dense()))

    def dot(self, other: Delta) -> float:
        if isinstance(other, LowRank):
            return other.dot(self)
        return self.along(other.dense())

    def along(self, direction: Tensor) -> float:
        """Return the inner product with a tensor of the block's shape, such as a gradient."""
        a, b = self.dense().reshape(-1), direction.reshape(-1)
        # chunks in double: a single float32 sum over millions of terms loses digits
        pieces = (slice(start, start + _CHUNK) for start in range(0, a.numel(), _CHUNK))
        return math.fsum(float(a[piece].double() @ b[piece].double()) for piece in pieces)

    def norm(self) -> float:
        square = self.dot(self)
        return 0.0 if square <= 0 else math.sqrt(square)  # not max(), which would turn NaN into 0

    def vanishes(self, norm: float) -> bool:
        """True if the delta, whose norm is given, changes nothing."""
        return norm == 0

    def without_exact(self) -> Delta:
        """Return the difference alone: exact values belong to the base that it was made of."""
        return self

    def applied_to(self, base: Tensor, coefficient: float) -> Tensor:
        """Return ``base + coefficient * self`` as a new float32 tensor; 0 gives the base bit for bit."""
        out = base.to(torch.float32, copy=True)
        if coefficient != 0:  # adding 0 * delta would turn -0.0 into 0.0
            out.add_(self.dense(), alpha=coefficient)
        return out


@dataclass(frozen=True, eq=False)
class Exact:
    """Tuned values of the few elements that base + difference misses by a rounding."""

    index: Tensor
    value: Tensor


@final
@dataclass(frozen=True, eq=False)
class Dense(Delta):
    """A delta with one number per element, in any float dtype."""

    values: Tensor
    exact: Exact | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        extra = 0 if self.exact is None else 12 * self.exact.index.numel()
        return self.values.numel() * self.values.element_size() + extra

    def dense(self) -> Tensor:
        return self.values.to(torch.float32, copy=True)

    def scaled(self, factor: float) -> Dense:
        return self if factor == 1 else Dense(self.values.to(torch.float32) * factor)

    def norm(self) -> float:
        norm = float(torch.linalg.vector_norm(self.values, dtype=torch.float32))
        # squares of very small or large numbers leave float32's range
        return norm if 1e-15 < norm < 1e15 else super().norm()

    def vanishes(self, norm: float) -> bool:
        # a block in which only signs of zero changed has exact values and no norm
        return norm == 0 and self.exact is None

    def without_exact(self) -> Dense:
        return Dense(self.values)

    def applied_to(self, base: Tensor, coefficient: float) -> Tensor:
        out = super().applied_to(base, coefficient)
        if self.exact is not None and coefficient == 1:
            out.reshape(-1)[self.exact.index] = self.exact.value
        return out


def difference(base: Tensor, tuned: Tensor) -> Dense:
    """Return ``tuned - base`` in float32, such that adding it back gives ``tuned`` bit for bit.

    ``tuned`` is overwritten with the result: two tensors are in memory, not three.
    """
    flat_base, flat = base.reshape(-1), tuned.reshape(-1)
    # two small buffers that stay in cache; new ones would cost more than the arithmetic
    buffers = torch.empty(2, min(_CHUNK, flat.numel()))
    indices, values = [], []
    for start in range(0, flat.numel(), _CHUNK):
        b, t = flat_base[start : start + _CHUNK], flat[start : start + _CHUNK]
        d, total = buffers[:, : t.numel()]
        torch.sub(t, b, out=d)
        torch.add(b, d, out=total)
        # compared as bits, so that -0.0 counts as missed where the sum is 0.0
        differ = total.view(torch.int32) != t.view(torch.int32)
        missed = torch.from_numpy(numpy.flatnonzero(differ.numpy()))  # torch's own is five times slower
        if missed.numel():
            values.append(t[missed])
            indices.append(missed + start)
        t.copy_(d)
    exact = Exact(torch.cat(indices), torch.cat(values)) if indices else None
    return Dense(flat.view(tuned.shape), exact)


@dataclass(frozen=True, eq=False)
class Term:
    """``scale * b @ a`` added to the rows of a block from ``start`` on."""

    b: Tensor
    a: Tensor
    scale: float
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.b.shape[0]

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@final
@dataclass(frozen=True, eq=False)
class LowRank(Delta):
    """A sum of low-rank terms, stored as factors. Terms may cover different rows (query, key and value)."""

    shape: tuple[int, ...]
    terms: tuple[Term, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for term in self.terms for t in (term.a, term.b))

    @property
    def rank(self) -> int:
        return sum(term.rank for term in self.terms)

    def dense(self) -> Tensor:
        rows = self.shape[0]
        out = torch.zeros(rows, math.prod(self.shape[1:]))
        for term in self.terms:
            # the same order as PEFT, multiply then scale, for the same rounding
            out[term.start : term.stop] += (term.b.float() @ term.a.float()) * term.scale
        return out.reshape(self.shape)

    def scaled(self, factor: float) -> LowRank:
        return LowRank(self.shape, tuple(Term(t.b, t.a, t.scale * factor, t.start) for t in self.terms))

    def plus(self, other: Delta) -> Delta:
        if isinstance(other, LowRank):
            return LowRank(self.shape, (*self.terms, *other.terms))
        return super().plus(other)

    def dot(self, other: Delta) -> float:
        if isinstance(other, LowRank):
            return sum(_dot_terms(x, y) for x in self.terms for y in other.terms)
        return self.along(other.dense().double())

    def along(self, direction: Tensor) -> float:
        """Return the inner product without forming the product of factors."""
        matrix = direction.reshape(self.shape[0], -1)
        return sum(_dot_matrix(term, matrix) for term in self.terms)


def _dot_terms(x: Term, y: Term) -> float:
    """Return <Bx Ax, By Ay> over the rows that both cover, without forming either product."""
    start, stop = max(x.start, y.start), min(x.stop, y.stop)
    if start >= stop:
        return 0.0
    bx = x.b[start - x.start : stop - x.start].double()
    by = y.b[start - y.start : stop - y.start].double()
    return float(((bx.T @ by) * (x.a.double() @ y.a.double().T)).sum()) * x.scale * y.scale


def _dot_matrix(term: Term, matrix: Tensor) -> float:
    """Return the inner product in the matrix's precision, at least float32; sums are in float64."""
    kind = torch.promote_types(matrix.dtype, torch.float32)
    rows = matrix[term.start : term.stop].to(kind)
    return float(((term.b.to(kind).T @ rows).double() * term.a.double()).sum()) * term.scale


@final
@dataclass(frozen=True, eq=False)
class Packed(Delta):
    """A delta with few bits per element and a scale per group, maybe plus a mean that vectors share."""

    shape: tuple[int, ...]
    packing: Packing
    codes: Tensor
    scales: Tensor
    mean: Tensor | None = None
    factor: float = 1.0

    @property
    def nbytes(self) -> int:
        # without the mean, which vectors share
        return self.codes.numel() * self.codes.element_size() + 2 * self.scales.numel()

    def dense(self) -> Tensor:
        numel = math.prod(self.shape)
        out = unpack(self.codes, self.scales, self.packing, numel).reshape(self.shape)
        if self.mean is not None:
            out += self.mean.to(torch.float32)
        return out if self.factor == 1.0 else out.mul_(self.factor)

    def scaled(self, factor: float) -> Packed:
        return Packed(self.shape, self.packing, self.codes, self.scales, self.mean, self.factor * factor)
