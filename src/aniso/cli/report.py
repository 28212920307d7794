"""``aniso report``: records as tables, figures and a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import options, show

if TYPE_CHECKING:
    from aniso.report.predictions import ErrorItem, TaskPredictions

_OURS = re.compile(r"index\.html|report\.md|[\w.+-]+\.(md|csv|png|svg)")


def report(
    records: Annotated[list[Path], typer.Argument(help="Records, or directories of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to write.")],
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Report",
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures.")] = True,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            "--figure",
            help="Write only this figure, such as venn, as PNG and SVG; repeatable. --figure ? lists all.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", help="Only records with this label; repeatable.")
    ] = None,
    data: options.DataRoot = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Write Markdown and CSV tables, PNG and SVG figures, and one HTML page from records."""
    from aniso.record_files import failed_cells
    from aniso.report import build, draw_figures, experiments, mixed, read_records, run_predictions, table
    from aniso.report.figures import find_figure

    for name in figure or ():
        find_figure(name)
    found = read_records(records, label or ())
    if figure:
        files = draw_figures(found, figure)
    else:
        predictions, notes = run_predictions(records, found)
        errors, more = _errors(predictions, data)
        show.notes(f"warning: {note}" for note in (*notes, *more))
        files = build(found, title, figures=figures, predictions=predictions, errors=errors)
    from aniso.weights.atomic import atomic_directory  # imports torch: mistakes are found before

    with atomic_directory(out, overwrite=overwrite, ours=_OURS) as place:
        for name, content in files.items():
            (place / name).write_bytes(content)
    show.notes(f"warning: {note}" for note in mixed(found))
    if failed := failed_cells(records):
        show.notes([f"warning: {failed} failed cells have no record: run them with aniso run --retry-failed"])
    if json:
        show.as_json({"out": str(out), "records": len(found), "files": sorted(files)})
        return
    for own in () if figure else experiments(found).values():
        show.text(table(own).markdown() + "\n")
    show.line(f"wrote {out}: {len(files)} files from {len(found)} records")


def _errors(
    predictions: list[TaskPredictions], data: Path | None
) -> tuple[dict[tuple[Path, str, str], ErrorItem], list[str]]:
    """Return the items that runs got wrong, by directory, task and id, and notes on missing data."""
    if not any(one.errors for one in predictions):
        return {}, []
    from aniso.experiments.prediction.thumbnails import error_items  # imports torch

    out: dict[tuple[Path, str, str], ErrorItem] = {}
    notes = []
    for one in predictions:
        items, note = error_items(one.directory, one.task, [item.id for item in one.errors], data)
        out |= {(one.directory, one.task, name): item for name, item in items.items()}
        notes += [note] if note else []
    return out, notes
