"""Epoch rows for trackers: trackio, wandb or TensorBoard. ``metrics.jsonl`` has the same numbers."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, final

from aniso.json_value import JsonObject
from aniso.records import EpochRow

TrackerName = Literal["trackio", "wandb", "tensorboard"]
PROJECT = "aniso"


class _Backend(Protocol):
    """What a tracker is asked to do."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


@final
class Tracker:
    """Sends the numbers of every epoch to a tracker. Whatever goes wrong there never stops a run.

    A package that is missing, a server that does not answer or a full disk is reported once through ``note``,
    and nothing is sent from then on.
    """

    def __init__(
        self,
        name: TrackerName,
        *,
        run: str = "",
        directory: Path | None = None,
        config: JsonObject | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``run`` is the name of the run; ``directory`` is where trackers that write files put them."""
        self._name = name
        self._note = note
        self._rows = 0
        self._backend: _Backend | None = None
        with self._contained():
            self._backend = _BACKENDS[name](run, directory, dict(config or {}))

    def __call__(self, row: EpochRow) -> None:
        """Send one row."""
        step = self._rows if row.epoch is None else row.epoch
        self._rows += 1
        if self._backend is not None:
            with self._contained():
                self._backend.log(epoch_numbers(row), step)

    def finish(self) -> None:
        """Tell the tracker that the run has ended."""
        if self._backend is not None:
            with self._contained():
                self._backend.finish()
        self._backend = None

    @contextlib.contextmanager
    def _contained(self) -> Any:
        """Turn any failure into a note; what trackers print does not mix with results."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except ImportError as e:
            self._give_up(f"it is not installed ({e}): pip install {self._name}")
        except (Exception, SystemExit) as e:
            self._give_up(f"{type(e).__name__}: {e}")

    def _give_up(self, reason: str) -> None:
        self._backend = None
        self._note(f"{self._name} is not used: {reason}; the run and its metrics.jsonl are not affected")


def epoch_numbers(row: EpochRow) -> dict[str, float]:
    """Return the losses, accuracies, agreements and perplexities of a row by name, as trackers show them."""
    found = {f"accuracy/{name}": value for name, value in row.accuracy.items()}
    found |= {f"agreement/{name}": value for name, value in row.agreement.items()}
    found |= {f"perplexity/{name}": value for name, value in row.perplexity.items()}
    found |= {f"loss/{name}": value for name, value in row.terms.items()}
    if row.loss is not None:
        found["loss"] = row.loss
    return {name.replace(" ", "_"): value for name, value in found.items()}


class _TensorBoard:
    def __init__(self, run: str, directory: Path | None, config: JsonObject) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self._writer = make(str(directory) if directory is not None else None)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _RunTracker:
    """wandb, and trackio, which has the same functions."""

    package = "wandb"

    def __init__(self, run: str, directory: Path | None, config: JsonObject) -> None:
        self._tracker: Any = importlib.import_module(self.package)
        own = self._options(directory)
        self._tracker.init(project=PROJECT, name=run or None, config=config, **own)

    def _options(self, directory: Path | None) -> dict[str, str]:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_CONSOLE", "off")
        found = {} if directory is None else {"dir": str(directory)}
        known = os.environ.get("WANDB_MODE") or getattr(getattr(self._tracker, "api", None), "api_key", None)
        return found if known else {**found, "mode": "offline"}  # else it asks for a key, and waits

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(numbers), step=step)

    def finish(self) -> None:
        self._tracker.finish()


class _Trackio(_RunTracker):
    package = "trackio"

    def _options(self, directory: Path | None) -> dict[str, str]:
        return {}  # a database of its own


_BACKENDS: dict[str, Callable[[str, Path | None, JsonObject], _Backend]] = {
    "trackio": _Trackio,
    "wandb": _RunTracker,
    "tensorboard": _TensorBoard,
}
