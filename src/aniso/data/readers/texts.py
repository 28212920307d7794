"""Text files of a dataset: of bounded size, regular, UTF-8; among them lists of classes."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aniso.data.readers.naming import some
from aniso.errors import InputError, printable
from aniso.json_value import JsonObject
from aniso.weights.jsontext import JsonError, parse_object

_LARGEST = 512 << 20  # a list of ten million images


@dataclass(frozen=True)
class ClassCard:
    """Classes and prompts from ``card.json`` or ``classes.txt`` in a dataset's directory."""

    classes: tuple[str, ...] | None = None
    prompts: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()
    """One phrase per class, which prompts are filled with."""


def read_bytes(path: Path, largest: int = _LARGEST) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe could block for ever
            raise _unreadable(path, "not a regular file", "a text file")
        if status.st_size > largest:
            raise _unreadable(path, f"{status.st_size:,} bytes", f"at most {largest:,}")
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(
            "DATA-MISSING",
            f"'{printable(path)}' does not exist",
            fix=f"complete the dataset: ls '{printable(path.parent)}'",
        ) from None
    except OSError as e:
        raise _unreadable(path, e.strerror or str(e), "a readable file") from None


def read_text(path: Path, largest: int = _LARGEST) -> str:
    try:
        return read_bytes(path, largest).decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as e:
        raise _unreadable(path, f"byte {e.start:,} is not UTF-8", "UTF-8: save the file as such") from None


def read_lines(path: Path) -> list[tuple[str, str]]:
    """Return every line that is not empty, with its file and number for messages."""
    lines = read_text(path).split("\n")
    label = printable(path)
    return [(line.strip(), f"{label} line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def read_objects(path: Path) -> Iterator[tuple[JsonObject, str]]:
    """Yield the object of every line of JSON lines, with its file and number for messages."""
    for line, where in read_lines(path):
        try:
            yield parse_object(line.encode()), where
        except JsonError as e:
            raise InputError(
                "DATA-TEXT", f"{where} is not a JSON object", reason=printable(e), fix="correct the line"
            ) from None


def read_json(path: Path, largest: int = _LARGEST) -> JsonObject:
    try:
        return parse_object(read_bytes(path, largest))
    except JsonError as e:
        raise _unreadable(path, printable(e), "a JSON object") from None


def read_class_card(directory: Path) -> ClassCard:
    """Read ``card.json`` or ``classes.txt`` from a directory; empty if it has neither."""
    card, lines = directory / "card.json", directory / "classes.txt"
    if card.is_file():
        fields = read_json(card, 16 << 20)
        listed = fields.get("classes")
        classes = None if listed is None else distinct(_strings(card, "classes", listed), card)
        prompts = _strings(card, "prompts", fields.get("prompts", []))
        return ClassCard(classes, prompts, _descriptions(card, fields, classes))
    if lines.is_file():
        return ClassCard(distinct(tuple(line for line, _ in read_lines(lines)), lines))
    return ClassCard()


def _descriptions(card: Path, fields: JsonObject, classes: tuple[str, ...] | None) -> tuple[str, ...]:
    found = _strings(card, "descriptions", fields.get("descriptions", []))
    if found and len(found) != len(classes or ()):
        raise _unreadable(
            card, f"{len(found)} descriptions", f"one for each of the {len(classes or ())} classes"
        )
    return found


def distinct(classes: tuple[str, ...], source: Path) -> tuple[str, ...]:
    """Return the classes; raises if one is empty or named twice."""
    seen: set[str] = set()
    twice = [name for name in classes if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
    empty = [str(i) for i, name in enumerate(classes) if not name.strip()]
    if twice or empty or not classes:
        raise InputError(
            "DATA-CLASS",
            f"the list of classes in '{printable(source)}' cannot be used",
            twice=some(twice),
            empty=some(empty),
            found="" if classes else "no class",
            fix="give every class a unique name",
        )
    return classes


def _strings(path: Path, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _unreadable(path, f"{key}: {printable(value)}", f"{key}: a list of texts")
    return tuple(value)


def _unreadable(path: Path, found: str, expected: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(path)}' cannot be used",
        found=found,
        expected=expected,
        fix="replace the file",
    )
