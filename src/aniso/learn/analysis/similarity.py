"""Cosine similarity between the vectors of a bank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.learn.analysis.matrix import LabelledMatrix, Value
from aniso.vectors import Bank, Block
from aniso.vectors.delta import Delta, LowRank
from aniso.weights.files import Progress

_CHUNK = 1 << 16  # elements of each vector that are multiplied at once
_DENSE = 256 << 20  # bytes of unpacked deltas in memory


@final
@dataclass(frozen=True)
class Similarity:
    """Cosines between all pairs of vectors: over all blocks, and over the blocks of each kind.

    A cosine is None if one of the two vectors is zero in these blocks.
    """

    whole: LabelledMatrix
    by_kind: Mapping[str, LabelledMatrix]


def cosine_similarity(bank: Bank, *, progress: Progress | None = None) -> Similarity:
    """Return cos(i, j) = <tau_i, tau_j> / (|tau_i| |tau_j|) for all pairs of a bank's vectors.

    The bank is read once, one block at a time; ``progress`` is called with the bytes of each block.
    """
    products: dict[str, Tensor] = {}
    for block, own in block_products(bank, progress=progress):
        total = products.setdefault(str(block.kind), torch.zeros_like(own))
        total += own
    whole = sum(products.values(), torch.zeros(len(bank), len(bank), dtype=torch.float64))
    return Similarity(
        cosines(bank.names, whole),
        {kind: cosines(bank.names, own) for kind, own in products.items()},
    )


def block_products(bank: Bank, *, progress: Progress | None = None) -> Iterator[tuple[Block, Tensor]]:
    """Yield every block with <tau_i, tau_j> of all pairs of vectors in it; 0 where one has no such block."""
    position = {name: i for i, name in enumerate(bank)}
    for block in bank.layout.blocks:
        deltas = bank.read_block(block.name, exact=False)
        if deltas:
            own = torch.zeros(len(bank), len(bank), dtype=torch.float64)
            at = torch.tensor([position[name] for name in deltas])
            own[at[:, None], at] = _inner_products(list(deltas.values()))
            yield block, own
        if progress:
            progress(bank.block_bytes(block.name))


def cosines(names: Sequence[str], products: Tensor) -> LabelledMatrix:
    """Return cosines from the inner products of all pairs; None where a vector is zero."""
    norms = products.diagonal().clamp(min=0).sqrt()
    scales = torch.outer(norms, norms)
    values = (products / scales).clamp(-1, 1)  # rounding may carry a perfect match a hair over one
    cells: list[tuple[Value, ...]] = []
    for row, scale in zip(values.tolist(), scales.tolist(), strict=True):
        cells.append(tuple(x if s > 0 else None for x, s in zip(row, scale, strict=True)))
    return LabelledMatrix(tuple(names), tuple(names), tuple(cells))


def _inner_products(deltas: Sequence[Delta]) -> Tensor:
    """Return the inner products of all pairs of one block's deltas."""
    out = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
    if any(isinstance(delta, LowRank) for delta in deltas):  # products of factors, without dense matrices
        for i, one in enumerate(deltas):
            for j, two in enumerate(deltas[: i + 1]):
                out[i, j] = out[j, i] = one.dot(two)
        return out
    group = max(1, _DENSE // (8 * max(1, _numel(deltas[0]))))  # two groups are in memory
    starts = range(0, len(deltas), group)
    for first in starts:
        left = _flat(deltas[first : first + group])
        for second in (start for start in starts if start >= first):
            right = left if second == first else _flat(deltas[second : second + group])
            own = _products(left, right)
            out[first : first + len(left), second : second + len(right)] = own
            out[second : second + len(right), first : first + len(left)] = own.T
    return out


def _numel(delta: Delta) -> int:
    return int(torch.Size(delta.shape).numel())


def _flat(deltas: Sequence[Delta]) -> Tensor:
    return torch.stack([delta.dense().reshape(-1) for delta in deltas])


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T`` in double: a float32 sum over millions of terms loses digits."""
    out = torch.zeros(len(left), len(right), dtype=torch.float64)
    for start in range(0, left.shape[1], _CHUNK):
        piece = slice(start, start + _CHUNK)
        out += left[:, piece].double() @ right[:, piece].double().T
    return out
