"""Files of predictions: CSV or JSON lines for other programs, and a file beside that names what made them.

``NAME`` holds items only: a CSV file begins with the names of its columns, JSON lines with the first item.
Every item is exactly one line, so that a file which was cut short can be continued after its last complete
line. ``NAME.meta.json`` holds the header, the format and, of a complete file, its sha256: it is written
before ``NAME`` gets its name, so that a file which another process replaced or cut is noticed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aniso.csv_text import csv_text
from aniso.errors import InputError, printable

FileFormat = Literal["csv", "jsonl"]
NOT_CALIBRATED = "not calibrated"
META = ".meta.json"
"""Ends the name of the file that holds the header of predictions."""
_LONGEST = 4 << 20  # characters of a line


class PredictionHeader(BaseModel):
    """What made a file of predictions: two files with equal headers were made by the same classifier."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    made_by: str
    model: str
    """The model, composition and head in words."""
    identity: dict[str, str] = Field(default_factory=dict)
    """Hashes of weights, coefficients, head and classes."""
    calibration: str = NOT_CALIBRATED
    record: str = ""
    """The id of the run that the predictions belong to, if they belong to one."""
    columns: list[str]

    @property
    def top(self) -> int:
        """How many classes are listed for every item."""
        return sum(name.startswith("probability") for name in self.columns)


class _Meta(BaseModel):
    """The content of ``NAME.meta.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: FileFormat
    sha256: str | None
    header: PredictionHeader


def prediction_columns(
    *, top: int = 1, task: bool = False, text: bool = False, label: bool = False
) -> list[str]:
    """Return the names of the columns: the id, what is known of the item, and its most probable classes."""
    known = [name for name, has in (("task", task), ("id", True), ("text", text), ("label", label)) if has]
    ends = ["", *(f"_{rank}" for rank in range(2, top + 1))]
    return [*known, *(f"{name}{end}" for end in ends for name in ("prediction", "probability"))]


@final
@dataclass(frozen=True)
class PredictedItem:
    """One item: its most probable classes, the first one being the prediction; none if it is unreadable."""

    id: str
    ranked: tuple[tuple[str, float], ...] = ()
    text: str = ""
    label: str = ""
    task: str = ""
    error: str = ""
    """Why the item could not be read; in JSON lines only."""

    @property
    def prediction(self) -> str:
        return self.ranked[0][0] if self.ranked else ""

    @property
    def probability(self) -> float:
        """The probability of the prediction; 0 for an unreadable item."""
        return self.ranked[0][1] if self.ranked else 0.0


def meta_path(path: Path) -> Path:
    """Return the file that holds the header of a file of predictions."""
    return path.with_name(path.name + META)


def meta_text(header: PredictionHeader, kind: FileFormat, sha256: str | None = None) -> str:
    """Return the content of ``NAME.meta.json``; ``sha256`` is that of a file to which nothing is added."""
    return _Meta(format=kind, sha256=sha256, header=header).model_dump_json(indent=1) + "\n"


def first_line(header: PredictionHeader, kind: FileFormat) -> str:
    """Return what precedes the first item: in CSV the names of the columns."""
    return _csv(header.columns) if kind == "csv" else ""


def item_line(header: PredictionHeader, item: PredictedItem, kind: FileFormat) -> str:
    """Return the line of one item."""
    if kind == "jsonl":
        return json.dumps(_fields(header, item)) + "\n"
    known = {"task": item.task, "id": item.id, "text": item.text, "label": item.label}
    cells = [csv_text(known[name]) for name in header.columns if name in known]
    ranked: list[str] = []
    for name, probability in item.ranked:
        ranked += [csv_text(name), f"{probability:.6g}"]
    ranked += [""] * (len(header.columns) - len(cells) - len(ranked))
    return _csv([*cells, *ranked])


def _fields(header: PredictionHeader, item: PredictedItem) -> dict[str, object]:
    known: dict[str, object] = {"task": item.task, "id": item.id, "text": item.text, "label": item.label}
    fields = {name: value for name, value in known.items() if name in header.columns}
    if item.error:
        return {**fields, "error": item.error}
    ranked = [{"class": name, "probability": float(f"{p:.6g}")} for name, p in item.ranked]
    return {**fields, "prediction": item.prediction, "predictions": ranked}


def _csv(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


@final
@dataclass(frozen=True)
class PredictionFile:
    """A file of predictions, whose items are read one at a time."""

    path: Path
    header: PredictionHeader
    kind: FileFormat
    length: int = field(repr=False)
    """Bytes before the first item."""

    @classmethod
    def open(cls, path: Path) -> PredictionFile:
        """Read the header; raises DATA-FORMAT if there is none, or if the file has changed since."""
        meta = _read_meta(path)
        start = first_line(meta.header, meta.format).encode()
        try:
            with path.open("rb") as file:
                found = file.read(len(start))
                file.seek(0)
                same = meta.sha256 in (None, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as e:
            raise _bad(path, e.strerror or str(e)) from None
        if found != start:
            raise _bad(path, printable(found.decode(errors="replace"), 80) or "an empty file")
        if not same:
            raise _bad(path, f"another content than when {meta_path(path).name} was written")
        return cls(path, meta.header, meta.format, len(start))

    def items(self) -> Iterator[PredictedItem]:
        """Yield the items in order; an incomplete last line is left out."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.length)
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield self._item(line, number)
        except OSError as e:
            raise _bad(self.path, e.strerror or str(e)) from None

    def _item(self, line: bytes, number: int) -> PredictedItem:
        try:
            if len(line) > _LONGEST:
                raise ValueError(f"{len(line):,} bytes")
            return self._parsed(line.decode())
        except (ValueError, KeyError, TypeError, IndexError, csv.Error, RecursionError) as e:
            raise _bad(self.path, f"item {number}: {printable(e, 80)}") from None

    def _parsed(self, line: str) -> PredictedItem:
        if self.kind == "jsonl":
            fields = json.loads(line)
            pairs = [(str(one["class"]), float(one["probability"])) for one in fields.get("predictions", ())]
            known = {name: str(fields.get(name, "")) for name in ("id", "text", "label", "task", "error")}
            return PredictedItem(ranked=tuple(pairs), **known)
        (cells,) = csv.reader([line], strict=True)
        row = dict(zip(self.header.columns, cells, strict=True))
        known = {name: row.get(name, "") for name in ("id", "text", "label", "task")}
        rest = [cell for name, cell in row.items() if name not in known]
        pairs = [(a, float(b)) for a, b in zip(rest[::2], rest[1::2], strict=True) if a]
        return PredictedItem(ranked=tuple(pairs), **known)


def _read_meta(path: Path) -> _Meta:
    place = meta_path(path)
    try:
        with place.open("rb") as file:
            return _Meta.model_validate_json(file.read(_LONGEST))
    except OSError as e:
        raise _bad(path, f"{printable(place.name)}: {e.strerror or e}") from None
    except ValidationError:
        raise _bad(path, f"{printable(place.name)} is no header of predictions") from None


def _bad(path: Path, found: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(path)}' is no file of predictions",
        found=found,
        expected=f"what aniso predict, aniso eval --predictions or aniso fit wrote, with {META} beside",
        fix="remove the file, or name another one",
    )
