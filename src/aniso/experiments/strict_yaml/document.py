"""A file as plain data with its lines, and how refusals speak of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aniso.errors import UsageError, printable

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings, and indices of lists from 0."""

LARGEST = 1 << 20
DEEPEST = 32
SMALL = f"at most {LARGEST:,} bytes"
FIX = "correct it, then try again"
LONGEST_NUMBER = 100  # characters; a larger whole number would become infinite as a float


@dataclass(frozen=True)
class Document:
    """A YAML 1.2 file as plain data, with the line (from 1) of every key and every item of a list."""

    label: str
    data: dict[str, Any]
    lines: Mapping[Keys, int]


def dotted(path: Keys) -> str:
    return printable(".".join(map(str, path)))


def shown(value: Any) -> str:
    """A value so that the text '5' and the number 5 look different."""
    if isinstance(value, dict | list):
        return kind_of(value)
    return f"the text '{value}'" if isinstance(value, str) else json.dumps(value)


def kind_of(value: Any) -> str:
    if isinstance(value, dict | list):
        count = f"of {len(value)}" if value else "without any"
        return f"a mapping {count} keys" if isinstance(value, dict) else f"a list {count} items"
    return "null" if value is None else f"a value of type {type(value).__name__}"


def refusal(label: str, line: int | None, what: str, fix: str = FIX, **facts: Any) -> UsageError:
    place = f"'{printable(label)}'" + (f", line {line}" if line else "")
    return UsageError("SPEC", f"{place}: {what}", fix=fix, **facts)


def encodes(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which no file can hold."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
