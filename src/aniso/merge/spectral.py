"""Polar factors and bases of matrices, and components of several matrices in one, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from aniso.vectors.singular import NOTHING, Components, decomposed


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
    return decomposed(matrix.double(), min(matrix.shape)).u
