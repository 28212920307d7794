"""A table of coefficients as assignments, and the commands that write it and bake it."""

from __future__ import annotations

import glob
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from aniso.assignment_text import Assignment
from aniso.compose import Coefficients
from aniso.explore.table import CoefficientTable

COEFFICIENTS = "coefficients.safetensors"
_SHORT = 16  # assignments in a command; more are passed on standard input
_Row = Mapping[str, float]
"""The coefficients of a vector by block."""


@final
@dataclass(frozen=True)
class Recipe:
    """How a table is written by ``aniso coefficients make``: assignments, maybe over given coefficients."""

    assignments: tuple[Assignment, ...]
    over_start: bool = False

    def command(self, bank: str, start: str | None) -> str:
        """Return the command that writes these coefficients."""
        words = ["aniso", "coefficients", "make", "--bank", bank]
        if self.over_start and start is not None:
            words += ["--from", start]
        values = [str(a) for a in self.assignments]
        if len(values) <= _SHORT:
            return shlex.join([*words, *values, "-o", COEFFICIENTS])
        lines = "\n".join(values)
        return f"{shlex.join([*words, '--values', '-', '-o', COEFFICIENTS])} <<'END'\n{lines}\nEND"


def recipe_of(table: CoefficientTable, values: Tensor, start: Coefficients | None, alone: bool) -> Recipe:
    """Return the shorter recipe of a table: over zero, or over the start.

    ``alone`` is False if the coefficients cannot be made without the start: it has a part of the
    bank's cells, or a vector that the bank does not have.
    """
    rows = {name: _row(table, values[i]) for i, name in enumerate(table.vectors)}
    constant = {name: min(row.values()) for name, row in rows.items() if len(set(row.values())) == 1}
    if alone and len(constant) == len(rows):
        used = [Assignment(name, value) for name, value in constant.items() if value]
        return Recipe(tuple(used or (Assignment(name, 0.0) for name in constant)))
    over_start = None
    if start is not None:
        before = table.of_coefficients(start)
        known = {name: _row(table, before[i]) for i, name in enumerate(table.vectors)}
        over_start = Recipe(tuple(a for name in rows for a in _changes(name, rows[name], known[name])), True)
        if not alone:
            return over_start
    fresh = Recipe(tuple(a for name, row in rows.items() if any(row.values()) for a in _from_zero(name, row)))
    short = over_start is not None and len(over_start.assignments) < len(fresh.assignments)
    return over_start if over_start is not None and short else fresh


def _row(table: CoefficientTable, values: Tensor) -> _Row:
    names = (block.name for block in table.blocks)
    return {name: x for name, x in zip(names, values.tolist(), strict=True) if x == x}


def _from_zero(vector: str, row: _Row) -> Iterator[Assignment]:
    """Yield the most common number for the vector, then those of the other blocks."""
    usual = Counter(row.values()).most_common(1)[0][0]
    yield Assignment(vector, usual)
    yield from _changes(vector, row, dict.fromkeys(row, usual))


def _changes(vector: str, row: _Row, before: _Row) -> Iterator[Assignment]:
    """Yield assignments of the blocks whose numbers differ; blocks of one number share a pattern."""
    left = {name for name in row if row[name] != before[name]}
    if left and len(set(row.values())) == 1:
        yield Assignment(vector, next(iter(row.values())))
        return
    while left:
        first = min(left, key=list(row).index)
        same = {name for name in row if row[name] == row[first]}
        found = Assignment(vector, row[first], _pattern(first, row, same))
        yield found
        left -= {name for name in left if found.covers(name)}


def _pattern(first: str, row: _Row, same: set[str]) -> str:
    """Return the widest pattern with a star at one end that covers a block, and only blocks of its number."""
    parts = first.split(".")
    starts = [".".join(parts[:length]) + "." for length in range(1, len(parts))]
    ends = ["." + ".".join(parts[-length:]) for length in range(1, len(parts))]
    covered = [(glob.escape(text) + "*", {n for n in row if n.startswith(text)}) for text in starts]
    covered += [("*" + glob.escape(text), {n for n in row if n.endswith(text)}) for text in ends]
    fitting = [(len(names), pattern) for pattern, names in covered if names <= same]
    return max(fitting, key=lambda found: found[0])[1] if fitting else glob.escape(first)
