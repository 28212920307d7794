"""Labels as written in files, turned into one list of classes and an index for every image."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aniso.data.part import coded
from aniso.data.readers.naming import first_few, some
from aniso.errors import InputError, printable
from aniso.item_files import natural

Coded = tuple[tuple[str, ...], dict[str, tuple[int, ...]]]
"""The classes, and for every part the class index of its images."""

_WHOLE = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
_NOTHING = frozenset({"", "nan"})


@dataclass(frozen=True)
class Column:
    """One label for every image of a part, as written."""

    values: Sequence[str]
    where: Callable[[int], str]
    """Describes a row in messages."""


def by_name(parts: Mapping[str, Sequence[str]], classes: Sequence[str] | None = None) -> Coded:
    """Return class indices for class names; the list of classes is that of all parts by default."""
    if classes is None:
        used = {part: set(names) for part, names in parts.items()}
        _require_trained(used)
        classes = sorted({name for names in used.values() for name in names}, key=natural)
    codes = {part: coded(names, classes) for part, names in parts.items()}
    return tuple(classes), codes


def by_text(parts: Mapping[str, Column], classes: Sequence[str] | None, *, count: bool = False) -> Coded:
    """Return class indices for labels that are class names, or indices into a list of classes.

    All parts have one kind of label. ``count`` forces indices where the labels could be either.
    """
    every = {value for column in parts.values() for value in column.values}
    numbers = all(_NUMBER.fullmatch(value) or value.lower() in _NOTHING for value in every)
    _require_labels(parts, numbers)
    if classes is None or (not count and every <= set(classes)) or not numbers:
        return by_name({part: column.values for part, column in parts.items()}, classes)
    _require_range(parts, len(classes))
    codes = {part: tuple(map(int, column.values)) for part, column in parts.items()}
    return tuple(classes), codes


def _require_trained(used: Mapping[str, set[str]]) -> None:
    """Raise if val or test has a class that train lacks, which is nearly always a misspelt folder."""
    if not used.get("train"):
        return
    learned = sorted(used["train"], key=natural)
    for part in ("val", "test"):
        names: set[str] = used.get(part, set())
        extra = sorted(names - used["train"], key=natural)
        if extra:
            raise InputError(
                "DATA-CLASS",
                f"{part} has {len(extra)} classes that train lacks",
                found=some(extra),
                expected=some(learned),
                fix="correct the names, or remove these classes",
            )


def _require_labels(parts: Mapping[str, Column], numbers: bool) -> None:
    wrong = [
        f"{column.where(i)}: {printable(value) or 'nothing'}"
        for column in parts.values()
        for i, value in enumerate(column.values)
        if value.lower() in _NOTHING or (numbers and not _WHOLE.fullmatch(value))
    ]
    _refuse(wrong, "a class name, or a whole number from 0")


def _require_range(parts: Mapping[str, Column], count: int) -> None:
    # compared by length first: int() refuses more than 4300 digits
    wrong = [
        f"{column.where(i)}: {printable(value)}"
        for column in parts.values()
        for i, value in enumerate(column.values)
        if len(value) > 18 or int(value) >= count
    ]
    _refuse(wrong, f"0 to {count - 1}")


def _refuse(wrong: Sequence[str], expected: str) -> None:
    if wrong:
        raise InputError(
            "DATA-LABEL",
            f"{len(wrong):,} labels name no class",
            found=first_few(wrong),
            expected=expected,
            fix="correct the labels, or remove these rows",
        )


def once(paths: Sequence[str], names: Sequence[str], where: Callable[[int], str]) -> list[int]:
    """Return the rows to keep so that no item repeats; an item with two labels is an error."""
    first: dict[str, int] = {}
    wrong = []
    for i, path in enumerate(paths):
        before = first.setdefault(path, i)
        if names[before] != names[i]:
            wrong.append(
                f"{printable(path, 60)}: {printable(names[before], 30)} ({where(before)}), "
                f"{printable(names[i], 30)} ({where(i)})"
            )
    if wrong:
        raise InputError(
            "DATA-LABEL",
            f"{len(wrong):,} items have more than one label",
            found=first_few(wrong),
            expected="one class for each item",
            fix="keep one of the lines",
        )
    return list(first.values())
