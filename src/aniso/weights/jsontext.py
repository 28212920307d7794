"""JSON from strangers: size-limited, no duplicate keys, no unbounded nesting."""

from __future__ import annotations

import json
from typing import Any


class JsonError(ValueError):
    """The text is not JSON that two readers would agree on."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; duplicate keys, NaN and deep nesting are refused."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8") from None
    except JsonError:
        raise
    except ValueError as e:
        raise JsonError(str(e)) from None
    if not isinstance(value, dict):
        raise JsonError(f"a JSON {type(value).__name__}, not an object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise JsonError(f"key {key!r} appears twice")
        out[key] = value
    return out


def _no_constants(name: str) -> float:
    raise JsonError(f"{name} is not JSON")
