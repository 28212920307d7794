"""Starts of learning as text: ``0.3``, ``depth:0.1,0.5``, ``least-squares``, a merge rule, or a file."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from aniso.errors import UsageError, printable
from aniso.registry import MERGE_RULES

DEPTH, LEAST_SQUARES = "depth", "least-squares"
RIDGE = 0.1
"""Default weight of the least-squares start's ridge towards the mean."""
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MOST_ANCHORS = 1000


@final
@dataclass(frozen=True)
class StartText:
    """A start as it is written: its kind, the merge rule or file that it names, and its numbers."""

    kind: Literal["constant", "depth", "least-squares", "rule", "file"]
    name: str = ""
    numbers: tuple[float, ...] = ()

    @property
    def file(self) -> Path | None:
        """The file of coefficients, or the directory of the run that wrote one."""
        return Path(self.name).expanduser() if self.kind == "file" else None

    @property
    def rule(self) -> str | None:
        """The merge rule."""
        return self.name if self.kind == "rule" else None


def parse_start(text: str) -> StartText:
    """Return a start from its text; nothing is read. What looks like a path, or exists, is a file."""
    if _NUMBER.fullmatch(text):
        return StartText("constant", numbers=_numbers(text, text))
    name, colon, rest = text.partition(":")
    if name == DEPTH:
        numbers = _numbers(text, rest)
        if not 2 <= len(numbers) <= _MOST_ANCHORS:
            raise _unknown(text, "two numbers or more: of the first layer, …, of the last", "depth:0.1,0.5")
        return StartText("depth", numbers=numbers)
    if name == LEAST_SQUARES:
        numbers = _numbers(text, rest) if colon else (RIDGE,)
        if len(numbers) != 1 or numbers[0] < 0:
            raise _unknown(text, "a ridge of 0 or more", f"{LEAST_SQUARES}:{RIDGE:g}")
        return StartText("least-squares", numbers=numbers)
    if text in MERGE_RULES:
        return StartText("rule", text)
    if "/" in text or text.endswith(".safetensors") or (text and _exists(text)):
        return StartText("file", text)
    known = [DEPTH, LEAST_SQUARES, *MERGE_RULES.names]
    near = difflib.get_close_matches(text, known, 1)
    expected = f"a number, depth:A,B, {LEAST_SQUARES}, {', '.join(MERGE_RULES.names)}, or a file"
    raise _unknown(text, expected, near[0] if near else MERGE_RULES.names[0])


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


def _numbers(text: str, part: str) -> tuple[float, ...]:
    found = part.split(",")
    if not all(_NUMBER.fullmatch(number.strip()) for number in found):
        raise _unknown(text, "numbers with commas between them", "depth:0.1,0.5")
    numbers = tuple(float(number) for number in found)
    if not all(map(math.isfinite, numbers)):
        raise _unknown(text, "finite numbers", "0.3")
    return numbers


def _unknown(text: str, expected: str, fix: str) -> UsageError:
    return UsageError("START", f"'{printable(text)}' is no start", expected=expected, fix=f"--start {fix}")
