"""The difference of a composition to its base as one task vector, and coefficients of it folded back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aniso.compose._engine.coefficient_index import BlockCoefficients, CoefficientIndex
from aniso.compose._engine.stacking import stack_deltas
from aniso.compose.coefficients import Coefficients
from aniso.vectors import Bank, TaskVector
from aniso.vectors.delta import Delta, Dense
from aniso.vectors.provenance import Provenance


def difference_vector(bank: Bank, coefficients: Coefficients, name: str) -> TaskVector | None:
    """Return the sum over vectors of coefficient * delta, which is a composition minus its base.

    It is held in memory, one dense block for each that changes. None if no coefficient differs from zero.
    """
    index = coefficients.index
    cells = {}
    for entry, own in zip(index.blocks, index.divided(coefficients.values), strict=True):
        if bool(own.any()):
            cells[entry.block.name] = partial(_held, Dense(_summed(bank, entry, own)))
    if not cells:
        return None
    first = bank[bank.names[0]]
    formula = f"composition of {', '.join(bank.names)} - base"
    provenance = Provenance(name, "arithmetic", coefficients.content_hash, formula=formula)
    return TaskVector(name, first.layout, lambda: bank.base, cells, provenance)


def _held(delta: Dense) -> Delta:
    return delta


def _summed(bank: Bank, entry: BlockCoefficients, own: Tensor) -> Tensor:
    """One block of the sum; one vector at a time, so that one block is in memory beside the output."""
    total = torch.zeros(entry.block.shape)
    for vector, row in zip(entry.vectors, own, strict=True):
        if bool(row.any()):
            for stack in stack_deltas(entry, {vector: bank[vector][entry.block.name]}, {vector: 0}):
                stack.add_to(total.view(-1), row.unsqueeze(0).to(total.dtype), entry.partition)
    return total


def folded(extended: CoefficientIndex, values: Tensor, before: Coefficients, difference: str) -> Tensor:
    """Return coefficients of the bank alone that mean the same as ``values`` of the extended bank.

    The difference is the sum of ``before`` * delta, so that with its coefficient c and the others' mu the
    coefficients are mu + c * before, for every part of every block.
    """
    index = before.index
    out = torch.zeros_like(before.values)
    blocks = ["*"] if index.partition.is_shared else [entry.block.name for entry in index.blocks]
    for block in blocks:
        for vector in index.vectors if block == "*" else index.by_block[block].vectors:
            here = _cell(index, vector, block)
            out[here] = values[_cell(extended, vector, block)]
            if block == "*" or difference in extended.by_block[block].vectors:
                out[here] += values[_cell(extended, difference, block)] * before.values[here]
    return out


def _cell(index: CoefficientIndex, vector: str, block: str) -> slice:
    if block != "*":
        return index.cell(vector, block)
    at = index.vectors.index(vector)
    return slice(at, at + 1)
