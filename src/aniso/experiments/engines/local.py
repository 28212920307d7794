"""Cells on this machine, several at a time, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any, final

from aniso.errors import LockedError
from aniso.experiments.cell_source import CellSource
from aniso.experiments.engines.engine import Engine, GridRun, failure_message, note_failure
from aniso.experiments.grid import Grid
from aniso.experiments.spec import Cell
from aniso.experiments.worker import INTERRUPTED, run_cell
from aniso.learn import REQUESTS, Interrupt
from aniso.registry import ENGINES
from aniso.weights.atomic import disk

_GRACE = 20.0  # seconds to save a state in
_TICK = 0.5
_ASKED = (INTERRUPTED, -signal.SIGTERM)
"""Exit codes of cells that were asked to end: not failed, but to be run again."""
_LOCKED = LockedError.exit_code


@ENGINES.register("local")
@final
class LocalEngine(Engine):
    """Run cells on this machine, each in its own process."""

    def run(self, grid: Grid, source: CellSource, how: GridRun) -> None:
        _Pool(grid, how).run(source)


def _threads(jobs: int) -> int:
    """Threads of each of so many cells at once: an equal share of the cores, at most OMP_NUM_THREADS.

    More threads than cores wait for each other, which can be much slower than one thread each.
    """
    share = max(1, (os.cpu_count() or 1) // jobs)
    given = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(given)) if given.isdecimal() and int(given) else share


@final
@dataclass
class _Running:
    cell: Cell
    process: Any
    begun: float


@final
class _Pool:
    """Processes forked from one that has imported everything and computed nothing."""

    def __init__(self, grid: Grid, how: GridRun) -> None:
        self._grid = grid
        self._jobs = how.jobs
        self._how = (how.options, how.options.threads or _threads(how.jobs))
        self._timeout = how.timeout
        self._happened = how.happened
        self._context: Any = multiprocessing.get_context("forkserver")
        # importing takes longer than many a cell; what cannot be imported is left to the cells
        self._context.set_forkserver_preload(
            ["aniso.experiments.worker", "transformers.models.clip.modeling_clip"]
        )
        self._running: list[_Running] = []

    def run(self, source: CellSource) -> None:
        with Interrupt() as stop:
            try:
                if source.left:
                    self._serve()
                while (source.left or self._running) and stop.request is None:
                    while (
                        len(self._running) < self._jobs and stop.request is None and (cell := source.take())
                    ):
                        self._start(cell, stop)
                    wait([one.process.sentinel for one in self._running], timeout=_TICK)
                    self._end_lost(source)
                    self._collect(source)
                stop.check()
            finally:
                self._end()

    def _end_lost(self, source: CellSource) -> None:
        """Ask cells to end that another worker has taken over."""
        for one in self._running:
            if source.lost(one.cell) and one.process.is_alive():
                one.process.terminate()

    def _serve(self) -> None:
        """Start what forks the cells, with signals blocked; cells unblock them once they can heed them.

        A signal to the whole process group must not end the server: it reports how cells ended, and they save
        their state first. Signals to this process wait until it has been started.
        """
        if not isinstance(self._context, ForkServerContext):
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            resource_tracker.ensure_running()  # unblocks the others, so it comes first
            signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start(self, cell: Cell, stop: Interrupt) -> None:
        arguments = (cell, self._grid.place(cell).without_failure(), *self._how)
        process = self._context.Process(target=run_cell, args=arguments)
        try:
            # a request between fork and the cell's own handlers would be lost; the cell unblocks them
            before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except (EOFError, OSError):
            stop.check()  # what forks the cells was asked to end as well
            raise
        self._running.append(_Running(cell, process, time.monotonic()))

    def _collect(self, source: CellSource) -> None:
        for one in list(self._running):
            seconds = time.monotonic() - one.begun
            late = self._timeout is not None and seconds > self._timeout
            if one.process.is_alive() and late:
                one.process.kill()
                one.process.join()
            if not one.process.is_alive():
                one.process.join()
                self._running.remove(one)
                source.ended(one.cell)
                self._happened(one.cell, self._became(one, late), seconds)

    def _became(self, one: _Running, late: bool) -> str:
        place = self._grid.place(one.cell)
        if one.process.exitcode == 0:
            return "recorded"
        if one.process.exitcode in _ASKED:
            return "interrupted"
        if one.process.exitcode == _LOCKED:
            disk.remove(place.failure)
            return "run by another process"
        if not place.failure.exists():
            reason = "took too long" if late else f"ended with code {one.process.exitcode}"
            note_failure(place, one.cell, reason)
        return f"failed: {failure_message(place)}"

    def _end(self) -> None:
        """Ask what still runs to save its state, and wait for it."""
        for one in self._running:
            if one.process.is_alive():
                one.process.terminate()
        deadline = time.monotonic() + _GRACE
        while self._running and time.monotonic() < deadline:
            wait([one.process.sentinel for one in self._running], timeout=_TICK)
            self._running = [one for one in self._running if one.process.is_alive()]
        for one in self._running:
            one.process.kill()
            one.process.join()
        self._running = []
