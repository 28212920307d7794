"""Banks of task vectors made by fine-tuning, one run per data set; recorded runs are not repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aniso.experiments.paper.recipe import Recipe, RunSelection
from aniso.experiments.paper.template import Setup, experiment_document
from aniso.experiments.spec import Cell, Experiment, cells
from aniso.experiments.strict_yaml import validated

if TYPE_CHECKING:
    from aniso.experiments.worker import CellOptions
    from aniso.models import Wrapped
    from aniso.vectors import Bank

MANIFEST = "manifest.json"
Happened = Callable[[Cell, str, float], None]


def runs_directory(bank: Path) -> Path:
    """Return where the fine-tuning runs of a bank are."""
    return bank.with_name(f"{bank.name}.runs")


def bank_cells(recipe: Recipe, setup: Setup, tasks: Sequence[str]) -> dict[str, Cell]:
    """Return the fine-tuning run of every task."""
    (selection,) = recipe.entry.runs
    out = {}
    for task in tasks:
        chosen = RunSelection(variants=selection.variants, grid={"task": [task]})
        document = experiment_document(recipe, chosen, setup)
        (out[task],) = cells(validated(Experiment, document), document)
    return out


def missing_vectors(bank: Path, tasks: Sequence[str]) -> list[str]:
    """Return the tasks that a bank has no vector of; all if there is no bank yet."""
    if not (bank / MANIFEST).exists():
        return list(tasks)
    from aniso.vectors import Bank

    present = Bank.load(bank).names
    return [task for task in tasks if task not in present]


def make_bank(
    found: dict[str, Cell], bank: Path, options: CellOptions, *, features: bool, happened: Happened
) -> None:
    """Fine-tune on every task that has no record yet, then build the bank of all runs."""
    for task, cell in found.items():
        _fine_tune(cell, runs_directory(bank) / task, options, happened)
    first = next(iter(found.values()))
    built = _build(bank, first.setting.load_model())
    if features:
        _add_features(built, found, options)


def _fine_tune(cell: Cell, directory: Path, options: CellOptions, happened: Happened) -> None:
    from aniso.compose import Runtime
    from aniso.experiments.record import Clock, record
    from aniso.experiments.result import RunOptions
    from aniso.experiments.run_directory import RunDirectory
    from aniso.experiments.session import Session

    run = RunDirectory(directory)
    if run.begin(cell.setting, resume=True) is not None:
        return
    clock = Clock()
    how = RunOptions(
        data=options.data,
        workers=options.workers,
        device=options.device,
        runtime=Runtime(keep_freed=True),
        directory=directory,
        resume=True,
    )
    try:
        result = Session(cell.setting, how).run()
    except BaseException as e:
        run.forget(e)
        raise
    run.finish(record(cell.setting, result, clock, experiment=cell.experiment, label=cell.label), result)
    happened(cell, "recorded", clock.seconds)


def _build(bank: Path, base: Wrapped) -> Bank:
    """Build the bank of all finished runs; one that lacks vectors is replaced."""
    from aniso.experiments.run_files import ADAPTER, RECORD, WEIGHTS
    from aniso.vectors import Bank

    tuned = {}
    for directory in sorted(runs_directory(bank).iterdir()):
        if (directory / RECORD).exists():
            weights = directory / WEIGHTS
            tuned[directory.name] = weights if weights.exists() else directory / ADAPTER
    return Bank.build(base.weight_source(), tuned, to=bank, overwrite=True)


def _add_features(bank: Bank, found: dict[str, Cell], options: CellOptions) -> None:
    """Store mean features of the training images, which selection by features compares with."""
    from aniso.experiments.result import RunOptions
    from aniso.experiments.session import Session
    from aniso.learn.selection import mean_feature

    rows = {}
    for task, cell in found.items():
        session = Session(cell.setting, RunOptions(data=options.data, device=options.device))
        split = session.task(str(getattr(cell.setting, "task", ""))).split("train")
        rows[task] = mean_feature(session.encoder, split, workers=options.workers)
    bank.with_features(rows)
