"""Running a recipe: banks that are missing, then cells without a record, then the analysis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import final

from aniso.errors import CellsError, InputError
from aniso.experiments import runner
from aniso.experiments.engines import GridRun
from aniso.experiments.grid import Grid, Status
from aniso.experiments.paper.analysis import run_analysis
from aniso.experiments.paper.banks import bank_cells, make_bank, missing_vectors, runs_directory
from aniso.experiments.paper.catalogue import all_vectors, bank_recipe, experiment_file
from aniso.experiments.paper.recipe import Recipe
from aniso.experiments.paper.smoke import smoke_tasks, write_smoke_data
from aniso.experiments.paper.template import RecipeCells, recipe_cells
from aniso.experiments.paper.workspace import Workspace
from aniso.experiments.run_files import RECORD
from aniso.experiments.spec import Cell
from aniso.experiments.worker import CellOptions
from aniso.weights.atomic import make_directory, write_text

Happened = Callable[[str], None]
"""Called with a line for every run that ends."""


@final
@dataclass(frozen=True)
class MissingBank:
    """A bank that has to be made, and the tasks that are fine-tuned on for it."""

    name: str
    place: Path
    tasks: tuple[str, ...]


@final
@dataclass(frozen=True)
class RunPlan:
    """What a run would do."""

    banks: tuple[MissingBank, ...]
    status: dict[str, dict[Status, int]]
    """By experiment: cells by status."""
    analysis: str | None
    """The file that an analysis would write."""

    @property
    def todo(self) -> int:
        """The number of runs, fine-tuning included."""
        missing = sum(n for found in self.status.values() for s, n in found.items() if s != "recorded")
        return missing + sum(len(bank.tasks) for bank in self.banks)


@final
@dataclass(frozen=True)
class Execution:
    """A recipe with the place of its results."""

    recipe: Recipe
    place: Workspace
    options: CellOptions = field(default_factory=CellOptions)
    jobs: int = 1
    retry_failed: bool = False

    @cached_property
    def cells(self) -> list[RecipeCells]:
        """The cells of every experiment of the recipe."""
        return recipe_cells(self.recipe, self.place.setup) if self.recipe.entry.kind == "runs" else []

    def plan(self) -> RunPlan:
        """Return what would be run; reads no data."""
        status = {
            found.experiment: dict(Counter(map(self._grid(found).status, found.cells)))
            for found in self.cells
        }
        pending = self.recipe.entry.analysis is not None
        file = str(self.place.analysis(self.recipe.entry.file_name)) if pending else None
        return RunPlan(tuple(self._missing_banks()), status, file)

    def run(self, happened: Happened) -> None:
        """Run what has no record yet."""
        if self.place.smoke:
            write_smoke_data(self.place.smoke_data)
        for bank in self._missing_banks():
            self._make(bank, happened)
        for found in self.cells:
            self._run_cells(found, happened)
        if self.recipe.entry.analysis is not None:
            self._analyse()

    # banks

    def _missing_banks(self) -> list[MissingBank]:
        out = []
        for name, tasks in self._needed_banks().items():
            place = self.place.bank(name)
            if self.place.bundled(name) is not None and self.recipe.entry.kind != "bank":
                continue
            if missing := self._not_made(name, place, tasks):
                out.append(MissingBank(name, place, tuple(missing)))
        return out

    def _needed_banks(self) -> dict[str, list[str]]:
        """Return the vectors that every bank of the recipe needs."""
        if self.recipe.entry.kind == "bank":
            variant = self.recipe.entry.runs[0].variants[0]
            return {variant: self._tasks(all_vectors())}
        names = {place: name for name, place in self.place.banks.items()}
        out: dict[str, list[str]] = {}
        for found in self.cells:
            file = experiment_file(found.experiment)
            wanted = self._tasks(file.tasks if file.vectors == "tasks" else all_vectors())
            for place in found.banks:
                known = out.setdefault(names[place], [])
                known += [task for task in wanted if task not in known]
        return out

    def _tasks(self, names: Sequence[str]) -> list[str]:
        return smoke_tasks(names) if self.place.smoke else list(names)

    def _not_made(self, name: str, place: Path, tasks: Sequence[str]) -> list[str]:
        """Return tasks without a vector; a bank that is to be made also needs the record of every run."""
        missing = missing_vectors(place, tasks)
        if self.recipe.entry.kind != "bank":
            return missing
        runs = runs_directory(place)
        return [t for t in tasks if t in missing or not (runs / t / RECORD).exists()]

    def _make(self, bank: MissingBank, happened: Happened) -> None:
        found = bank_cells(bank_recipe(bank.name), self.place.setup, self._needed_banks()[bank.name])
        make_directory(runs_directory(bank.place))

        def done(cell: Cell, what: str, seconds: float) -> None:
            happened(f"bank {bank.name}: {cell_name(cell)}: {what} ({seconds:.0f} s)")

        make_bank(found, bank.place, self._how, features=bank.name == "standard", happened=done)
        happened(f"bank {bank.name}: {len(found)} vectors in {bank.place}")

    # cells

    @property
    def _how(self) -> CellOptions:
        if not self.place.smoke:
            return self.options
        # more threads than one are slower for a model this small
        return replace(self.options, data=self.place.smoke_data, threads=1)

    def _grid(self, found: RecipeCells) -> Grid:
        return Grid(found.cells, self.place.records(found.experiment))

    def _run_cells(self, found: RecipeCells, happened: Happened) -> None:
        grid = self._grid(found)
        changed = grid.compare(self._how.data).files
        if changed:
            raise InputError(
                "RUN-CHANGED",
                f"{len(changed)} of {len(grid.cells)} cells were recorded with other images",
                changed=sorted({file for files in changed.values() for file in files})[:8],
                fix=f"restore these files, or remove '{grid.directory}'",
            )
        left = sum(grid.status(cell) != "recorded" for cell in grid.cells)
        done = 0

        def line(cell: Cell, what: str, seconds: float) -> None:
            nonlocal done
            done += 1
            happened(f"{found.experiment} [{done}/{left}] {cell_name(cell)}: {what} ({seconds:.0f} s)")

        count = runner.run(grid, GridRun(self._how, self.jobs, None, line), retry_failed=self.retry_failed)
        if count["failed"] or count["missing"]:
            failed = [cell_name(cell) for cell in grid.cells if grid.status(cell) == "failed"]
            raise CellsError(
                "CELLS",
                f"{count['failed']} of {len(grid.cells)} cells of {found.experiment} failed, "
                f"{count['missing']} are missing",
                found=failed[:8],
                fix=f"look at *.failed.json in '{grid.directory}', then run again with --retry-failed",
            )

    def _analyse(self) -> None:
        file = self.place.analysis(self.recipe.entry.file_name)
        grids = [self._grid(own) for own in self.cells]
        found = run_analysis(self.recipe, self.place, grids, self._how)
        make_directory(file.parent)
        write_text(file, found.model_dump_json(indent=1) + "\n", overwrite=True)


def cell_name(cell: Cell) -> str:
    """Return a run's label and what tells it from others of the label."""
    spec = cell.setting.spec()
    words = [str(spec[key]).removeprefix("./") for key in ("task", "target") if spec.get(key) is not None]
    words += [f"{key} {spec[key]}" for key in ("shots", "fraction", "budget", "seed") if spec.get(key)]
    return ", ".join([cell.label, *words])
