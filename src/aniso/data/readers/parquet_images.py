"""Images in the row groups of Parquet files, read when they are used."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from aniso.data.images import Images
from aniso.errors import InputError, printable
from aniso.weights.caches import HashCache

_LARGEST_CELL = 1 << 30


@dataclass(frozen=True)
class RowGroup:
    """A row group, the unit in which a Parquet file is read."""

    path: str
    index: int
    first: int
    """The number of its first row in the file."""
    rows: int
    column: str
    field: str
    """The member of the column's struct that holds the bytes; empty for plain bytes."""
    size: int
    """The bytes of all its columns, according to the footer."""


@final
class ParquetImages(Images):
    """Images in row groups; the groups that were read stay in memory, all or the last ``keep``."""

    def __init__(self, groups: Sequence[RowGroup], ids: Sequence[str], keep: int | None) -> None:
        self._groups = tuple(groups)
        self._ids = tuple(ids)
        self._keep = keep
        self._starts = [0]
        for group in groups:
            self._starts.append(self._starts[-1] + group.rows)
        self._group = self._cache()

    def _cache(self) -> Callable[[int], Any]:
        # unlike a dictionary and a lock, lru_cache is right with threads, and after a fork amid them
        return functools.lru_cache(self._keep)(functools.partial(read_cells, self._groups))

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        group, row = self._place(index)
        where = self._groups[group]
        return f"{where.path} row {where.first + row}"

    def content(self, index: int) -> bytes:
        group, row = self._place(index)
        cell = self._group(group)[row]
        size = len(cell.as_buffer()) if cell.is_valid else 0
        if not cell.is_valid or size > _LARGEST_CELL:
            found = f"{size:,} bytes" if cell.is_valid else "nothing"
            raise format_error(
                self.describe(index), f"column '{self._groups[group].column}' holds {found}", "an image"
            )
        return bytes(cell.as_py())

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        group, row = self._place(index)
        where = self._groups[group]
        part = f"{where.column} row {where.first + row}"
        return cache.digest(Path(where.path), part, lambda: self.content(index))

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self._ids):
            raise IndexError(index)
        group = bisect.bisect_right(self._starts, index) - 1
        return group, index - self._starts[group]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._group = self._cache()


def read_cells(groups: Sequence[RowGroup], number: int) -> Any:
    """Read the bytes of a row group's images."""
    group = groups[number]
    wanted = f"{group.column}.{group.field}" if group.field else group.column
    with OpenTable(group.path) as file:
        column = file.read_row_group(group.index, columns=[wanted], use_threads=False).column(0)
        if group.field:
            column = column.combine_chunks().field(0) if column.num_chunks != 1 else column.chunk(0).field(0)
        if len(column) != group.rows:
            raise InputError(
                "FILE-CHANGED",
                f"'{printable(group.path)}' changed since it was listed",
                fix="make sure nothing writes to the file, then try again",
            )
        return column


class OpenTable:
    """An open table; errors of pyarrow become ours.

    Read by position and in this thread: no memory maps, and no threads that a fork would lose.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(self._path, memory_map=False, pre_buffer=False)
        except (pa.ArrowException, OSError, ValueError) as e:
            raise self._damaged(e) from None
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa

        self._file.close()
        if isinstance(error, (pa.ArrowException, OSError, ValueError)):
            raise self._damaged(error) from None

    def _damaged(self, error: BaseException) -> InputError:
        return InputError(
            "DATA-FORMAT",
            f"'{printable(self._path)}' cannot be read as a parquet table",
            found=printable(str(error).splitlines()[0] if str(error) else type(error).__name__),
            fix="download it again",
        )


def format_error(path: Path | str, found: str, expected: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(path)}' cannot be used",
        found=found,
        expected=expected,
        fix="write the table again",
    )
