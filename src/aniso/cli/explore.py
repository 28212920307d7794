"""``aniso explore``: a page to move coefficients by hand and see what changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import checks, options, show


def explore(
    source: Annotated[str, typer.Argument(help="The directory of a run, a file of coefficients, or a bank.")],
    task: Annotated[
        str | None,
        typer.Option("--task", help="Predict its classes, and measure accuracy on its validation split."),
    ] = None,
    bank: Annotated[
        str | None, typer.Option("--bank", help="The bank of coefficients, or of a run, if it was moved.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="The base of the bank; of a run, if it was moved. Default for mini: mini."
        ),
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option("--classes", help="A text file with a class per line, or a class; repeatable."),
    ] = None,
    items: Annotated[
        list[str] | None,
        typer.Option("--items", help="Images or texts to predict, as aniso predict takes them; repeatable."),
    ] = None,
    sample: Annotated[
        int, typer.Option("--sample", help="Validation items that accuracy is measured on.", min=1)
    ] = 128,
    data: options.DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Directory for baked models; default: none are written."),
    ] = None,
    device: options.Device = None,
    port: Annotated[
        int, typer.Option("--port", help="Port of this machine; default: a free one.", min=0, max=65535)
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Open a page on this machine to move coefficients by hand and see predictions change; Ctrl-C ends it."""
    if not Path(source).expanduser().exists():
        checks.existing_bank(source)
    checks.existing_bank(bank)
    if base is not None:
        checks.existing_weights(base)
    from aniso.experiments.input_files import read_names
    from aniso.explore import DeskOptions, DeskServer, open_desk

    chosen = DeskOptions(
        source,
        bank,
        base,
        task,
        data,
        tuple(read_names(classes or ())),
        tuple(items or ()),
        sample,
        out,
        device,
    )
    with show.item_progress() as progress:
        desk = open_desk(chosen, progress)
    show.notes(desk.notes)
    server = DeskServer(desk, port)
    show.line(server.url)
    if browser:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve()
    except KeyboardInterrupt:
        show.progress_line("stopped")
    finally:
        server.release()
