"""Polar factors and bases of matrices, and components of several matrices in one, in float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from aniso.vectors.singular import NOTHING, Components, decomposed


def joined(parts: Iterable[Components], shape: tuple[int, ...], most: int) -> Components:
    """Return all directions with their singular values in one; ``most`` is the largest number of them.

    They are copied into two matrices that are there from the start: kept as they come, small tensors lie
    between large ones that are freed, whose memory cannot be used again.
    """
    rows, columns = shape
    u, s, v = (torch.empty(*size, most, dtype=torch.float64) for size in ((rows,), (), (columns,)))
    count = 0
    for part in parts:
        end = count + part.count
        u[:, count:end], s[count:end], v[:, count:end] = part.u, part.s, part.v
        count = end
    return Components(u[:, :count], s[:count], v[:, :count])


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
