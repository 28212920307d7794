"""Coefficients taken over to a bank whose blocks are cut differently, or refused with the block named.

Hugging Face keeps query, key and value apart, open_clip in one tensor. A layout may have either as blocks:
``X`` or ``X.q``, ``X.k`` and ``X.v``.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from aniso.compose.division import Columns, Division, Rows, Undivided
from aniso.compose.slots import Slot, Slots
from aniso.errors import InputError
from aniso.vectors import Bank

_PIECES = ("q", "k", "v")


def adopted(slots: Slots, values: Tensor, bank: Bank) -> tuple[Slots, Tensor]:
    """The slots of the bank, and the values for them in order."""
    mine = Slots.of(bank.only(*slots.vectors), slots.partition)
    if slots.partition.is_shared:
        _require_blocks(slots, mine)
        order = [slots.vectors.index(v) for v in mine.vectors]
        return mine, values[order]
    known = dict(zip((s.block.name for s in slots.blocks), slots.divided(values), strict=True))
    pieces = [_values_for(slot, slots, known) for slot in mine.blocks]
    _require_used(slots, mine)
    return mine, torch.cat([p.reshape(-1) for p in pieces]) if pieces else values[:0]


def _values_for(slot: Slot, slots: Slots, known: dict[str, Tensor]) -> Tensor:
    name = slot.block.name
    if name in known:
        theirs = slots.by_block[name]
        if theirs.block.shape != slot.block.shape:
            raise _misfit(name, "has another shape", str(theirs.block.shape), str(slot.block.shape))
        return _in_order(slot, theirs, known[name])
    stem, _, letter = name.rpartition(".")
    if letter in _PIECES and stem in known:
        return _piece(slot, slots.by_block[stem], known[stem], _PIECES.index(letter))
    pieces = {p: slots.by_block[f"{name}.{p}"] for p in _PIECES if f"{name}.{p}" in known}
    if pieces:
        return _joined(slot, {p: (theirs, known[theirs.block.name]) for p, theirs in pieces.items()})
    raise _misfit(name, "has no coefficients", "coefficients for every block", "none")


def _in_order(slot: Slot, theirs: Slot, own: Tensor) -> Tensor:
    """Rows in the bank's order; both must name the same vectors."""
    _require_vectors(slot, set(slot.vectors) ^ set(theirs.vectors), theirs.vectors)
    return own[[theirs.vectors.index(v) for v in slot.vectors]]


def _piece(slot: Slot, whole: Slot, own: Tensor, which: int) -> Tensor:
    """Query, key or value out of all three; a vector need not change each of them."""
    _require_divisible(whole.division, slot)
    _require_vectors(slot, set(slot.vectors) - set(whole.vectors), whole.vectors)
    own = own[[whole.vectors.index(v) for v in slot.vectors]]
    if isinstance(whole.division, Undivided) or _by_column(whole.division, slot):
        return own
    return own.chunk(3, dim=1)[which]


def _joined(slot: Slot, pieces: dict[str, tuple[Slot, Tensor]]) -> Tensor:
    """All three in one, where they agree or have rows of their own; what a vector does not change agrees."""
    named = {v for theirs, _ in pieces.values() for v in theirs.vectors}
    _require_vectors(slot, set(slot.vectors) ^ named, named)
    for theirs, _ in pieces.values():
        _require_divisible(theirs.division, slot)
    is_one = isinstance(slot.division, Undivided) or _by_column(slot.division, slot)
    out = []
    for vector in slot.vectors:
        own = {p: values[t.vectors.index(vector)] for p, (t, values) in pieces.items() if vector in t.vectors}
        out.append(_agreed(slot, vector, own) if is_one else _rows(slot, own))
    return torch.stack(out)


def _rows(slot: Slot, own: dict[str, Tensor]) -> Tensor:
    none = next(iter(own.values())).new_zeros(slot.division.count // 3)
    return torch.cat([own.get(p, none) for p in _PIECES])


def _agreed(slot: Slot, vector: str, own: dict[str, Tensor]) -> Tensor:
    (first, expected), *others = own.items()
    for letter, other in others:
        odd = (expected != other).nonzero().reshape(-1).tolist()
        if odd:
            raise _misfit(
                slot.block.name,
                f"has different coefficients of vector '{vector}' for its parts {first} and {letter}",
                "equal ones, since the bank has one block for them",
                f"{expected[odd[0]]:.6g} and {other[odd[0]]:.6g}",
            )
    return expected


def _require_vectors(slot: Slot, odd: set[str], theirs: Collection[str]) -> None:
    for vector in sorted(odd):
        absent = "the bank" if vector in theirs else "the coefficients"
        what = f"of vector '{vector}' is absent from {absent}"
        raise _misfit(slot.block.name, what, "the same cells in both", "others")


def _by_column(division: Division, slot: Slot) -> bool:
    """Whether coefficients stand for columns of a matrix, which q, k and v have in common."""
    return isinstance(division, Columns) and len(slot.block.shape) > 1


def _require_divisible(division: Division, slot: Slot) -> None:
    if not isinstance(division, Undivided | Rows | Columns):
        raise _misfit(
            slot.block.name, "is divided at random, over other elements", "the same blocks", "others"
        )


def _require_blocks(slots: Slots, mine: Slots) -> None:
    """Coefficients of whole vectors need no blocks, but they must be of the same model."""
    theirs = {s.block.name: s.block.shape for s in slots.blocks}
    stems = {n.rpartition(".")[0] for n in theirs if n.rpartition(".")[2] in _PIECES}
    for slot in mine.blocks:
        name = slot.block.name
        stem, _, letter = name.rpartition(".")
        if theirs.get(name, slot.block.shape) != slot.block.shape:
            raise _misfit(name, "has another shape", str(theirs[name]), str(slot.block.shape))
        if name not in theirs and name not in stems and not (letter in _PIECES and stem in theirs):
            raise _misfit(name, "is unknown to the coefficients", "the same blocks", "others")


def _require_used(slots: Slots, mine: Slots) -> None:
    ours = mine.by_block
    for name, slot in slots.by_block.items():
        stem, _, letter = name.rpartition(".")
        if name in ours or (letter in _PIECES and stem in ours):
            continue
        pieces = [ours[f"{name}.{p}"] for p in _PIECES if f"{name}.{p}" in ours]
        if not pieces:
            raise _misfit(name, "is not in the bank", "the same blocks", "coefficients for it")
        _require_vectors(slot, set(slot.vectors) - {v for p in pieces for v in p.vectors}, slot.vectors)


def _misfit(block: str, what: str, expected: str, found: str) -> InputError:
    return InputError(
        "COEF-LAYOUT",
        f"the coefficients do not fit the bank: block {what}",
        key=block,
        expected=expected,
        found=found,
        fix="use the bank that they were learned on",
    )
