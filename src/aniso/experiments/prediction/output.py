"""Predictions as a file that can be continued after an interruption, or on a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, final

from aniso.csv_text import csv_text
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.prediction.tables import InputItem
from aniso.prediction_files import (
    FileFormat,
    PredictedItem,
    PredictionFile,
    PredictionHeader,
    first_line,
    item_line,
    meta_path,
    meta_text,
)
from aniso.weights.append import AppendedFile
from aniso.weights.atomic import disk, write_text
from aniso.weights.files import RawFile

_ROWS = 256  # written and synced at once


@final
class FileOutput:
    """A file of predictions: it is the old one until the new one is complete.

    Rows are appended to ``FILE.partial``. If that file is there already, or a complete one with the same
    header, new rows follow its rows, provided that these are of the same items. Each of the two files has its
    header beside it (``.meta.json``), which is written before the rows, and before the file gets its name.
    """

    def __init__(self, path: Path, header: PredictionHeader, kind: FileFormat, *, overwrite: bool) -> None:
        self.header = header
        self.kind = kind
        self.unreadable = 0
        """Items that could not be read, those of an earlier call included."""
        self.done = 0
        """Rows that are there."""
        self._buffer: list[str] = []
        self._file = AppendedFile(path)
        self._is_complete = False
        try:
            self._begin(overwrite)
        except BaseException:
            if not self._file.size:
                self._discard()
            self.close()
            raise

    def _begin(self, overwrite: bool) -> None:
        file = self._file
        if overwrite:
            file.cut(0)
        file.cut_incomplete_line()
        if file.size:
            self._require_same(_existing(file.partial), file.partial)
            return
        if file.path.exists() and not overwrite:
            self._require_same(_existing(file.path), file.path)
            self._write_meta(file.partial)
            file.copy(file.path)
            file.cut_incomplete_line()
            self._is_complete = True
        else:
            self._write_meta(file.partial)
            file.write(first_line(self.header, self.kind).encode())

    def _write_meta(self, path: Path, sha256: str | None = None) -> None:
        write_text(meta_path(path), meta_text(self.header, self.kind, sha256), overwrite=True)

    def _require_same(self, found: PredictionFile, path: Path) -> None:
        ours, theirs = self.header.model_dump(), found.header.model_dump()
        other = [name for name in ours if ours[name] != theirs[name]]
        if other or found.kind != self.kind:
            raise InputError(
                "RUN-CHANGED",
                f"the predictions in '{printable(path)}' were made with another "
                f"{other[0] if other else 'format'}",
                found=printable(theirs.get(other[0]) if other else found.kind, 300),
                expected=printable(ours.get(other[0]) if other else self.kind, 300),
                fix="--overwrite to replace them, or name another file with -o",
            )

    def skip(self, items: Iterator[InputItem]) -> Iterator[InputItem]:
        """Return the items without those whose rows are there; raises if the rows are of other items."""
        for row in PredictionFile.open(self._file.partial).items():
            item = next(items, None)
            if item is None or _shown(item.id, self.kind) != row.id:
                raise InputError(
                    "RUN-CHANGED",
                    f"the inputs are not those that '{printable(self._file.path)}' was begun with",
                    found=f"item {self.done + 1}: {printable(item.id) if item else 'none'}",
                    expected=printable(row.id),
                    fix="--overwrite to start again, or name another file with -o",
                )
            self.done += 1
            self.unreadable += not row.ranked
        return items

    def write(self, item: PredictedItem) -> None:
        """Append the row of an item."""
        self._is_complete = False
        self._buffer.append(item_line(self.header, item, self.kind))
        self.done += 1
        if len(self._buffer) >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._file.write("".join(self._buffer).encode())
            self._buffer = []

    def finish(self) -> None:
        """Put the complete file in the place of the old one."""
        self._flush()
        if self._is_complete:  # nothing was added to it
            self._discard()
        else:
            self._write_meta(self._file.path, RawFile(self._file.partial).sha256())
            self._file.finish()
            disk.remove(meta_path(self._file.partial))

    def _discard(self) -> None:
        self._file.discard()
        disk.remove(meta_path(self._file.partial))

    def close(self) -> None:
        """Keep the rows so far for the next call."""
        try:
            self._flush()
            if self._is_complete:
                self._discard()
        finally:
            self._file.__exit__()


def _existing(path: Path) -> PredictionFile:
    try:
        return PredictionFile.open(path)
    except InputError:
        raise UsageError(
            "OUT-EXISTS",
            f"'{printable(path)}' exists, and is no file of predictions",
            fix="add --overwrite to replace it",
        ) from None


def _shown(text: str, kind: FileFormat) -> str:
    """Return an id as it is read back from a file."""
    return csv_text(text) if kind == "csv" else str(json.loads(json.dumps(text)))


@final
class StreamOutput:
    """Predictions on a stream, such as standard output."""

    def __init__(self, stream: TextIO, header: PredictionHeader, kind: FileFormat) -> None:
        self.header = header
        self.kind = kind
        self._stream = stream
        stream.write(first_line(header, kind))

    def write(self, item: PredictedItem) -> None:
        """Write the row of an item."""
        self._stream.write(item_line(self.header, item, self.kind))
