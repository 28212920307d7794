"""A task vector: what fine-tuning changed, block by block, over one base."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.errors import InputError, NumericalError, printable
from aniso.vectors.adapter import adapter_cells
from aniso.vectors.block import Block, Layout, Place
from aniso.vectors.block_source import BlockSource, edited, short_label
from aniso.vectors.delta import Delta, difference
from aniso.vectors.judge import judge
from aniso.vectors.naming import PLAIN
from aniso.vectors.origin import BaseInfo, Provenance
from aniso.vectors.pairing import paired_blocks
from aniso.vectors.segment import Segment
from aniso.vectors.segment_writer import write_segment
from aniso.weights import PeftAdapter, Ref, open_weights
from aniso.weights.atomic import atomic_file
from aniso.weights.files import Progress

Cells = Mapping[str, Callable[[], Delta]]
"""Block name to a function that reads that block's delta; a block without an entry is an absent cell."""

Judgement = Callable[[Mapping[str, float]], list[str]]
"""Block norms to notes, or an error if they cannot be right."""


@final
class TaskVector:
    """Immutable deltas over one base, read when asked for: a vector may be larger than memory."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        base: Callable[[], BaseInfo],
        cells: Cells,
        provenance: Provenance,
        norms: Mapping[str, float] | None = None,
        relative_error: float = 0.0,
        judgement: Judgement | None = None,
    ) -> None:
        """``judgement`` is what remains to be said once the norms are known."""
        self.name = name
        self.layout = layout
        self.provenance = provenance
        self.relative_error = relative_error
        """What packing lost, as a share of the vector's norm."""
        self._base = base
        self._cells = cells
        self._norms = dict(norms) if norms is not None else None
        self._judgement = judgement

    # making one

    @classmethod
    def between(
        cls,
        base: Ref | BlockSource,
        tuned: Ref,
        *,
        name: str = "",
        skip: tuple[str, ...] = (),
        rename: Mapping[str, str] | None = None,
        allow_distant: bool = False,
        check: bool = True,
        progress: Progress | None = None,
    ) -> TaskVector:
        """The difference of a fine-tuned model or adapter to its base.

        Names, shapes and everything outside of the vector are compared at once. ``check`` also reads all
        values and refuses what is not finite, not different, or too different; a bank that is being
        written does this as it writes.
        """
        blocks = BlockSource.of(base)
        source = edited(open_weights(tuned), skip, rename or {})
        name = name or Path(short_label(source)).stem
        if isinstance(source, PeftAdapter):
            parts = _from_adapter(blocks, source, name, progress)
        else:
            parts = _from_model(blocks, blocks.like(source), name, skip, progress)
        cells, provenance = parts
        if blocks.layout.scheme == PLAIN:
            note = "the base's names are not those of a CLIP: every tensor is a block of its own"
            provenance = replace(provenance, notes=(note, *provenance.notes))

        def judgement(norms: Mapping[str, float]) -> list[str]:
            known = blocks.identity().norms
            # an adapter is a difference by itself: its size says nothing about the base it came from
            distant = allow_distant or isinstance(source, PeftAdapter)
            return judge(name, blocks.layout, norms, known, provenance.dtype, allow_distant=distant)

        vector = cls(name, blocks.layout, blocks.identity, cells, provenance, judgement=judgement)
        return vector.checked(progress) if check else vector

    @classmethod
    def of_segment(cls, segment: Segment, i: int) -> TaskVector:
        own = segment.vector(i)
        return cls(
            own.name,
            segment.layout,
            lambda: segment.base,
            own.cells,
            own.provenance,
            own.norms,
            own.relative_error,
        )

    def checked(self, progress: Progress | None = None) -> TaskVector:
        """The same vector after reading all of it once; unchanged blocks become absent."""
        norms = {}
        for block in self.blocks:
            norms[block.name] = self[block.name].norm()
            if progress:
                progress(4 * block.numel)
        provenance = self.concluded(norms)
        base = self.base
        kept = {name: self._cells[name] for name, norm in norms.items() if norm > 0}
        return TaskVector(self.name, self.layout, lambda: base, kept, provenance, {n: norms[n] for n in kept})

    def concluded(self, norms: Mapping[str, float]) -> Provenance:
        """The provenance once all norms are known, with whatever there is to say about them."""
        found = self._judgement(norms) if self._judgement else []
        return replace(self.provenance, notes=(*self.provenance.notes, *found))

    # looking at it

    @property
    def base(self) -> BaseInfo:
        return self._base()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that the vector changes."""
        return tuple(b for b in self.layout.blocks if b.name in self._cells)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.provenance.notes

    def __contains__(self, block: str) -> bool:
        return block in self._cells

    def __getitem__(self, block: str) -> Delta:
        """The delta of one block, read now."""
        if block not in self._cells:
            raise InputError(
                "CKPT-KEYS",
                f"vector '{self.name}' has no block '{printable(block)}'",
                fix="aniso vector show",
            )
        return self._cells[block]()

    @property
    def norms(self) -> Mapping[str, float]:
        """Euclidean norm of each block."""
        if self._norms is None:
            self._norms = {block.name: self[block.name].norm() for block in self.blocks}
        return self._norms

    def norm(self) -> float:
        return math.sqrt(sum(n * n for n in self.norms.values()))

    def dot(self, other: TaskVector) -> float:
        self._require_same_base(other)
        return sum(self[b.name].dot(other[b.name]) for b in self.blocks if b.name in other)

    def cosine(self, other: TaskVector) -> float:
        scale = self.norm() * other.norm()
        # rounding may carry a perfect match a hair over one
        return max(-1.0, min(1.0, self.dot(other) / scale)) if scale else 0.0

    def __repr__(self) -> str:
        return f"TaskVector({self.name!r}, {len(self.blocks)} of {len(self.layout.blocks)} blocks)"

    # arithmetic

    def renamed(self, name: str) -> TaskVector:
        return TaskVector(
            name,
            self.layout,
            self._base,
            self._cells,
            self.provenance,
            self._norms,
            self.relative_error,
            self._judgement,
        )

    def __mul__(self, factor: float) -> TaskVector:
        cells = {n: partial(self._scaled_cell, n, factor) for n in self._cells}
        return self._derived(f"{factor:g}*{self.name}", cells, f"{factor:g} * ({self.provenance.formula})")

    __rmul__ = __mul__

    def _scaled_cell(self, block: str, factor: float) -> Delta:
        return self[block].scaled(factor)

    def __neg__(self) -> TaskVector:
        return self * -1.0

    def __add__(self, other: TaskVector) -> TaskVector:
        self._require_same_base(other)

        def cell(name: str) -> Delta:
            if name not in other:
                return self[name]
            return self[name].plus(other[name]) if name in self else other[name]

        both = [b.name for b in self.layout.blocks if b.name in self or b.name in other]
        cells = {n: partial(cell, n) for n in both}
        return self._derived(f"{self.name}+{other.name}", cells, "sum of vectors")

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + (-other)

    def _derived(self, name: str, cells: Cells, formula: str) -> TaskVector:
        provenance = replace(self.provenance, formula=formula)
        return TaskVector(
            name, self.layout, self._base, cells, provenance, relative_error=self.relative_error
        )

    def _require_same_base(self, other: TaskVector) -> None:
        if self.layout.signature != other.layout.signature:
            raise InputError(
                "BANK-LAYOUT",
                f"vectors '{self.name}' and '{other.name}' have different blocks",
                fix="make both over the same base",
            )
        if self.base.fingerprint != other.base.fingerprint:
            raise InputError(
                "VECTOR-BASE",
                f"vectors '{self.name}' and '{other.name}' are differences to different bases",
                expected=f"{self.base.label} {self.base.fingerprint[:12]}",
                found=f"{other.base.label} {other.base.fingerprint[:12]}",
                fix="make both over the same base",
            )

    # using it

    def applied_to(
        self, base: Ref | BlockSource, coefficient: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of ``base + coefficient * vector`` under the base's own names, one at a time."""
        blocks = BlockSource.of(base)
        if blocks.layout.signature != self.layout.signature:
            raise InputError(
                "BANK-LAYOUT",
                f"vector '{self.name}' does not fit '{blocks.label}'",
                expected=f"{len(self.layout.blocks)} blocks ({self.layout.scheme})",
                found=f"{len(blocks.layout.blocks)} blocks ({blocks.layout.scheme})",
                fix="use the base that the vector was made over",
            )
        for key, places in blocks.layout.places.items():
            yield key, self._tensor(blocks, key, places, coefficient, dtype)
        for block in blocks.layout.outside:
            for part in block.parts:
                yield part.key, blocks.source.read(part.key)

    def apply(
        self, base: Ref | BlockSource, coefficient: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """``base + coefficient * vector`` as a state dict; 1 is the tuned model, 0 the base, bit for bit."""
        source = BlockSource.of(base)
        out = dict(self.applied_to(source, coefficient, dtype))
        for alias, first in source.source.aliases.items():
            out[alias] = out[first]
        return out

    def _tensor(
        self,
        base: BlockSource,
        key: str,
        places: tuple[Place, ...],
        coefficient: float,
        dtype: torch.dtype,
    ) -> Tensor:
        pieces = []
        for place in places:
            values = base.read(place.block)
            if place.block.name in self:
                values = self[place.block.name].applied_to(values, coefficient)
            part = place.part
            rows = values[part.start : part.stop] if place.block.shape else values
            pieces.append(rows.T if part.transposed else rows)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return _cast(whole.contiguous(), dtype, self.name, key)

    def save(
        self,
        path: str | Path,
        *,
        storage: str = "fp32",
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> str:
        """Write the vector to one file; returns its sha256."""
        with atomic_file(Path(path), overwrite=overwrite) as out:
            write_segment(out.stream, [self], storage=storage, progress=progress)
        return out.sha256

    @classmethod
    def load(cls, path: str | Path) -> TaskVector:
        """Open a file written by ``save``; deltas are read when asked for."""
        segment = Segment.open(Path(path))
        if len(segment.index.vectors) != 1:
            raise InputError(
                "VECTOR-FILE",
                f"'{printable(path)}' holds {len(segment.index.vectors)} vectors, not one",
                fix="open the bank it belongs to",
            )
        return cls.of_segment(segment, 0)


def _cast(values: Tensor, dtype: torch.dtype, name: str, key: str) -> Tensor:
    limit = torch.finfo(dtype).max
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= limit:
        raise NumericalError(
            "VECTOR-RANGE",
            f"composing with '{name}' leaves the range of {str(dtype).removeprefix('torch.')}",
            key=key,
            found=f"{largest:.4g}",
            expected=f"at most {limit:.4g}",
            fix="use a smaller coefficient, or --dtype bf16 or fp32",
        )
    return values.to(dtype)


def _from_model(
    base: BlockSource,
    tuned: BlockSource,
    name: str,
    skip: tuple[str, ...],
    progress: Progress | None,
) -> tuple[Cells, Provenance]:
    pairs, notes = paired_blocks(base, tuned, skip)

    def cell(mine: Block, theirs: Block) -> Delta:
        return difference(base.read_as_base(mine), tuned.read(theirs))

    source = tuned.source
    provenance = Provenance(
        short_label(source),
        source.info.format,
        source.sha256(progress),
        source.info.revision,
        tuned.dtype_of(pairs[0][1]) if pairs else None,
        notes=(*source.info.notes, *notes),
    )
    return {mine.name: partial(cell, mine, theirs) for mine, theirs in pairs}, provenance


def _from_adapter(
    base: BlockSource, adapter: PeftAdapter, name: str, progress: Progress | None
) -> tuple[Cells, Provenance]:
    cells = adapter_cells(base, adapter)
    notes = list(adapter.info.notes)
    trained_on = adapter.settings.base_model
    # the name is a stranger's word and maybe a path of theirs: compared, never opened
    if trained_on and Path(trained_on).name not in (
        Path(base.label).name,
        base.label.partition("@")[0],
    ):
        notes.append(
            f"warning: says it was trained on '{printable(trained_on, 80)}', the base is "
            f"'{short_label(base.source)}'"
        )
    untouched = len(base.layout.blocks) - len(cells)
    notes.append(f"{len(cells)} blocks updated, {untouched} absent")
    provenance = Provenance(
        short_label(adapter),
        adapter.info.format,
        adapter.sha256(progress),
        adapter.info.revision,
        formula=adapter.settings.formula(),
        notes=tuple(notes),
    )
    return cells, provenance
