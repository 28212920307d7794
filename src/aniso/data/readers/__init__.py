"""Readers of datasets, one file per layout on disk. A reader lists images and labels; it decodes none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aniso.data.part import Reading
from aniso.data.reader import Reader
from aniso.errors import InputError, printable
from aniso.registry import READERS


def read(kind: str, root: Path, settings: Mapping[str, object]) -> Reading:
    """Read the dataset of a kind at ``root``; all parts have the same classes in the same order."""
    return _reader(kind).read(root, settings)


def fetch(kind: str, root: Path, settings: Mapping[str, object]) -> None:
    """Download what ``read`` would read; raises for kinds without a download address."""
    _reader(kind).fetch(root, settings)


def recognise(path: Path) -> str | None:
    """Return the kind of dataset that a directory or file holds, or None if no reader recognises it."""
    readers = {kind: _reader(kind) for kind in READERS.names}
    for kind in sorted(readers, key=lambda kind: -readers[kind].priority):
        if readers[kind].recognises(path):
            return kind
    return None


def _reader(kind: str) -> Reader:
    if kind not in READERS:
        raise InputError(
            "DATA-CARD",
            f"there is no reader for datasets of kind '{printable(kind)}'",
            expected=", ".join(READERS.names),
            fix="correct 'kind' in the task's card",
        )
    reader: Reader = READERS.get(kind)()
    return reader
