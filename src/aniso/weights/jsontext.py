"""Untrusted JSON: limited in size, values and nesting, no duplicate keys, only valid text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from aniso.json_value import JsonObject

# A value of two bytes takes up to 60 bytes of memory once it is read, an object 240.
_LARGEST = 16 << 20
_MOST_VALUES = 2_000_000
_DEEPEST = 64
_MOST_DIGITS = 308  # every integer of so many digits fits a float, whose largest is 1.8e308
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text is not valid JSON, or parsers could disagree about it."""


def parse_object(data: bytes, *, largest: int = _LARGEST, most_values: int = _MOST_VALUES) -> JsonObject:
    """Return the JSON object in ``data``; see ``parse_value`` for what is refused."""
    value = parse_value(data, largest=largest, most_values=most_values)
    if not isinstance(value, dict):
        raise JsonError(f"a JSON {type(value).__name__}, not an object")
    return value


def parse_value(data: bytes, *, largest: int = _LARGEST, most_values: int = _MOST_VALUES) -> object:
    """Return the JSON value in ``data``: an object, a list, a text, a number, true, false or null.

    Duplicate keys, NaN, infinity, integers beyond the range of a float, halves of surrogate pairs, deep
    nesting, and texts of more than ``largest`` bytes or ``most_values`` values raise ``JsonError``; sizes are
    checked before memory is allocated for values.
    """
    _check_size(data, largest, most_values)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constants,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8") from None
    except JsonError:
        raise
    except ValueError as e:
        raise JsonError(str(e)) from None
    _check_values(value, texts=_SURROGATE.search(data) is not None)
    return value


def _check_size(data: bytes, largest: int, most_values: int) -> None:
    if len(data) > largest:
        raise JsonError(f"{len(data)} bytes long, more than {largest}")
    # every value but the first follows one of these; those inside of texts are counted, too
    containers = data.count(b"{") + data.count(b"[")
    values = containers + data.count(b",")
    if values > most_values or 4 * containers > most_values:
        raise JsonError(f"more than {most_values} values")


def _check_values(value: Any, *, texts: bool) -> None:
    """Refuse deep nesting, which makes printing a value fail, and texts that cannot be encoded."""
    level = [value]
    for _ in range(_DEEPEST):
        if texts and (bad := [v for v in level if isinstance(v, str) and not _is_text(v)]):
            raise JsonError(f"half of a surrogate pair in {bad[0][:60]!r}")
        level = [inner for v in level if isinstance(v, dict | list) for inner in _inside(v, texts)]
        if not level:
            return
    raise JsonError("nested too deeply")


def _inside(value: JsonObject | list[Any], texts: bool) -> list[Any]:
    values = [*value, *value.values()] if isinstance(value, dict) else value
    return values if texts else [v for v in values if isinstance(v, dict | list)]


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
    out: JsonObject = {}
    for key, value in pairs:
        if key in out:
            raise JsonError(f"key {key!r} appears twice")
        out[key] = value
    return out


def _no_constants(name: str) -> float:
    raise JsonError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonError(f"{text[:20]} is too large a number")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS and math.isinf(float(text)):  # before int(), which takes quadratic time
        raise JsonError(f"{text[:20]}… is too large a number, with {len(text)} digits")
    return int(text)
