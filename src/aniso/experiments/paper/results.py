"""Recorded runs of a recipe: which records belong to it, and to each of its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from aniso.analysis_records import AnalysisRecord, read_analysis
from aniso.experiments.paper.banks import runs_directory
from aniso.experiments.paper.recipe import FigureUse, Recipe, RunSelection
from aniso.experiments.paper.workspace import Workspace
from aniso.experiments.run_files import RECORD
from aniso.record_files import read_records
from aniso.records import Record


def recorded(recipe: Recipe, place: Workspace) -> list[Record]:
    """Return the records that a recipe shows."""
    if recipe.entry.kind == "bank":
        runs = runs_directory(place.bank(recipe.entry.runs[0].variants[0]))
        return read_records(sorted(runs.glob(f"*/{RECORD}")))
    out: list[Record] = []
    for selection in recipe.entry.runs if recipe.entry.kind == "runs" else ():
        directory = place.records(selection.experiment or recipe.file.experiment)
        found = read_records([directory]) if _has_records(directory) else []
        out += [record for record in found if _is_selected(record, selection)]
    return out


def _has_records(directory: Path) -> bool:
    return directory.is_dir() and any(path.suffix in (".json", ".jsonl") for path in directory.iterdir())


def _is_selected(record: Record, selection: RunSelection) -> bool:
    if selection.variants and record.label not in selection.variants:
        return False
    free = ("shots", "fraction", "seed") if record.spec.unchanged else ()
    return all(
        key in free or _option(record, key) in values
        for key, values in selection.grid.items()
        if isinstance(values, list)
    )


def _option(record: Record, name: str) -> object:
    return getattr(record.spec, name, None)


def figure_records(use: FigureUse, records: Iterable[Record]) -> list[Record]:
    """Return the records that a figure is drawn from."""
    return [
        record
        for record in records
        if (not use.variants or record.label in use.variants)
        and all(_option(record, key) == value for key, value in use.where.items())
    ]


def recorded_analysis(recipe: Recipe, place: Workspace) -> AnalysisRecord | None:
    """Return the analysis of a recipe, if it has been run."""
    file = place.analysis(recipe.entry.file_name)
    return read_analysis(file) if recipe.entry.analysis is not None and file.exists() else None


def backbones_with_results(recipe: Recipe, places: Mapping[str, Workspace]) -> list[str]:
    """Return the backbones that anything has been recorded for."""
    return [
        name
        for name, place in places.items()
        if recorded(recipe, place) or recorded_analysis(recipe, place) is not None
    ]
