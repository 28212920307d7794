"""Runs the cells of an experiment that have no record yet, several at a time, each in its own process."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal, final

from aniso.errors import InputError, printable
from aniso.experiments.cell import Place, run_cell
from aniso.experiments.record import file_name
from aniso.experiments.spec import Cell
from aniso.learn.stop import Stop
from aniso.weights.atomic import disk, locked, make_directory, write_text

Status = Literal["recorded", "failed", "missing"]
_GRACE = 20.0  # seconds to save a state in
_TICK = 0.5

Happened = Callable[[Cell, str, float], None]
"""Called with a cell, what became of it, and the seconds it took."""


@final
@dataclass(frozen=True)
class Grid:
    """Cells and the directory that their records are in."""

    cells: Sequence[Cell]
    directory: Path

    def place(self, cell: Cell) -> Place:
        name = file_name(cell.setting, cell.label)
        states = self.directory / ".states" / cell.setting.id[:16]
        return Place(self.directory / name, states, self.directory / "coefficients")

    def status(self, cell: Cell) -> Status:
        place = self.place(cell)
        if place.record.exists():
            self._require_own(place.record, cell)
            return "recorded"
        return "failed" if place.failure.exists() else "missing"

    def _require_own(self, path: Path, cell: Cell) -> None:
        """A record counts if it says what it is of; a file that was put there by mistake does not."""
        try:
            found = json.loads(path.read_text())["id"]
        except (OSError, ValueError, KeyError, TypeError):
            found = "no record"
        if found != cell.setting.id:
            raise InputError(
                "RECORD",
                f"'{printable(path)}' is not the record of its cell",
                expected=cell.setting.id,
                found=printable(found),
                fix="remove it, and run the experiment again",
            )


def run(
    grid: Grid,
    *,
    jobs: int = 1,
    data: Path | None = None,
    workers: int = 0,
    retry_failed: bool = False,
    timeout: float | None = None,
    happened: Happened | None = None,
) -> dict[Status, int]:
    """Run what has no record; one that crashes, is killed or takes too long costs itself alone."""
    make_directory(grid.directory)
    with locked(grid.directory):
        wanted = {"missing", "failed"} if retry_failed else {"missing"}
        todo = [cell for cell in grid.cells if grid.status(cell) in wanted]
        _Pool(grid, jobs, data, workers, timeout, happened).run(todo)
    count: dict[Status, int] = {"recorded": 0, "failed": 0, "missing": 0}
    for cell in grid.cells:
        count[grid.status(cell)] += 1
    return count


@final
@dataclass
class _Running:
    cell: Cell
    process: Any
    begun: float


@final
class _Pool:
    """Processes forked from one that has imported everything and computed nothing."""

    def __init__(
        self,
        grid: Grid,
        jobs: int,
        data: Path | None,
        workers: int,
        timeout: float | None,
        happened: Happened | None,
    ) -> None:
        self._grid = grid
        self._jobs = jobs
        self._how = (data, workers, max(1, (os.cpu_count() or 1) // jobs))
        self._timeout = timeout
        self._happened = happened or (lambda cell, what, seconds: None)
        self._context: Any = multiprocessing.get_context("forkserver")
        # importing takes longer than many a cell; what cannot be imported is left to the cells
        self._context.set_forkserver_preload(
            ["aniso.experiments.cell", "transformers.models.clip.modeling_clip"]
        )
        self._running: list[_Running] = []

    def run(self, todo: Sequence[Cell]) -> None:
        left = list(todo)
        with Stop() as stop:
            try:
                if left:
                    self._serve()
                while (left or self._running) and stop.request is None:
                    while left and len(self._running) < self._jobs and stop.request is None:
                        self._start(left.pop(0), stop)
                    wait([one.process.sentinel for one in self._running], timeout=_TICK)
                    self._collect()
                stop.check()
            finally:
                self._end()

    def _serve(self) -> None:
        """Start what forks the cells; Ctrl-C, which reaches it as well, must not end it while it imports."""
        if not isinstance(self._context, ForkServerContext):
            return
        with contextlib.ExitStack() as after:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGHUP):
                    after.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
            forkserver.ensure_running()

    def _start(self, cell: Cell, stop: Stop) -> None:
        place = self._grid.place(cell)
        disk.remove(place.failure)  # what it died of before says nothing about now
        arguments = (cell, place, *self._how)
        process = self._context.Process(target=run_cell, args=arguments)
        try:
            process.start()
        except (EOFError, OSError):
            stop.check()  # what forks the cells was asked to end as well
            raise
        self._running.append(_Running(cell, process, time.monotonic()))

    def _collect(self) -> None:
        for one in list(self._running):
            seconds = time.monotonic() - one.begun
            late = self._timeout is not None and seconds > self._timeout
            if one.process.is_alive() and late:
                one.process.kill()
                one.process.join()
            if not one.process.is_alive():
                one.process.join()
                self._running.remove(one)
                self._happened(one.cell, self._became(one, late), seconds)

    def _became(self, one: _Running, late: bool) -> str:
        place = self._grid.place(one.cell)
        if one.process.exitcode == 0:
            return "recorded"
        if not place.failure.exists():
            reason = "took too long" if late else f"ended with code {one.process.exitcode}"
            _note_failure(place, one.cell, reason)
        return f"failed: {json.loads(place.failure.read_text()).get('message', '')}"

    def _end(self) -> None:
        """Ask what still runs to save its state, and wait for it."""
        for one in self._running:
            if one.process.is_alive():
                one.process.terminate()
        deadline = time.monotonic() + _GRACE
        for one in self._running:
            one.process.join(max(0.0, deadline - time.monotonic()))
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
        self._running = []


def _note_failure(place: Place, cell: Cell, reason: str) -> None:
    made = {"id": cell.setting.id, "label": cell.label, "spec": cell.setting.spec(), "message": reason}
    write_text(place.failure, json.dumps(made, indent=1, sort_keys=True) + "\n", overwrite=True)
