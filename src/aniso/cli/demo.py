"""``aniso demo``: a tour of few-shot learning, addition and negation."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import options, show
from aniso.errors import UsageError


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory to work in.")] = Path("aniso-demo"),
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Few-shot learning, addition and negation on small images, in about two minutes, without a network."""
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken and not (overwrite and (out / "data" / "digits" / "task.toml").exists()):  # only a demo's own
        raise UsageError(
            "OUT-EXISTS", f"'{out}' exists", fix="name a new directory with -o, or add --overwrite"
        )
    from aniso.demo import steps, write_page, write_tasks
    from aniso.weights.atomic import disk, make_directory

    if taken:
        disk.remove(out)
    make_directory(out)
    begun = time.monotonic()
    tour = steps()
    with _inside(out):
        with show.item_progress() as progress:
            write_tasks(Path("data"), progress)
        for n, step in enumerate(tour, 1):
            show.progress_line("")
            show.progress_line(f"[{n}/{len(tour)}] {step.title}")
            show.progress_line(f"$ {step}")
            with _stdout_to_stderr(json):
                code = _aniso(step.command)
            if code:
                raise typer.Exit(code)
        tables, notes = write_page(Path(), tour)
    show.notes(notes)
    seconds = time.monotonic() - begun
    if json:
        rows = {
            table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            for table in tables
        }
        show.as_json({"out": str(out), "page": str(out / "index.html"), "seconds": seconds, "tables": rows})
        return
    for table in tables:
        show.table(table.columns, table.rows, title=table.title)
        show.line("")
    show.line(f"{seconds:.0f} seconds. Open {out / 'index.html'}; records and checkpoints are beside it.")


def _aniso(command: tuple[str, ...]) -> int:
    """Run a command in this process: importing everything again would take half of the time."""
    main = importlib.import_module("aniso.cli").main
    code: int = main(list(command))
    return code


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Run commands in a directory, so that their paths are short."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """Keep standard output for the demo's own JSON."""
    if not wanted:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield
