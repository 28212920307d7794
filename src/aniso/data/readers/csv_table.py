"""Tables as CSV or TSV: a column of image paths, or of texts, and one of labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from aniso.data.images import FileImages
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import Column, by_text, once
from aniso.data.readers.naming import first_few, in_order, known_part, some
from aniso.data.readers.safe_paths import Below
from aniso.data.readers.texts import read_class_card, read_text
from aniso.errors import AnisoError, InputError, printable
from aniso.item_files import ITEM_COLUMNS, is_hidden
from aniso.registry import READERS

LABELS = ("label", "class", "target", "category")
SUFFIXES = (".csv", ".tsv")


@dataclass(frozen=True)
class TableRow:
    """A row of a table: an image's path or a text, and its label, both as written."""

    item: str
    label: str
    part: str
    where: str


@dataclass(frozen=True)
class TableColumns:
    """The positions of the columns."""

    item: int
    label: int
    split: int | None
    unused: tuple[str, ...]
    delimiter: str


@READERS.register("csv")
@final
class CsvReader(Reader):
    """Reads a CSV or TSV table with a column of image paths and one of labels."""

    priority = 2

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return any(is_table(table) for table in _tables_in(path))
        return path.is_file() and path.suffix.lower() in SUFFIXES

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read paths, which are relative to the table's directory, and labels."""
        given.require_known(settings, "path", "label", "split", "parts")
        files, notes = _tables(root)
        rows: list[TableRow] = []
        for part, file in files.items():
            found, columns = table_rows(file, part, settings)
            rows += found
            if columns.unused:
                notes.append(f"columns of {printable(file.name)} not used: {some(columns.unused)}")
        grouped, left_out = given.select_parts(by_part(rows), settings)
        base = root if root.is_dir() else root.parent
        return _reading(base, grouped, [*notes, *left_out])


def is_table(path: Path, item: str = "path") -> bool:
    """True if a file's first line names a column of paths (or texts) and one of labels."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:
            return _columns(path, f.readline(1 << 16), {}, item) is not None
    except (OSError, UnicodeDecodeError, AnisoError):
        return False


def _tables_in(root: Path) -> list[Path]:
    """Return the tables in a directory."""
    names = sorted(p for p in root.iterdir() if p.suffix.lower() in SUFFIXES and not is_hidden(p.name))
    return [path for path in names if path.is_file()]


def _tables(root: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the table of each part, and notes."""
    if not root.is_dir():
        return {known_part(root.stem) or "all": root}, []
    found = _tables_in(root)
    standard = {part: path for path in found if (part := known_part(path.stem))}
    twice = [path.name for path in found if (part := known_part(path.stem)) and standard[part] != path]
    if twice:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(root)}' has two tables for one part",
            found=some(sorted({*twice, *(path.name for path in standard.values())})),
            fix="keep one of them, or name a table itself",
        )
    if standard:
        rest = [path.name for path in found if path not in standard.values()]
        return standard, [f"ignored tables whose names are no split: {some(rest)}"] if rest else []
    if len(found) != 1:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(root)}' does not say which table to read",
            found=some(path.name for path in found) or "no .csv or .tsv file",
            expected="train.csv, val.csv and test.csv, or a single table",
            fix="name the table itself",
        )
    return {"all": found[0]}, []


# rows


def table_rows(
    file: Path, part: str, settings: Mapping[str, object], item: str = "path"
) -> tuple[list[TableRow], TableColumns]:
    """Return the rows of a table, with the positions of its columns; ``item`` is path or text."""
    content = read_text(file)
    header = next(iter(content[: 1 << 16].splitlines()), "")
    columns = _columns(file, header, settings, item)
    if columns is None:
        raise _no_columns(file, header, item)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=columns.delimiter, strict=True)
    label = printable(file)
    try:
        width = len(next(reader))
        lines = [(cells, f"{label} line {reader.line_num}") for cells in reader if cells]
    except csv.Error as e:
        raise _malformed(file, [f"line {reader.line_num}: {printable(e)}"]) from None
    wrong = [f"{where}: {len(cells)} cells, not {width}" for cells, where in lines if len(cells) != width]
    if wrong:
        raise _malformed(file, wrong)
    if not lines:
        raise InputError("DATA-EMPTY", f"'{label}' has no rows", fix="add a line for every item")
    rows = [_row(cells, where, columns, part) for cells, where in lines]
    without_split = [row.where for row in rows if not row.part]
    if without_split:
        raise _malformed(file, [f"{where}: no split" for where in without_split])
    return rows, columns


def _row(cells: Sequence[str], where: str, columns: TableColumns, part: str) -> TableRow:
    if columns.split is not None:
        split = cells[columns.split].strip()
        part = known_part(split) or split
    return TableRow(cells[columns.item].strip(), cells[columns.label].strip(), part, where)


def column_names(file: Path) -> list[str]:
    """Return the names in a table's first line."""
    header = next(iter(read_text(file)[: 1 << 16].splitlines()), "")
    return max((names for _, names in _headers(file, header)), key=len, default=[])


def _headers(file: Path, header: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the names in a header for every delimiter that tables may have."""
    for delimiter in ("\t",) if file.suffix.lower() == ".tsv" else (",", ";", "\t"):
        try:
            yield delimiter, [cell.strip() for cell in next(csv.reader([header], delimiter=delimiter), [])]
        except csv.Error:
            continue


def _columns(file: Path, header: str, settings: Mapping[str, object], item: str) -> TableColumns | None:
    for delimiter, names in _headers(file, header):
        place = _find(names, settings, item, ITEM_COLUMNS[item])
        label = _find(names, settings, "label", LABELS)
        split = _find(names, settings, "split", ("split",))
        if (
            place is not None
            and label is not None
            and place != label
            and (split is not None) >= ("split" in settings)
        ):
            unused = tuple(name for i, name in enumerate(names) if i not in (place, label, split))
            return TableColumns(place, label, split, unused, delimiter)
    return None


def _find(
    names: Sequence[str], settings: Mapping[str, object], key: str, standard: Sequence[str]
) -> int | None:
    if key in settings:
        name = given.text(settings, key)
        return names.index(name) if name in names else None
    lower = [name.lower() for name in names]
    return next((lower.index(name) for name in standard if name in lower), None)


def by_part(rows: Sequence[TableRow]) -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(row.part, []).append(row)
    return in_order(found)


def _reading(base: Path, parts: Mapping[str, list[TableRow]], notes: list[str]) -> Reading:
    below = Below(base)
    paths: dict[str, list[str]] = {}
    columns: dict[str, Column] = {}
    for part, rows in parts.items():
        named = [below.name(row.item, row.where) for row in rows]
        kept = once(named, [row.label for row in rows], lambda i, rows=rows: rows[i].where)  # type: ignore[misc]
        if len(kept) < len(rows):
            notes.append(f"{part}: {len(rows) - len(kept):,} repeated lines ignored")
        paths[part] = [named[i] for i in kept]
        columns[part] = _column([rows[i] for i in kept])
        below.require(paths[part], columns[part].where)
    card = read_class_card(base)
    classes, codes = by_text(columns, card.classes)
    images = {part: Part(FileImages(base, paths[part]), classes, codes[part]) for part in parts}
    return Reading(images, tuple(notes), prompts=card.prompts)


def _column(rows: Sequence[TableRow]) -> Column:
    return Column([row.label for row in rows], lambda i: rows[i].where)


# errors


def _no_columns(file: Path, header: str, item: str) -> InputError:
    what = "texts" if item == "text" else "texts or image paths"
    usual = [*ITEM_COLUMNS["text"], *(ITEM_COLUMNS["path"] if item == "path" else ())]
    return InputError(
        "DATA-FORMAT",
        f"'{printable(file)}' has no column of {what}, or none of labels",
        found=printable(header.strip()) or "an empty line",
        expected=f"a first line with a column of {', '.join(usual)} and one of {', '.join(LABELS)}",
        fix="name the columns in the first line, or in the task's card",
    )


def _malformed(file: Path, wrong: list[str]) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(file)}' has {len(wrong):,} lines that cannot be read",
        found=first_few(wrong),
        fix="correct these lines",
    )
