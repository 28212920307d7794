"""Files that hold items: suffixes of images, tables and texts, columns of tables, natural sort order."""

from __future__ import annotations

import re
from typing import Final

IMAGE_SUFFIXES: Final = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"})
"""Suffixes of image files; the format itself is recognised when an image is decoded."""
TABLE_SUFFIXES: Final = frozenset({"csv", "tsv"})
JSON_LINES_SUFFIXES: Final = frozenset({"jsonl", "ndjson"})
ITEM_COLUMNS: Final = {
    "path": ("path", "file", "filename", "image", "filepath", "file_name"),
    "text": ("text", "sentence", "review", "content", "question", "utterance"),
}
"""The usual names of columns, by what they hold."""

_JUNK = frozenset({"__macosx", "thumbs.db", "desktop.ini"})
_DIGITS = re.compile("([0-9]+)")


def suffix(name: str) -> str:
    """Return what follows the last dot of a name, in lower case."""
    stem, dot, last = name.rpartition(".")
    return last.lower() if dot and stem else ""


def is_hidden(name: str) -> bool:
    """True for names that operating systems and editors leave behind, such as ``.DS_Store``."""
    return name.startswith(".") or name.lower() in _JUNK


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key that puts "2" before "10"."""
    # numbers are compared as (length, digits): int() refuses more than 4300 digits
    pieces = [_number(piece) if i % 2 else piece for i, piece in enumerate(_DIGITS.split(name))]
    return tuple(pieces), name


def _number(digits: str) -> tuple[int, str]:
    plain = digits.lstrip("0")
    return len(plain), plain
