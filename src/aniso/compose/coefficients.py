"""Coefficients as a value: labelled numbers in a file of a few kB that names its bank and base."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast, final

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from torch import Tensor

from aniso.coefficient_matrix import BlockLabel
from aniso.compose._engine.coefficient_index import CoefficientIndex
from aniso.compose._engine.qkv_remap import remap_coefficients
from aniso.compose.partition import Partition, require_rule
from aniso.errors import AnisoError, InputError, printable
from aniso.vectors import Bank, BaseInfo, Block, Kind
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import content_checksum, require_checksum, tensor_hash

SCHEMA = 1
FORMAT = "aniso coefficients"
_VALUES = "coefficients"
_CELLS = 1 << 22  # vectors times blocks: an index of a few kB can describe a very large table
_DIMENSIONS = 64
_ELEMENTS = 1 << 62


@final
@dataclass(frozen=True)
class CoefficientProvenance:
    """The bank that coefficients were learned on."""

    scheme: str
    layout: str
    base: BaseInfo
    bank: str
    """The content hash of the whole bank, also if only some of its vectors have coefficients."""
    sources: dict[str, str]
    """The sha256 of the file that each vector was made from, which packing does not change."""

    @classmethod
    def of(cls, bank: Bank) -> CoefficientProvenance:
        base = replace(bank.base, norms={})
        sources = {name: bank[name].provenance.sha256 for name in bank}
        return cls(bank.layout.scheme, bank.layout.signature, base, bank.whole_hash, sources)


@final
@dataclass(frozen=True, eq=False)
class Coefficients:
    """One coefficient for each vector, block and part, with the bank they were learned on.

    They are saved in a file of a few kB::

        coefficients = Coefficients.load("coefficients.safetensors")
        coefficients.of("cars", "visual.proj")
        composition = Composition.of(model, bank, coefficients)
    """

    index: CoefficientIndex
    values: Tensor
    provenance: CoefficientProvenance
    linearised: bool = False
    """Learned over a linearised model; they do not apply to the model itself."""
    selection: str = ""
    """How vectors were selected, in words; empty if they were not."""

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (self.index.count,):
            raise InputError(
                "COEF-VALUES",
                "the number of coefficients does not match vectors, blocks and parts",
                found=f"shape {tuple(self.values.shape)}",
                expected=f"{self.index.count} numbers",
                fix="learn them again, or restore the file from a copy",
            )
        bad = (~torch.isfinite(self.values)).nonzero().reshape(-1).tolist()
        if bad:
            vector, block, part = list(self.index.labels())[bad[0]]
            raise InputError(
                "COEF-VALUES",
                f"{len(bad)} coefficients are NaN or infinite",
                key=block,
                first=f"vector '{vector}', part {part}",
                fix="learn them again with a smaller learning rate",
            )

    @classmethod
    def zeros(cls, bank: Bank, partition: Partition | None = None) -> Coefficients:
        """Return zeros, which give the base itself."""
        index = CoefficientIndex.of(bank, partition or Partition.blocks())
        return cls(index, torch.zeros(index.count), CoefficientProvenance.of(bank))

    @classmethod
    def ones(cls, bank: Bank) -> Coefficients:
        """Return 1 for every vector, which adds all of them to the base."""
        index = CoefficientIndex.of(bank, Partition.whole())
        return cls(index, torch.ones(index.count), CoefficientProvenance.of(bank))

    @property
    def partition(self) -> Partition:
        return self.index.partition

    @property
    def vectors(self) -> tuple[str, ...]:
        return self.index.vectors

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(entry.block.name for entry in self.index.blocks)

    @property
    def block_labels(self) -> list[BlockLabel]:
        """Name, kind and layer of every block, for figures and records."""
        return [BlockLabel(e.block.name, str(e.block.kind), e.block.depth) for e in self.index.blocks]

    def __len__(self) -> int:
        return self.index.count

    def __repr__(self) -> str:
        size = f"{len(self.vectors)} vectors, {len(self.blocks)} blocks"
        return f"Coefficients({len(self)}: {size}, {self.partition})"

    @property
    def content_hash(self) -> str:
        """A hash of the values; it names these coefficients in cards, records and heads."""
        return tensor_hash(self.values.detach().cpu())

    def of(self, vector: str, block: str) -> Tensor:
        """Return the coefficients of one vector in one block, one for each part."""
        return self.values[self.index.cell(vector, block)]

    def matrix(self) -> Tensor:
        """Return a table, vectors by blocks: the mean over a cell's parts, NaN where there is none."""
        return self.index.matrix(self.values)

    def items(self) -> list[tuple[str, str, int, float]]:
        """Return vector, block, part and value of every coefficient."""
        labels = self.index.labels()
        return [(*label, value) for label, value in zip(labels, self.values.tolist(), strict=True)]

    def chosen(self, bank: Bank) -> Bank:
        """Return the cells of the bank that have coefficients; ``for_bank`` checks for missing ones."""
        known = [v for v in self.vectors if v in bank]
        if not known or bank.layout.signature != self.provenance.layout:
            return bank.only(*known) if known else bank
        return bank.only_cells({v: self._cells_of(v, bank) for v in known})

    def _cells_of(self, vector: str, bank: Bank) -> list[str]:
        """Return a vector's blocks without those that have coefficients for other vectors only."""
        mine = self.index.by_block
        own = [b for b in bank[vector].blocks if self.partition.covers(b)]
        left_out = {b.name for b in own if b.name not in mine or vector not in mine[b.name].vectors}
        return [b.name for b in bank[vector].blocks if b.name not in left_out]

    def for_bank(self, bank: Bank, *, any_bank: bool = False) -> Coefficients:
        """Return the coefficients for a bank of the same vectors, which may be stored or split differently.

        If the bank has separate blocks for query, key and value, each takes the coefficient of the fused
        block; if it has one fused block, the coefficients of the three must be equal.
        """
        if not any_bank:
            _check_provenance(self.provenance, bank)
        _check_names(self, bank)
        index, values = remap_coefficients(self.index, self.values, bank)
        return Coefficients(index, values, CoefficientProvenance.of(bank), self.linearised, self.selection)

    def require_standard(self) -> None:
        if self.linearised:
            raise InputError(
                "CKPT-LINEARISED",
                "these coefficients were learned over the linearised model, which has no composed weights",
                fix="evaluate them with aniso eval --linearised, or learn them over the model itself",
            )

    def save(self, path: str | Path, *, overwrite: bool = False) -> str:
        """Write one safetensors file; returns its sha256."""
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        record = _Record.of(self).model_dump_json(exclude_defaults=True)
        checksum = content_checksum(record, {_VALUES: values})
        meta = {"format": FORMAT, "schema": str(SCHEMA), "index": record, "checksum": checksum}
        return save_safetensors(Path(path), {_VALUES: values}, meta, overwrite=overwrite)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file that ``save`` writes."""
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "coefficients"
            self.save(path)
            return path.read_bytes()

    @classmethod
    def load(cls, path: str | Path) -> Coefficients:
        """Read coefficients from a file written by ``save``; raises if the file is damaged."""
        file = SafetensorsFile(RawFile(Path(path)))
        if file.metadata.get("format") != FORMAT or set(file.tensors) != {_VALUES}:
            raise InputError(
                "COEF-FILE",
                f"'{file.label}' holds no coefficients",
                found=f"metadata {printable(json.dumps(file.metadata), 100)}",
                expected=f"a file with format '{FORMAT}'",
                fix="name a file that Coefficients.save wrote",
            )
        if file.metadata.get("schema") != str(SCHEMA):
            raise InputError(
                "COEF-FILE",
                f"'{file.label}' was written by a different version of aniso",
                found=f"schema {printable(file.metadata.get('schema', ''))}",
                expected=f"schema {SCHEMA}",
                fix="pip install -U aniso",
            )
        return _parsed(file)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _BaseRecord(_Strict):
    label: str
    content: str
    activation: str | None = None


class _PartitionRecord(_Strict):
    rule: Annotated[str, AfterValidator(require_rule)] = "blocks"
    families: tuple[str, ...] = ()
    parts: int = 1
    seed: int = 0


class _Record(_Strict):
    """The index in the file's metadata. Blocks are (name, shape, kind, depth)."""

    scheme: str
    layout: str
    base: _BaseRecord
    bank: str
    vectors: tuple[tuple[str, str], ...]
    partition: _PartitionRecord
    blocks: tuple[tuple[str, tuple[int, ...], Kind, int | None], ...]
    absent: dict[str, tuple[str, ...]] = {}
    """Vectors that do not change a block."""
    linearised: bool = False
    selection: str = ""

    @classmethod
    def of(cls, coefficients: Coefficients) -> _Record:
        provenance, index = coefficients.provenance, coefficients.index
        absent = {s.block.name: tuple(v for v in index.vectors if v not in s.vectors) for s in index.blocks}
        return cls(
            scheme=provenance.scheme,
            layout=provenance.layout,
            base=_BaseRecord(
                label=provenance.base.label,
                content=provenance.base.content,
                activation=provenance.base.activation,
            ),
            bank=provenance.bank,
            vectors=tuple((name, provenance.sources[name]) for name in index.vectors),
            partition=_PartitionRecord(**cast(Any, index.partition.as_dict())),
            blocks=tuple((s.block.name, s.block.shape, s.block.kind, s.block.depth) for s in index.blocks),
            absent={block: names for block, names in absent.items() if names},
            linearised=coefficients.linearised,
            selection=coefficients.selection,
        )

    def index(self) -> CoefficientIndex:
        names = tuple(name for name, _ in self.vectors)
        self._check(names)
        cells = []
        for name, shape, kind, depth in self.blocks:
            missing = set(self.absent.get(name, ()))
            cells.append((Block(name, shape, kind, depth), tuple(v for v in names if v not in missing)))
        made = CoefficientIndex.from_cells(Partition(**self.partition.model_dump()), names, cells)
        for block, _ in cells:
            if block.name not in made.by_block:
                raise ValueError(f"block '{block.name}' has no coefficients")
        return made

    def _check(self, names: tuple[str, ...]) -> None:
        """Raise unless names and sizes are plausible, before anything is built from the index."""
        blocks = [name for name, *_ in self.blocks]
        if not names:
            raise ValueError("there is no vector")
        if len(names) * len(blocks) > _CELLS:
            raise ValueError(f"{len(names)} vectors by {len(blocks)} blocks are too many")
        for what, found in (("vector", names), ("block", blocks)):
            twice = [name for name, times in Counter(found).items() if times > 1]
            if twice:
                raise ValueError(f"{what} '{twice[0]}' occurs twice")
        absent = {vector for vectors in self.absent.values() for vector in vectors}
        for what, odd in (("block", set(self.absent) - set(blocks)), ("vector", absent - set(names))):
            if odd:
                raise ValueError(f"{what} '{min(odd)}' is absent from cells, but unknown")
        for name, shape, *_ in self.blocks:
            sane = len(shape) <= _DIMENSIONS and all(0 <= size < _ELEMENTS for size in shape)
            if not sane or math.prod(shape) >= _ELEMENTS:
                raise ValueError(f"block '{name}' has a size that is negative or beyond any model's")

    def provenance(self) -> CoefficientProvenance:
        base = BaseInfo(self.base.label, self.base.content, self.base.activation)
        return CoefficientProvenance(self.scheme, self.layout, base, self.bank, dict(self.vectors))


def _parsed(file: SafetensorsFile) -> Coefficients:
    try:
        record = _Record.model_validate_json(file.metadata.get("index", ""))
        index, provenance = record.index(), record.provenance()
    except (ValidationError, ValueError, AnisoError) as e:
        reason = _reason(e)
        raise InputError(
            "COEF-FILE",
            f"'{file.label}' has an index that cannot be read",
            reason=printable(reason),
            fix="restore the file from a copy, or learn the coefficients again",
        ) from None
    values = file.read(_VALUES)
    require_checksum(file.metadata, {_VALUES: values}, file.label)
    if values.dtype not in (torch.float32, torch.float64):
        raise InputError(
            "COEF-VALUES",
            f"'{file.label}' has coefficients of an unsupported dtype",
            found=values.dtype,
            expected="float32 or float64",
            fix="restore the file from a copy, or learn the coefficients again",
        )
    try:
        return Coefficients(index, values, provenance, record.linearised, record.selection)
    except InputError as e:
        e.message = f"'{file.label}': {e.message}"
        raise


def _reason(e: Exception) -> str:
    if isinstance(e, ValidationError):
        first = e.errors()[0]
        return ": ".join((".".join(map(str, first["loc"])), first["msg"]))
    return e.message if isinstance(e, AnisoError) else str(e)


def _check_provenance(provenance: CoefficientProvenance, bank: Bank) -> None:
    if not provenance.base.is_same_as(bank.base):
        raise InputError(
            "COEF-BANK",
            "the coefficients were learned with a different base than the bank's",
            expected=_base_name(provenance.base),
            found=_base_name(bank.base),
            fix="use the bank that they were learned on",
        )
    known = provenance.bank in (bank.whole_hash, bank.content_hash)  # earlier versions wrote the latter
    for name, source in provenance.sources.items():
        if name not in bank:
            continue  # reported with all names, below
        theirs = bank[name].provenance.sha256
        # a vector may have joined a known bank; computed ones, and all of earlier versions, have no source
        if theirs != source if source else not known:
            raise InputError(
                "COEF-BANK",
                f"vector '{printable(name)}' of the bank is not the one that coefficients were learned with",
                expected=f"made from {source[:16] or 'a vector that was computed'}",
                found=f"made from {theirs[:16] or 'a vector that was computed'}",
                fix="use the bank that they were learned on, or any_bank=True if you are sure",
            )


def _base_name(base: BaseInfo) -> str:
    return f"{base.label} {base.content[:16]} ({base.activation})"


def _check_names(coefficients: Coefficients, bank: Bank) -> None:
    missing = [v for v in coefficients.vectors if v not in bank]
    extra = [v for v in bank if v not in coefficients.vectors]
    if missing:
        raise InputError(
            "COEF-BANK",
            f"the bank has no vector '{printable(missing[0])}', for which there are coefficients",
            expected=", ".join(coefficients.vectors),
            found=", ".join(bank.names),
            fix="use the bank that they were learned on",
        )
    if extra:
        raise InputError(
            "COEF-BANK",
            f"there are no coefficients for vector '{printable(extra[0])}' of the bank",
            expected=", ".join(coefficients.vectors),
            found=", ".join(bank.names),
            fix="bank.only(*coefficients.vectors)",
        )
