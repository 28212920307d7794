"""Reader of Parquet tables in the layout of the Hugging Face hub, with the images inside."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import Column, by_text
from aniso.data.readers.naming import first_few, some
from aniso.data.readers.parquet_images import OpenTable, ParquetImages, RowGroup, format_error, read_cells
from aniso.data.readers.shards import require_filled, shards
from aniso.data.readers.texts import ClassCard, distinct, read_class_card
from aniso.errors import InputError, printable
from aniso.registry import READERS

_IN_MEMORY = 1 << 30  # tables up to this size are kept once read
_GROUPS_KEPT = 4
_LARGEST_GROUP = 4 << 30  # a row group is decoded as a whole
_SMALL_ROW = 256


@dataclass(frozen=True)
class _Table:
    """A file's footer, labels and keys; no images."""

    groups: tuple[RowGroup, ...]
    labels: tuple[str, ...]
    counted: bool
    """True if labels are indices into the list of classes."""
    keys: tuple[str, ...] | None
    names: tuple[str, ...] | None
    """The class names in the table's schema."""


@READERS.register("parquet")
@final
class ParquetReader(Reader):
    """Reads Parquet files as the Hugging Face hub has them, with a column of images and one of labels."""

    priority = 3

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return bool(shards(path, ".parquet"))
        return path.is_file() and path.suffix.lower() == ".parquet"

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read footers, labels and keys; ``image``, ``label`` and ``key`` name other columns."""
        given.require_known(settings, "image", "label", "key", "parts")
        files, notes = given.select_parts(shards(root, ".parquet"), settings)
        tables = {part: [_table(path, settings) for path in paths] for part, paths in files.items()}
        require_filled(root, {part: sum(len(table.labels) for table in of) for part, of in tables.items()})
        card = _class_card(root, files, tables)
        columns = {part: _column(files[part], of) for part, of in tables.items()}
        every = [table for of in tables.values() for table in of]
        counted = {table.counted for table in every if table.labels}
        if len(counted) > 1:
            raise format_error(
                root, "labels are numbers in some files and names in others", "one kind of label"
            )
        classes, codes = by_text(columns, card.classes, count=counted == {True})
        size = sum(group.size for table in every for group in table.groups)
        keep = None if size <= _IN_MEMORY else _GROUPS_KEPT
        images = {part: _images(part, of, keep) for part, of in tables.items()}
        parts = {part: Part(images[part], classes, codes[part]) for part in tables}
        return Reading(parts, notes, prompts=card.prompts)


def _images(part: str, tables: Sequence[_Table], keep: int | None) -> ParquetImages:
    ids: list[str] = []
    for table in tables:
        ids += table.keys or (f"{part}/{i}" for i in range(len(ids), len(ids) + len(table.labels)))
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = [name for name in ids if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
        raise InputError(
            "DATA-FORMAT",
            f"{len(twice):,} keys of {part} are not unique",
            found=first_few(twice),
            fix="make the column of keys unique, or leave it out",
        )
    return ParquetImages([group for table in tables for group in table.groups], ids, keep)


# footers and labels


def _table(path: Path, settings: Mapping[str, object]) -> _Table:
    image, label = given.text(settings, "image", "image"), given.text(settings, "label", "label")
    with OpenTable(str(path)) as file:
        schema = file.schema_arrow
        named_key = [given.text(settings, "key")] if "key" in settings else []
        _require_columns(path, schema, [image, label, *named_key])
        groups = row_groups(path, file, image)
        key = given.text(settings, "key", "key")
        keys = read_keys(path, file, key) if key in schema.names else None
        labels, counted = read_labels(path, file, label)
        rows = sum(group.rows for group in groups)
        if not rows == len(labels) == len(labels if keys is None else keys):
            raise format_error(path, f"{rows:,} rows, {len(labels):,} labels", "a label for each row")
        return _Table(tuple(groups), tuple(labels), counted, keys, schema_names(path, schema, label))


def row_groups(path: Path, file: Any, image: str) -> list[RowGroup]:
    """Return the row groups of an open table whose column ``image`` holds images."""
    field = _bytes_field(path, file.schema_arrow.field(image))
    groups = _groups(path, file.metadata, image, field)
    _require_images(path, groups)
    return groups


def _require_columns(path: Path, schema: Any, wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if schema.names.count(name) != 1]
    if missing:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(path)}' has no column {some(missing)}",
            found=some(f"{field.name} ({field.type})" for field in schema),
            expected="image (struct of bytes and path) and label; for texts: text and label",
            fix='name the columns in the task\'s card: [reader] image = "...", label = "..."; '
            'for texts: [reader] kind = "text_table", text = "...", label = "..."',
        )


def _bytes_field(path: Path, field: Any) -> str:
    """Which member of the image column holds bytes; a column of paths is refused."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_struct(kind) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]:
        if _is_bytes(kind.field("bytes").type):
            return "bytes"
    elif _is_bytes(kind):
        return ""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        raise _only_paths(path, field.name)
    raise format_error(path, f"column '{field.name}' is {kind}", "bytes, or a struct of bytes and path")


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _groups(path: Path, metadata: Any, image: str, field: str) -> list[RowGroup]:
    """Return the row groups by their totals.

    The footer's statistics of single columns are not read: where a damaged footer contradicts itself, the
    library ends the whole process (seen with pyarrow 26).
    """
    found, first = [], 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        rows, size = group.num_rows, group.total_byte_size
        if rows < 0 or not 0 <= size <= _LARGEST_GROUP:
            raise format_error(
                path,
                f"row group {i}: {rows:,} rows, {size:,} bytes",
                f"at most {_LARGEST_GROUP:,} bytes; write the table with row_group_size=100",
            )
        found.append(RowGroup(str(path), i, first, rows, image, field, size))
        first += rows
    return found


def _require_images(path: Path, groups: Sequence[RowGroup]) -> None:
    """Raise if rows too small for images hold only paths."""
    first = next((i for i, group in enumerate(groups) if group.rows), None)
    if first is not None and groups[first].size < _SMALL_ROW * groups[first].rows:
        cells = read_cells(groups, first)
        if cells.null_count == len(cells):
            raise _only_paths(path, groups[first].column)


def read_labels(path: Path, file: Any, name: str) -> tuple[list[str], bool]:
    """Labels as text, and whether they are whole numbers."""
    import pyarrow as pa

    column = read_column(file, name)
    kind = column.type
    if column.null_count:
        _refuse_labels(path, column, lambda value: value is None, "no label")
    if pa.types.is_boolean(kind):
        return [str(int(value)) for value in column.to_pylist()], True
    if pa.types.is_integer(kind):
        return [str(value) for value in column.to_numpy().tolist()], True
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [value.strip() for value in column.to_pylist()], False
    _refuse_labels(path, column, lambda _: True, f"a label of type {kind}")
    return [], False


def read_column(file: Any, name: str) -> Any:
    import pyarrow as pa

    column = file.read(columns=[name], use_threads=False).column(0)
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _refuse_labels(path: Path, column: Any, wrong: Callable[[Any], bool], what: str) -> None:
    rows = [(i, value) for i, value in enumerate(column.to_pylist()) if wrong(value)]
    if rows:
        raise InputError(
            "DATA-LABEL",
            f"'{printable(path)}' has {len(rows):,} rows with {what}",
            found=first_few([f"row {i}: {printable(value)}" for i, value in rows]),
            expected="one class for each image: a whole number or a name",
            fix="correct the labels, or take these rows out",
        )


def read_keys(path: Path, file: Any, name: str) -> tuple[str, ...]:
    keys = read_column(file, name).to_pylist()
    wrong = [f"row {i}: {printable(key)}" for i, key in enumerate(keys) if not isinstance(key, (str, int))]
    if wrong:
        raise format_error(path, f"column '{name}': {some(wrong)}", "texts or whole numbers")
    return tuple(map(str, keys))


def schema_names(path: Path, schema: Any, label: str) -> tuple[str, ...] | None:
    """Return the class names that Hugging Face's ``datasets`` writes into the schema."""
    raw = (schema.metadata or {}).get(b"huggingface")
    if raw is None:
        return None
    try:
        names = json.loads(raw)["info"]["features"][label]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return distinct(tuple(names), path)


def _class_card(
    root: Path, files: Mapping[str, Sequence[Path]], tables: Mapping[str, Sequence[_Table]]
) -> ClassCard:
    """Return the classes from a card in the directory of the tables, or else from their schemas."""
    folders = dict.fromkeys(
        [root if root.is_dir() else root.parent, *(p.parent for of in files.values() for p in of)]
    )
    cards = [read_class_card(folder) for folder in folders]
    card = next((card for card in cards if card.classes is not None), cards[0])
    if card.classes is not None:
        return card
    listed = {table.names for of in tables.values() for table in of if table.labels}
    if len(listed) > 1:
        raise InputError(
            "DATA-CLASS",
            f"the tables in '{printable(root)}' list different classes",
            found=[some(names or ["none"]) for names in sorted(listed, key=str)[:4]],
            fix="write them with the same features, or put the list into card.json beside them",
        )
    return ClassCard(next(iter(listed), None), card.prompts)


def _column(files: Sequence[Path], tables: Sequence[_Table]) -> Column:
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table.labels))

    def where(i: int) -> str:
        number = bisect.bisect_right(starts, i) - 1
        return f"{printable(files[number])} row {i - starts[number]}"

    return Column([label for table in tables for label in table.labels], where)


# errors


def _only_paths(path: Path, column: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(path)}' holds the paths of images, not the images",
        column=column,
        expected="bytes; a path in a table is never opened: it could name any file",
        likely="datasets.Dataset.to_parquet wrote it: that stores paths",
        fix="write it with the images embedded, as push_to_hub does, or list paths and labels in a .csv",
    )
