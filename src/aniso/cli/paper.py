"""``aniso paper``: the tables and figures of the paper, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import InputError, UsageError, printable

if TYPE_CHECKING:
    from aniso.experiments.paper.description import Needs
    from aniso.experiments.paper.execution import Execution
    from aniso.experiments.paper.recipe import Recipe
    from aniso.experiments.paper.workspace import Workspace
    from aniso.report.recipe_report import RecipeReport

app = typer.Typer(help="The paper's tables and figures: list, show, run, report.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(help="A label of the paper, such as tab:addition, or a bank:NAME.")]
Backbone = Annotated[
    str | None, typer.Option("--backbone", help="ViT-B-32, ViT-B-16, ViT-L-14, RN50 or RN101.")
]
Out = Annotated[
    Path, typer.Option("-o", "--out", help="Directory of banks, records and reports of all recipes.")
]
Banks = Annotated[
    Path | None,
    typer.Option("--bank", help="Directory of banks: standard, linearised, …; default: within --out."),
]
Tflops = Annotated[float, typer.Option(help="Assumed rate of the GPU, in TFLOP/s.", min=0.01)]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Scaled down: bundled model, drawn images, two steps; no data needed.")
]
_OUT = Path("paper")


@app.command()
def ls(tflops: Tflops = 10.0, json: show.Json = False) -> None:
    """List every table and figure with what it needs; GPU hours are estimates, see `aniso paper show`."""
    from aniso.experiments.paper.catalogue import recipes
    from aniso.experiments.paper.description import description, needs

    if json:
        show.as_json([description(recipe, tflops) for recipe in recipes().values()])
        return
    rows = []
    found = recipes().values()
    with show.item_progress() as progress:
        for done, recipe in enumerate(found, 1):
            needed = [needs(recipe, backbone) for backbone in recipe.entry.backbones]
            rows.append(_row(recipe, needed, tflops))
            progress("recipes", done, len(found))
    show.table(("id", "title", "data sets", "banks", "runs", "GPU hours"), rows)
    show.line(
        f"GPU hours, without the runs that make the banks: forward passes counted from the recipe, at an"
        f" assumed {tflops:g} TFLOP/s (--tflops). aniso paper show ID prints the count."
    )


def _row(recipe: Recipe, needed: list[Needs], tflops: float) -> tuple[str, ...]:
    """Return a row of the list: hours are by backbone, the rest is the same for all of them."""
    if not needed:
        return recipe.id, recipe.entry.title, "", "", "", "nothing to run"
    first = needed[0]
    hours = ", ".join(f"{own.backbone} {own.hours(tflops):.1f}" for own in needed)
    sets, banks = str(len(first.data_sets)), " ".join(first.banks)
    return recipe.id, recipe.entry.title, sets, banks, str(first.work.cells), hours


@app.command("show")
def show_(id_: Id, tflops: Tflops = 10.0, json: show.Json = False) -> None:
    """Show the runs of a table or figure, its published numbers and their doubts, and the command."""
    from aniso.experiments.paper.catalogue import recipe

    found = recipe(id_)
    from aniso.cli.recipe_output import print_recipe, recipe_json

    if json:
        show.as_json(recipe_json(found, tflops))
    else:
        print_recipe(found, tflops)


@app.command()
def run(
    id_: Id,
    backbone: Backbone = None,
    data: options.DataRoot = None,
    bank: Banks = None,
    out: Out = _OUT,
    jobs: Annotated[int, typer.Option(help="Cells run at the same time.", min=1)] = 1,
    workers: options.Workers = 0,
    device: options.Device = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run; run nothing.")] = False,
    smoke: Smoke = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again.")] = False,
    json: show.Json = False,
) -> None:
    """Run what has no record yet: missing banks, then cells, then the analysis; print both numbers."""
    recipe, chosen = _chosen(id_, backbone)
    if data is not None and not data.is_dir():
        raise InputError("DATA-MISSING", f"there is no directory '{printable(data)}'", fix="--data DIR")
    from aniso.experiments.paper.execution import Execution
    from aniso.experiments.paper.workspace import Workspace
    from aniso.experiments.worker import CellOptions

    place = Workspace(out, chosen, smoke, bank)
    execution = Execution(recipe, place, CellOptions(data, workers, device), jobs, retry_failed)
    if plan:
        _print_plan(execution, json)
        return
    execution.run(show.progress_line)
    from aniso.cli.recipe_output import recipe_report

    _write_report(recipe_report(recipe, [place]), place, figures=False, json=json)


@app.command()
def report(
    id_: Id,
    backbone: Backbone = None,
    out: Out = _OUT,
    bank: Banks = None,
    smoke: Smoke = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw figures.")] = True,
    json: show.Json = False,
) -> None:
    """Write measured values beside the published ones: Markdown, CSV and figures, in OUT/report."""
    recipe, _ = _chosen(id_, backbone)
    from aniso.experiments.paper.results import backbones_with_results
    from aniso.experiments.paper.workspace import Workspace

    names = [backbone] if backbone is not None else list(recipe.entry.backbones)
    names = names[:1] if smoke else names
    places = {name: Workspace(out, name, smoke, bank) for name in names}
    run_on = backbones_with_results(recipe, places)
    if not run_on:
        raise UsageError(
            "RECORD",
            f"there are no results of {recipe.id} in '{printable(out)}'",
            fix=f"aniso paper run {recipe.id} --data DIR -o {printable(out)}",
        )
    from aniso.cli.recipe_output import recipe_report

    found = recipe_report(recipe, [places[name] for name in run_on])
    _write_report(found, places[run_on[0]], figures=figures, json=json)


def _chosen(name: str, backbone: str | None) -> tuple[Recipe, str]:
    """Return the recipe and the backbone, checked before torch is imported."""
    from aniso.experiments.paper.catalogue import recipe

    found = recipe(name)
    if not found.entry.runnable:
        raise UsageError(
            "USAGE", f"there is nothing to run for {found.id}", fix=f"aniso paper show {found.id}"
        )
    checks.one_of("--backbone", backbone, found.entry.backbones)
    return found, backbone or found.entry.backbones[0]


def _print_plan(execution: Execution, json: bool) -> None:
    found = execution.plan()
    if json:
        banks = [{"bank": own.name, "place": str(own.place), "tasks": list(own.tasks)} for own in found.banks]
        show.as_json({"banks": banks, "cells": found.status, "analysis": found.analysis, "todo": found.todo})
        return
    for own in found.banks:
        show.line(f"bank {own.name}: {len(own.tasks)} fine-tuning runs, to {own.place}")
    for experiment, status in found.status.items():
        counts = ", ".join(f"{count} {what}" for what, count in status.items())
        show.line(f"{experiment}: {counts}")
    if found.analysis is not None:
        show.line(f"analysis, to {found.analysis}")
    show.line(f"{found.todo} runs to do")


def _write_report(found: RecipeReport, place: Workspace, *, figures: bool, json: bool) -> None:
    from aniso.weights.atomic import atomic_file, make_directory

    files, lost = found.files(figures=figures)
    make_directory(place.reports)
    for name, content in files.items():
        with atomic_file(place.reports / name, overwrite=True) as file:
            file.stream.write(content)
    show.notes((*found.notes, *lost))
    if json:
        numbers = [
            {
                "table": title,
                "row": number.row,
                "column": number.column,
                "measured": None if number.measured is None else number.measured.mean,
                "published": number.published,
                "difference": number.difference,
            }
            for title, compared in found.compared()
            for number in compared
        ]
        show.as_json({"out": str(place.reports), "files": sorted(files), "numbers": numbers})
        return
    for table in found.tables():
        show.text(table.markdown() + "\n")
    show.line(f"wrote {place.reports}: {', '.join(sorted(files))}")
