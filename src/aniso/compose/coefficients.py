"""Coefficients as a value: numbers with labels, saved in a file of a few kB that knows what it belongs to."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from aniso.compose.adopt import adopted
from aniso.compose.partition import Partition, Rule
from aniso.compose.slots import Slots
from aniso.errors import AnisoError, InputError, printable
from aniso.vectors import Bank, BaseInfo, Block, Kind
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile

SCHEMA = 1
FORMAT = "aniso coefficients"
_VALUES = "coefficients"
_CELLS = 1 << 22  # vectors times blocks: a table that an index of a few kB can ask for is made in full
_DIMENSIONS = 64
_ELEMENTS = 1 << 62


@final
@dataclass(frozen=True)
class Origin:
    """The bank that coefficients were learned on."""

    scheme: str
    layout: str
    base: BaseInfo
    bank: str
    """Content hash of the bank."""
    sources: dict[str, str]
    """Hash of the file that each vector was made from: it survives packing, the bank's own does not."""

    @classmethod
    def of(cls, bank: Bank) -> Origin:
        base = replace(bank.base, norms={})
        sources = {name: bank[name].provenance.sha256 for name in bank}
        return cls(bank.layout.scheme, bank.layout.signature, base, bank.content_hash, sources)


@final
@dataclass(frozen=True, eq=False)
class Coefficients:
    """One number for each vector, block and part."""

    slots: Slots
    values: Tensor
    origin: Origin
    linearised: bool = False
    """Learned over a linearised model: as weights of the model itself they mean something else."""
    selection: str = ""
    """How vectors were chosen, in words, if they were."""

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (self.slots.count,):
            raise InputError(
                "COEF-VALUES",
                "the number of coefficients is not what vectors, blocks and parts make",
                found=f"shape {tuple(self.values.shape)}",
                expected=f"{self.slots.count} numbers",
                fix="learn them again, or restore the file from a copy",
            )
        bad = (~torch.isfinite(self.values)).nonzero().reshape(-1).tolist()
        if bad:
            vector, block, part = list(self.slots.labels())[bad[0]]
            raise InputError(
                "COEF-VALUES",
                f"{len(bad)} coefficients are NaN or infinite",
                key=block,
                first=f"vector '{vector}', part {part}",
                fix="learn them again with a smaller learning rate",
            )

    @classmethod
    def zeros(cls, bank: Bank, partition: Partition | None = None) -> Coefficients:
        """The base itself."""
        slots = Slots.of(bank, partition or Partition.blocks())
        return cls(slots, torch.zeros(slots.count), Origin.of(bank))

    @property
    def partition(self) -> Partition:
        return self.slots.partition

    @property
    def vectors(self) -> tuple[str, ...]:
        return self.slots.vectors

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(slot.block.name for slot in self.slots.blocks)

    def __len__(self) -> int:
        return self.slots.count

    def __repr__(self) -> str:
        size = f"{len(self.vectors)} vectors, {len(self.blocks)} blocks"
        return f"Coefficients({len(self)}: {size}, {self.partition})"

    def of(self, vector: str, block: str) -> Tensor:
        """The coefficients of one cell, one for each part."""
        return self.values[self.slots.index(vector, block)]

    def matrix(self) -> Tensor:
        """Vectors by blocks: the mean over the parts of a cell, NaN where there is no coefficient."""
        return self.slots.matrix(self.values)

    def items(self) -> list[tuple[str, str, int, float]]:
        """Vector, block, part and value of every coefficient."""
        labels = self.slots.labels()
        return [(*label, value) for label, value in zip(labels, self.values.tolist(), strict=True)]

    def chosen(self, bank: Bank) -> Bank:
        """The cells of the bank that have coefficients; if some are missing, ``for_bank`` says so."""
        known = [v for v in self.vectors if v in bank]
        if not known or bank.layout.signature != self.origin.layout:
            return bank.only(*known) if known else bank
        return bank.only_cells({v: self._cells_of(v, bank) for v in known})

    def _cells_of(self, vector: str, bank: Bank) -> list[str]:
        """Blocks of a vector without those for which other vectors have coefficients, but it has none."""
        mine = self.slots.by_block
        own = [b for b in bank[vector].blocks if self.partition.covers(b)]
        left_out = {b.name for b in own if b.name not in mine or vector not in mine[b.name].vectors}
        return [b.name for b in bank[vector].blocks if b.name not in left_out]

    def for_bank(self, bank: Bank, *, any_bank: bool = False) -> Coefficients:
        """The same coefficients for a bank of the same vectors, which may be stored or divided differently.

        Query, key and value that are blocks of their own there take over the coefficient of the block that
        holds all three here; the other way round the three must agree.
        """
        if not any_bank:
            _check_origin(self.origin, bank)
        _check_names(self, bank)
        slots, values = adopted(self.slots, self.values, bank)
        return Coefficients(slots, values, Origin.of(bank), self.linearised, self.selection)

    def require_standard(self) -> None:
        if self.linearised:
            raise InputError(
                "CKPT-LINEARISED",
                "these coefficients were learned over the linearised model, which has no composed weights",
                fix="evaluate them with --linearised, or learn them over the model itself",
            )

    def save(self, path: str | Path, *, overwrite: bool = False) -> str:
        """Write one safetensors file; returns its sha256."""
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        record = _Record.of(self).model_dump_json(exclude_defaults=True)
        meta = {"format": FORMAT, "schema": str(SCHEMA), "index": record}
        return save_safetensors(Path(path), {_VALUES: values}, meta, overwrite=overwrite)

    def to_bytes(self) -> bytes:
        """The file that ``save`` writes."""
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "coefficients"
            self.save(path)
            return path.read_bytes()

    @classmethod
    def load(cls, path: str | Path) -> Coefficients:
        """Read a file written by ``save``."""
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
                f"'{file.label}' was written by another version",
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
    rule: Rule = "blocks"
    families: tuple[str, ...] = ()
    parts: int = 1
    seed: int = 0


class _Record(_Strict):
    """What the file says of its numbers. Blocks are (name, shape, kind, depth)."""

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
        origin, slots = coefficients.origin, coefficients.slots
        absent = {s.block.name: tuple(v for v in slots.vectors if v not in s.vectors) for s in slots.blocks}
        return cls(
            scheme=origin.scheme,
            layout=origin.layout,
            base=_BaseRecord(
                label=origin.base.label, content=origin.base.content, activation=origin.base.activation
            ),
            bank=origin.bank,
            vectors=tuple((name, origin.sources[name]) for name in slots.vectors),
            partition=_PartitionRecord(**cast(Any, slots.partition.as_dict())),
            blocks=tuple((s.block.name, s.block.shape, s.block.kind, s.block.depth) for s in slots.blocks),
            absent={block: names for block, names in absent.items() if names},
            linearised=coefficients.linearised,
            selection=coefficients.selection,
        )

    def slots(self) -> Slots:
        names = tuple(name for name, _ in self.vectors)
        self._check(names)
        cells = []
        for name, shape, kind, depth in self.blocks:
            missing = set(self.absent.get(name, ()))
            cells.append((Block(name, shape, kind, depth), tuple(v for v in names if v not in missing)))
        made = Slots.made(Partition(**self.partition.model_dump()), names, cells)
        for block, _ in cells:
            if block.name not in made.by_block:
                raise ValueError(f"block '{block.name}' has no coefficients")
        return made

    def _check(self, names: tuple[str, ...]) -> None:
        """Nothing is made of an index before its names and sizes are known to be sane."""
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

    def origin(self) -> Origin:
        base = BaseInfo(self.base.label, self.base.content, self.base.activation)
        return Origin(self.scheme, self.layout, base, self.bank, dict(self.vectors))


def _parsed(file: SafetensorsFile) -> Coefficients:
    try:
        record = _Record.model_validate_json(file.metadata.get("index", ""))
        slots, origin = record.slots(), record.origin()
    except (ValidationError, ValueError, AnisoError) as e:
        reason = _reason(e)
        raise InputError(
            "COEF-FILE",
            f"'{file.label}' has an index that cannot be read",
            reason=printable(reason),
            fix="restore the file from a copy, or learn the coefficients again",
        ) from None
    values = file.read(_VALUES)
    if values.dtype not in (torch.float32, torch.float64):
        raise InputError(
            "COEF-VALUES",
            f"'{file.label}' has coefficients in an unusual format",
            found=values.dtype,
            expected="float32 or float64",
            fix="restore the file from a copy, or learn the coefficients again",
        )
    try:
        return Coefficients(slots, values, origin, record.linearised, record.selection)
    except InputError as e:
        e.message = f"'{file.label}': {e.message}"
        raise


def _reason(e: Exception) -> str:
    if isinstance(e, ValidationError):
        first = e.errors()[0]
        return ": ".join((".".join(map(str, first["loc"])), first["msg"]))
    return e.message if isinstance(e, AnisoError) else str(e)


def _check_origin(origin: Origin, bank: Bank) -> None:
    if not origin.base.is_same_as(bank.base):
        raise InputError(
            "COEF-BANK",
            "the coefficients were learned over another base than the bank's",
            expected=f"{origin.base.label} {origin.base.fingerprint[:16]} ({origin.base.activation})",
            found=f"{bank.base.label} {bank.base.fingerprint[:16]} ({bank.base.activation})",
            fix="use the bank that they were learned on",
        )
    if origin.bank == bank.content_hash:
        return
    for name, source in origin.sources.items():
        if name not in bank:
            continue  # said with all names, below
        theirs = bank[name].provenance.sha256
        if not source or theirs != source:
            raise InputError(
                "COEF-BANK",
                f"vector '{name}' of the bank is not the one that coefficients were learned with",
                expected=f"made from {source[:16] or 'a vector that was computed'}",
                found=f"made from {theirs[:16] or 'a vector that was computed'}",
                fix="use the bank that they were learned on, or any_bank=True if you are sure",
            )


def _check_names(coefficients: Coefficients, bank: Bank) -> None:
    missing = [v for v in coefficients.vectors if v not in bank]
    extra = [v for v in bank if v not in coefficients.vectors]
    if missing:
        raise InputError(
            "COEF-BANK",
            f"the bank has no vector '{missing[0]}', for which there are coefficients",
            expected=", ".join(coefficients.vectors),
            found=", ".join(bank.names),
            fix="use the bank that they were learned on",
        )
    if extra:
        raise InputError(
            "COEF-BANK",
            f"there are no coefficients for vector '{extra[0]}' of the bank",
            expected=", ".join(coefficients.vectors),
            found=", ".join(bank.names),
            fix="bank.only(*coefficients.vectors)",
        )
