"""The directory of one run: its spec, its states on the way, and what came out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import final

from aniso.data import IMAGES
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.class_lists import class_lists_text
from aniso.experiments.content import Content
from aniso.experiments.prediction.measured import write_run_predictions
from aniso.experiments.record import write
from aniso.experiments.result import RunResult
from aniso.experiments.run_files import (
    ADAPTER,
    CLASSES,
    COEFFICIENTS,
    COMPARISON,
    COMPARISON_ROWS,
    FAILURE,
    HEAD,
    MERGED,
    METRICS,
    PREDICTIONS,
    PREDICTIONS_META,
    RECORD,
    ROUND,
    SPEC,
    TENSORBOARD,
    WANDB,
    WEIGHTS,
)
from aniso.experiments.settings import Setting
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.strict_yaml import as_yaml, read_yaml
from aniso.learn import TrainingCheckpoints, differences
from aniso.record_files import read_record
from aniso.records import Record
from aniso.weights import save_safetensors
from aniso.weights.atomic import disk, make_directory, remove_empty, require_space, sweep, write_text
from aniso.weights.temporary import TEMPORARY

_UNTRAINED = "state-00000-000000.safetensors"
_FILES = (
    *(SPEC, RECORD, METRICS, COEFFICIENTS, MERGED, WEIGHTS, HEAD, ADAPTER, FAILURE, TENSORBOARD, WANDB),
    *(COMPARISON, COMPARISON_ROWS, IMAGES, CLASSES, PREDICTIONS, PREDICTIONS_META),
)
_OURS = re.compile("|".join([*map(re.escape, _FILES), ROUND, r"state-\d+-\d+\.safetensors"]))


@final
class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._fresh = False
        self._made: list[Path] = []

    @staticmethod
    def expected(setting: Setting) -> list[str]:
        """What a run leaves behind."""
        head = [HEAD] if setting.head_name is not None else []
        items = [IMAGES, CLASSES, PREDICTIONS, PREDICTIONS_META] if isinstance(setting, ImageSetting) else []
        return [SPEC, *setting.outputs(), *head, *items, RECORD]

    def require_unchanged(self, record: Record, content: Content) -> None:
        """Raise RUN-CHANGED if files that a finished run was made from are others now."""
        changed = content.changes(record.inputs.content_hashes or {}, self.path)
        if changed:
            raise InputError(
                "RUN-CHANGED",
                f"the run in '{printable(self.path)}' is done, but files it was made from have changed since",
                changed=changed,
                fix="restore these files, or start a new run in another directory",
            )

    def begin(self, setting: Setting, *, resume: bool) -> Record | None:
        """Make the directory; if the run is done already, its record."""
        self.require_usable(setting, resume=resume)
        done = self.path / RECORD
        if resume and done.exists():
            found = read_record(done)
            self._remove_states()  # it was killed before it could
            sweep(self.path)
            return found
        self._made = make_directory(self.path)
        sweep(self.path)
        self._fresh = not any(self.path.iterdir())
        write_text(self.path / SPEC, as_yaml(setting.spec()), overwrite=True)
        return None

    def require_usable(self, setting: Setting, *, resume: bool) -> None:
        """What would fail after an hour fails now."""
        there = self.require_ours()
        if there and not resume:
            raise UsageError(
                "OUT-EXISTS",
                f"'{printable(self.path)}' holds a run already",
                found=printable(", ".join(there[:6])),
                fix="add --resume to continue it, or name another directory",
            )
        if resume and there:
            self._require_same(setting)

    def require_ours(self) -> list[str]:
        """Return the names of what is there; raises if any is no file of a run, or nothing can be written."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError("OUT-EXISTS", f"'{printable(self.path)}' is a file", fix="name a directory")
        require_space(self.path, 1 << 20)
        there = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        there = [name for name in there if not TEMPORARY.fullmatch(name)]  # a write that was cut short
        foreign = [name for name in there if not _OURS.fullmatch(name)]
        if foreign:
            raise UsageError(
                "OUT-EXISTS",
                f"'{printable(self.path)}' holds other files",
                found=printable(", ".join(foreign[:6])),
                fix="name a new directory",
            )
        return there

    def forget(self, failure: BaseException) -> None:
        """Leave nothing of a run that failed before there was anything to go on from.

        A state from before the first step is nothing if the input has to be mended, or other options given.
        """
        unused = {SPEC, MERGED} | ({METRICS, _UNTRAINED} if isinstance(failure, InputError) else set())
        there = {p.name for p in self.path.iterdir() if p.name != IMAGES}
        if self._fresh and there <= unused:
            disk.remove(self.path)
            remove_empty(self._made[:-1])

    def _require_same(self, setting: Setting) -> None:
        if not (self.path / SPEC).exists():
            return
        was = read_yaml(self.path / SPEC).data
        other = differences(was, json.loads(json.dumps(setting.spec())))  # as plain data, too
        if other:
            raise InputError(
                "RUN-CHANGED",
                f"the run in '{printable(self.path)}' was begun with other settings",
                changed=other[:12],
                fix="use the same options, or start a new run in another directory",
            )

    def finish(self, made: Record, outcome: RunResult) -> Record:
        """Write what came out, the record last; states are not needed any more."""
        if outcome.content is not None:
            outcome.content.keep(self.path)
        if outcome.coefficients is not None:
            outcome.coefficients.save(self.path / COEFFICIENTS, overwrite=True)
        if outcome.weights is not None:
            tensors = {name: outcome.weights.read(name) for name in outcome.weights.tensors}
            save_safetensors(self.path / WEIGHTS, tensors, overwrite=True)
        if outcome.head is not None:
            outcome.head.save(self.path / HEAD, outcome.head_of, overwrite=True)
        if outcome.adapter is not None:
            outcome.adapter.save(self.path / ADAPTER, overwrite=True)
        if outcome.classes:
            write_text(self.path / CLASSES, class_lists_text(outcome.classes), overwrite=True)
        if outcome.predictions:
            write_run_predictions(self.path / PREDICTIONS, made, outcome.predictions)
        if outcome.classes:  # for model cards; in the records of a grid they would be repeated
            names = {name: classes.names for name, classes in outcome.classes.items()}
            made = made.with_values(inputs=made.inputs.with_values(class_names=names))
        write(self.path / RECORD, made, overwrite=True)
        self._remove_states()
        return made

    def _remove_states(self) -> None:
        rounds = [path for path in self.path.iterdir() if re.fullmatch(ROUND, path.name)]
        for directory in (self.path, *rounds):
            for state in TrainingCheckpoints(directory).files():
                disk.remove(state)

    def outputs(self) -> list[str]:
        names = (
            COEFFICIENTS,
            MERGED,
            WEIGHTS,
            HEAD,
            ADAPTER,
            PREDICTIONS,
            CLASSES,
            RECORD,
            METRICS,
            SPEC,
            COMPARISON,
        )
        return [name for name in names if (self.path / name).exists()]
