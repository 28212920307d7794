"""The type of values that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JsonValue: TypeAlias = bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
"""Anything ``json.dumps`` writes. Parsed values are plain: lists and dictionaries."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""A JSON object."""


def as_object(value: object) -> JsonObject:
    """Return the value if it is a JSON object, else an empty one: for optional parts of untrusted files."""
    return value if isinstance(value, dict) else {}
