"""A start of learning: the vectors that are composed, and their first coefficients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose import CoefficientIndex, Coefficients, Composition, Partition, Runtime
from aniso.compose.coefficients import CoefficientProvenance
from aniso.vectors import Bank, Block


@final
@dataclass(frozen=True, eq=False)
class Start:
    """The coefficients that learning begins at, and the bank that they belong to.

    The bank is the given one, or one with a merged vector more.
    """

    bank: Bank
    coefficients: Coefficients
    description: str
    """How the start was made, for records."""

    def composition(
        self, model: nn.Module, *, runtime: Runtime | None = None, any_base: bool = False
    ) -> Composition:
        """Return a composition of a model with the bank, at these coefficients."""
        made = Composition(model, self.bank, self.coefficients.partition, runtime=runtime, any_base=any_base)
        return made.load(self.coefficients)

    def scaled(self, factor: float) -> Start:
        """Return the start with all coefficients multiplied by a factor."""
        if factor == 1:
            return self
        coefficients = replace(self.coefficients, values=self.coefficients.values * factor)
        return replace(self, coefficients=coefficients, description=f"{self.description}, times {factor:g}")


def filled_coefficients(
    bank: Bank, partition: Partition, value: Callable[[str, Block], float | Tensor]
) -> Coefficients:
    """Return coefficients whose values are a function of vector and block, or of the vector if shared.

    The function returns one number for all parts of a block, or a tensor with one for each.
    """
    index = CoefficientIndex.of(bank, partition)
    values = torch.zeros(index.count)
    for entry in index.blocks:
        for vector in entry.vectors:
            values[index.cell(vector, entry.block.name)] = value(vector, entry.block)
    return Coefficients(index, values, CoefficientProvenance.of(bank))
