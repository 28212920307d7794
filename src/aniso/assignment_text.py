"""Coefficients as text: ``cars=0.4`` for a vector, ``cars/visual.proj=1`` for its blocks with that name."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from aniso.errors import UsageError, printable

_LONGEST = 4096  # letters of a line
_MOST = 1 << 20  # lines


@final
@dataclass(frozen=True)
class Assignment:
    """A number for a vector, or for those of its blocks whose names match a pattern such as ``*.attn.*``."""

    vector: str
    value: float
    pattern: str = ""
    """A pattern of the shell; empty for all blocks."""

    def covers(self, block: str) -> bool:
        """Return True if the number is for this block."""
        return not self.pattern or fnmatchcase(block, self.pattern)

    def __str__(self) -> str:
        where = f"/{self.pattern}" if self.pattern else ""
        return f"{self.vector}{where}={short_number(self.value)}"


def parse_assignment(text: str) -> Assignment:
    """Read ``VECTOR=NUMBER`` or ``VECTOR/BLOCKS=NUMBER``."""
    name, equals, number = text.strip().rpartition("=")
    vector, slash, pattern = name.partition("/")
    try:
        value = float(number)
        if not (equals and vector and math.isfinite(value) and bool(slash) == bool(pattern)):
            raise ValueError
    except ValueError:
        raise UsageError(
            "USAGE",
            f"invalid coefficient '{printable(text)}'",
            fix="write VECTOR=NUMBER, or VECTOR/BLOCKS=NUMBER",
        ) from None
    return Assignment(vector, value, pattern)


def parse_assignments(texts: Sequence[str]) -> list[Assignment]:
    """Read several assignments; raises if two are for the same vector and blocks."""
    found: dict[tuple[str, str], Assignment] = {}
    for text in texts:
        new = parse_assignment(text)
        if (new.vector, new.pattern) in found:
            what = f"vector '{printable(new.vector)}'" if not new.pattern else f"'{printable(new.pattern)}'"
            raise UsageError("USAGE", f"{what} is given twice", fix="name each vector once")
        found[new.vector, new.pattern] = new
    return list(found.values())


def assignment_lines(lines: Iterable[str], name: str) -> list[str]:
    """Return the assignments in a file, one per line, without empty lines and comments (#)."""
    out: list[str] = []
    for number, line in enumerate(lines, 1):
        if len(line) > _LONGEST or number > _MOST:
            raise UsageError(
                "USAGE",
                f"'{printable(name)}', line {number:,}, is too long" if number <= _MOST else "too many lines",
                fix="write one VECTOR/BLOCKS=NUMBER per line",
            )
        if line.strip() and not line.startswith("#"):
            out.append(line.strip())
    return out


def short_number(value: float) -> str:
    """Return the shortest decimal that is read back as the same float32."""
    kept = _float32(value)
    for digits in range(1, 10):
        text = f"{kept:.{digits}g}"
        if _float32(float(text)) == kept:
            return text
    raise AssertionError("nine digits tell every float32")


def _float32(value: float) -> float:
    (kept,) = struct.unpack("<f", struct.pack("<f", value))
    return float(kept)
