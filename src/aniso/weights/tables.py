"""Small parquet tables that aniso writes: whole or not at all, and read only if their columns are known."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aniso.errors import InputError, printable
from aniso.json_value import JsonObject, JsonValue
from aniso.weights.atomic import atomic_file
from aniso.weights.jsontext import JsonError, parse_object

_LARGEST = 8 << 30  # bytes of all columns once they are decoded
_DICTIONARY = 64 << 20
_KEY = b"aniso"

Columns = Mapping[str, str]
"""Names of columns, and their types: text, bytes, texts, whole or number."""


def write_table(
    path: Path,
    columns: Columns,
    rows: Sequence[Sequence[Any]],
    about: Mapping[str, JsonValue],
    *,
    overwrite: bool,
) -> None:
    """Write rows, whose values are in the order of the columns; ``about`` is kept in the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = _kinds()
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    schema = schema.with_metadata({_KEY: json.dumps(about, sort_keys=True).encode()})
    values = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    table = pa.table(
        [pa.array(own, field.type) for own, field in zip(values, schema, strict=True)], schema=schema
    )
    out = io.BytesIO()
    pq.write_table(
        table, out, compression="zstd", dictionary_pagesize_limit=_DICTIONARY, write_statistics=False
    )
    with atomic_file(path, overwrite=overwrite) as file:
        file.stream.write(out.getbuffer())


def read_table(path: Path, columns: Columns, code: str) -> tuple[dict[str, list[Any]], JsonObject]:
    """Return the columns of a table and what it is about; raises an error with ``code`` for other files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = _kinds()
    try:
        # by position and in this thread; statistics of a damaged footer are not read
        with pq.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            size = sum(
                file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)
            )
            schema = file.schema_arrow
            about = parse_object((schema.metadata or {}).get(_KEY, b""))
            if {field.name: field.type for field in schema} != {n: kinds[k] for n, k in columns.items()}:
                raise ValueError(f"columns {', '.join(schema.names)}")
            if not 0 <= size <= _LARGEST:
                raise ValueError(f"{size} bytes once it is read")
            table = file.read(use_threads=False)
            table.validate(full=True)
            return {name: table.column(name).to_pylist() for name in columns}, about
    except (pa.ArrowException, OSError, ValueError, JsonError) as e:
        missing = isinstance(e, FileNotFoundError)
        raise InputError(
            "FILE-MISSING" if missing else code,
            f"'{printable(path)}' does not exist" if missing else f"'{printable(path)}' cannot be read",
            reason="" if missing else printable(str(e).splitlines()[0] if str(e) else type(e).__name__),
            expected=f"a table with the columns {', '.join(columns)}",
            fix="check the name" if missing else "remove it, and run the command that makes it again",
        ) from None


def _kinds() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "text": pa.string(),
        "bytes": pa.binary(),
        "texts": pa.list_(pa.string()),
        "whole": pa.int64(),
        "number": pa.float64(),
    }
