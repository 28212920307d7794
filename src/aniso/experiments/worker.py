"""One cell in a process of its own: whatever happens to it happens to it alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from aniso.compose import Runtime
from aniso.errors import AnisoError, InputError, StoppedError
from aniso.experiments.banks import coefficients_file
from aniso.experiments.record import Clock, record, write
from aniso.experiments.result import RunOptions, RunResult
from aniso.experiments.session import Session
from aniso.experiments.spec import Cell
from aniso.learn import REQUESTS
from aniso.weights.atomic import disk, make_directory, write_text

FAILED = ".failed.json"
INTERRUPTED = 130


@final
@dataclass(frozen=True)
class Place:
    """Where a cell leaves what it finds."""

    record: Path
    states: Path
    coefficients: Path
    """A directory for those of all cells."""

    @property
    def failure(self) -> Path:
        return self.record.with_suffix(FAILED)

    def without_failure(self) -> Place:
        """Remove what the cell died of before, which says nothing about now."""
        disk.remove(self.failure)
        return self


@final
@dataclass(frozen=True)
class CellOptions:
    """How cells are executed; their results do not depend on it."""

    data: Path | None = None
    workers: int = 0
    device: str | None = None
    """Default: the GPU if there is one."""
    threads: int | None = None
    """Threads of each cell; default: the machine's cores divided by the cells at the same time."""


def run_cell(cell: Cell, place: Place, options: CellOptions, threads: int) -> None:
    """Record a cell, or why it failed. A cell that was interrupted resumes."""
    torch.set_num_threads(threads)
    # Ctrl-C reaches all processes of a terminal; the runner alone hears it, and asks cells to end
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)  # blocked since before it was forked
    _end_with_the_runner()
    if code := record_cell(cell, place, options):
        raise SystemExit(code)


def record_cell(cell: Cell, place: Place, options: CellOptions) -> int:
    """Record a cell, or why it failed, in any process; returns an exit code."""
    clock = Clock()
    try:
        how = RunOptions(
            data=options.data,
            workers=options.workers,
            device=options.device,
            runtime=Runtime(keep_freed=True),  # the process is the cell's own
            directory=place.states,
            resume=True,
            coefficients=place.coefficients,
        )
        outcome = _carried_out(cell, how)
        if outcome.coefficients is not None:
            make_directory(place.coefficients)
            file = place.coefficients / coefficients_file(cell.setting, outcome.inputs)
            outcome.coefficients.save(file, overwrite=True)
        if outcome.content is not None:
            outcome.content.keep(place.record.parent)
        made = record(cell.setting, outcome, clock, experiment=cell.experiment, label=cell.label)
        write(place.record, made, overwrite=True)
        disk.remove(place.failure)
        if place.states.exists():
            disk.remove(place.states)
    except StoppedError:
        return INTERRUPTED
    except Exception as e:
        _write_failure(place.failure, cell, e)
        return e.exit_code if isinstance(e, AnisoError) else 1
    return 0


def _carried_out(cell: Cell, how: RunOptions) -> RunResult:
    """A state of other inputs, software or threads (another --jobs) is of no use: begin anew."""
    try:
        return Session(cell.setting, how).run()
    except InputError as e:
        if e.code != "RUN-CHANGED" or how.directory is None:
            raise
        disk.remove(how.directory)
        return Session(cell.setting, how).run()


def _end_with_the_runner() -> None:
    """A runner that was killed asks nobody to end: its cells would go on, and hold their locks."""
    runner = multiprocessing.parent_process()

    def watch() -> None:
        if runner is not None:
            runner.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _write_failure(path: Path, cell: Cell, error: Exception) -> None:
    what = error.to_json() if isinstance(error, AnisoError) else {"error": "BUG", "message": str(error)}
    lines = [] if isinstance(error, AnisoError) else traceback.format_exc().splitlines()[-12:]
    made = {"id": cell.setting.id, "label": cell.label, "spec": cell.setting.spec(), **what, "trace": lines}
    write_text(path, json.dumps(made, indent=1, sort_keys=True) + "\n", overwrite=True)
