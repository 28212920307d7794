"""Reader of tables with a column of texts and one of labels: Parquet, CSV, TSV and JSON lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from aniso.data.items import Texts
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.csv_table import LABELS, TableRow, by_part, is_table, table_rows
from aniso.data.readers.labels import Column, by_text, once
from aniso.data.readers.naming import first_few, in_order, known_part, some
from aniso.data.readers.parquet import read_column, read_keys, read_labels, schema_names
from aniso.data.readers.parquet_images import OpenTable, format_error
from aniso.data.readers.shards import require_filled, shards
from aniso.data.readers.texts import ClassCard, read_class_card, read_objects
from aniso.errors import AnisoError, InputError, printable
from aniso.item_files import ITEM_COLUMNS
from aniso.registry import READERS
from aniso.weights.jsontext import JsonError, parse_object

_TABLES = (".csv", ".tsv")
_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (".parquet", *_TABLES, *_LINES)
_LARGEST = 4 << 30  # bytes of a Parquet file's columns; texts are held in memory
_IMAGES = ("image", *ITEM_COLUMNS["path"])


@READERS.register("text_table")
@final
class TextTableReader(Reader):
    """Reads tables whose items are texts, not paths: ``text`` and ``label`` in Parquet, CSV or JSON lines."""

    priority = 4

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            try:
                found = [file for files in shards(path, *_SUFFIXES).values() for file in files]
            except AnisoError:
                return False
            return bool(found) and all(_holds_texts(file) for file in found)
        return path.is_file() and path.suffix.lower() in _SUFFIXES and _holds_texts(path)

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read texts and labels; ``text``, ``label``, ``key`` and ``split`` name other columns."""
        given.require_known(settings, "text", "label", "key", "split", "parts")
        rows: dict[str, list[TableRow]] = {}
        keys: dict[str, list[str]] = {}
        listed: tuple[str, ...] | None = None
        counted = False
        for part, files in shards(root, *_SUFFIXES).items():
            for file in files:
                if file.suffix.lower() == ".parquet":
                    found, own, names, numbers = _parquet(file, part, settings)
                    keys.setdefault(part, []).extend(own)
                    listed, counted = listed or names, counted or numbers
                    rows.setdefault(part, []).extend(found)
                else:
                    read = _lines if file.suffix.lower() in _LINES else _csv
                    for name, some_rows in by_part(read(file, part, settings)).items():
                        rows.setdefault(name, []).extend(some_rows)
        chosen, notes = given.select_parts(in_order(rows), settings)
        require_filled(root, {part: len(of) for part, of in chosen.items()})
        card = read_class_card(root if root.is_dir() else root.parent)
        card = card if card.classes is not None else ClassCard(listed, card.prompts)
        return text_reading(chosen, card, keys, counted=counted, notes=notes)


def text_reading(
    parts: Mapping[str, Sequence[TableRow]],
    card: ClassCard,
    keys: Mapping[str, Sequence[str]] | None = None,
    *,
    counted: bool = False,
    notes: Sequence[str] = (),
) -> Reading:
    """Return rows as parts of a task; a text that is repeated within a part is read once."""
    _require_texts(parts)
    all_notes = list(notes)
    columns: dict[str, Column] = {}
    items: dict[str, Texts] = {}
    for part, rows in parts.items():
        kept = once([r.item for r in rows], [r.label for r in rows], lambda i, rows=rows: rows[i].where)  # type: ignore[misc]
        if len(kept) < len(rows):
            all_notes.append(f"{part}: {len(rows) - len(kept):,} repeated texts ignored")
        own = (keys or {}).get(part, ())
        if len(own) != len(rows):
            own = [f"{part}/{_digest(row.item)}" for row in rows]
        used = [rows[i] for i in kept]
        columns[part] = Column([row.label for row in used], lambda i, used=used: used[i].where)  # type: ignore[misc]
        items[part] = Texts([r.item for r in used], [own[i] for i in kept], [r.where for r in used])
    classes, codes = by_text(columns, card.classes, count=counted)
    all_notes += _shared(parts)
    found = {part: Part(items[part], classes, codes[part]) for part in parts}
    return Reading(found, tuple(all_notes), card.prompts, card.descriptions)


def _require_texts(parts: Mapping[str, Sequence[TableRow]]) -> None:
    empty = [row.where for rows in parts.values() for row in rows if not row.item.strip()]
    if empty:
        raise InputError(
            "DATA-TEXT",
            f"{len(empty):,} texts are empty",
            found=first_few(empty),
            expected="at least one letter in every text",
            fix="remove these rows",
        )


def _shared(parts: Mapping[str, Sequence[TableRow]]) -> list[str]:
    """Return a warning for texts that are in two parts."""
    contents = {part: {row.item for row in rows} for part, rows in parts.items()}
    learned = contents.get("train", set()) | contents.get("val", set())
    both = len(learned & contents.get("test", set()))
    return [f"warning: {both:,} texts of test are in train or val, too"] if both else []


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# columns and rows


def _holds_texts(path: Path) -> bool:
    """True if a table names a column of texts and one of labels, and none of images."""
    try:
        if path.suffix.lower() in _TABLES:
            return is_table(path, "text") and not is_table(path, "path")
        names = _names(path)
    except (AnisoError, OSError, UnicodeDecodeError, JsonError):
        return False
    lower = {name.lower() for name in names}
    return bool(lower & {*ITEM_COLUMNS["text"]} and lower & {*LABELS}) and not lower & {*_IMAGES}


def _names(path: Path) -> list[str]:
    if path.suffix.lower() == ".parquet":
        with OpenTable(str(path)) as file:
            return list(file.schema_arrow.names)
    with path.open(encoding="utf-8-sig") as lines:
        return list(parse_object(lines.readline(1 << 20).encode()))


def _column(path: Path, names: Sequence[str], settings: Mapping[str, object], key: str) -> str:
    """Return the name of the column of texts or labels."""
    usual = ITEM_COLUMNS["text"] if key == "text" else LABELS
    if key in settings:
        wanted = given.text(settings, key)
        found = [name for name in names if name == wanted]
    else:
        lower = {name.lower(): name for name in reversed(names)}
        found = [lower[name] for name in usual if name in lower][:1]
    if len(found) != 1:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(path)}' has no column of {key}s",
            found=some(names) or "no column",
            expected=f"a column {', '.join(usual)}",
            fix=f'rename the column, or name it in the task\'s card: [reader] {key} = "..."',
        )
    return found[0]


def _csv(file: Path, part: str, settings: Mapping[str, object]) -> list[TableRow]:
    return table_rows(file, part, settings, "text")[0]


def _lines(file: Path, part: str, settings: Mapping[str, object]) -> list[TableRow]:
    """Read JSON lines, each an object with a text, a label and, if wanted, a split."""
    rows = []
    for fields, where in read_objects(file):
        text, label = (fields[_column(file, list(fields), settings, key)] for key in ("text", "label"))
        if not isinstance(text, str) or not isinstance(label, str | int):
            raise InputError(
                "DATA-TEXT",
                f"{where} is not an example",
                found=printable(f"text: {type(text).__name__}, label: {type(label).__name__}"),
                expected='{"text": "…", "label": "…"}',
                fix="correct the line",
            )
        split = fields.get(given.text(settings, "split", "split"))
        own = (known_part(split) or split.strip()) if isinstance(split, str) and split.strip() else part
        rows.append(
            TableRow(text, str(int(label)) if isinstance(label, bool) else str(label).strip(), own, where)
        )
    return rows


def _parquet(
    path: Path, part: str, settings: Mapping[str, object]
) -> tuple[list[TableRow], list[str], tuple[str, ...] | None, bool]:
    """Return rows, keys, the classes that the schema lists, and whether labels are their indices."""
    with OpenTable(str(path)) as file:
        names, metadata = list(file.schema_arrow.names), file.metadata
        text, label = (_column(path, names, settings, key) for key in ("text", "label"))
        size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        if not 0 <= size <= _LARGEST:
            raise format_error(path, f"{size:,} bytes of columns", f"at most {_LARGEST:,}")
        labels, counted = read_labels(path, file, label)
        texts = _texts(path, read_column(file, text), text)
        key = given.text(settings, "key", "key")
        keys = list(read_keys(path, file, key)) if key in names else []
        listed = schema_names(path, file.schema_arrow, label)
    if len(texts) != len(labels) or (keys and len(set(keys)) != len(texts)):
        raise format_error(
            path, f"{len(texts):,} texts, {len(labels):,} labels, {len(set(keys)):,} keys", "one each"
        )
    where = printable(path)
    rows = [
        TableRow(t, y, part, f"{where} row {i}") for i, (t, y) in enumerate(zip(texts, labels, strict=True))
    ]
    return rows, keys, listed, counted


def _texts(path: Path, column: Any, name: str) -> list[str]:
    import pyarrow as pa

    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise format_error(path, f"column '{printable(name)}' is {kind}", "texts")
    return [value if value is not None else "" for value in column.to_pylist()]
