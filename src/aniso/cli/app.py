"""The commands by name."""

from __future__ import annotations

from typing import Annotated

import typer

from aniso import __version__
from aniso.cli import (
    align,
    analyse,
    bake,
    bank,
    catalogue,
    coefficients,
    compare,
    convert,
    demo,
    doctor,
    evaluate,
    explain,
    explore,
    inspect,
    ls,
    paper,
    predict,
    push,
    report,
    run,
    select,
    task,
    vector,
    verify_removal,
)
from aniso.cli.setting_commands import FitGroup, RootGroup, SearchGroup

app = typer.Typer(
    cls=RootGroup,
    name="aniso",
    help="Compose fine-tuned models: one learned coefficient per task vector and parameter block.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aniso {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Results go to standard output, messages and progress to standard error; --json is for programs."""


app.command("demo")(demo.demo)
app.command("ls")(ls.ls)
app.command("inspect")(inspect.inspect)
app.add_typer(vector.app, name="vector")
app.add_typer(bank.app, name="bank")
app.add_typer(coefficients.app, name="coefficients")
app.command("bake")(bake.bake)
app.command("push")(push.push)
app.add_typer(task.app, name="task")
app.command("eval")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.add_typer(
    typer.Typer(cls=FitGroup, help="Learn coefficients, or fine-tune, in one of the settings."),
    name="fit",
    no_args_is_help=True,
)
app.command("explore")(explore.explore)
app.add_typer(compare.app, name="compare")
app.command("select")(select.select)
app.command("catalogue")(catalogue.catalogue)
app.add_typer(
    typer.Typer(cls=SearchGroup, help="Search one scale for all task vectors, without learning."),
    name="search",
    no_args_is_help=True,
)
app.add_typer(analyse.app, name="analyse")
app.command("run")(run.run)
app.command("verify-removal")(verify_removal.verify_removal)
app.command("report")(report.report)
app.add_typer(paper.app, name="paper")
app.command("align")(align.align)
app.command("convert")(convert.convert)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
