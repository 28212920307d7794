"""Singular components and polar factors of matrices, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

NOTHING = 1e-7
"""A singular value below this share of the largest is zero: deltas are stored with float32's precision."""
_GRAM = 1e-4
"""Smallest share of the largest singular value that a Gram matrix in float64 gives to about 1e-8."""


@final
@dataclass(frozen=True)
class Components:
    """The largest singular components of a matrix, ``u @ diag(s) @ v.T``, without those that are zero."""

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def count(self) -> int:
        return len(self.s)

    def matrix(self) -> Tensor:
        """Return the product."""
        return (self.u * self.s) @ self.v.T


def components(matrix: Tensor, count: int | None = None) -> Components:
    """Return the ``count`` largest components of a matrix, or all of them that are not zero.

    They come from the eigenvectors of the smaller Gram matrix, which takes a third of the time of a singular
    value decomposition, unless a component is too small for that.
    """
    matrix = matrix.double()
    rows, columns = matrix.shape
    if rows > columns:
        turned = components(matrix.T, count)
        return Components(turned.v, turned.s, turned.u)
    wanted = min(rows, count if count is not None else rows)
    # dividing first: squares of small deltas would underflow
    size = float(torch.linalg.vector_norm(matrix, torch.inf)) if matrix.numel() else 0.0
    if size == 0 or wanted == 0:
        return Components(matrix.new_zeros(rows, 0), matrix.new_zeros(0), matrix.new_zeros(columns, 0))
    scaled = matrix / size
    squares, vectors = torch.linalg.eigh(scaled @ scaled.T)
    s = squares[-wanted:].flip(0).clamp(min=0).sqrt()
    if float(s[-1]) < _GRAM * float(s[0]):
        return _decomposed(matrix, wanted)
    u = vectors[:, -wanted:].flip(1)  # a copy: a view would keep all of the eigenvectors in memory
    return Components(u, s * size, (scaled.T @ u) / s)


def _decomposed(matrix: Tensor, wanted: int) -> Components:
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    kept = min(wanted, int((s > NOTHING * s[0]).sum()))
    return Components(u[:, :kept].clone(), s[:kept].clone(), vt[:kept].T.clone())


def joined(kept: list[Components]) -> Components:
    """Return all directions with their singular values in one; the list is emptied to free its memory."""
    u, s, v = (torch.cat(parts, -1) for parts in zip(*((c.u, c.s, c.v) for c in kept), strict=True))
    kept.clear()
    return Components(u, s, v)


def polar(matrix: Tensor) -> Tensor:
    """Return the orthogonal polar factor ``P @ Q.T`` of ``P @ S @ Q.T``, the nearest orthogonal matrix.

    Directions whose singular value is zero are left out. They are arbitrary, and occur where two vectors
    have the same directions.
    """
    if not matrix.numel():
        return matrix
    p, s, qt = torch.linalg.svd(matrix, full_matrices=False)
    kept = int((s > NOTHING * s[0]).sum())
    factor: Tensor = p[:, :kept] @ qt[:kept]
    return factor


def orthonormal_basis(matrix: Tensor) -> Tensor:
    """Return left singular vectors of a matrix, a basis of what its columns span."""
    return _decomposed(matrix.double(), min(matrix.shape)).u
