"""Coefficients taken over to a bank whose blocks are cut differently, or refused with the block named.

Hugging Face keeps query, key and value apart, open_clip in one tensor. A layout may have either as blocks:
``X`` or ``X.q``, ``X.k`` and ``X.v``.
"""

from __future__ import annotations

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
        theirs = slots.by_block[stem]
        return _piece(slot, theirs, _in_order(slot, theirs, known[stem]), _PIECES.index(letter))
    if all(f"{name}.{letter}" in known for letter in _PIECES):
        parts = [slots.by_block[f"{name}.{letter}"] for letter in _PIECES]
        return _joined(slot, parts, [_in_order(slot, p, known[p.block.name]) for p in parts])
    raise _misfit(name, "has no coefficients", "coefficients for every block", "none")


def _in_order(slot: Slot, theirs: Slot, own: Tensor) -> Tensor:
    """Rows in the bank's order; both must name the same vectors."""
    if set(slot.vectors) != set(theirs.vectors):
        odd = sorted(set(slot.vectors) ^ set(theirs.vectors))[0]
        absent = "the bank" if odd in theirs.vectors else "the coefficients"
        raise _misfit(
            slot.block.name, f"of vector '{odd}' is absent from {absent}", "the same cells in both", "others"
        )
    return own[[theirs.vectors.index(v) for v in slot.vectors]]


def _piece(slot: Slot, whole: Slot, own: Tensor, which: int) -> Tensor:
    """Query, key or value out of all three."""
    _require_divisible(whole.division, slot)
    if isinstance(whole.division, (Undivided,)) or _by_column(whole.division, slot):
        return own
    return own.chunk(3, dim=1)[which]


def _joined(slot: Slot, parts: list[Slot], own: list[Tensor]) -> Tensor:
    """All three in one, where they agree or have rows of their own."""
    for part in parts:
        _require_divisible(part.division, slot)
    if not isinstance(slot.division, Undivided) and not _by_column(slot.division, slot):
        return torch.cat(own, dim=1)
    for letter, other in zip(_PIECES[1:], own[1:], strict=True):
        if not torch.equal(own[0], other):
            raise _misfit(
                slot.block.name,
                f"has different coefficients for its parts q and {letter}",
                "equal ones, since the bank has one block for them",
                f"{own[0].reshape(-1)[0]:.6g} and {other.reshape(-1)[0]:.6g}",
            )
    return own[0]


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
    theirs = {s.block.name: s.block.numel for s in slots.blocks}
    stems = {n.rpartition(".")[0] for n in theirs if n.rpartition(".")[2] in _PIECES}
    for slot in mine.blocks:
        name = slot.block.name
        stem, _, letter = name.rpartition(".")
        if name not in theirs and name not in stems and not (letter in _PIECES and stem in theirs):
            raise _misfit(name, "is unknown to the coefficients", "the same blocks", "others")


def _require_used(slots: Slots, mine: Slots) -> None:
    ours = set(mine.by_block)
    for name in slots.by_block:
        stem, _, letter = name.rpartition(".")
        pieces = all(f"{name}.{p}" in ours for p in _PIECES)
        if name not in ours and not pieces and not (letter in _PIECES and stem in ours):
            raise _misfit(name, "is not in the bank", "the same blocks", "coefficients for it")


def _misfit(block: str, what: str, expected: str, found: str) -> InputError:
    return InputError(
        "COEF-LAYOUT",
        f"the coefficients do not fit the bank: block {what}",
        key=block,
        expected=expected,
        found=found,
        fix="use the bank that they were learned on",
    )
