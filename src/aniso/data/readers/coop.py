"""The split files of CoOp and its successors: JSON lists of path, number and name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from aniso.data.part import Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import by_name
from aniso.data.readers.lists import Listed, reading
from aniso.data.readers.naming import first_few, in_order
from aniso.data.readers.safe_paths import Below, relative
from aniso.data.readers.texts import read_json
from aniso.errors import InputError, printable
from aniso.registry import READERS


@READERS.register("coop")
@final
class CoopReader(Reader):
    """Reads the JSON splits that CoOp published."""

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read ``file``, {"train": [[path, number, class name], ...], ...}; paths are below ``images``."""
        given.require_known(settings, "images", "file", "parts")
        file = root / relative(given.text(settings, "file"), "file")
        below = Below(root, relative(given.text(settings, "images"), "images"))
        asked, notes = given.select_parts(in_order(read_json(file)), settings)
        numbers: dict[str, int] = {}
        rows = {part: _rows(file, part, entries, below, numbers) for part, entries in asked.items()}
        # raises if a part other than train has classes of its own
        by_name({part: [name for _, name, _ in of] for part, of in rows.items()})
        found = reading(root, below, rows, sorted(numbers, key=lambda name: numbers[name]))
        return Reading(found.parts, (*notes, *found.notes))


def _rows(file: Path, part: str, entries: object, below: Below, numbers: dict[str, int]) -> list[Listed]:
    if not isinstance(entries, list):
        raise _malformed(file, [f"{part}: {printable(entries)}"])
    wrong = [f"{part}[{i}]: {printable(entry)}" for i, entry in enumerate(entries) if not _is_entry(entry)]
    if wrong:
        raise _malformed(file, wrong)
    names = {number: name for name, number in numbers.items()}
    for i, (_, number, name) in enumerate(entries):
        # the numbers give the order; names and numbers must agree on who is who
        if numbers.setdefault(name, number) != number or names.setdefault(number, name) != name:
            raise InputError(
                "DATA-LABEL",
                f"'{printable(file)}' gives one class two numbers, or one number two classes",
                found=f"{part}[{i}]: {number} {printable(name)}",
                expected=f"{numbers[name]} {printable(names.get(number, name))}",
                fix="download the split file again",
            )
    where = printable(file)
    return [
        (below.name(path, f"{where} {part}[{i}]"), name, f"{part}[{i}]")
        for i, (path, _, name) in enumerate(entries)
    ]


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    path, number, name = entry
    numbered = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    return isinstance(path, str) and numbered and isinstance(name, str) and bool(name.strip())


def _malformed(file: Path, wrong: list[str]) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(file)}' is no split file",
        found=first_few(wrong),
        expected="lists of [path, number, class name]",
        fix="download the split file again",
    )
