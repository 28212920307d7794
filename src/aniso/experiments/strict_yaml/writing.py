"""Plain data to YAML 1.2 that ``parse_yaml`` reads back to equal data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aniso.errors import UsageError, printable
from aniso.experiments.strict_yaml.reading import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, is_encodable

_MAX_KEY = 1000  # characters; YAML allows 1024 before the colon
_WORD = r"[A-Za-z0-9_./@+-](?:[A-Za-z0-9_./@+:-]*[A-Za-z0-9_./@+-])?"
_PLAIN = re.compile(rf"(?=[A-Za-z_/]){_WORD}(?: {_WORD})*")
# also what only YAML 1.1 readers take for something else, so that all readers agree
_SPECIAL = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def as_yaml(data: Mapping[str, Any]) -> str:
    """Return block-style YAML in the order given."""
    text = "\n".join(_block(data, 0)) + "\n" if data else "{}\n"
    if (size := len(text.encode())) > MAX_BYTES:
        raise _unwritable(f"{size:,} bytes", f"at most {MAX_BYTES:,} bytes")
    return text


def _block(value: Any, level: int) -> Iterator[str]:
    """Yield the lines of a mapping or list that is not empty."""
    if level >= MAX_DEPTH:
        raise _unwritable("deeper nesting", f"at most {MAX_DEPTH} levels")
    margin = "  " * level
    if isinstance(value, Mapping):
        for key, own in value.items():
            head = f"{margin}{_key_text(key)}:"
            if _is_block(own):
                yield head
                yield from _block(own, level + 1)
            else:
                yield f"{head} {_scalar_text(own)}"
        return
    for own in value:
        inner = _block(own, level + 1) if _is_block(own) else iter((f"{margin}  {_scalar_text(own)}",))
        yield f"{margin}- {next(inner)[len(margin) + 2 :]}"
        yield from inner


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _key_text(key: Any) -> str:
    text = _text(key) if isinstance(key, str) else ""
    if not text or len(text) > _MAX_KEY:
        raise _unwritable(f"the key {key!r}", f"text of at most {_MAX_KEY:,} characters")
    return text


def _scalar_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, int) and abs(value) < 10 ** (MAX_DIGITS - 1):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    found = f"a value of type {type(value).__name__}"
    raise _unwritable(found, "text, a finite number, true, false, null, a mapping or a list")


def _text(text: str) -> str:
    """Return text without quotes where no reader could take it for anything else."""
    if not is_encodable(text):
        raise _unwritable(text, "text without halves of surrogate pairs")
    if _PLAIN.fullmatch(text) and text.lower() not in _SPECIAL:
        return text
    escaped = (f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(escaped)}"'


def _unwritable(found: str, expected: str) -> UsageError:
    what = "these data cannot be written as YAML that is read back to the same data"
    return UsageError("SPEC", what, found=printable(found), expected=expected, fix="leave the value out")
