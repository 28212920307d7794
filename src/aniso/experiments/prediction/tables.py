"""Items in files of rows: a column of a CSV, TSV or JSON-lines file, or the lines of a text file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Literal, final

from aniso.errors import InputError, printable
from aniso.item_files import IMAGE_SUFFIXES, ITEM_COLUMNS, JSON_LINES_SUFFIXES, suffix

ItemKind = Literal["images", "texts"]
_LONGEST = 1 << 20  # bytes of a line
_DELIMITERS = (",", ";", "\t")


@final
@dataclass(frozen=True)
class InputItem:
    """An image by its path, or a text; ``id`` names it in the output."""

    id: str
    path: str = ""
    text: str = ""


@final
@dataclass(frozen=True)
class Column:
    """A column of texts or of paths in a table; paths are relative to the table's directory."""

    path: Path
    column: str
    kind: ItemKind
    delimiter: str = ""
    """Empty for JSON lines."""

    def items(self) -> Iterator[InputItem]:
        for number, value in enumerate(self._values(), 1):
            if self.kind == "images":
                place = str(self.path.parent / value.strip())
                yield InputItem(place, path=place)
            else:
                yield InputItem(f"{self.path}:{number}", text=value)

    def _values(self) -> Iterator[str]:
        values = self._cells() if self.delimiter else self._objects()
        for value, line in values:
            if not value.strip():
                raise _bad_line(self.path, line, f"column '{self.column}' is empty")
            yield value

    def _cells(self) -> Iterator[tuple[str, int]]:
        with _reading(self.path) as file:
            rows = csv.reader(_decoded(self.path, _lines(file)), delimiter=self.delimiter, strict=True)
            try:
                names = [name.strip() for name in next(rows)]
                place = names.index(self.column)
                for cells in rows:
                    if cells and len(cells) != len(names):
                        raise _bad_line(
                            self.path, rows.line_num, f"{len(cells)} cells, not {len(names)} as in the header"
                        )
                    if cells:
                        yield cells[place], rows.line_num
            except csv.Error as e:
                raise _bad_line(self.path, rows.line_num, printable(e)) from None

    def _objects(self) -> Iterator[tuple[str, int]]:
        with _reading(self.path) as file:
            for number, line in enumerate(_decoded(self.path, _lines(file)), 1):
                if line.strip():
                    value = _object(self.path, line, number).get(self.column)
                    if not isinstance(value, str):
                        raise _bad_line(self.path, number, f"no text '{self.column}'")
                    yield value, number


def open_table(path: Path, column: str | None = None) -> Column:
    """Return the column of a table that holds its items: the named one, or one with a usual name."""
    names, delimiter, first = _header(path)
    if column is None:
        lower = {name.lower(): name for name in reversed(names)}
        usual = (*ITEM_COLUMNS["text"], *ITEM_COLUMNS["path"])
        column = next((lower[name] for name in usual if name in lower), None)
        if column is None:
            raise _no_column(path, names, f"a column {', '.join(usual)}")
        is_path = column.lower() in ITEM_COLUMNS["path"]
    else:
        if column not in names:
            raise _no_column(path, names, f"a column '{printable(column)}'")
        is_path = suffix(first.get(column, "").strip()) in IMAGE_SUFFIXES
    return Column(path, column, "images" if is_path else "texts", delimiter)


def _header(path: Path) -> tuple[list[str], str, dict[str, str]]:
    """Return the names of a table's columns, its delimiter, and the first row by name."""
    with _reading(path) as file:
        lines = _decoded(path, _lines(file))
        head = next((line for line in lines if line.strip()), "")
        if suffix(path.name) in JSON_LINES_SUFFIXES:
            fields = _object(path, head, 1)
            return list(fields), "", {k: v for k, v in fields.items() if isinstance(v, str)}
        known = ("\t",) if suffix(path.name) == "tsv" else _DELIMITERS
        delimiter = max(known, key=head.count)
        try:
            names = [name.strip() for name in next(csv.reader([head], delimiter=delimiter), [])]
            cells: list[str] = next(csv.reader(lines, delimiter=delimiter), [])
        except csv.Error as e:
            raise _bad_line(path, 1, printable(e)) from None
        return names, delimiter, dict(zip(names, cells, strict=False))


@final
class TextLines:
    """A text, or the path of an image, per line of a file or a stream; empty lines are left out."""

    def __init__(self, path: Path | None, stream: IO[bytes] | None = None) -> None:
        """``path`` is None for a stream, which is read once; its first lines are read now."""
        self.path = path
        self._stream = stream
        self._first: list[bytes] = []
        self.kind: ItemKind = "images" if suffix(self._peek().strip()) in IMAGE_SUFFIXES else "texts"

    def _peek(self) -> str:
        """Return the first line that is not empty."""
        if self.path is not None:
            with _reading(self.path) as file:
                return next((line for line in _decoded(self.path, _lines(file)) if line.strip()), "")
        assert self._stream is not None
        for line in _lines(self._stream):
            self._first.append(line)
            if line.strip():
                return line.decode("utf-8", "replace")
        return ""

    def items(self) -> Iterator[InputItem]:
        if self.path is not None:
            with _reading(self.path) as file:
                yield from self._items(str(self.path), _lines(file))
        elif self._stream is not None:
            yield from self._items("stdin", chain(self._first, _lines(self._stream)))

    def _items(self, name: str, lines: Iterator[bytes]) -> Iterator[InputItem]:
        for number, line in enumerate(_decoded(Path(name), lines), 1):
            text = line.strip()
            if text and self.kind == "images":
                yield InputItem(text, path=text)
            elif text:
                yield InputItem(f"{name}:{number}", text=text)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines, of one that is too long only the first bytes."""
    while line := file.readline(_LONGEST + 1):
        yield line


def _reading(path: Path) -> IO[bytes]:
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        return path.open("rb")
    except OSError as e:
        raise InputError(
            "DATA-MISSING",
            f"'{printable(path)}' cannot be read",
            reason=e.strerror or str(e),
            fix=f"ls -l '{printable(path)}'",
        ) from None


def _decoded(path: Path, lines: Iterator[bytes]) -> Iterator[str]:
    """Yield lines of text; raises for one that is too long, or not UTF-8."""
    for number, line in enumerate(lines, 1):
        if len(line) > _LONGEST:
            raise _bad_line(path, number, f"longer than {_LONGEST:,} bytes")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as e:
            raise _bad_line(path, number, f"byte {e.start:,} is not UTF-8") from None


def _object(path: Path, line: str, number: int) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise _bad_line(path, number, f"not JSON: {printable(e, 80)}") from None
    if not isinstance(found, dict):
        raise _bad_line(path, number, "not a JSON object")
    return found


def _bad_line(path: Path, number: int, found: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(path)}', line {number}, cannot be read",
        found=found,
        fix="correct the line, or remove it",
    )


def _no_column(path: Path, names: Sequence[str], expected: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(path)}' has no column of texts or paths",
        found=", ".join(printable(name, 40) for name in names[:12]) or "no column",
        expected=expected,
        fix=f"--column {printable(names[0], 40) if names else 'NAME'}",
    )
