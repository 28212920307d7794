"""Lengths and angles of task vectors: similarity of vectors, norm and interference of every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.explore.table import CoefficientTable
from aniso.learn.analysis import LabelledMatrix, block_products, cosines
from aniso.vectors import Bank


@final
@dataclass(frozen=True, eq=False)
class BlockGeometry:
    """What a composition adds to every block at some coefficients."""

    norms: Tensor
    """|sum of coefficient * delta| of each block, as a share of the base's norm if that is known."""
    interference: Tensor
    """Mean cosine between pairs of scaled vectors, weighted by the products of their lengths; NaN for fewer
    than two vectors. 1: all point the same way, 0: they are orthogonal, -1: they cancel."""


@final
@dataclass(frozen=True, eq=False)
class Geometry:
    """Inner products of all pairs of vectors in every block, from which the rest follows without the bank."""

    table: CoefficientTable
    products: Tensor
    """Blocks by vectors by vectors."""
    base_norms: Tensor
    """Norm of every block of the base; 1 where it is not known."""
    relative: bool
    """True if the base's norms are known."""

    @classmethod
    def of(cls, bank: Bank, table: CoefficientTable, done: Callable[[int], None] | None = None) -> Geometry:
        """Read the bank once, one block at a time."""
        found = {block.name: own for block, own in block_products(bank, progress=done)}
        products = torch.stack([found[block.name] for block in table.blocks])
        known = bank.base.norms
        norms = [known.get(block.name, 0.0) for block in table.blocks]
        relative = all(norm > 0 for norm in norms)
        return cls(
            table, products, torch.tensor(norms if relative else [1.0] * len(norms)).double(), relative
        )

    def similarity(self) -> LabelledMatrix:
        """Return the cosines between all pairs of vectors, over all blocks."""
        return cosines(self.table.vectors, self.products.sum(0))

    def at(self, values: Tensor) -> BlockGeometry:
        """Return norms and interference for a table of coefficients."""
        scales = values.nan_to_num(0.0).double().T  # blocks by vectors
        weighted = self.products * scales[:, :, None] * scales[:, None, :]
        squared = weighted.diagonal(dim1=1, dim2=2).clamp(min=0)
        total, own = weighted.sum((1, 2)), squared.sum(1)
        lengths = squared.sqrt()
        pairs = lengths.sum(1).square() - own  # sum over i != j of |a_i| |a_j|
        # lengths of one vector alone leave a rounding error, not a pair
        several = (lengths > 0).sum(1) > 1
        cosine = torch.where(several, (total - own) / pairs.clamp(min=1e-300), torch.nan)
        return BlockGeometry(total.clamp(min=0).sqrt() / self.base_norms, cosine.clamp(-1, 1))
