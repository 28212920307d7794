"""Runs the cells of an experiment that have no record yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from aniso.errors import LockedError
from aniso.experiments.cell_source import CellSource, ClaimedCells, ListedCells
from aniso.experiments.claims import Claims
from aniso.experiments.engines import Engine, GridRun, make_engine
from aniso.experiments.grid import Grid, Status
from aniso.experiments.spec import Cell
from aniso.weights.atomic import locked, make_directory


@final
@dataclass(frozen=True)
class Sharing:
    """Other processes or machines work on the grid at the same time.

    Without claims each has cells of its own, by ``Shard``.
    """

    claims: Claims | None = None
    waiting: Callable[[int], None] = lambda count: None
    """Called with the number of cells that others run, when there is nothing else to do."""

    def source(self, grid: Grid, todo: list[Cell], retry_failed: bool) -> CellSource:
        if self.claims is None:
            return ListedCells(todo)
        return ClaimedCells(grid, todo, self.claims, retry_failed=retry_failed, waiting=self.waiting)


def run(
    grid: Grid,
    how: GridRun | None = None,
    *,
    engine: Engine | None = None,
    retry_failed: bool = False,
    again: Collection[str] = (),
    sharing: Sharing | None = None,
) -> dict[Status, int]:
    """Run what has no record, by default on this machine; a cell that fails costs itself alone.

    Cells whose id is in ``again`` are run although they have a record, which is replaced. Of the workers that
    share a grid, the last to end packs the records.
    """
    make_directory(grid.directory)
    wanted = {"missing", "failed"} if retry_failed else {"missing"}
    count: dict[Status, int] = {"recorded": 0, "failed": 0, "missing": 0}
    with locked(grid.directory, shared=sharing is not None):
        todo = [c for c in grid.cells if grid.status(c) in wanted or c.setting.id in again]
        source = sharing.source(grid, todo, retry_failed) if sharing else ListedCells(todo)
        with source:
            (engine or make_engine("local")).run(grid, source, how or GridRun())
        for cell in grid.cells:
            count[grid.status(cell)] += 1
    with contextlib.suppress(LockedError), locked(grid.directory):
        grid.compact()
    return count
