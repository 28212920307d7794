"""A catalogue of adapters: where each is, what it changes, and why it cannot be used if it cannot.

Configurations and headers are part of it, so that adapters are compared with a base, and their tensors found,
without reading them again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import final

from aniso.errors import AnisoError, InputError, UnsafeError, printable
from aniso.vectors.adapter import block_tensors
from aniso.vectors.block_source import BlockSource
from aniso.weights import PeftAdapter
from aniso.weights.files import ByteFile
from aniso.weights.object_store import UNREACHABLE, StoredObject
from aniso.weights.remote_file import RemoteFile
from aniso.weights.safetensors import looks_like_safetensors
from aniso.weights.tables import read_table, write_table

WEIGHTS = "adapter_model.safetensors"
_FORMAT = "aniso catalogue 1"
_FIRST = 16 << 10  # bytes of the first read, which hold the header of small adapters
_HEADER_LIMIT = 8 << 20
_CONFIG_LIMIT = 1 << 20
_COLUMNS = {
    **dict.fromkeys(("uri", "name", "root", "etag"), "text"),
    "nbytes": "whole",
    "rank": "whole",
    "targets": "texts",
    "blocks": "whole",
    "trained_on": "text",
    "base": "text",
    "norm": "number",
    **dict.fromkeys(("code", "reason"), "text"),
    **dict.fromkeys(("config", "header"), "bytes"),
}


@final
@dataclass(frozen=True)
class CatalogueRow:
    """One adapter."""

    uri: str
    """The directory of its two files."""
    name: str
    """The name of its vector in a bank."""
    root: str
    """The address below which it was found."""
    etag: str
    """Of both files; another one means that the adapter has changed."""
    nbytes: int = 0
    """Size of its weights."""
    rank: int = 0
    """The largest rank of its updates."""
    targets: tuple[str, ...] = ()
    """The last parts of the names of modules that it updates."""
    blocks: int = 0
    """Blocks of the base that it changes."""
    trained_on: str = ""
    """The base that its configuration names; never opened."""
    base: str = ""
    """Hash of the base that it was compared with."""
    norm: float | None = None
    """Euclidean norm of its delta, once its tensors were read."""
    code: str = ""
    """Code of the error for which it cannot be used; empty if it can."""
    reason: str = ""
    config: bytes = field(default=b"", repr=False)
    header: bytes = field(default=b"", repr=False)

    @property
    def usable(self) -> bool:
        return not self.code

    @property
    def weights(self) -> StoredObject:
        """The file with its tensors."""
        return StoredObject(f"{self.uri}/{WEIGHTS}", self.nbytes, self.etag.rpartition(" | ")[2])

    def adapter(self, weights: ByteFile | None = None) -> PeftAdapter:
        """Return the adapter; without its file of weights, names and shapes are known, but not values."""
        config = RemoteFile(f"{self.uri}/adapter_config.json", len(self.config), _unread, self.config)
        if weights is None:
            weights = RemoteFile(self.weights.uri, self.nbytes, _unread, self.header)
        return PeftAdapter.of_files(printable(self.uri), config, weights)

    def refused(self, error: AnisoError) -> CatalogueRow:
        """Return the row with the reason why its adapter cannot be used."""
        return replace(self, code=error.code, reason=error.in_one_line())

    def compared_with(self, base: BlockSource, content: str) -> CatalogueRow:
        """Return the row for a base, whose hash is given: names and shapes are compared, nothing is read."""
        if not self.header:
            return self
        row = replace(
            self, base=content, norm=self.norm if content == self.base else None, code="", reason=""
        )
        try:
            adapter = row.adapter()
        except AnisoError as e:  # the header itself is unusable, for any base
            return replace(row.refused(e), header=b"")
        ranks = [adapter.tensors[update.a].shape[0] for update in adapter.updates]
        row = replace(
            row,
            rank=max(ranks, default=0),
            targets=tuple(sorted({update.module.rpartition(".")[2] for update in adapter.updates})),
            trained_on=printable(adapter.settings.base_model or "", 200),
        )
        try:
            _require_thin(base, row)
            return replace(row, blocks=len(block_tensors(base, adapter)))
        except AnisoError as e:
            return replace(row.refused(e), blocks=0)


def read_contents(config: ByteFile, weights: ByteFile) -> tuple[bytes, bytes]:
    """Return an adapter's configuration and the header of its weights, in two reads or three."""
    if config.size > _CONFIG_LIMIT:
        raise UnsafeError(
            "LORA-CONFIG",
            f"'{config.label}' is too long",
            found=f"{config.size} bytes",
            expected=f"at most {_CONFIG_LIMIT}",
            fix="save the adapter again with PEFT",
        )
    text, head = config.read(0, config.size), weights.head(_FIRST)
    if not looks_like_safetensors(head):
        return text, head[:512]
    stop = 8 + struct.unpack("<Q", head[:8])[0]
    if stop > _HEADER_LIMIT:
        raise UnsafeError(
            "ST-HEADER",
            f"'{weights.label}' declares a header of {stop - 8} bytes",
            expected=f"at most {_HEADER_LIMIT}",
            fix="leave it out",
        )
    if stop > len(head) and stop <= weights.size:
        head += weights.read(len(head), stop - len(head))
    return text, head[:stop]


@final
@dataclass(frozen=True)
class Catalogue:
    """Rows of adapters by address, each once."""

    rows: tuple[CatalogueRow, ...]

    @property
    def usable(self) -> tuple[CatalogueRow, ...]:
        return tuple(row for row in self.rows if row.usable)

    def below(self, addresses: Sequence[str]) -> Catalogue:
        """Return the rows found below these addresses."""
        return Catalogue(tuple(row for row in self.rows if row.root in addresses))

    def compared_with(self, base: BlockSource) -> Catalogue:
        """Return the catalogue for a base; rows that were compared with it before stay as they are."""
        content = base.identity().content
        return Catalogue(
            tuple(row if row.base == content else row.compared_with(base, content) for row in self.rows)
        )

    def updated(self, rows: Iterable[CatalogueRow]) -> Catalogue:
        """Return the catalogue with other rows for the same adapters."""
        new = {row.uri: row for row in rows}
        return Catalogue(tuple(new.get(row.uri, row) for row in self.rows))

    def save(self, path: str | Path) -> None:
        """Write the catalogue to a parquet file, in place of an older one."""
        rows = [astuple(row) for row in self.rows]
        write_table(Path(path), _COLUMNS, rows, {"format": _FORMAT}, overwrite=True)

    @classmethod
    def load(cls, path: str | Path) -> Catalogue:
        """Read a catalogue that ``save`` wrote."""
        columns, about = read_table(Path(path), _COLUMNS, "CATALOGUE")
        names = [one.name for one in fields(CatalogueRow)]
        texts: dict[bytes, bytes] = {}  # adapters of one training have equal headers: each is kept once
        try:
            if about.get("format") != _FORMAT:
                raise ValueError(f"format {about.get('format')}")
            rows = []
            for values in zip(*(columns[name] for name in names), strict=True):
                facts = dict(zip(names, values, strict=True))
                if any(value is None for name, value in facts.items() if name != "norm"):
                    raise ValueError("a value is missing")
                facts["targets"] = tuple(facts["targets"])
                facts |= {key: texts.setdefault(facts[key], facts[key]) for key in ("config", "header")}
                rows.append(CatalogueRow(**facts))
            if len({row.uri for row in rows}) != len(rows) or len({row.name for row in rows}) != len(rows):
                raise ValueError("an adapter is in two rows")
        except ValueError as e:
            raise InputError(
                "CATALOGUE",
                f"'{printable(path)}' is not a catalogue of this version",
                reason=printable(e),
                fix="build it again: aniso catalogue",
            ) from None
        return cls(tuple(rows))


def is_temporary(row: CatalogueRow) -> bool:
    """True if the adapter could not be read, and may be readable the next time."""
    return row.code == UNREACHABLE


def _require_thin(base: BlockSource, row: CatalogueRow) -> None:
    most = 4 * sum(block.numel for block in base.layout.blocks) + len(row.header)
    if row.nbytes > most:
        raise UnsafeError(
            "LORA-KIND",
            f"'{printable(row.uri)}' is larger than its base",
            found=f"{row.nbytes} bytes",
            expected=f"at most {most}",
            fix="leave it out",
        )


def _unread(start: int, stop: int) -> bytes:
    raise InputError(
        "FILE-TRUNCATED", "the header ends before its own length", fix="download the adapter again"
    )
