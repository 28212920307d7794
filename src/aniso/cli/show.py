"""Output of commands: tables for people, JSON for programs, notes and progress on standard error."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from aniso.errors import printable

UNDEFINED = "-"
"""Shown in place of a number that is not defined."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", *, one_line: bool = False
) -> None:
    """Print a table with numbers aligned to the right. Cells are plain text, whatever they contain.

    Cells that do not fit a terminal are wrapped, or cut if every row shall be on ``one_line``.
    """
    shown = [[cell if isinstance(cell, str) else _cell(cell) for cell in row] for row in rows]
    numeric = [bool(shown) and all(_is_number(row[i]) for row in shown) for i in range(len(columns))]
    out = _out()
    if one_line:
        shown = _cut_to_width([list(columns), *shown], numeric, out.width)[1:]
    grid = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column, is_number in zip(columns, numeric, strict=True):
        grid.add_column(column, justify="right" if is_number else "left", no_wrap=is_number)
    for row in shown:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    out.print(grid)


def _cut_to_width(rows: list[list[str]], numeric: Sequence[bool], width: int) -> list[list[str]]:
    """Return the rows with cells cut so that they fit; the first column and numbers are not cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(numeric))]
    free = [i for i, is_number in enumerate(numeric) if i and not is_number]
    while free and sum(widths) + 2 * len(widths) - 2 > width:
        widest = max(free, key=lambda i: widths[i])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
    return [
        [
            cell if len(cell) <= most else f"{cell[: most - 1]}…"
            for cell, most in zip(row, widths, strict=True)
        ]
        for row in rows
    ]


def line(text: str) -> None:
    _out().print(Text(printable(text, 2000)), soft_wrap=True)


def terminal_width() -> int:
    """Return the columns of the terminal."""
    return Console().width


def shortened(text: str, width: int) -> str:
    """Return text in at most so many columns: of what is longer, the end, where names of files differ."""
    plain = printable(text, len(text) * 10 + 1)
    return plain if len(plain) <= width else f"…{plain[1 - width :]}"


def this_command() -> str:
    """Return the command line as it was typed; absolute paths are shortened to their last part."""
    words = [Path(word).name if word.startswith(("/", "~")) else word for word in sys.argv[1:]]
    return " ".join(["aniso", *(shlex.quote(word) for word in words)])


def text(lines: str) -> None:
    """Print text as it is."""
    typer.echo(lines, nl=False)


def progress_line(text: str) -> None:
    """Print a line of progress on standard error."""
    typer.echo(printable(text, 2000), err=True)


def as_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, sort_keys=True))


def notes(lines: Iterable[str]) -> None:
    """Print notes and warnings on standard error, each once."""
    err = Console(stderr=True, highlight=False)
    for text in dict.fromkeys(lines):
        warning = text.startswith("warning: ")
        label = "warning" if warning else "note"
        body = printable(text.removeprefix("warning: "), 600)
        err.print(Text(f"{label}: ", style="yellow" if warning else "dim") + Text(body), soft_wrap=True)


def note_of(name: str, note: str) -> str:
    """Prefix a note with the name it is about; a warning stays a warning."""
    warning = "warning: " if note.startswith("warning: ") else ""
    return f"{warning}{name}: {note.removeprefix('warning: ')}"


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over bytes if standard error is a terminal."""
    err = Console(stderr=True)
    if not err.is_terminal or total == 0:
        yield lambda n: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


@contextlib.contextmanager
def item_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar over counts for every description if standard error is a terminal."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda what, done, total: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    with bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield progress


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def _out() -> Console:
    out = Console(highlight=False)
    # a pipe has no width: shortened names would be lost to programs that read them
    return out if out.is_terminal else Console(highlight=False, width=10_000)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return "" if value is None else str(value)


def _is_number(cell: str) -> bool:
    if cell == UNDEFINED:
        return True
    return cell.replace(",", "").replace(".", "").replace("-", "").replace("e", "").replace("%", "").isdigit()
