"""The coefficients of a desk: a number for each vector and block, none where a vector has no such block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from aniso.coefficient_matrix import BlockLabel
from aniso.compose import CoefficientIndex, Coefficients, Partition
from aniso.errors import InputError
from aniso.experiments.assignments import require_one_part
from aniso.vectors import Bank

Rows = Sequence[Sequence[float | None]]
"""A table as the page sends it: None where there is no coefficient."""
LARGEST = 100.0
"""Coefficients beyond this are typing errors: weights leave the range where a model says anything."""


@final
@dataclass(frozen=True)
class CoefficientTable:
    """The cells of a bank under a partition with one coefficient for each vector and block."""

    index: CoefficientIndex

    @classmethod
    def of(cls, bank: Bank, families: Sequence[str] = ()) -> CoefficientTable:
        """Build the table of all cells of a bank, or of the blocks of some families."""
        return cls(CoefficientIndex.of(bank, Partition.blocks().over(*families)))

    @property
    def vectors(self) -> tuple[str, ...]:
        return self.index.vectors

    @cached_property
    def blocks(self) -> tuple[BlockLabel, ...]:
        """The columns, from the input of the model to its output."""
        return tuple(BlockLabel(e.block.name, str(e.block.kind), e.block.depth) for e in self.index.blocks)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Row and column of every coefficient, in the order of the index."""
        row = {name: i for i, name in enumerate(self.vectors)}
        rows = [row[v] for entry in self.index.blocks for v in entry.vectors]
        columns = [j for j, entry in enumerate(self.index.blocks) for _ in entry.vectors]
        return torch.tensor(rows), torch.tensor(columns)

    @cached_property
    def exists(self) -> Tensor:
        """True for cells that have a coefficient."""
        out = torch.zeros(len(self.vectors), len(self.index.blocks), dtype=torch.bool)
        out[self._places] = True
        return out

    def flat(self, values: Tensor) -> Tensor:
        """Return the coefficients in the order of the index."""
        return values[self._places]

    def filled(self, value: float) -> Tensor:
        """Return a table with the same number in all cells."""
        return torch.where(self.exists, value, torch.nan)

    def read(self, rows: Rows) -> Tensor:
        """Return the table that a page sent; raises unless it has a number for every cell, and no other."""
        shape = (len(self.vectors), len(self.index.blocks))
        if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
            found = f"{len(rows)} rows of {sorted({len(row) for row in rows})} numbers"
            raise _invalid("the table has another size", found, f"{shape[0]} rows of {shape[1]} numbers")
        numbers = [[float("nan") if x is None else float(x) for x in row] for row in rows]
        values = torch.tensor(numbers, dtype=torch.float32).view(shape)
        if not torch.equal(~values.isnan(), self.exists):
            raise _invalid("the table has numbers in other cells", "another set of cells", "the bank's cells")
        if bool((values.abs() > LARGEST).any()):
            worst = float(values[self.exists].abs().max())
            raise _invalid("a coefficient is too large", f"{worst:g}", f"at most {LARGEST:g}")
        return values

    def write(self, values: Tensor) -> list[list[float | None]]:
        """Return a table for the page."""
        return [[None if x != x else x for x in row] for row in values.tolist()]

    def of_coefficients(self, coefficients: Coefficients) -> Tensor:
        """Return the table of coefficients with the same vectors and blocks."""
        require_one_part(coefficients)
        known = {name: j for j, name in enumerate(coefficients.blocks)}
        columns = torch.tensor([known[block.name] for block in self.blocks])
        rows = torch.tensor([coefficients.vectors.index(name) for name in self.vectors])
        return coefficients.matrix().float()[rows][:, columns]


def _invalid(message: str, found: str, expected: str) -> InputError:
    return InputError("COEF-VALUES", message, found=found, expected=expected, fix="reload the page")
