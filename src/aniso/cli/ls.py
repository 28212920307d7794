"""``aniso ls``: everything that can be chosen by name."""

from __future__ import annotations

from typing import Annotated

import typer

from aniso.cli import show
from aniso.errors import UsageError, printable
from aniso.registry import REGISTRIES

_KINDS = {f"{registry.kind}s".replace(" ", "-"): registry for registry in REGISTRIES}


def ls(
    kind: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(_KINDS)}; all by default.")] = None,
    json: show.Json = False,
) -> None:
    """List settings, methods, objectives, heads and whatever else can be chosen by name or added."""
    if kind is not None and kind not in _KINDS:
        raise UsageError(
            "USAGE", f"there are no {printable(kind)}", expected=", ".join(_KINDS), fix="aniso ls methods"
        )
    rows = [
        (name, entry, registry.summary(entry))
        for name, registry in _KINDS.items()
        if kind in (None, name)
        for entry in registry.names
    ]
    if json:
        show.as_json([{"kind": a, "name": b, "summary": c} for a, b, c in rows])
        return
    show.table(("kind", "name", "what it does"), rows)
