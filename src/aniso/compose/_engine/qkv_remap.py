"""Maps coefficients to a bank whose query, key and value blocks are split or fused differently.

Hugging Face keeps query, key and value apart, open_clip in one tensor. A layout may have either as blocks:
``X`` or ``X.q``, ``X.k`` and ``X.v``. Coefficients that do not fit are refused with the block named.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import BlockPartition, ColumnParts, RowParts, WholeBlock
from aniso.compose._engine.coefficient_index import BlockCoefficients, CoefficientIndex
from aniso.errors import InputError
from aniso.vectors import Bank

_PIECES = ("q", "k", "v")


def remap_coefficients(
    index: CoefficientIndex, values: Tensor, bank: Bank
) -> tuple[CoefficientIndex, Tensor]:
    """Return the index of the bank, and the values in its order."""
    mine = CoefficientIndex.of(bank.only(*index.vectors), index.partition)
    if index.partition.is_shared:
        _require_blocks(index, mine)
        order = [index.vectors.index(v) for v in mine.vectors]
        return mine, values[order]
    known = dict(zip((s.block.name for s in index.blocks), index.divided(values), strict=True))
    pieces = [_values_for(entry, index, known) for entry in mine.blocks]
    _require_used(index, mine)
    return mine, torch.cat([p.reshape(-1) for p in pieces]) if pieces else values[:0]


def _values_for(entry: BlockCoefficients, index: CoefficientIndex, known: dict[str, Tensor]) -> Tensor:
    name = entry.block.name
    if name in known:
        theirs = index.by_block[name]
        if theirs.block.shape != entry.block.shape:
            raise _misfit(name, "has another shape", str(theirs.block.shape), str(entry.block.shape))
        return _in_order(entry, theirs, known[name])
    stem, _, letter = name.rpartition(".")
    if letter in _PIECES and stem in known:
        return _piece(entry, index.by_block[stem], known[stem], _PIECES.index(letter))
    pieces = {p: index.by_block[f"{name}.{p}"] for p in _PIECES if f"{name}.{p}" in known}
    if pieces:
        return _joined(entry, {p: (theirs, known[theirs.block.name]) for p, theirs in pieces.items()})
    raise _misfit(name, "has no coefficients", "coefficients for every block", "none")


def _in_order(entry: BlockCoefficients, theirs: BlockCoefficients, own: Tensor) -> Tensor:
    """Return the rows in the bank's order; both must name the same vectors."""
    _require_vectors(entry, set(entry.vectors) ^ set(theirs.vectors), theirs.vectors)
    return own[[theirs.vectors.index(v) for v in entry.vectors]]


def _piece(entry: BlockCoefficients, whole: BlockCoefficients, own: Tensor, which: int) -> Tensor:
    """Return the coefficients of query, key or value out of all three; a vector may change only some."""
    _require_divisible(whole.partition, entry)
    _require_vectors(entry, set(entry.vectors) - set(whole.vectors), whole.vectors)
    own = own[[whole.vectors.index(v) for v in entry.vectors]]
    if isinstance(whole.partition, WholeBlock) or _by_column(whole.partition, entry):
        return own
    return own.chunk(3, dim=1)[which]


def _joined(entry: BlockCoefficients, pieces: dict[str, tuple[BlockCoefficients, Tensor]]) -> Tensor:
    """Return the coefficients of the fused block, where all three agree or have rows of their own.

    A vector's absent piece agrees with anything.
    """
    named = {v for theirs, _ in pieces.values() for v in theirs.vectors}
    _require_vectors(entry, set(entry.vectors) ^ named, named)
    for theirs, _ in pieces.values():
        _require_divisible(theirs.partition, entry)
    is_one = isinstance(entry.partition, WholeBlock) or _by_column(entry.partition, entry)
    out = []
    for vector in entry.vectors:
        own = {p: values[t.vectors.index(vector)] for p, (t, values) in pieces.items() if vector in t.vectors}
        out.append(_agreed(entry, vector, own) if is_one else _rows(entry, own))
    return torch.stack(out)


def _rows(entry: BlockCoefficients, own: dict[str, Tensor]) -> Tensor:
    none = next(iter(own.values())).new_zeros(entry.partition.count // 3)
    return torch.cat([own.get(p, none) for p in _PIECES])


def _agreed(entry: BlockCoefficients, vector: str, own: dict[str, Tensor]) -> Tensor:
    (first, expected), *others = own.items()
    for letter, other in others:
        odd = (expected != other).nonzero().reshape(-1).tolist()
        if odd:
            raise _misfit(
                entry.block.name,
                f"has different coefficients of vector '{vector}' for its parts {first} and {letter}",
                "equal ones, since the bank has one block for them",
                f"{expected[odd[0]]:.6g} and {other[odd[0]]:.6g}",
            )
    return expected


def _require_vectors(entry: BlockCoefficients, odd: set[str], theirs: Collection[str]) -> None:
    for vector in sorted(odd):
        absent = "the bank" if vector in theirs else "the coefficients"
        what = f"of vector '{vector}' is absent from {absent}"
        raise _misfit(entry.block.name, what, "the same cells in both", "others")


def _by_column(partition: BlockPartition, entry: BlockCoefficients) -> bool:
    """Return True if coefficients belong to columns of a matrix, which q, k and v have in common."""
    return isinstance(partition, ColumnParts) and len(entry.block.shape) > 1


def _require_divisible(partition: BlockPartition, entry: BlockCoefficients) -> None:
    if not isinstance(partition, WholeBlock | RowParts | ColumnParts):
        raise _misfit(entry.block.name, "is divided at random or by components", "the same blocks", "others")


def _require_blocks(index: CoefficientIndex, mine: CoefficientIndex) -> None:
    """Refuse other blocks: coefficients of whole vectors need none, but must belong to the same model."""
    theirs = {s.block.name: s.block.shape for s in index.blocks}
    stems = {n.rpartition(".")[0] for n in theirs if n.rpartition(".")[2] in _PIECES}
    for entry in mine.blocks:
        name = entry.block.name
        stem, _, letter = name.rpartition(".")
        if theirs.get(name, entry.block.shape) != entry.block.shape:
            raise _misfit(name, "has another shape", str(theirs[name]), str(entry.block.shape))
        if name not in theirs and name not in stems and not (letter in _PIECES and stem in theirs):
            raise _misfit(name, "is unknown to the coefficients", "the same blocks", "others")


def _require_used(index: CoefficientIndex, mine: CoefficientIndex) -> None:
    ours = mine.by_block
    for name, entry in index.by_block.items():
        stem, _, letter = name.rpartition(".")
        if name in ours or (letter in _PIECES and stem in ours):
            continue
        pieces = [ours[f"{name}.{p}"] for p in _PIECES if f"{name}.{p}" in ours]
        if not pieces:
            raise _misfit(name, "is not in the bank", "the same blocks", "coefficients for it")
        _require_vectors(entry, set(entry.vectors) - {v for p in pieces for v in p.vectors}, entry.vectors)


def _misfit(block: str, what: str, expected: str, found: str) -> InputError:
    return InputError(
        "COEF-LAYOUT",
        f"the coefficients do not fit the bank: block {what}",
        key=block,
        expected=expected,
        found=found,
        fix="use the bank that they were learned on",
    )
