"""Cells as tasks of a Ray cluster. The driver only schedules; workers write the records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, final

from pydantic import Field

from aniso.experiments.cell_source import CellSource
from aniso.experiments.engines.engine import Engine, GridRun, failure_message, note_failure, require_package
from aniso.experiments.engines.remote_cell import RemoteCell
from aniso.experiments.grid import Grid
from aniso.experiments.spec import Cell
from aniso.experiments.worker import INTERRUPTED
from aniso.learn import Interrupt
from aniso.registry import ENGINES

_TICK = 0.5
_GRACE = 20.0  # seconds to save states in


@ENGINES.register("ray")
@final
class RayEngine(Engine):
    """Run cells as tasks of a Ray cluster: that of ``address`` or RAY_ADDRESS, else one on this machine."""

    address: str | None = None
    cpus: float = Field(1, gt=0)
    """Of each cell, as many threads too."""
    gpus: float = Field(0, ge=0)
    retries: int = Field(2, ge=0)
    """How often a cell is run again whose worker or machine died."""

    def run(self, grid: Grid, source: CellSource, how: GridRun) -> None:
        ray = require_package("ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
        own = not ray.is_initialized()
        if own:
            address = self.address or os.environ.get("RAY_ADDRESS")
            local = {} if address else {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
            ray.init(address=address, log_to_driver=False, logging_level="warning", **local)
        try:
            self._schedule(ray, grid, source, how)
        finally:
            if own:
                ray.shutdown()

    def _schedule(self, ray: Any, grid: Grid, source: CellSource, how: GridRun) -> None:
        task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries)(_run_remotely)
        running: dict[Any, tuple[Cell, float]] = {}
        with Interrupt() as stop:
            while cell := source.take():
                remote = RemoteCell(cell, grid.place(cell).without_failure(), how, max(1, int(self.cpus)))
                running[task.remote(remote)] = (cell, time.monotonic())
            try:
                while running and stop.request is None:
                    for done in ray.wait(list(running), timeout=_TICK)[0]:
                        cell, begun = running.pop(done)
                        source.ended(cell)
                        became = _became(ray, done, cell, grid)
                        how.happened(cell, became, time.monotonic() - begun)
                stop.check()
            finally:
                for left in running:
                    ray.cancel(left)  # an interrupt, on which cells save their state
                if running:
                    ray.wait(list(running), num_returns=len(running), timeout=_GRACE)


def _run_remotely(cell: Callable[[], int]) -> int:
    return cell()


def _became(ray: Any, done: Any, cell: Cell, grid: Grid) -> str:
    place = grid.place(cell)
    try:
        code = ray.get(done)
    except ray.exceptions.RayError as e:
        if not place.record.exists() and not place.failure.exists():
            note_failure(place, cell, f"its worker died: {type(e).__name__}")
        code = 1
    if place.record.exists():
        return "recorded"
    return "interrupted" if code == INTERRUPTED else f"failed: {failure_message(place)}"
