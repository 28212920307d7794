"""Untrusted text in CSV files."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(text: str) -> str:
    """Escape text so that no spreadsheet reads it as a formula and no terminal as a command."""
    risky = text.startswith(_FORMULA) or text.lstrip().startswith(_FORMULA)
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f"'{plain}" if risky and not _NUMBER.fullmatch(text) else plain
