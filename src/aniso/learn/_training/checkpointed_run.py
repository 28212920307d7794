"""A training run in a directory: a checkpoint after every epoch and before an interrupt, and its metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from aniso.data import IMAGES, ImageLists, Split
from aniso.errors import InputError, NumericalError, StoppedError, UsageError, printable
from aniso.learn._training.interrupt import Interrupt
from aniso.learn._training.loop import Loop
from aniso.learn._training.training_checkpoint import TrainingCheckpoints, require_same
from aniso.progress import ProgressCallback
from aniso.records import EpochRow, JsonValue
from aniso.weights.atomic import locked, make_directory, require_space, write_text

METRICS = "metrics.jsonl"


@final
@dataclass(frozen=True)
class RunIdentity:
    """What must be unchanged for a run to be resumed."""

    what: Mapping[str, JsonValue]
    """Inputs and settings."""
    environment: Mapping[str, JsonValue]
    """Software, device and threads, which change rounding."""
    content: Mapping[str, str]
    """A hash of the images of every split, by the split's name."""


@final
class CheckpointedRun:
    """Runs a loop in a directory of its own."""

    def __init__(self, directory: Path, loop: Loop, identity: RunIdentity, images: Sequence[Split]) -> None:
        self._directory = directory
        self._images = images
        self._loop = loop
        self._checkpoints = TrainingCheckpoints(directory)
        # through JSON and back, as it is compared with what was read
        self._identity: dict[str, Any] = json.loads(json.dumps(asdict(identity)))
        self._notes: list[str] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory, and keep other processes out of it meanwhile."""
        size = sum(t.nbytes for t in self._loop.state().tensors.values())
        require_space(self._directory, 6 * size + (1 << 20))  # moments come; two checkpoints and a new one
        make_directory(self._directory)
        with locked(self._directory):
            yield

    def begin(self, *, resume: bool, allow_env_change: bool) -> list[str]:
        """Restore the newest checkpoint if there is one; returns notes about it."""
        if not resume and self._checkpoints.files():
            raise UsageError(
                "OUT-EXISTS",
                f"'{printable(self._directory)}' holds a run already",
                fix="add --resume to continue it, or name another directory",
            )
        state, notes = self._checkpoints.newest()
        lists = ImageLists(self._directory / IMAGES)
        if state is None:
            lists.keep(self._images)
        else:
            was = state.facts.get("identity", {})
            changed = require_same(was, self._identity, environment=allow_env_change)
            self._require_same_images(was.get("content", {}), lists)
            self._notes = [
                *state.facts.get("notes", []),
                *(f"resumed in another environment: {difference}" for difference in changed),
            ]
            self._loop.restore(state)
            self._write_metrics()
        return [*notes, *self._notes]

    def _require_same_images(self, before: Mapping[str, str], lists: ImageLists) -> None:
        """Raise an error that names the files if images were replaced since the run was started."""
        now = self._identity["content"]
        other = [split for split in self._images if before.get(split.name) not in (None, now[split.name])]
        if other:
            raise InputError(
                "RUN-CHANGED",
                "images changed since the run was started",
                changed=[name for split in other for name in lists.changes(before[split.name], split)],
                fix="restore these files, or start a new run in another directory",
            )

    def run(self, progress: ProgressCallback, row_done: Callable[[EpochRow], None]) -> None:
        """Train to the end, with a checkpoint after every epoch."""
        sharding = self._loop.sharding
        with Interrupt(int if sharding is None else sharding.largest) as interrupt:
            try:
                for row in self._loop.run(progress, interrupt.check):
                    self._save()
                    row_done(row)
                    interrupt.check()
            except StoppedError as e:
                self._save()
                e.fix = "run the same command with --resume"
                raise
            except NumericalError as e:
                e.facts["kept"] = f"the last good values are in '{printable(self._directory)}'"
                failure = json.dumps(e.to_json(), indent=1, sort_keys=True)
                write_text(self._directory / "failure.json", failure + "\n", overwrite=True)
                raise

    def _save(self) -> None:
        state = self._loop.state()
        state.facts.update(identity=self._identity, notes=self._notes)
        self._checkpoints.save(state)
        self._write_metrics()

    def _write_metrics(self) -> None:
        """Write the whole file each time: no line is ever missing, cut or there twice."""
        lines = "".join(json.dumps(row.content(), sort_keys=True) + "\n" for row in self._loop.history)
        write_text(self._directory / METRICS, lines, overwrite=True)
