"""Singular components of matrices and of deltas, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.vectors.delta import Delta, LowRank, Term

NOTHING = 1e-7
"""A singular value below this share of the largest is zero: deltas are stored with float32's precision."""
_GRAM = 1e-4
"""Smallest share of the largest singular value that a Gram matrix in float64 gives to about 1e-8."""
_ORTHOGONAL = 1e-5
"""Cosine below which factors are orthogonal; rounding to float32 leaves about 1e-7."""


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
        return decomposed(matrix, wanted)
    u = vectors[:, -wanted:].flip(1)  # a copy: a view would keep all of the eigenvectors in memory
    return Components(u, s * size, (scaled.T @ u) / s)


def decomposed(matrix: Tensor, wanted: int) -> Components:
    """Return the largest components from a singular value decomposition, however small they are."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    kept = min(wanted, int((s > NOTHING * s[:1]).sum()))
    return Components(u[:, :kept].clone(), s[:kept].clone(), vt[:kept].T.clone())


def components_of_product(b: Tensor, a: Tensor, count: int | None = None) -> Components:
    """Return the largest components of ``b @ a``, which is not formed."""
    (qb, rb), (qa, ra) = torch.linalg.qr(b.double()), torch.linalg.qr(a.double().T)
    core = rb @ ra.T
    found = decomposed(core, min(core.shape) if count is None else count)
    return Components(qb @ found.u, found.s, qa @ found.v)


def low_rank_approximation(delta: Delta, count: int | None = None) -> LowRank:
    """Return the ``count`` largest singular components of a delta, one for each rank, the largest first.

    Components that are zero are left out. A delta that is stored in this form keeps its numbers.
    """
    if not isinstance(delta, LowRank):
        return _factored(delta.shape, components(delta.dense().reshape(delta.shape[0], -1), count))
    if len(delta.terms) == 1 and _is_decomposed(delta.terms[0], delta.shape[0]):
        (term,) = delta.terms
        return LowRank(delta.shape, (Term(term.b[:, :count], term.a[:count], term.scale),))
    if not delta.terms:
        return delta
    b = torch.zeros(delta.shape[0], delta.rank, dtype=torch.float64)
    first = 0
    for term in delta.terms:
        b[term.start : term.stop, first : first + term.rank] = term.b.double() * term.scale
        first += term.rank
    a = torch.cat([term.a.double() for term in delta.terms])
    return _factored(delta.shape, components_of_product(b, a, count))


def _factored(shape: tuple[int, ...], found: Components) -> LowRank:
    """Return components as float32 factors of equal norms."""
    if not found.count:
        return LowRank(shape, ())
    root = found.s.sqrt()
    return LowRank(shape, (Term((found.u * root).float(), (found.v * root).T.float().contiguous(), 1.0),))


def _is_decomposed(term: Term, rows: int) -> bool:
    """Return True if the ranks of a term over all rows are singular components in descending order."""
    if term.b.shape[0] != rows or not term.rank:
        return False
    grams = term.b.double().T @ term.b.double(), term.a.double() @ term.a.double().T
    norms = [gram.diagonal().sqrt() for gram in grams]
    sizes = norms[0] * norms[1]
    if not bool((sizes > 0).all()) or bool((sizes[1:] > sizes[:-1] * (1 + _ORTHOGONAL)).any()):
        return False
    return all(
        bool(((gram / torch.outer(norm, norm)).fill_diagonal_(0).abs() < _ORTHOGONAL).all())
        for gram, norm in zip(grams, norms, strict=True)
    )
