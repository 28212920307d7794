"""File names: names of splits, and lists of names for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from aniso.errors import printable
from aniso.item_files import is_hidden, natural

_PARTS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
_SHOWN = 5

T = TypeVar("T")


def visible_folders(root: Path) -> set[Path]:
    """Return the folders in a directory that are not hidden."""
    return {path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name)}


def known_part(name: str) -> str | None:
    """Return ``train``, ``val`` or ``test`` for the usual spellings of these, else None."""
    return _PARTS.get(name.strip().lower())


def part_of_file(name: str) -> str:
    """Return the part of a shard: ``train-00000-of-00002.parquet`` is of train, ``pool.parquet`` of pool."""
    words = re.split(r"[-_.]", name)
    known = known_part(words[0]) or next(iter(_only(known_part(word) for word in words[1:])), None)
    if known:
        return known
    prefix = re.split(r"[-.]", name, maxsplit=1)[0]
    return re.sub(r"(^|_)[0-9]+$", "", prefix) or "all"


def _only(parts: Iterable[str | None]) -> set[str]:
    """Return the part if just one is named: ``imagenet-train-0.tar`` is of train, ``train_val`` of none."""
    named = {part for part in parts if part}
    return named if len(named) == 1 else set()


def in_order(parts: Mapping[str, T]) -> dict[str, T]:
    """Return the parts in the order train, val, test, then the others."""
    first = [name for name in ("train", "val", "test") if name in parts]
    return {name: parts[name] for name in [*first, *sorted(parts.keys() - set(first), key=natural)]}


def some(names: Iterable[object]) -> str:
    """Return the first few of many names, and how many there are."""
    listed = list(names)
    shown = ", ".join(printable(name, 80) for name in listed[:_SHOWN])
    return shown if len(listed) <= _SHOWN else f"{shown} … ({len(listed):,} in all)"


def first_few(lines: Sequence[object]) -> list[str]:
    """Return the first few of many lines, and how many more there are."""
    rest = [f"… {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return [printable(line, 400) for line in lines[:_SHOWN]] + rest
