"""Ways data sets lie on disk. Every reader lists pictures and labels; none decodes a picture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from aniso.data.part import Reading
from aniso.errors import InputError, printable

READERS: dict[str, str] = {
    "folder": "folder",
    "parquet": "parquet",
    "csv": "csv_table",
    "webdataset": "webdataset",
    "torchvision": "torchvision",
    "lists": "lists",
    "coop": "coop",
    "cub": "cub",
    "voc": "voc",
}
"""The module of each kind, imported when it is needed."""


def read(kind: str, root: Path, settings: Mapping[str, Any]) -> Reading:
    """Everything of a kind below a directory. All parts have the same classes, in the same order."""
    return cast(Reading, _module(kind).read(root, settings))


def fetch(kind: str, root: Path, settings: Mapping[str, Any]) -> None:
    """Download what ``read`` would read, for kinds that know where to get it."""
    module = _module(kind)
    if not hasattr(module, "fetch"):
        raise InputError(
            "DATA-MISSING",
            f"there is no address to fetch data sets of kind '{kind}' from",
            fix="see the homepage in the task's card",
        )
    module.fetch(root, settings)


def recognise(root: Path) -> str | None:
    """Which of the kinds that need no card a directory or file is; None if it is none of them."""
    from aniso.data.readers.webdataset import SUFFIXES, is_no_file

    if not root.exists():
        return "webdataset" if is_no_file(str(root)) else None  # which says why not
    if not root.is_dir():
        return _of_file(root, SUFFIXES) if root.is_file() else None
    return _of_directory(root, SUFFIXES)


def _of_file(path: Path, archives: tuple[str, ...]) -> str | None:
    name = path.name.lower()
    kinds = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
    return "webdataset" if name.endswith(archives) else kinds.get(path.suffix.lower())


def _of_directory(root: Path, archives: tuple[str, ...]) -> str | None:
    from aniso.data.readers.csv_table import is_table, tables_in
    from aniso.data.readers.naming import is_hidden
    from aniso.data.readers.shards import shards

    if shards(root, ".parquet"):
        return "parquet"
    if any(is_table(path) for path in tables_in(root)):  # before folders: it says which pictures are what
        return "csv"
    folders = {path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name)}
    found = {path.parent for paths in shards(root, *archives).values() for path in paths}
    if found and folders <= found:  # an archive beside folders is what they were unpacked from
        return "webdataset"
    return "folder" if folders else None


def _module(kind: str) -> Any:
    if kind not in READERS:
        raise InputError(
            "DATA-CARD",
            f"there is no reader for data sets of kind '{printable(kind)}'",
            expected=", ".join(READERS),
            fix="correct 'kind' in the task's card",
        )
    return importlib.import_module(f"aniso.data.readers.{READERS[kind]}")
