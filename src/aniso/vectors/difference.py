"""The difference of a fine-tuned model or adapter to its base: names and shapes compared, values unread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from aniso.errors import printable
from aniso.vectors._matching.key_edits import KeyEdits
from aniso.vectors._matching.key_matching import match_blocks
from aniso.vectors._matching.plausibility import check_plausible
from aniso.vectors.adapter import adapter_cells
from aniso.vectors.block import Block, Kind, Layout
from aniso.vectors.block_source import BlockSource, short_label
from aniso.vectors.delta import Delta, difference
from aniso.vectors.naming import PLAIN
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.vectors.sparse_rows import sparse_rows
from aniso.weights import PeftAdapter, WeightSource
from aniso.weights.files import Progress

Cells = Mapping[str, Callable[[], Delta]]
"""Block name to a function that reads that block's delta; a block without an entry is an absent cell."""

NormCheck = Callable[[Mapping[str, float]], list[str]]
"""Block norms to notes; raises an error if they cannot come from fine-tuning."""


@dataclass(frozen=True)
class Difference:
    """The parts of a task vector before any value is read."""

    name: str
    layout: Layout
    base: Callable[[], BaseInfo]
    cells: Cells
    provenance: Provenance
    check_norms: NormCheck


def difference_between(
    base: BlockSource,
    tuned: WeightSource,
    edits: KeyEdits,
    *,
    name: str = "",
    allow_distant: bool = False,
    hashed: bool = True,
    progress: Progress | None = None,
) -> Difference:
    """Compare the names, shapes and non-vector tensors of a tuned model with its base.

    ``progress`` is called while the tuned files are hashed; an adapter that is not to be read as a whole need
    not be ``hashed``.
    """
    source = edits.applied(tuned)
    name = name or Path(short_label(source)).stem
    if isinstance(source, PeftAdapter):
        cells, provenance = _from_adapter(base, source, progress, hashed=hashed)
        dtypes: Mapping[str, str] = {}
    else:
        cells, provenance, dtypes = _from_model(base, base.like(source), edits, progress)
    if base.layout.scheme == PLAIN:
        note = "the base's names are not those of a CLIP: every tensor is a block of its own"
        provenance = replace(provenance, notes=(note, *provenance.notes))

    def check_norms(norms: Mapping[str, float]) -> list[str]:
        # an adapter is a difference by itself: its size says nothing about the base it was trained on
        distant = allow_distant or isinstance(source, PeftAdapter)
        base_norms = base.identity().norms
        return check_plausible(name, base.layout, norms, base_norms, dtypes, allow_distant=distant)

    return Difference(name, base.layout, base.identity, cells, provenance, check_norms)


def _from_model(
    base: BlockSource, tuned: BlockSource, edits: KeyEdits, progress: Progress | None
) -> tuple[Cells, Provenance, Mapping[str, str]]:
    """Return the cells, the provenance and the dtype that each block of the tuned model is stored in."""
    pairs, notes = match_blocks(base, tuned, edits)

    def cell(mine: Block, theirs: Block) -> Delta:
        found = difference(base.read_as_base(mine), tuned.read(theirs))
        return sparse_rows(found) if mine.kind is Kind.EMBEDDING else found

    source = tuned.source
    dtypes = {mine.name: tuned.dtype_of(theirs) for mine, theirs in pairs}
    provenance = Provenance(
        short_label(source),
        source.info.format,
        source.sha256(progress),
        source.info.revision,
        "+".join(sorted(set(dtypes.values()))),
        notes=(*source.info.notes, *notes),
    )
    return {mine.name: partial(cell, mine, theirs) for mine, theirs in pairs}, provenance, dtypes


def _from_adapter(
    base: BlockSource, adapter: PeftAdapter, progress: Progress | None, *, hashed: bool
) -> tuple[Cells, Provenance]:
    cells, adapter_notes = adapter_cells(base, adapter)
    notes = [*adapter.info.notes, *adapter_notes]
    trained_on = adapter.settings.base_model
    # untrusted, and maybe a path on another machine: compared, never opened
    base_names = (Path(base.label).name, base.label.partition("@")[0])
    if trained_on and Path(trained_on).name not in base_names:
        notes.append(
            f"warning: says it was trained on '{printable(trained_on, 80)}', the base is "
            f"'{short_label(base.source)}'"
        )
    notes.append(f"{len(cells)} blocks updated, {len(base.layout.blocks) - len(cells)} absent")
    provenance = Provenance(
        short_label(adapter),
        adapter.info.format,
        adapter.sha256(progress) if hashed else "",
        adapter.info.revision,
        formula=adapter.settings.formula(),
        notes=tuple(notes),
    )
    return cells, provenance
