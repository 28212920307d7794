"""Records on disk: one file per experiment, and one per cell that has just ended.

A finished experiment is one file, ``records.jsonl``, with a record per line, sorted by id. A cell of an
experiment that has just ended is a JSON file of its own, so that many processes may write at once and a crash
costs nothing; ``RecordStore`` moves such files into the one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from pydantic import ValidationError

from aniso.errors import InputError, UsageError, printable
from aniso.records import SCHEMA, Record

RECORDS = "records.jsonl"
FAILED = ".failed.json"
_BESIDE = ("failure.json", "adapter_config.json", "classes.json")
_LARGEST = 1 << 30  # bytes of a file
_LONGEST = 64 << 20  # bytes of a record


def record_text(record: Record) -> str:
    """Return the text of a file with one record."""
    return json.dumps(record.content(), indent=1, sort_keys=True) + "\n"


def read_records(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Record]:
    """Read every record in these files and below these directories, or those with one of these labels.

    Copies count once.
    """
    read: dict[tuple[str, str], tuple[str, Record]] = {}
    for path in _files(paths):
        for place, record in _records(path):
            # experiments may have a run in common, such as zero-shot
            first, known = read.setdefault((record.experiment, record.id), (place, record))
            if known != record:
                raise InputError(
                    "RECORD",
                    "two records of the same run differ",
                    found=[first, place],
                    differs=", ".join(_differences(known, record)),
                    fix="report on one of the two",
                )
    found = [record for _, record in read.values()]
    known_labels = {record.label for record in found}
    if unknown := set(labels) - known_labels:
        raise UsageError(
            "RECORD",
            "no record has this label",
            found=sorted(unknown),
            expected=", ".join(sorted(known_labels)),
            fix="choose one of these labels",
        )
    return [record for record in found if not labels or record.label in labels]


def failed_cells(paths: Sequence[Path]) -> int:
    """How many cells below these directories failed, and so have no record."""
    return sum(1 for path in map(Path, paths) if path.is_dir() for _ in path.rglob(f"*{FAILED}"))


@final
class RecordStore:
    """The finished records of a directory, by id."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / RECORDS

    def finished(self) -> dict[str, Record]:
        """The records in ``records.jsonl``."""
        if not self.path.exists():
            return {}
        return {record.id: record for _, record in _records(self.path)}

    def merged(self, loose: Sequence[Path]) -> str:
        """The text of ``records.jsonl`` with the records of other files added, sorted by id.

        Of two records with one id the one from a file of its own is newer, and replaces the other.
        """
        found = self.finished() | {record.id: record for record in map(read_record, loose)}
        return "".join(f"{json.dumps(found[i].content(), sort_keys=True)}\n" for i in sorted(found))


def read_record(path: Path) -> Record:
    """Read the record in a file of its own."""
    (found,) = (record for _, record in _records(path))
    return found


def _differences(a: Record, b: Record) -> list[str]:
    ours, theirs = a.model_dump(), b.model_dump()
    return [printable(name) for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            found = [*path.rglob("*.json"), *path.rglob(RECORDS)]
            yield from sorted(p for p in found if p.is_file() and not _is_beside(p, path))
        elif path.is_file():
            yield path
        else:
            raise _bad(path, "no such file" if not path.exists() else "neither a file nor a directory")


def _is_beside(path: Path, root: Path) -> bool:
    """True for what runs leave beside records: reasons of failures, adapters, classes, lists of images."""
    words = path.relative_to(root).parts
    hidden = any(word.startswith(".") for word in words) or "images" in words[:-1]
    return hidden or path.name.endswith(FAILED) or path.name in _BESIDE


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    """The records of a file, each with its place for messages."""
    place = printable(path)
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            raise _bad(place, f"{size:,} bytes")
        if path.suffix != ".jsonl":
            yield place, _parsed(path.read_bytes(), place)
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{place}, line {number}"
                yield where, _parsed(line, where)
    except OSError as e:
        raise _bad(place, e.strerror or str(e)) from None


def _parsed(data: bytes, place: str) -> Record:
    if len(data) > _LONGEST:
        raise _bad(place, f"{len(data):,} bytes")
    try:
        return Record.model_validate_json(data)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        key = ".".join(str(word) for word in first["loc"])
        raise _bad(place, f"{key}: {first['msg']}" if key else first["msg"]) from None


def _bad(place: object, found: str) -> InputError:
    return InputError(
        "RECORD",
        f"'{printable(place)}' is no record of an experiment",
        found=found,
        expected=f"JSON of schema {SCHEMA}, as experiments write it",
        fix="name only files and directories of records",
    )
