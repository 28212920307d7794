"""Writing of vector files, block by block, in the memory of one block."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from aniso.errors import InputError, NumericalError, printable
from aniso.vectors._files.checksums import PartWriter
from aniso.vectors._files.segment_format import (
    INDEX,
    SCHEMA,
    SCHEMA_WITH_ROWS,
    BaseRecord,
    BlockRecord,
    CellRecord,
    Index,
    ProvenanceRecord,
    RowsRecord,
    TermRecord,
    VectorRecord,
    metadata,
)
from aniso.vectors.block import Block, Layout
from aniso.vectors.delta import Delta, Dense, Exact, LowRank, Term
from aniso.vectors.packing import GROUP, SMALL, Packing, Storage, pack, unpack
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.vectors.singular import low_rank_approximation
from aniso.vectors.sparse_rows import SparseRows
from aniso.weights import SafetensorsWriter, header_room
from aniso.weights.atomic import HashedStream
from aniso.weights.dtypes import NAMES
from aniso.weights.files import Progress

_CHUNK = GROUP << 12  # elements packed at a time; intermediate results stay in cache


class VectorLike(Protocol):
    """A vector as the writer uses it."""

    name: str
    layout: Layout

    @property
    def relative_error(self) -> float: ...
    @property
    def base(self) -> BaseInfo: ...
    def __contains__(self, block: str) -> bool: ...
    def __getitem__(self, block: str) -> Delta: ...
    def checked_provenance(self, norms: Mapping[str, float]) -> Provenance:
        """Return the provenance, with notes on the norms, which are all known now."""


def write_segment(
    stream: HashedStream,
    vectors: Sequence[VectorLike],
    *,
    storage: str = "fp32",
    progress: Progress | None = None,
) -> Written:
    """Write vectors over one base, block by block. Cells that are zero are left out."""
    kind = Storage.of(storage)
    layout = vectors[0].layout
    for block in layout.blocks:
        if "|" in block.name or block.name == INDEX:
            raise InputError(
                "CKPT-KEYS",
                f"a block in a vector file cannot be called '{printable(block.name)}'",
                fix="rename the tensor in the base and in every tuned model",
            )
    names = [f"{b.name}{end}" for b in layout.blocks for end in _NAME_ENDS]
    file = SafetensorsWriter(stream, header_room([*names, INDEX]))
    writer = PartWriter(file)
    cells: dict[str, CellRecord] = {}
    measured = [_Measured() for _ in vectors]
    for block in layout.blocks:
        cell = _BlockWriter(writer, block, kind, progress)
        cell.write(vectors)
        if cell.record != CellRecord():
            cells[block.name] = cell.record
        for i, norm in cell.norms.items():
            measured[i].norms[block.name] = norm
            measured[i].stored[block.name] = cell.stored.get(i, norm)
            measured[i].error += cell.errors.get(i, 0.0)
            if i in cell.kept:
                measured[i].kept.append(block.name)
    index = _index(kind, layout, vectors, cells, measured)
    index = index.model_copy(update={"checksums": writer.checksums})
    text = _as_json(index)
    file.add(INDEX, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    sha256 = hashlib.sha256(text).hexdigest()
    file.finish(metadata(sha256, index.schema_version))
    return Written(index, sha256)


def _as_json(index: Index) -> bytes:
    """The index; without rows it is that of schema 2, which older versions read."""
    left_out = {"cells": {"__all__": {"rows"}}} if index.schema_version == SCHEMA else None
    return index.model_dump_json(exclude=left_out).encode()


@dataclass(frozen=True)
class Written:
    """The index of a file that was just written, and its sha256."""

    index: Index
    sha256: str


_NAME_ENDS = ("", "|rows.index", "|rows.value", "|rows.exact.index", "|rows.exact.value",
              "|codes", "|scales", "|mean", "|exact.index", "|exact.value",
              *(f"|{factor}.{group}" for factor in "AB" for group in range(8)))  # fmt: skip


def common_base(vectors: Sequence[VectorLike]) -> BaseInfo:
    """Return the base that all vectors share, with its activation if any of them records it."""
    bases = [vector.base for vector in vectors]
    activation = next((base.activation for base in bases if base.activation), None)
    return replace(bases[0], activation=activation)


def _index(
    storage: Storage,
    layout: Layout,
    vectors: Sequence[VectorLike],
    cells: dict[str, CellRecord],
    measured: list[_Measured],
) -> Index:
    records = []
    for vector, measured_vector in zip(vectors, measured, strict=True):
        provenance = vector.checked_provenance(measured_vector.norms)
        kept = {block: measured_vector.stored[block] for block in measured_vector.kept}
        squares = sum(n * n for n in measured_vector.norms.values())
        lost = math.sqrt(measured_vector.error / max(squares, 1e-300))
        # for vectors that were packed before: errors of independent roundings add up in squares
        total = math.hypot(lost, vector.relative_error)
        record = ProvenanceRecord(**asdict(provenance))
        records.append(VectorRecord(name=vector.name, norms=kept, relative_error=total, origin=record))
    base = common_base(vectors)
    return Index(
        schema_version=SCHEMA_WITH_ROWS if any(cell.rows for cell in cells.values()) else SCHEMA,
        storage=storage,
        scheme=layout.scheme,
        base=BaseRecord(
            label=base.label,
            content=base.content,
            activation=base.activation,
            norms=dict(base.norms),
        ),
        blocks=tuple(
            BlockRecord(name=b.name, shape=b.shape, kind=b.kind, depth=b.depth) for b in layout.blocks
        ),
        vectors=tuple(records),
        cells=cells,
    )


@dataclass
class _Measured:
    """Norms and errors of a vector, measured while it is written."""

    norms: dict[str, float] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    error: float = 0.0


class _BlockWriter:
    """Writes one block of all vectors."""

    def __init__(self, writer: PartWriter, block: Block, storage: Storage, progress: Progress | None) -> None:
        self.writer = writer
        self.block = block
        self.storage = storage
        self.packing = storage.packing if block.numel > SMALL else None
        self.rank = storage.rank if block.most_components > 1 else None
        self.progress = progress
        self.norms: dict[int, float] = {}
        self.stored: dict[int, float] = {}  # norms after packing, where they differ
        self.errors: dict[int, float] = {}
        self.record = CellRecord()
        self._dense: list[int] = []
        self._factored: list[tuple[int, LowRank]] = []
        self._sparse: list[tuple[int, SparseRows]] = []

    def write(self, vectors: Sequence[VectorLike]) -> None:
        present = [(i, v) for i, v in enumerate(vectors) if self.block.name in v]
        mean = self._mean(present)
        if mean is not None:
            self.writer.add(f"{self.block.name}|mean", mean)
        if self.packing is None:
            self._stack(present)
        else:
            self._stack_packed(present, self.packing, mean)
        terms = self._write_factors()
        packed = self.packing is not None and bool(self._dense)
        rows = self._write_rows()
        self.record = CellRecord(
            dense=tuple(self._dense), packed=packed, terms=tuple(terms), rows=tuple(rows)
        )

    def _visit(self, i: int, vector: VectorLike, write: Callable[[int, Dense], None]) -> None:
        """Pass a dense delta to ``write``; collect a low-rank one, drop one that is zero.

        The delta is local to this call, so that it is freed before the next one is read.
        """
        delta = vector[self.block.name]
        self.norms[i] = delta.norm()
        if self.progress:
            self.progress(4 * self.block.numel)
        if delta.vanishes(self.norms[i]):
            return
        if self.rank is not None:
            delta = self._factored_delta(i, delta, self.rank)
        if isinstance(delta, LowRank):
            self._factored.append((i, delta))
            return
        if isinstance(delta, SparseRows):
            self._sparse.append((i, delta))
            return
        self._dense.append(i)
        write(i, delta if isinstance(delta, Dense) else Dense(delta.dense()))

    def _factored_delta(self, i: int, delta: Delta, rank: int) -> LowRank:
        """Return the largest singular components of a delta, and note the error."""
        out = low_rank_approximation(delta, rank)
        self.stored[i] = out.norm()
        self.errors[i] = float(torch.linalg.vector_norm(delta.dense().sub_(out.dense()))) ** 2
        return out

    @property
    def kept(self) -> set[int]:
        """The vectors that have a cell in this block."""
        return {*self._dense, *(i for i, _ in self._factored), *(i for i, _ in self._sparse)}

    def _stack(self, present: list[tuple[int, VectorLike]]) -> None:
        dtype = self.storage.dtype if self.block.numel > SMALL else torch.float32
        name = self.block.name
        exact: list[Exact] = []

        def write(i: int, delta: Dense) -> None:
            if len(self._dense) == 1:
                self.writer.begin(name, NAMES[dtype])
            if dtype is not torch.float32:
                self._append_narrow(i, delta.values, dtype)
                return
            self.writer.append(delta.values.float())
            self.writer.end_part()
            if delta.exact is not None:
                offset = (len(self._dense) - 1) * self.block.numel
                exact.append(Exact(delta.exact.index + offset, delta.exact.value))

        for i, vector in present:
            self._visit(i, vector, write)
        if self._dense:
            self.writer.end((len(self._dense), *self.block.shape))
        if exact:
            self.writer.add(f"{name}|exact.index", torch.cat([e.index for e in exact]))
            self.writer.add(f"{name}|exact.value", torch.cat([e.value for e in exact]))

    def _append_narrow(self, i: int, values: Tensor, dtype: torch.dtype) -> None:
        error, size = 0.0, 0.0
        flat = values.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            narrow = chunk.to(dtype)
            error += float(torch.linalg.vector_norm(narrow.float().sub_(chunk))) ** 2
            size += float(torch.linalg.vector_norm(narrow.float())) ** 2
            self.writer.append(narrow)
        self.writer.end_part()
        if not math.isfinite(error):
            raise NumericalError(
                "VECTOR-RANGE",
                f"a difference in block '{self.block.name}' leaves the range of {NAMES[dtype]}",
                found=f"{float(values.abs().max()):.4g}",
                expected=f"at most {torch.finfo(dtype).max:.4g}",
                fix="use --storage bf16 or fp32",
            )
        self.errors[i], self.stored[i] = error, math.sqrt(size)

    def _stack_packed(
        self, present: list[tuple[int, VectorLike]], packing: Packing, mean: Tensor | None
    ) -> None:
        name = self.block.name
        scales: list[Tensor] = []

        def write(i: int, delta: Dense) -> None:
            if len(self._dense) == 1:
                self.writer.begin(f"{name}|codes", "U8")
            scales.append(self._pack(i, delta.values.reshape(-1), packing, mean))

        for i, vector in present:
            self._visit(i, vector, write)
        if self._dense:
            self.writer.end((len(self._dense), packing.code_bytes(self.block.numel)))
            self._add_parts(f"{name}|scales", scales, (len(scales), *scales[0].shape))

    def _pack(self, i: int, values: Tensor, packing: Packing, mean: Tensor | None) -> Tensor:
        """Write one vector's codes in chunks, which need little memory; returns its scales."""
        scales, error, size = [], 0.0, 0.0
        for start in range(0, values.numel(), _CHUNK):
            chunk = values[start : start + _CHUNK].float()
            shared = mean.reshape(-1)[start : start + _CHUNK].float() if mean is not None else 0.0
            codes, scale = pack(chunk - shared, packing)
            kept = unpack(codes, scale, packing, chunk.numel()).add_(shared)
            size += float(torch.linalg.vector_norm(kept)) ** 2
            error += float(torch.linalg.vector_norm(kept.sub_(chunk))) ** 2
            self.writer.append(codes)
            scales.append(scale)
        self.writer.end_part()
        self.errors[i], self.stored[i] = error, math.sqrt(size)
        return torch.cat(scales)

    def _mean(self, present: list[tuple[int, VectorLike]]) -> Tensor | None:
        """Return the mean of the dense vectors, if the storage has one; this reads them once more."""
        if not self.storage.has_mean or self.packing is None:
            return None
        total, count = torch.zeros(self.block.shape), 0
        for _, vector in present:
            count += _added(total, vector[self.block.name])
        return total.div_(count).to(torch.bfloat16) if count else None

    def _write_factors(self) -> list[TermRecord]:
        groups: dict[tuple[int, torch.dtype], list[tuple[int, Term]]] = {}
        for i, delta in self._factored:
            for term in delta.terms:
                dtype = torch.promote_types(term.a.dtype, term.b.dtype)
                groups.setdefault((term.b.shape[0], dtype), []).append((i, term))
        records = []
        for group, ((_, dtype), members) in enumerate(groups.items()):
            first = 0
            for i, term in members:
                record = TermRecord(
                    vector=i,
                    group=group,
                    first=first,
                    rank=term.rank,
                    start=term.start,
                    scale=term.scale,
                )
                records.append(record)
                first += term.rank
            for factor, pieces in (("A", [t.a for _, t in members]), ("B", [t.b.T for _, t in members])):
                shape = (first, pieces[0].shape[1])
                self._add_parts(f"{self.block.name}|{factor}.{group}", [p.to(dtype) for p in pieces], shape)
        return sorted(records, key=lambda r: r.vector)

    def _write_rows(self) -> list[RowsRecord]:
        """Write the rows of sparse deltas, in 32 bits in every storage: they are few."""
        if not self._sparse:
            return []
        name, width = f"{self.block.name}|rows", self.block.matrix_shape[1]
        records, exact, first = [], [], 0
        for i, delta in self._sparse:
            records.append(RowsRecord(vector=i, first=first, count=len(delta.rows)))
            if delta.exact is not None and self.storage is Storage.FP32:
                exact.append(Exact(delta.exact.index + first * width, delta.exact.value))
            first += len(delta.rows)
        self._add_parts(f"{name}.index", [delta.rows for _, delta in self._sparse], (first,))
        self._add_parts(f"{name}.value", [delta.values.float() for _, delta in self._sparse], (first, width))
        if exact:
            self.writer.add(f"{name}.exact.index", torch.cat([e.index for e in exact]))
            self.writer.add(f"{name}.exact.value", torch.cat([e.value for e in exact]))
        return records

    def _add_parts(self, name: str, parts: Sequence[Tensor], shape: tuple[int, ...]) -> None:
        """Write a tensor whose parts are all in memory."""
        self.writer.begin(name, NAMES[parts[0].dtype])
        for part in parts:
            self.writer.append(part)
            self.writer.end_part()
        self.writer.end(shape)


def _added(total: Tensor, delta: Delta) -> bool:
    """Add a delta that will be packed to ``total``; says whether it is one."""
    if isinstance(delta, LowRank | SparseRows) or delta.vanishes(delta.norm()):
        return False
    total += delta.values if isinstance(delta, Dense) else delta.dense()
    return True
