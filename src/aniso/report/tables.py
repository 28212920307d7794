"""Tables of estimates, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aniso.csv_text import csv_text
from aniso.errors import printable

_MARKUP = re.compile(r"[\\`*\[\]<>|&~$#]|:(?=//)|^[-+=]|(?<=^\d)[.)](?=\s|$)")
MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error if there is one, and a remark if it is not over all tasks."""

    mean: float
    error: float | None = None
    remark: str = ""
    digits: int = 1
    """Digits after the decimal point."""

    def __str__(self) -> str:
        spread = "" if self.error is None else f" ± {self.error:.{self.digits}f}"
        return f"{self.mean:.{self.digits}f}{spread}{f' ({self.remark})' if self.remark else ''}"


Cell = Estimate | str | None


@dataclass(frozen=True)
class Table:
    """Columns and rows under a title, with notes on what the numbers are taken over."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [f"### {markdown_text(self.title)}", ""]
        lines.append(_line(self.columns))
        lines.append("|" + "".join(" ---: |" if number else " --- |" for number in self.numeric))
        lines += [_line(shown(cell) for cell in row) for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {markdown_text(note)}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return CSV with a column per number: mean, then standard error and remark if there are any."""
        columns = [list(_unfolded(name, cells)) for name, cells in self._by_column()]
        flat = [column for group in columns for column in group]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for row in zip(*flat, strict=True):
            writer.writerow([csv_text(text) for text in row])
        return out.getvalue()

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether it holds numbers, which are aligned to the right."""
        return [any(isinstance(cell, Estimate) for cell in cells) for _, cells in self._by_column()]

    def _by_column(self) -> Iterator[tuple[str, list[Cell]]]:
        for i, name in enumerate(self.columns):
            yield name, [row[i] for row in self.rows]


def shown(cell: Cell) -> str:
    return MISSING if cell is None else str(cell)


def _unfolded(name: str, cells: list[Cell]) -> Iterator[list[str]]:
    estimates = [cell if isinstance(cell, Estimate) else None for cell in cells]
    yield [name, *(_mean(cell) for cell in cells)]
    if any(e and e.error is not None for e in estimates):
        yield [f"{name} s.e.", *("" if not e or e.error is None else f"{e.error:.4f}" for e in estimates)]
    if any(e and e.remark for e in estimates):
        yield [f"{name} remark", *(e.remark if e else "" for e in estimates)]


def _mean(cell: Cell) -> str:
    return f"{cell.mean:.4f}" if isinstance(cell, Estimate) else cell or ""


def markdown_text(text: str) -> str:
    """Escape an untrusted name: no markup, no link, no line break."""
    one_line = " ".join(text.split())
    return _MARKUP.sub(r"\\\g<0>", printable(one_line, len(one_line) * 10 + 1))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(markdown_text(cell) for cell in cells) + " |"
