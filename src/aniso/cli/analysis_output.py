"""Output of ``aniso analyse``: matrices as tables, and figures as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import show
from aniso.errors import UsageError, printable

if TYPE_CHECKING:
    from aniso.learn.analysis import LabelledMatrix
    from aniso.report.figures import Kind

Figure = Annotated[Path | None, typer.Option("-o", "--out", help="Draw a figure: FILE.png or FILE.svg.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing figure.")]
Leading = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns before those of a matrix, and their cells by row."""


def require_figure(out: Path | None, overwrite: bool) -> None:
    """Check that a figure can be drawn and written, before anything is computed."""
    if out is None:
        return
    _kind(out)
    if out.exists() and not overwrite:
        raise UsageError("OUT-EXISTS", f"'{printable(out)}' exists", fix="add --overwrite to replace it")
    from aniso.report.figures.canvas import require_matplotlib

    require_matplotlib()


def write_figure(out: Path, overwrite: bool, draw: Callable[[Kind], bytes]) -> None:
    """Draw a figure in the format of the file's ending, and write it."""
    from aniso.weights.atomic import atomic_file

    content = draw(_kind(out))
    with atomic_file(out, overwrite=overwrite) as file:
        file.stream.write(content)


def matrix_table(
    corner: str,
    matrix: LabelledMatrix,
    *,
    percent: bool = False,
    title: str = "",
    means: bool = False,
    leading: Leading = ((), ()),
) -> None:
    """Print a matrix, with a row of column means if asked for."""
    names, cells = leading
    rows = []
    for i, (name, values) in enumerate(zip(matrix.rows, matrix.values, strict=True)):
        before = cells[i] if names else ()
        rows.append((name, *before, *(_cell(value, percent) for value in values)))
    if means:
        rows.append(("mean", *([show.UNDEFINED] * len(names)), *_mean_cells(matrix, percent)))
    if title:
        show.line(title)  # a title of the table itself would be wrapped to the table's width
    show.table((corner, *names, *matrix.columns), rows)


def _mean_cells(matrix: LabelledMatrix, percent: bool) -> list[str]:
    return [_cell(value, percent) for value in matrix.column_means]


def _cell(value: float | None, percent: bool) -> str:
    if value is None:
        return show.UNDEFINED
    return f"{value:.1%}" if percent else f"{value:.3f}"


def _kind(out: Path) -> Kind:
    if out.suffix == ".png":
        return "png"
    if out.suffix == ".svg":
        return "svg"
    raise UsageError(
        "USAGE",
        f"figures cannot be written as '{printable(out.name)}'",
        expected="a file that ends in .png or .svg",
        fix=f"-o {printable(out.stem)}.png",
    )
