"""Building a catalogue: list, read what is new or has changed, and compare it with the base."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import final

from aniso.errors import AnisoError, InputError, printable
from aniso.progress import ProgressCallback
from aniso.vectors.block_source import BlockSource
from aniso.vectors.catalogue import WEIGHTS, Catalogue, CatalogueRow, is_temporary, read_contents
from aniso.weights import PeftAdapter
from aniso.weights.object_store import (
    ObjectStore,
    Retry,
    StoredObject,
    Traffic,
    store_at,
)

_CONFIG = "adapter_config.json"
_PICKLE = "adapter_model.bin"
CONNECTIONS = 8
"""Requests at once."""


@final
class AdapterStores:
    """The stores of some addresses: nothing outside of them is read."""

    def __init__(
        self, addresses: Sequence[str], *, retry: Retry | None = None, connections: int = CONNECTIONS
    ) -> None:
        self.traffic = Traffic()
        self.connections = connections
        self._stores = {
            store.root: store for store in (store_at(one, retry, self.traffic) for one in addresses)
        }

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(self._stores)

    def __iter__(self) -> Iterator[ObjectStore]:
        return iter(self._stores.values())

    def adapter(self, row: CatalogueRow) -> PeftAdapter:
        """Return the adapter of a row; its tensors are read when they are used, or by ``prefetch``."""
        store = self._stores.get(row.root)
        if store is None or not f"{row.uri}/".startswith(f"{row.root}/"):
            raise InputError(
                "CATALOGUE",
                f"'{printable(row.uri)}' does not lie below an address that was given",
                expected=", ".join(map(printable, self.roots)),
                fix="give its address, or build the catalogue again",
            )
        return row.adapter(store.file(row.weights, row.header))


def refresh_catalogue(
    base: BlockSource,
    addresses: Sequence[str] | AdapterStores,
    known: Catalogue | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> Catalogue:
    """Return the catalogue of all adapters below some addresses, compared with the base.

    Files are listed again. Of ``known`` adapters only those with another ETag are read, and those that could
    not be reached before. An adapter that cannot be used is a row with a reason. An address that cannot be
    listed raises an error::

        catalogue = refresh_catalogue(base, ["s3://bucket/adapters"], Catalogue.load("adapters.parquet"))
        catalogue.save("adapters.parquet")
    """
    stores = addresses if isinstance(addresses, AdapterStores) else AdapterStores(addresses)
    old = {row.uri: row for row in known.rows} if known is not None else {}
    found: dict[str, _Files] = {}
    for i, store in enumerate(stores, 1):
        for files in _listed(store):
            found.setdefault(files.uri, files)  # of an address within another one
        if progress:
            progress("listing", i, len(stores.roots))
    rows, fresh = {}, []
    for files in sorted(found.values(), key=lambda one: one.uri):
        row = old.get(files.uri)
        if row is not None and row.etag == files.etag != "" and not is_temporary(row):
            rows[files.uri] = replace(row, root=files.store.root)
        else:
            fresh.append(files)
    names = _names(fresh, {row.name for row in rows.values()}, old)
    content = base.identity().content
    with ThreadPoolExecutor(stores.connections) as pool:
        for i, row in enumerate(pool.map(lambda one: _row(one, names[one.uri]), fresh), 1):
            rows[row.uri] = row.compared_with(base, content)
            if progress:
                progress("reading headers", i, len(fresh))
    return Catalogue(tuple(rows[uri] for uri in sorted(rows))).compared_with(base)


@dataclass(frozen=True)
class _Files:
    """The files of one adapter."""

    store: ObjectStore
    uri: str
    files: Mapping[str, StoredObject]

    @property
    def etag(self) -> str:
        """Of both files; empty if one has none, so that it counts as changed."""
        parts = [self.files[name].etag for name in (_CONFIG, WEIGHTS) if name in self.files]
        return " | ".join(parts) if all(parts) else ""


def _listed(store: ObjectStore) -> list[_Files]:
    found: dict[str, dict[str, StoredObject]] = {}
    for one in store.objects((_CONFIG, WEIGHTS, _PICKLE)):
        found.setdefault(one.uri.rpartition("/")[0], {})[one.name] = one
    return [_Files(store, uri, files) for uri, files in found.items()]


def _row(one: _Files, name: str) -> CatalogueRow:
    """Read the configuration and the header of an adapter."""
    row = CatalogueRow(one.uri, name, one.store.root, one.etag)
    try:
        _require_both(one)
        weights = one.files[WEIGHTS]
        row = replace(row, nbytes=weights.size)
        config, header = read_contents(one.store.file(one.files[_CONFIG]), one.store.file(weights))
        return replace(row, config=config, header=header)
    except AnisoError as e:
        return row.refused(e)


def _require_both(one: _Files) -> None:
    if WEIGHTS not in one.files:
        raise InputError(
            "DIR-EMPTY",
            f"'{printable(one.uri)}' is an adapter without weights that are read by ranges",
            expected=WEIGHTS,
            found=_PICKLE if _PICKLE in one.files else "",
            fix="save it with safetensors",
        )
    if _CONFIG not in one.files:
        raise InputError(
            "LORA-CONFIG",
            f"'{printable(one.uri)}' has no configuration, which gives the scale of its updates",
            expected=_CONFIG,
            fix="save the adapter again with PEFT",
        )


def _names(fresh: Sequence[_Files], taken: set[str], old: Mapping[str, CatalogueRow]) -> dict[str, str]:
    """Names of vectors: the path below the address, with a part of its hash if another adapter has it."""
    names = {}
    for one in fresh:
        below = one.uri.removeprefix(one.store.root).strip("/") or one.uri.rpartition("/")[2]
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", below).strip("-._+")[:80] or "vector"
        if one.uri in old and old[one.uri].name not in taken:
            name = old[one.uri].name
        if name in taken:
            name = f"{name}-{hashlib.sha256(one.uri.encode()).hexdigest()[:12]}"
        taken.add(name)
        names[one.uri] = name
    return names
