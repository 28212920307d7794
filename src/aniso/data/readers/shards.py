"""Datasets in a few large files, one or more per part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from aniso.data.readers.naming import in_order, known_part, part_of_file, some
from aniso.errors import InputError, printable
from aniso.item_files import is_hidden, natural


def shards(root: Path, *suffixes: str) -> dict[str, list[Path]]:
    """Return the files of each part: by name in ``root`` or ``root/data``, or by folder in ``root/train``."""
    if not root.is_dir():
        if not root.is_file():  # a pipe could block for ever
            raise InputError(
                "DATA-MISSING",
                f"'{printable(root)}' does not exist, or is not a regular file",
                fix=f"ls -l '{printable(root)}'",
            )
        return {known_part(part_of_file(root.name)) or "all": [root]}
    found = _by_part(_folders(root), suffixes) or _by_part(_configuration(root), suffixes)
    ordered = {part: sorted(paths, key=lambda p: natural(str(p))) for part, paths in found.items()}
    return in_order(ordered)


def _by_part(folders: list[tuple[Path, str | None]], suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for folder, part in folders:
        for path in _files(folder, suffixes):
            found.setdefault(part or part_of_file(path.name), []).append(path)
    return found


def require_filled(root: Path, counts: Mapping[str, int]) -> None:
    """Raise if there is no part, or one without images."""
    empty = [part for part, count in counts.items() if not count]
    if empty or not counts:
        raise InputError(
            "DATA-EMPTY",
            f"'{printable(root)}' has no images" + (f" for {some(empty)}" if empty else ""),
            found=some(f"{part}: {count:,}" for part, count in counts.items()) or "no file of this kind",
            fix=f"complete or remove these parts: ls '{printable(root)}'",
        )


def _folders(root: Path) -> list[tuple[Path, str | None]]:
    parts = [(root / name, known_part(name)) for name in _names(root) if known_part(name)]
    return [(root, None), (root / "data", None), *((path, part) for path, part in parts if path.is_dir())]


def _configuration(root: Path) -> list[tuple[Path, str | None]]:
    """Return the only folder, in which the hub puts the tables of a dataset's configuration."""
    inner = [root / name for name in _names(root) if not is_hidden(name) and (root / name).is_dir()]
    return [(inner[0], None)] if len(inner) == 1 else []


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    names = [name for name in _names(folder) if name.lower().endswith(suffixes) and not is_hidden(name)]
    return [folder / name for name in names if (folder / name).is_file()]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208 - names are enough
    except OSError as e:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(folder)}' cannot be listed",
            reason=e.strerror,
            fix=f"ls -ld '{printable(folder)}'",
        ) from None
