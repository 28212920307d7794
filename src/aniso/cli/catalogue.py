"""``aniso catalogue``: list the adapters below an address, and what each of them changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from aniso.addresses import require_address
from aniso.cli import show


def catalogue(
    addresses: Annotated[
        list[str], typer.Argument(help="Directories, or s3://, gs://, hf:// and https:// addresses.")
    ],
    model: Annotated[
        str, typer.Option(help="The base: mini, an open_clip name, a hub id, a directory, or a file.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The parquet file; an existing one is refreshed.")],
    texts: Annotated[bool, typer.Option("--texts", help="The base is a language model.")] = False,
    connections: Annotated[int, typer.Option(help="Requests to remote stores at once.", min=1, max=256)] = 8,
    reasons: Annotated[int, typer.Option(help="Adapters that cannot be used to list.", min=0)] = 20,
    json: show.Json = False,
) -> None:
    """Build or refresh a catalogue of adapters: only what is new or has changed is read."""
    for address in addresses:
        require_address(address)
    from aniso.cli import select_inputs
    from aniso.vectors import AdapterStores, BlockSource, Catalogue, refresh_catalogue

    stores = AdapterStores(addresses, connections=connections)
    known = Catalogue.load(out) if out.exists() else None
    inputs = select_inputs.texts if texts else select_inputs.images
    base = BlockSource.of(inputs(model, None).model.weight_source())
    with show.item_progress() as progress:
        found = refresh_catalogue(base, stores, known, progress=progress)
    found.save(out)
    unusable = [row for row in found.rows if not row.usable]
    counts = dict(Counter(row.code for row in unusable).most_common())
    facts = {"adapters": len(found.rows), "usable": len(found.usable), "reasons": counts}
    if json:
        rows = [{"uri": row.uri, "code": row.code, "reason": row.reason} for row in unusable]
        traffic = {"requests": stores.traffic.requests, "bytes": stores.traffic.nbytes}
        show.as_json({**facts, "unusable": rows, "path": str(out), "read": traffic})
        return
    if unusable and reasons:
        shown = [(row.name, row.code, row.reason) for row in unusable[:reasons]]
        show.table(("adapter", "code", "cannot be used because"), shown)
    more = f", {len(unusable) - reasons} more in the file" if len(unusable) > reasons else ""
    show.line(f"{len(found.usable)} of {len(found.rows)} adapters can be used{more}, written to {out}")
