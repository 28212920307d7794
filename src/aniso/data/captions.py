"""Images with captions, which an image tower is aligned to a text tower with.

Captions are classes here: a split of captioned images has the distinct captions as its classes, with the
prompt ``{}``, and the caption of every image as its label.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from aniso.classes import TEXT_PROMPTS, ClassList
from aniso.data import sampling
from aniso.data.images import FileImages
from aniso.data.items import Items
from aniso.data.readers import read, recognise
from aniso.data.readers.naming import first_few, known_part, part_of_file, some
from aniso.data.readers.parquet import read_column, read_keys, row_groups
from aniso.data.readers.parquet_images import OpenTable, ParquetImages, format_error
from aniso.data.readers.safe_paths import Below
from aniso.data.readers.texts import read_lines, read_text
from aniso.data.splits import Labelled
from aniso.errors import InputError, UsageError, printable
from aniso.weights.jsontext import JsonError, parse_object

CAPTIONS = ("captions", "caption", "text", "title")
IMAGES = ("image", "path", "file", "filename", "filepath", "file_name")
"""The usual names of columns, the first that is there is used."""
_TABLES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson")
_HELD_OUT = ("val", "test")
_IN_MEMORY = 1 << 30
_GROUPS_KEPT = 4


@final
@dataclass(frozen=True)
class CaptionedImages:
    """Images of one source, each with one or more captions."""

    name: str
    items: Items
    captions: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        empty = [
            self.items.describe(i)
            for i, own in enumerate(self.captions)
            if not own or not all(text.strip() for text in own)
        ]
        if empty:
            raise InputError(
                "DATA-CAPTION",
                f"{len(empty):,} images of {printable(self.name)} have an empty caption",
                found=first_few(empty),
                expected="at least one letter in every caption",
                fix="write a caption for them, or remove these rows",
            )


@final
class PairItems(Items):
    """Images of several sources, one item for every caption of an image."""

    def __init__(self, sources: Sequence[CaptionedImages]) -> None:
        self._items = tuple(source.items for source in sources)
        self._places = [
            (which, index)
            for which, source in enumerate(sources)
            for index, own in enumerate(source.captions)
            for _ in own
        ]
        self._ids = tuple(
            f"{which} {source.items.ids[index]}\x1f{n}"
            for which, source in enumerate(sources)
            for index, own in enumerate(source.captions)
            for n in range(len(own))
        )

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        which, inner = self._places[index]
        return self._items[which].describe(inner)

    def content(self, index: int) -> bytes:
        which, inner = self._places[index]
        return self._items[which].content(inner)

    def open(self, index: int) -> Any:
        which, inner = self._places[index]
        return self._items[which].open(inner)


def caption_split(sources: Sequence[CaptionedImages]) -> Labelled:
    """Return one split of all pairs of an image and a caption; its classes are the distinct captions.

    A source that is given twice counts twice.
    """
    texts = [text.strip() for source in sources for own in source.captions for text in own]
    if len(set(texts)) < 2:
        raise UsageError(
            "DATA-CAPTION",
            "images cannot be compared by their captions",
            found=f"{len(texts):,} captions, {len(set(texts))} different",
            expected="at least two different captions",
            fix="--pairs with images of more than one kind",
        )
    place: dict[str, int] = {}
    labels = tuple(place.setdefault(text, len(place)) for text in texts)
    name = ", ".join(dict.fromkeys(source.name for source in sources))
    classes = ClassList(tuple(place), TEXT_PROMPTS)
    return Labelled(name, classes, PairItems(sources), labels, "train")


def read_captions(path: str | Path, part: str = "train") -> CaptionedImages:
    """Read images with captions: a table with a column of captions, or any classification data set.

    A table is a Parquet file with images inside, or CSV, TSV or JSON lines with image paths relative to it; a
    directory may hold one per part, of which ``part`` is read. Of a classification data set, a class has one
    of its prompts as caption, drawn by its name.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            "DATA-MISSING",
            f"there is no '{printable(path)}'",
            expected="a table with captions, or a classification data set",
            fix=f"ls '{printable(path.parent)}'",
        )
    if part in _HELD_OUT:
        raise UsageError("LEARN-TEST", f"pairs of {part} are held out", fix="leave it out, for train")
    table = _table_of(path, part)
    if table is not None and _has_captions(table):
        return _read_table(table)
    return _from_classes(path, part)


def _table_of(path: Path, part: str) -> Path | None:
    """Return the table to read: a file itself, or that of the part in a directory."""
    if path.is_file():
        held_out = known_part(part_of_file(path.name)) in _HELD_OUT
        if held_out:
            raise UsageError(
                "LEARN-TEST",
                f"'{printable(path)}' is held out by its name: it cannot be trained on",
                fix="name the file of another part",
            )
        return path if path.suffix.lower() in _TABLES else None
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in _TABLES and p.is_file())
    return next((p for p in found if part_of_file(p.name) == part), None)


def _has_captions(path: Path) -> bool:
    names = [name.lower() for name in _header(path)]
    labelled = any(name in names for name in ("label", "class", "target", "category"))
    wanted = CAPTIONS[:2] if labelled else CAPTIONS
    return any(name in names for name in wanted) and any(name in names for name in IMAGES)


def _header(path: Path) -> list[str]:
    """Return the names of a table's columns."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        with OpenTable(str(path)) as file:
            return list(file.schema_arrow.names)
    if kind in (".csv", ".tsv"):
        rows = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=_delimiter(path))
        return [cell.strip() for cell in next(rows, [])]
    line, where = next(iter(read_lines(path)), ("{}", ""))
    return list(_fields(line, where))


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        return dict(parse_object(line.encode()))
    except JsonError as e:
        raise InputError(
            "DATA-TEXT", f"{where} is not a JSON object", reason=printable(e), fix="correct the line"
        ) from None


def _column(path: Path, names: Sequence[str], usual: Sequence[str]) -> str:
    lower = {name.lower(): name for name in reversed(names)}
    found = next((lower[name] for name in usual if name in lower), None)
    if found is None:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(path)}' has no column of {usual[0]}",
            found=some(names) or "no column",
            expected=f"a column {', '.join(usual)}",
            fix="rename the column",
        )
    return found


def _read_table(path: Path) -> CaptionedImages:
    name = path.resolve().parent.name if known_part(part_of_file(path.name)) else path.stem
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, name)
    rows = _csv_rows(path) if path.suffix.lower() in (".csv", ".tsv") else _json_rows(path)
    below = Below(path.parent)
    files: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for file, captions, where in rows:
        local = below.name(file, where)
        files.setdefault(local, []).extend(captions)
        places.setdefault(local, where)
    named = list(files)
    below.require(named, lambda i: places[named[i]])
    return CaptionedImages(name, FileImages(path.parent, named), tuple(tuple(files[f]) for f in named))


_Row = tuple[str, list[str], str]


def _csv_rows(path: Path) -> list[_Row]:
    names = _header(path)
    image, caption = (names.index(_column(path, names, usual)) for usual in (IMAGES, CAPTIONS))
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=_delimiter(path), strict=True)
    rows: list[_Row] = []
    try:
        next(reader)
        for cells in reader:
            where = f"{printable(path)} line {reader.line_num}"
            if cells and len(cells) != len(names):
                raise format_error(path, f"{where}: {len(cells)} cells", f"{len(names)} cells")
            if cells:
                rows.append((cells[image].strip(), [cells[caption]], where))
    except csv.Error as e:
        raise format_error(path, f"line {reader.line_num}: {printable(e)}", "a table") from None
    return rows


def _json_rows(path: Path) -> list[_Row]:
    rows: list[_Row] = []
    for line, where in read_lines(path):
        fields = _fields(line, where)
        image, caption = (fields[_column(path, list(fields), usual)] for usual in (IMAGES, CAPTIONS))
        captions = [caption] if isinstance(caption, str) else caption
        if not isinstance(image, str) or not _are_texts(captions):
            raise format_error(path, f"{where}: {printable(line[:80])}", '{"image": "…", "caption": "…"}')
        rows.append((image, captions, where))
    return rows


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _read_parquet(path: Path, name: str) -> CaptionedImages:
    with OpenTable(str(path)) as file:
        names = list(file.schema_arrow.names)
        image, caption = _column(path, names, IMAGES), _column(path, names, CAPTIONS)
        groups = row_groups(path, file, image)
        cells = read_column(file, caption).to_pylist()
        keys = read_keys(path, file, "key") if "key" in names else None
    captions = [[cell] if isinstance(cell, str) else list(cell or []) for cell in cells]
    wrong = [f"row {i}" for i, own in enumerate(captions) if not _are_texts(own)]
    rows = sum(group.rows for group in groups)
    if wrong or len(captions) != rows:
        raise format_error(
            path, some(wrong) if wrong else f"{rows:,} rows, {len(captions):,} captions", "texts"
        )
    ids = keys or tuple(f"{name}/{i}" for i in range(rows))
    if len(set(ids)) < len(ids):
        raise format_error(path, "keys that are not unique", "a key of its own for every image")
    size = sum(group.size for group in groups)
    items = ParquetImages(groups, ids, None if size <= _IN_MEMORY else _GROUPS_KEPT)
    return CaptionedImages(name, items, tuple(map(tuple, captions)))


def _from_classes(path: Path, part: str) -> CaptionedImages:
    """Read a classification data set; captions are prompts with class names filled in."""
    kind = recognise(path)
    if kind is None:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(path)}' holds neither captions nor classes",
            expected="a table with columns image and caption, or a classification data set",
            fix="see docs/howto/align.md for the layouts that are read",
        )
    reading = read(kind, path, {})
    chosen = next(iter(reading.parts)) if len(reading.parts) == 1 else part
    if chosen not in reading.parts or chosen in _HELD_OUT:
        raise InputError(
            "DATA-SPLIT",
            f"'{printable(path)}' has no part '{part}' to learn from",
            found=", ".join(reading.parts),
            fix="name the table of another part, such as PATH/pool.parquet",
        )
    own = reading.parts[chosen]
    if own.items.kind != "images":
        raise InputError("DATA-ITEM", f"'{printable(path)}' holds {own.items.kind}", fix="images are needed")
    classes = ClassList(
        tuple(" ".join(n.replace("_", " ").split()) or n for n in own.classes),
        *((reading.prompts,) if reading.prompts else ()),
    )
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    texts = classes.texts()
    drawn = [
        texts[i][sampling.number("caption", name, label) % len(texts[i])]
        for i, label in enumerate(classes.names)
    ]
    return CaptionedImages(name, own.items, tuple((drawn[code],) for code in own.codes))
