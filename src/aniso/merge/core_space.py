"""Core space: low-rank vectors as small matrices between bases of what all their factors span.

For updates B_i A_i, U is a basis of the columns of all B_i and V of the rows of all A_i. The matrices
M_i = U' B_i A_i V have at most the sum of all ranks as rows and columns, and U M_i V' is the update again. A
rule merges the M_i, and the result U M V' is one low-rank delta. Nothing of the layer's size is decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.merge.spectral import orthonormal_basis
from aniso.vectors import LowRank
from aniso.vectors.delta import Term
from aniso.vectors.singular import components


@final
@dataclass(frozen=True)
class CoreSpace:
    """Bases of one block's low-rank vectors, and the vectors as matrices between them."""

    shape: tuple[int, ...]
    u: Tensor
    v: Tensor
    matrices: Mapping[str, Tensor]

    @classmethod
    def of(cls, deltas: Mapping[str, LowRank]) -> CoreSpace:
        """Return the core space of some low-rank deltas of one block, of any ranks."""
        shape = next(iter(deltas.values())).shape
        factors = {name: _factors(delta) for name, delta in deltas.items()}
        u = orthonormal_basis(torch.cat([b for b, _ in factors.values()], 1))
        v = orthonormal_basis(torch.cat([a for _, a in factors.values()]).T)
        matrices = {name: (u.T @ b) @ (a @ v) for name, (b, a) in factors.items()}
        return cls(shape, u, v, matrices)

    def low_rank(self, matrix: Tensor) -> LowRank:
        """Return U M V' as one low-rank delta, of no higher rank than M has."""
        kept = components(matrix)
        root = kept.s.sqrt()
        b, a = self.u @ (kept.u * root), (self.v @ (kept.v * root)).T
        return LowRank(self.shape, (Term(b.float().contiguous(), a.float().contiguous(), 1.0),))


def _factors(delta: LowRank) -> tuple[Tensor, Tensor]:
    """Return all terms as one pair of factors in float64, with as many rows as the block has."""
    rows, columns = delta.shape[0], math.prod(delta.shape[1:])
    bs, as_ = [torch.zeros(rows, 0).double()], [torch.zeros(0, columns).double()]
    for term in delta.terms:
        b = torch.zeros(rows, term.rank, dtype=torch.float64)
        b[term.start : term.stop] = term.b.double() * term.scale
        bs.append(b)
        as_.append(term.a.double())
    return torch.cat(bs, 1), torch.cat(as_)
