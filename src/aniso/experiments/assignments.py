"""Coefficients written by hand: for vectors, or for some of their blocks, over zero or over other ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aniso.assignment_text import Assignment
from aniso.compose import Coefficients, Partition
from aniso.errors import InputError, UsageError, printable
from aniso.learn.starts.start import filled_coefficients
from aniso.vectors import Bank, Block


def assigned_coefficients(
    bank: Bank, assignments: Sequence[Assignment], start: Coefficients | None = None
) -> Coefficients:
    """Return coefficients from assignments, of which later ones win; ``start`` gives all others, else zero.

    Without a start, the coefficients are for the vectors that are named. They are one number for each vector
    unless an assignment names blocks, or the start has one for each block.
    """
    if start is not None:
        require_one_part(start)
    chosen = _chosen(bank, [a.vector for a in assignments], start)
    own = {name: [a for a in assignments if a.vector == name] for name in chosen}
    _require_blocks(chosen, assignments)
    families = start.partition.families if start is not None else ()
    by_block = any(a.pattern for a in assignments) or (start is not None and not start.partition.is_shared)
    partition = (Partition.blocks() if by_block else Partition.whole()).over(*families)
    before = _cells(start)

    def value(vector: str, block: Block) -> float:
        covering = [a.value for a in own[vector] if a.covers(block.name)]
        return covering[-1] if covering else before.get((vector, block.name), 0.0)

    made = filled_coefficients(chosen, partition, value)
    return replace(made, selection=start.selection) if start is not None else made


def require_one_part(coefficients: Coefficients) -> None:
    """Raise unless there is one coefficient per vector, or one per vector and block, of the model itself."""
    coefficients.require_standard()
    if coefficients.partition.rule not in ("whole", "blocks"):
        raise UsageError(
            "COEF-PARTITION",
            "a block of these coefficients has several, which are not set one by one",
            found=str(coefficients.partition),
            expected="one coefficient per vector, or one per vector and block",
            fix="learn them with --partition blocks",
        )


def _chosen(bank: Bank, named: Sequence[str], start: Coefficients | None) -> Bank:
    """Return the cells that get coefficients: those of the start, and all cells of other vectors."""
    if start is None:
        return bank.only(*named)
    kept = start.chosen(bank)
    cells = {name: [b.name for b in kept[name].blocks] for name in start.vectors}
    cells |= {name: [b.name for b in bank[name].blocks] for name in named if name not in cells}
    if all(len(cells[name]) == len(bank[name].blocks) for name in cells):
        return bank.only(*cells)
    return bank.only_cells(cells)


def _cells(start: Coefficients | None) -> dict[tuple[str, str], float]:
    if start is None:
        return {}
    rows = zip(start.vectors, start.matrix().tolist(), strict=True)
    return {(v, b): x for v, row in rows for b, x in zip(start.blocks, row, strict=True) if x == x}


def _require_blocks(bank: Bank, assignments: Sequence[Assignment]) -> None:
    for a in assignments:
        if a.pattern and not any(a.covers(block.name) for block in bank[a.vector].blocks):
            raise InputError(
                "COEF-LAYOUT",
                f"no block of vector '{printable(a.vector)}' matches '{printable(a.pattern)}'",
                expected=f"such as {bank[a.vector].blocks[0].name}",
                fix="aniso coefficients show --json lists the blocks of coefficients",
            )
