"""Amounts of memory as text, such as ``8GiB``, and budgets for task vectors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from aniso.errors import UsageError, printable

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes in ``8GiB``, ``500 MB`` or a plain number."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(
            "USAGE",
            f"'{printable(text)}' is not an amount of memory",
            expected="a number of bytes, such as 8GiB or 500MB",
            fix="write it with a unit: --memory 8GiB",
        )
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(count: float) -> str:
    """Return a number of bytes as text, such as ``7.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


@final
@dataclass(frozen=True)
class Budget:
    """A number of vectors, or of cells of each block; or a number of bytes as the bank stores them."""

    count: int | None = None
    nbytes: int | None = None

    @classmethod
    def of(cls, value: int | str | Budget) -> Budget:
        """Return the budget that ``5`` or ``"200MB"`` stands for."""
        if isinstance(value, Budget):
            return value
        plain = isinstance(value, int) and not isinstance(value, bool)
        try:
            words = str(value).strip()
            counts = plain or (words.isascii() and words.isdigit())
            made = cls(count=int(value)) if counts else cls(nbytes=parse_bytes(value))
        except UsageError:
            made = cls(count=0)
        if (made.count or 0) < 1 and (made.nbytes or 0) < 1:
            raise UsageError(
                "USAGE",
                f"with a budget of {printable(value)} nothing is left to compose",
                expected="a number of vectors from 1 on, or an amount of memory such as 200MB",
                fix="--budget 5",
            )
        return made

    def __str__(self) -> str:
        return show_bytes(self.nbytes) if self.nbytes is not None else f"{self.count}"
