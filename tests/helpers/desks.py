"""Desks of tiny models, and plain HTTP requests to their servers."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runs
import torch

from aniso.explore import Desk, DeskOptions, DeskServer, open_desk
from aniso.explore.desk import DeskFiles
from aniso.vectors import Bank

Table = list[list[float | None]]


def photo_desk(shelf: runs.Shelf, source: Path | None = None, **more: Any) -> Desk:
    """A desk over the shelf's bank, or a run or coefficients of it, that predicts colours of photos."""
    given = {"base": str(shelf.model), "task": str(shelf.data / "photos"), "sample": 4, **more}
    return open_desk(DeskOptions(str(source or shelf.bank), **given))


def layered_bank(vectors: int, layers: int, each: int, more: int) -> Bank:
    """A bank of tiny blocks: so many in each layer, and so many outside of layers."""
    names = [f"model.layers.{i}.part{j}.weight" for i in range(layers) for j in range(each)]
    names += [f"model.extra{i}.weight" for i in range(more)]
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(3, 2, generator=generator) for name in names}
    tuned = {
        f"task{i}": {name: t + 0.02 * torch.randn(3, 2, generator=generator) for name, t in base.items()}
        for i in range(vectors)
    }
    return Bank.build(base, tuned)


def bank_desk(bank: Bank) -> Desk:
    """A desk without a model."""
    return Desk("Bank", bank, bank, DeskFiles("bank"))


def constant(desk: Desk, **values: float) -> Table:
    """A table with these numbers for vectors, and 0 for the others."""
    table = desk.table.filled(0.0)
    for name, value in values.items():
        row = table[desk.table.vectors.index(name)]
        row[~row.isnan()] = value
    return desk.table.write(table)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def ask(
    server: DeskServer,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    method: str | None = None,
    **headers: str,
) -> Answer:
    """Send a request as the page does; ``body`` is JSON, or bytes as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    all_headers = {"X-Aniso-Token": server.token if token is None else token}
    all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, content, all_headers)
        found = connection.getresponse()
        return Answer(found.status, dict(found.getheaders()), found.read())
    finally:
        connection.close()
