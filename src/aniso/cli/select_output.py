"""Output of selections: a table for people, or JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aniso.cli import show

if TYPE_CHECKING:
    from aniso.json_value import JsonValue
    from aniso.learn.selection import ChosenCells


def print_choice(
    chosen: ChosenCells,
    blocks: int,
    among: int,
    out: Path | None,
    json: bool,
    more: Mapping[str, JsonValue] | None = None,
) -> None:
    """Print what was chosen; ``more`` is added to the JSON."""
    totals = {name: sum(abs(x) for x in own.values()) for name, own in chosen.scores.items()}
    kept = chosen.cells
    show.notes(chosen.notes)
    if json:
        rows = [{"vector": n, "blocks": list(kept[n]), "score": totals[n]} for n in kept]
        path = None if out is None else str(out)
        show.as_json({**chosen.summary(), "chosen": rows, "path": path, **(more or {})})
        return
    order = sorted(kept, key=lambda name: (-len(kept[name]), -totals[name]))
    show.table(
        ("vector", "blocks kept", "score"),
        [(name, f"{len(kept[name])}/{blocks}", f"{totals[name]:.4g}") for name in order],
        title=chosen.words,
    )
    place = "" if out is None else f", written to {out}"
    show.line(f"{len(kept)} of {among} vectors, {show.size(chosen.nbytes)}{place}")
