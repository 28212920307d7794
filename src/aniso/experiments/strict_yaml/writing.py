"""Plain data to text, so that what is written is what would be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aniso.errors import UsageError, printable
from aniso.experiments.strict_yaml.document import DEEPEST, LARGEST, LONGEST_NUMBER, SMALL, encodes, kind_of

_LONGEST_KEY = 1000  # characters; YAML allows 1024 before the colon


def as_yaml(data: Mapping[str, Any]) -> str:
    """Block-style YAML 1.2 in the order given, which ``parse_yaml`` reads back to equal data."""
    text = "\n".join(_block(data, 0)) + "\n" if data else "{}\n"
    if (size := len(text.encode())) > LARGEST:
        raise _unwritable("", f"{size:,} bytes", SMALL)
    return text


_WORD = r"[A-Za-z0-9_./@+-](?:[A-Za-z0-9_./@+:-]*[A-Za-z0-9_./@+-])?"
_PLAIN = re.compile(rf"(?=[A-Za-z_/]){_WORD}(?: {_WORD})*")
# also what only older readers take for something else, so that all of them agree
_SPECIAL = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def _block(value: Any, level: int) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    if level >= DEEPEST:
        raise _unwritable("", "deeper nesting", f"at most {DEEPEST} levels")
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
    if not isinstance(key, str):
        raise _unwritable(key, kind_of(key), "text as a key")
    text = _text(key)
    if len(text) > _LONGEST_KEY:
        raise _unwritable(key, f"{len(text):,} characters", f"a key of at most {_LONGEST_KEY:,} characters")
    return text


def _scalar_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, int) and abs(value) < 10 ** (LONGEST_NUMBER - 1):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise _unwritable("", kind_of(value), "text, a finite number, true, false, null, a mapping or a list")


def _text(text: str) -> str:
    """Unquoted where no reader could take it for anything else."""
    if not encodes(text):
        raise _unwritable("", text, "text without halves of surrogate pairs")
    if _PLAIN.fullmatch(text) and text.lower() not in _SPECIAL:
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _unwritable(key: object, found: str, expected: str) -> UsageError:
    return UsageError(
        "SPEC",
        "these data cannot be written as YAML that would be read back as they are",
        key=printable(key),
        found=found,
        expected=expected,
        fix="leave the value out",
    )
