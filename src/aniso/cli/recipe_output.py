"""Output of ``aniso paper``: recipes as text and JSON, and their reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aniso.cli import show
from aniso.json_value import JsonObject

if TYPE_CHECKING:
    from aniso.experiments.paper.recipe import Recipe
    from aniso.experiments.paper.workspace import Workspace
    from aniso.report.recipe_report import RecipeReport


def recipe_json(recipe: Recipe, tflops: float) -> JsonObject:
    """Return a recipe with its specs, published numbers and hyper-parameters."""
    from aniso.experiments.paper.description import compared_values, description, specs

    values: list[JsonObject] = [
        {"name": v.name, "task": v.task, "published": v.published, "aniso": v.resolved, "same": v.same}
        for v in compared_values(recipe.entry.values)
    ]
    return {
        **description(recipe, tflops),
        "specs": specs(recipe),
        "published": [table.model_dump(mode="json") for table in recipe.entry.published],
        "values": values,
        "command": command(recipe),
    }


def command(recipe: Recipe) -> str:
    """Return the command that runs a recipe; empty if there is nothing to run."""
    if not recipe.entry.runnable:
        return ""
    return f"aniso paper run {recipe.id} --backbone {recipe.entry.backbones[0]} --data DIR"


def print_recipe(recipe: Recipe, tflops: float) -> None:
    """Print what a recipe runs, its published numbers and their doubts, and the command."""
    from aniso.experiments.paper.description import compared_values, needs, specs
    from aniso.experiments.strict_yaml import as_yaml

    entry = recipe.entry
    show.line(f"{entry.id}: {entry.title}")
    if entry.parts:
        show.line(f"parts: {', '.join(entry.parts)}")
    for backbone in entry.backbones:
        own = needs(recipe, backbone)
        found = own.to_json(tflops)
        show.line(f"{backbone}: about {own.hours(tflops):.1f} GPU hours: {found['basis']}")
        show.line(f"  data sets: {', '.join(own.data_sets)}; banks: {', '.join(own.banks) or 'none'}")
    for spec in specs(recipe):
        show.text(f"\n{as_yaml(spec)}")
    for table in entry.published:
        rows = [
            (name, *(show.UNDEFINED if v is None else f"{v:g}" for v in row))
            for name, row in table.rows.items()
        ]
        show.table(("", *map(str, table.columns)), rows, title=f"\npublished: {table.heading}")
    if entry.values:
        values = [
            (v.name, v.task, f"{v.published:g}", f"{v.resolved:g}") for v in compared_values(entry.values)
        ]
        show.table(("hyper-parameter", "task", "paper", "aniso"), values)
    for heading in ("doubts", "missing", "differs", "assumed"):
        for text in getattr(entry, heading):
            show.line(f"{heading}: {text}")
    show.line(f"\n{command(recipe)}" if entry.runnable else "nothing to run")


def recipe_report(recipe: Recipe, places: Sequence[Workspace]) -> RecipeReport:
    """Return the report of a recipe from what was recorded on each backbone."""
    from aniso.experiments.paper.results import figure_records, recorded, recorded_analysis
    from aniso.experiments.paper.smoke import SMOKE_NOTE
    from aniso.report.published import RecordedRuns
    from aniso.report.recipe_report import FigureRequest, RecipeReport

    entry = recipe.entry
    runs, figures = {}, []
    for place in places:
        records = recorded(recipe, place)
        runs[place.backbone] = RecordedRuns(records, recorded_analysis(recipe, place), recipe.file.tasks)
        for use in entry.figures:
            part = (use.part or entry.id).replace(":", "-")
            file = f"{part}-{place.model}"
            figures.append(FigureRequest(file, use.figure, figure_records(use, records)))
    notes = [
        f"{word}: {text}"
        for word in ("doubts", "missing", "differs", "assumed")
        for text in getattr(entry, word)
    ]
    if any(place.smoke for place in places):
        notes.insert(0, SMOKE_NOTE)
    return RecipeReport(entry.file_name, f"{entry.id}: {entry.title}", entry.published, runs, figures, notes)
