"""Checks of the files that a setting names, made before anything heavy is imported or loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aniso.errors import InputError, printable

if TYPE_CHECKING:
    from aniso.experiments.settings import Setting

_LONGEST_NAME = 255  # bytes; what is longer is no file's name, and cannot even be looked for
_LONGEST_LIST = 16 << 20  # bytes of a file of class names
_TEXTS = ("train", "val", "test")
_START = "start"  # a file of coefficients or a run, which does not lie among the data
_CODES = {"bank": "BANK-NAME", "model": "MODEL-NAME", "weights": "MODEL-NAME", "start": "FILE-MISSING"}


def check_input_files(setting: Setting, data: Path | None) -> None:
    """Raise an error for a file or directory that is named by its path and does not exist, or is empty."""
    for name, value in setting.input_files().items():
        option = name.split()[0]
        is_text = option in _TEXTS
        if not is_text and option != _START and not value.startswith(("/", "./", "../", "~")):
            continue  # a name, of which only the libraries know whether it exists
        below = value.startswith("./") and data is not None and option != _START
        path = data / value[2:] if below and data is not None else Path(value).expanduser()
        if not os.path.lexists(path):
            raise InputError(
                _CODES.get(option, "DATA-MISSING"),
                f"there is nothing at '{printable(path)}'",
                option=f"--{option}",
                fix="correct the path",
            )
        if is_text and path.is_file() and path.stat().st_size == 0:
            raise InputError(
                "DATA-TEXT",
                f"'{printable(path)}' is empty",
                option=f"--{option}",
                expected="JSON lines of prompt and completion, or of text",
                fix="name a file with at least one text",
            )


def read_names(given: Sequence[str]) -> list[str]:
    """Return class names: the lines of a text file, or the given names themselves."""
    if len(given) != 1 or len(given[0].encode(errors="replace")) > _LONGEST_NAME:
        return list(given)
    path = Path(given[0])
    if not path.is_file():
        return list(given)
    with path.open("rb") as file:
        content = file.read(_LONGEST_LIST + 1)
    try:
        text = content.decode("utf-8-sig") if len(content) <= _LONGEST_LIST else None
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise InputError(
            "DATA-CLASS",
            f"'{printable(path)}' is not a text file of class names",
            expected=f"UTF-8, a class name per line, at most {_LONGEST_LIST >> 20} MiB",
            fix="save it as UTF-8 text",
        )
    return [line.strip() for line in text.splitlines() if line.strip()]
