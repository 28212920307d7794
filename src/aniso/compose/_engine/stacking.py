"""Turns the deltas of one block into few stacks, one for each way of storing them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import ComponentParts
from aniso.compose._engine.coefficient_index import BlockCoefficients
from aniso.compose._engine.delta_stack import DeltaStack, DenseStack, PackedStack
from aniso.compose._engine.low_rank_stack import LowRankStack, stacked_factors
from aniso.compose._engine.sparse_stack import SparseStack
from aniso.errors import InputError, printable
from aniso.vectors import Delta, Dense, LowRank, Packed, SparseRows
from aniso.vectors.singular import low_rank_approximation


def stack_deltas(
    entry: BlockCoefficients, deltas: Mapping[str, Delta], row_of: Mapping[str, int]
) -> list[DeltaStack]:
    """Return the deltas of a block as few stacks; ``row_of`` has each vector's row in the coefficients."""
    partition = entry.partition
    if isinstance(partition, ComponentParts):
        own = decomposed_deltas(entry, deltas)
        factors = stacked_factors(list(own.values()), partition)
        return [LowRankStack(tuple(row_of[v] for v in own), entry.block.matrix_shape, factors)]
    groups: dict[object, list[tuple[int, Delta]]] = {}
    for name, delta in deltas.items():
        groups.setdefault(_kind(delta), []).append((row_of[name], delta))
    return [_stack(tuple(i for i, _ in group), [d for _, d in group]) for group in groups.values()]


def decomposed_deltas(entry: BlockCoefficients, deltas: Mapping[str, Delta]) -> dict[str, LowRank]:
    """Return the deltas of a block as singular components; raises if one is not stored as factors."""
    for name, delta in deltas.items():
        if not isinstance(delta, LowRank):
            raise InputError(
                "PARTITION",
                f"vector '{printable(name)}' has no singular components: it is not stored as factors",
                key=entry.block.name,
                found="one number per element",
                expected="a LoRA adapter, or a bank in storage svd:K",
                fix="aniso bank quantise BANK --storage svd:32 -o DIR",
            )
    return {name: low_rank_approximation(delta) for name, delta in deltas.items()}


def _kind(delta: Delta) -> object:
    """Return a key; deltas with the same key can be stacked."""
    if isinstance(delta, Dense):
        return ("dense", delta.values.dtype)
    if isinstance(delta, Packed):
        return ("packed", delta.packing, None if delta.mean is None else delta.mean.data_ptr())
    return "sparse" if isinstance(delta, SparseRows) else "low-rank"


def _stack(vectors: tuple[int, ...], deltas: list[Delta]) -> DeltaStack:
    dense = [d for d in deltas if isinstance(d, Dense)]
    if dense:
        return DenseStack(vectors, _as_matrix([d.values.reshape(-1) for d in dense]))
    packed = [d for d in deltas if isinstance(d, Packed)]
    if packed:
        first = packed[0]
        return PackedStack(
            vectors,
            math.prod(first.shape),
            first.packing,
            _as_matrix([d.codes for d in packed]),
            _as_matrix([d.scales for d in packed]),
            None if first.mean is None else first.mean.reshape(-1),
            torch.tensor([d.factor for d in packed], dtype=torch.float64),
        )
    sparse = [d for d in deltas if isinstance(d, SparseRows)]
    if sparse:
        return SparseStack.of(vectors, sparse)
    low_rank = [d for d in deltas if isinstance(d, LowRank)]
    shape = low_rank[0].shape
    rows = shape[0] if shape else 1
    return LowRankStack(vectors, (rows, math.prod(shape) // max(1, rows)), stacked_factors(low_rank))


def _as_matrix(rows: list[Tensor]) -> Tensor:
    """Return rows as one matrix; rows that are adjacent in memory, as those of a file are, are not copied."""
    first = rows[0]
    step = first.numel()
    adjacent = all(
        row.is_contiguous()
        and row.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and row.storage_offset() == first.storage_offset() + k * step
        for k, row in enumerate(rows)
    )
    if adjacent:
        return first.as_strided((len(rows), step), (step, 1), first.storage_offset())
    return torch.stack(rows)
