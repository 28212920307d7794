"""Cells as an array of SLURM jobs, through submitit."""

from __future__ import annotations

import time
from typing import Any, Literal, final

from pydantic import Field

from aniso.experiments.cell_source import CellSource
from aniso.experiments.engines.engine import Engine, GridRun, failure_message, note_failure, require_package
from aniso.experiments.engines.remote_cell import RemoteCell
from aniso.experiments.grid import Grid
from aniso.experiments.spec import Cell
from aniso.experiments.worker import INTERRUPTED
from aniso.learn import Interrupt
from aniso.registry import ENGINES

_TICK = 1.0


@ENGINES.register("slurm")
@final
class SlurmEngine(Engine):
    """Run cells as jobs of SLURM; a job that is preempted and requeued resumes from its checkpoint."""

    partition: str | None = None
    account: str | None = None
    minutes: int = Field(240, ge=1)
    """Time limit of a job."""
    cpus: int = Field(1, ge=1)
    gpus: int = Field(0, ge=0)
    memory: int = Field(16, ge=1)
    """GiB of a job."""
    cluster: Literal["slurm", "local"] = "slurm"
    """"local" starts processes on this machine instead, to try a spec."""

    def run(self, grid: Grid, source: CellSource, how: GridRun) -> None:
        submitit = require_package("submitit", "slurm")
        executor = submitit.AutoExecutor(folder=grid.directory / ".slurm", cluster=self.cluster)
        executor.update_parameters(
            name="aniso",
            timeout_min=self.minutes,
            cpus_per_task=self.cpus,
            gpus_per_node=self.gpus,
            mem_gb=self.memory,
            **self._of_slurm(how.jobs),
        )
        at_once = how.jobs if self.cluster == "local" else None  # SLURM itself starts no more than it should
        running: dict[Any, tuple[Cell, float]] = {}
        with Interrupt() as stop:
            try:
                while (source.left or running) and stop.request is None:
                    cells = _next(source, None if at_once is None else at_once - len(running))
                    remote = [RemoteCell(c, grid.place(c).without_failure(), how, self.cpus) for c in cells]
                    jobs = executor.map_array(_Requeued(), remote) if remote else []
                    running |= {job: (c, time.monotonic()) for job, c in zip(jobs, cells, strict=True)}
                    for job in [job for job in running if job.done()]:
                        cell, begun = running.pop(job)
                        source.ended(cell)
                        how.happened(cell, _became(job, cell, grid), time.monotonic() - begun)
                    time.sleep(_TICK if running else 0)
                stop.check()
            finally:
                for job in running:
                    job.cancel()

    def _of_slurm(self, jobs: int) -> dict[str, str | int]:
        if self.cluster != "slurm":
            return {}
        given = {"slurm_partition": self.partition, "slurm_account": self.account}
        return {"slurm_array_parallelism": jobs, **{key: value for key, value in given.items() if value}}


@final
class _Requeued:
    """Calls a cell; submitit asks ``checkpoint`` what to submit again when a job is preempted."""

    def __call__(self, cell: RemoteCell) -> int:
        return cell()

    def checkpoint(self, cell: RemoteCell) -> Any:
        # the cell resumes from its checkpoint on disk
        return require_package("submitit.helpers", "slurm").DelayedSubmission(self, cell)


def _next(source: CellSource, most: int | None) -> list[Cell]:
    """Return further cells, at most so many; all if there is no limit."""
    found: list[Cell] = []
    while (most is None or len(found) < most) and (cell := source.take()):
        found.append(cell)
    return found


def _became(job: Any, cell: Cell, grid: Grid) -> str:
    place = grid.place(cell)
    error = job.exception()
    if place.record.exists():
        return "recorded"
    if error is None and job.result() == INTERRUPTED:
        return "interrupted"
    if not place.failure.exists():
        note_failure(place, cell, f"its job ended: {str(error).splitlines()[0] if error else job.state}")
    return f"failed: {failure_message(place)}"
