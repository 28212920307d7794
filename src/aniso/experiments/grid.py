"""The cells of an experiment and the directory of their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

from aniso.errors import AnisoError, InputError, printable
from aniso.experiments.content import KnownHashes
from aniso.experiments.record import file_name
from aniso.experiments.result import RunOptions
from aniso.experiments.session import Session
from aniso.experiments.spec import Cell
from aniso.experiments.worker import Place
from aniso.record_files import RecordStore, read_record
from aniso.records import Record
from aniso.weights.atomic import disk, write_text

Status = Literal["recorded", "failed", "missing"]


@final
@dataclass(frozen=True)
class DataChanges:
    """What became of the data of recorded cells."""

    files: dict[str, list[str]]
    """By the id of a cell: the files that changed since it was recorded."""
    missing: list[Cell]
    """Cells whose data are not on this machine, or cannot be read."""


@final
@dataclass(frozen=True)
class Grid:
    """Cells and the directory that their records are in.

    A cell that ends writes a file of its own; ``compact`` moves these into ``records.jsonl``.
    """

    cells: Sequence[Cell]
    directory: Path

    def place(self, cell: Cell) -> Place:
        """Where a cell leaves what it finds."""
        name = file_name(cell.setting, cell.label)
        states = self.directory / ".states" / cell.setting.id[:16]
        return Place(self.directory / name, states, self.directory / "coefficients")

    def status(self, cell: Cell) -> Status:
        """Whether a cell has a record, failed, or is still to be run."""
        if self.record(cell) is not None:
            return "recorded"
        return "failed" if self.place(cell).failure.exists() else "missing"

    def record(self, cell: Cell) -> Record | None:
        """The record of a cell: from a file of its own, which is the newer one, or from ``records.jsonl``."""
        path = self.place(cell).record
        if not path.exists():
            return self._finished.get(cell.setting.id)
        found = read_record(path)
        if found.id != cell.setting.id:
            raise InputError(
                "RECORD",
                f"'{printable(path)}' is not the record of its cell",
                expected=cell.setting.id,
                found=printable(found.id),
                fix="remove it, and run the experiment again",
            )
        return found

    @cached_property
    def _finished(self) -> dict[str, Record]:
        return RecordStore(self.directory).finished()

    def compact(self) -> None:
        """Move the records of all cells into ``records.jsonl``; a crash on the way loses none."""
        loose = [path for cell in self.cells if (path := self.place(cell).record).exists()]
        if not loose:
            return
        store = RecordStore(self.directory)
        write_text(store.path, store.merged(loose), overwrite=True)
        for path in loose:
            disk.remove(path)
        self.__dict__.pop("_finished", None)  # read again when asked for

    def compare(self, data: Path | None = None) -> DataChanges:
        """Compare the images and texts of recorded cells with what they were when they were recorded.

        Records of earlier versions do not say what their data were; there is nothing to compare them with.
        """
        tasks: dict[object, dict[str, Any]] = {}  # each loaded once, and its images hashed once
        known: KnownHashes = {}
        changed: dict[str, list[str]] = {}
        missing: list[Cell] = []
        for cell in self.cells:
            record = self.record(cell)
            if record is None or record.inputs.content_hashes is None:
                continue
            how = (getattr(cell.setting, "split_seed", None), getattr(cell.setting, "on_bad_image", None))
            shared = tasks.setdefault(how, {})
            try:
                content = Session(cell.setting, RunOptions(data=data), shared).content
                if files := content.changes(record.inputs.content_hashes, self.directory, known):
                    changed[cell.setting.id] = files
            except AnisoError:
                missing.append(cell)
        return DataChanges(changed, missing)
