"""A cell as something that another machine can call."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn, final

from aniso.experiments.engines.engine import GridRun
from aniso.experiments.spec import Cell
from aniso.experiments.worker import CellOptions, Place, record_cell


@final
class RemoteCell:
    """Runs a cell where it is called, and writes its record there; returns an exit code."""

    def __init__(self, cell: Cell, place: Place, how: GridRun, threads: int) -> None:
        self._cell = cell
        self._place = place
        self._options: CellOptions = how.options
        self._timeout = how.timeout
        self._threads = threads

    def __call__(self) -> int:
        import torch

        torch.set_num_threads(self._options.threads or self._threads)
        if self._timeout:
            signal.signal(signal.SIGALRM, self._late)
            signal.setitimer(signal.ITIMER_REAL, self._timeout)
        try:
            return record_cell(self._cell, self._place, self._options)
        finally:
            if self._timeout:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _late(self, number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError("took too long")
