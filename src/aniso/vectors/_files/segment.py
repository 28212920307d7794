"""Reading of vector files: the index when opened, deltas when used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast, final

import torch
from pydantic import ValidationError

from aniso.errors import InputError, printable
from aniso.vectors._files.checksums import DIGITS, VerifiedFile
from aniso.vectors._files.segment_format import (
    FORMAT,
    INDEX,
    READABLE,
    CellRecord,
    Index,
    RowsRecord,
    TermRecord,
    metadata,
)
from aniso.vectors.block import Block, Layout
from aniso.vectors.delta import Delta, Dense, Exact, LowRank, Packed, Term
from aniso.vectors.packing import Packing
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.vectors.sparse_rows import SparseRows
from aniso.weights import SafetensorsFile, TensorInfo
from aniso.weights.dtypes import FLOATS
from aniso.weights.files import ByteFile, RawFile

_MAX_INDEX = 256 << 20


@dataclass(frozen=True)
class SegmentVector:
    """One vector of a file; its deltas are not read yet."""

    name: str
    provenance: Provenance
    norms: Mapping[str, float]
    relative_error: float
    cells: Mapping[str, Callable[[], Delta]]


@final
class Segment:
    """A vector file: its index is read when opened, deltas when used."""

    def __init__(self, file: SafetensorsFile, index: Index, sha256: str | None = None) -> None:
        self._file = file
        self.index = index
        self._verified = VerifiedFile(file, index.checksums, self._part_starts, sha256)
        self.layout = Layout(
            index.scheme, tuple(Block(b.name, b.shape, b.kind, b.depth) for b in index.blocks)
        )
        self._present: list[dict[str, None]] = [{} for _ in index.vectors]
        for name, cell in index.cells.items():
            for i in cell.vectors:
                self._present[i][name] = None
        self.base = BaseInfo(index.base.label, index.base.content, index.base.activation, index.base.norms)

    @classmethod
    def open(cls, path: Path, *, index_sha256: str | None = None, sha256: str | None = None) -> Segment:
        """Open a file of vectors; its index is read and compared with its hash, deltas are not read.

        ``index_sha256`` and ``sha256`` are the hashes of the index and the file in a bank's manifest.
        Files of schema 1 have no checksums: they are compared with ``sha256`` when first read.
        """
        file = SafetensorsFile(RawFile(path))
        info = file.tensors.get(INDEX)
        if file.metadata.get("format") != FORMAT or info is None or info.nbytes > _MAX_INDEX:
            raise InputError(
                "VECTOR-FILE",
                f"'{file.label}' is not a file of task vectors",
                found=f"metadata {printable(json.dumps(file.metadata), 100)}",
                expected=json.dumps({"format": FORMAT}),
                fix="make one with: aniso vector make --base BASE TUNED -o FILE",
            )
        text = bytes(file.read(INDEX).numpy().tobytes())
        try:
            _require_intact(file, text, index_sha256)
            index = Index.model_validate_json(text)
            if str(index.schema_version) != file.metadata["schema"]:
                raise ValueError(f"schema {index.schema_version} in the index, another in the metadata")
            segment = cls(file, index, sha256)
            segment._check()
        except (ValidationError, ValueError, KeyError, IndexError) as e:
            reason = e.errors()[0]["msg"] if isinstance(e, ValidationError) else str(e)
            raise InputError(
                "VECTOR-FILE",
                f"'{file.label}' has an index that does not fit its content",
                reason=printable(reason),
                fix="build it again, or update aniso if it was written by a newer version",
            ) from None
        return segment

    @property
    def file(self) -> ByteFile:
        return self._file.files[0]

    def vector(self, i: int) -> SegmentVector:
        record = self.index.vectors[i]
        cells = {name: partial(self._cell, name, i) for name in self._present[i]}
        provenance = Provenance(**record.origin.model_dump())
        return SegmentVector(record.name, provenance, record.norms, record.relative_error, cells)

    def _cell(self, block: str, i: int) -> Delta:
        return self.read(block, {i})[i]

    def cell_bytes(self, block: str, i: int) -> int:
        """Return the stored size of one vector's delta of a block, with its share of shared tensors."""
        cell = self.index.cells.get(block)
        if cell is None:
            return 0
        tensors = self._file.tensors
        if i in cell.dense:
            names = (f"{block}|codes", f"{block}|scales", f"{block}|mean") if cell.packed else (block,)
            return sum(tensors[n].nbytes for n in names if n in tensors) // len(cell.dense)
        for own in cell.rows:
            if own.vector == i:
                rows = [tensors[f"{block}|rows.{what}"] for what in ("index", "value")]
                return sum(own.count * info.nbytes // max(1, info.shape[0]) for info in rows)
        ranks = [(t.rank, t.group) for t in cell.terms if t.vector == i]
        pairs = [(rank, tensors[f"{block}|{f}.{g}"]) for rank, g in ranks for f in "AB"]
        return sum(rank * info.nbytes // info.shape[0] for rank, info in pairs)

    def read(self, block: str, wanted: set[int], *, exact: bool = True) -> dict[int, Delta]:
        """Read one block of the wanted vectors; for all vectors this is one contiguous read."""
        cell = self.index.cells.get(block)
        if cell is None:
            return {}
        out: dict[int, Delta] = {}
        rows = [row for row, i in enumerate(cell.dense) if i in wanted]
        for start, stop in _runs(rows):
            for row, delta in self._read_dense(block, cell, start, stop, exact=exact):
                if cell.dense[row] in wanted:
                    out[cell.dense[row]] = delta
        terms = [t for t in cell.terms if t.vector in wanted]
        if terms:
            out |= self._read_factors(block, terms)
        out |= {
            r.vector: self._read_rows(block, cell, r, exact=exact) for r in cell.rows if r.vector in wanted
        }
        return {i: out[i] for i in sorted(out)}

    def _read_dense(
        self, block: str, cell: CellRecord, start: int, stop: int, *, exact: bool
    ) -> Iterable[tuple[int, Delta]]:
        shape = self.layout.by_name[block].shape
        if cell.packed:
            packing = cast(Packing, self.index.storage.packing)
            codes = self._verified.read_rows(f"{block}|codes", start, stop)
            scales = self._verified.read_rows(f"{block}|scales", start, stop)
            mean = self._verified.read(f"{block}|mean") if f"{block}|mean" in self._file.tensors else None
            for k in range(stop - start):
                yield start + k, Packed(shape, packing, codes[k], scales[k], mean)
            return
        values = self._verified.read_rows(block, start, stop)
        numel = math.prod(shape)
        missed = self._exact(block, len(cell.dense) * numel) if exact else None
        for k in range(stop - start):
            yield start + k, Dense(values[k], _slice(missed, start + k, numel))

    def _exact(self, block: str, numel: int, mark: str = "|") -> Exact | None:
        """Exact values of all vectors; ``numel`` is the number of elements they may point to."""
        if f"{block}{mark}exact.index" not in self._file.tensors:
            return None
        index = self._verified.read(f"{block}{mark}exact.index")
        value = self._verified.read(f"{block}{mark}exact.value")
        fits = (
            (index.dtype, value.dtype) == (torch.int64, torch.float32)
            and index.shape == value.shape == (index.numel(),)
            and (index.numel() == 0 or (int(index[0]) >= 0 and int(index[-1]) < numel))
            and bool((index[1:] > index[:-1]).all())
        )
        if not fits:
            raise InputError(
                "VECTOR-FILE",
                f"'{self._file.label}' has exact values with invalid indices",
                key=block,
                fix="build it again",
            )
        return Exact(index, value)

    def _read_factors(self, block: str, terms: list[TermRecord]) -> dict[int, Delta]:
        shape = self.layout.by_name[block].shape
        found: dict[int, tuple[Term, ...]] = {}
        for group in sorted({t.group for t in terms}):
            members = [t for t in terms if t.group == group]
            low, high = min(t.first for t in members), max(t.first + t.rank for t in members)
            a = self._verified.read_rows(f"{block}|A.{group}", low, high)
            b = self._verified.read_rows(f"{block}|B.{group}", low, high)
            for t in members:
                rows = slice(t.first - low, t.first - low + t.rank)
                found[t.vector] = (*found.get(t.vector, ()), Term(b[rows].T, a[rows], t.scale, t.start))
        return {i: LowRank(shape, own) for i, own in found.items()}

    def _read_rows(self, block: str, cell: CellRecord, own: RowsRecord, *, exact: bool) -> Delta:
        shape, last = self.layout.by_name[block].shape, own.first + own.count
        rows = self._verified.read_rows(f"{block}|rows.index", own.first, last)
        values = self._verified.read_rows(f"{block}|rows.value", own.first, last)
        if not (int(rows[0]) >= 0 and int(rows[-1]) < shape[0] and bool((rows[1:] > rows[:-1]).all())):
            raise InputError(
                "VECTOR-FILE",
                f"'{self._file.label}' has rows without a place",
                key=block,
                fix="build it again",
            )
        width, total = values.shape[1], sum(r.count for r in cell.rows)
        missed = self._exact(f"{block}|rows", total * width, ".") if exact else None
        return SparseRows(shape, rows, values, _between(missed, own.first * width, last * width))

    def _check(self) -> None:
        """Raise unless the index describes exactly the tensors in the file."""
        index = self.index
        for vector, present in zip(index.vectors, self._present, strict=True):
            if set(vector.norms) != set(present):
                raise ValueError(f"norms and deltas of vector {vector.name} are of different blocks")
        expected = {INDEX}
        for name, cell in index.cells.items():
            block = self.layout.by_name[name]
            expected |= self._check_cell(block, cell)
        if expected != set(self._file.tensors):
            odd = sorted(expected ^ set(self._file.tensors))
            raise ValueError(f"tensors and index disagree on {', '.join(odd[:4])}")
        if index.schema_version > 1:
            self._check_checksums()

    def _check_checksums(self) -> None:
        """Raise unless every part of every tensor has a checksum, so that none can be read unverified."""
        for name in self._file.tensors:
            parts = len(self._part_starts(name))
            if name != INDEX and len(self.index.checksums.get(name, "")) != parts * DIGITS:
                raise ValueError(f"{name} does not have {parts} checksums")

    def _part_starts(self, name: str) -> Sequence[int]:
        """Return the first row of every part of a tensor."""
        block, _, what = name.partition("|")
        if what == "mean" or what.endswith(("exact.index", "exact.value")):
            return (0,)
        cell = self.index.cells.get(block, CellRecord())
        if what.startswith("rows."):
            return [own.first for own in cell.rows]
        if what[:2] in ("A.", "B."):
            return sorted(term.first for term in cell.terms if str(term.group) == what[2:])
        return range(len(cell.dense))

    def _check_cell(self, block: Block, cell: CellRecord) -> set[str]:
        """Return the names of a cell's tensors; raises unless their shapes and dtypes are as expected."""
        count, tensors = len(self.index.vectors), self._file.tensors
        for i in cell.vectors:
            if not 0 <= i < count:
                raise ValueError(f"block {block.name} names vector {i} of {count}")
        expected = self._expected(block, cell)
        for name, info in expected.items():
            found = tensors[name]
            if found.shape != info.shape or info.dtype not in (found.dtype, "F" * (found.dtype in FLOATS)):
                raise ValueError(f"{name} is {found.dtype} {found.shape}, not {info.dtype} {info.shape}")
        factors = {f"{block.name}|{f}.{t.group}" for t in cell.terms for f in "AB"}
        for term in cell.terms:
            self._check_term(block, term)
        kinds = ("|", "|rows.") if cell.rows else ("|",)
        exact = {f"{block.name}{kind}exact.{what}" for kind in kinds for what in ("index", "value")}
        return set(expected) | factors | (exact & set(tensors))

    def _expected(self, block: Block, cell: CellRecord) -> dict[str, TensorInfo]:
        """Return shape and dtype ("F" for any float) of a cell's dense or packed tensors."""
        n, name = len(cell.dense), block.name
        rows = self._expected_rows(block, cell)
        if not cell.dense:
            return rows
        if not cell.packed:
            return {name: TensorInfo("F", (n, *block.shape)), **rows}
        packing = self.index.storage.packing
        if packing is None:
            raise ValueError(f"block {name} is packed in storage {self.index.storage}")
        out = {
            f"{name}|codes": TensorInfo("U8", (n, packing.code_bytes(block.numel))),
            f"{name}|scales": TensorInfo("BF16", (n, packing.groups(block.numel))),
        }
        if self.index.storage.has_mean:
            out[f"{name}|mean"] = TensorInfo("BF16", block.shape)
        return {**out, **rows}

    def _expected_rows(self, block: Block, cell: CellRecord) -> dict[str, TensorInfo]:
        """Shape and dtype of the tensors of changed rows, whose records must follow each other."""
        total = 0
        for own in cell.rows:
            if own.first != total or own.count < 1 or len(block.shape) != 2 or self.index.schema_version < 3:
                raise ValueError(f"the changed rows of block {block.name} do not fit")
            total += own.count
        if not total:
            return {}
        index, value = TensorInfo("I64", (total,)), TensorInfo("F32", (total, block.shape[1]))
        return {f"{block.name}|rows.index": index, f"{block.name}|rows.value": value}

    def _check_term(self, block: Block, term: TermRecord) -> None:
        rows, columns = block.matrix_shape
        a = self._file.tensors[f"{block.name}|A.{term.group}"].shape
        b = self._file.tensors[f"{block.name}|B.{term.group}"].shape
        fits = (
            len(a) == len(b) == 2
            and a[0] == b[0]
            and a[1] == columns
            and 0 <= term.start <= rows - b[1]
            and term.first >= 0
            and 0 < term.rank <= a[0] - term.first
        )
        if not fits:
            raise ValueError(f"a low-rank term of block {block.name} does not fit")


def _require_intact(file: SafetensorsFile, text: bytes, recorded: str | None) -> None:
    """Raise unless the index has a known schema and the sha256 in the file's metadata and the manifest."""
    schema = file.metadata.get("schema")
    if schema == "1":
        if file.metadata != {"format": FORMAT, "schema": "1"} or recorded is not None:
            raise ValueError("schema 1 in the index, another in the manifest or the metadata")
        return
    found = hashlib.sha256(text).hexdigest()
    if schema is None or schema not in map(str, READABLE):
        raise ValueError(f"schema {schema}, this version reads {', '.join(map(str, READABLE))}")
    if file.metadata != metadata(found, int(schema)) or recorded not in (None, found):
        raise InputError(
            "FILE-HASH",
            f"'{file.label}' is damaged, or is not the file of its bank",
            key=INDEX,
            expected=recorded or printable(file.metadata.get("index", "a hash in the metadata")),
            found=found,
            fix="restore the file from a copy, or build it again",
        )


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Return the ranges to read: first to last row, or only neighbours if most are not wanted."""
    if not rows or 2 * len(rows) > rows[-1] + 1 - rows[0]:
        return [(rows[0], rows[-1] + 1)] if rows else []
    starts = [row for i, row in enumerate(rows) if i == 0 or rows[i - 1] + 1 != row]
    return [(start, next(r for r in range(start, rows[-1] + 2) if r not in rows)) for start in starts]


def _slice(exact: Exact | None, row: int, numel: int) -> Exact | None:
    """The entries of one vector; entries are sorted by vector."""
    return _between(exact, row * numel, (row + 1) * numel)


def _between(exact: Exact | None, start: int, stop: int) -> Exact | None:
    """The entries from ``start`` on and before ``stop``, counted from ``start``."""
    if exact is None:
        return None
    bounds = torch.tensor([start, stop], dtype=exact.index.dtype)
    first, last = torch.searchsorted(exact.index, bounds).tolist()
    if first == last:
        return None
    return Exact(exact.index[first:last] - start, exact.value[first:last])
