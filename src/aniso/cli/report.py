"""``aniso report``: records as tables, figures and a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import options, show

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
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Write Markdown and CSV tables, PNG and SVG figures, and one HTML page from records."""
    from aniso.record_files import failed_cells
    from aniso.report import build, draw_figures, experiments, mixed, read_records, table
    from aniso.report.figures import find_figure

    for name in figure or ():
        find_figure(name)
    found = read_records(records)
    files = draw_figures(found, figure) if figure else build(found, title, figures=figures)
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
