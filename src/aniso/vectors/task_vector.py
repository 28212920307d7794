"""A task vector: what fine-tuning changed, block by block, over one base."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.errors import InputError, NumericalError, printable
from aniso.vectors._files.segment import Segment
from aniso.vectors._files.segment_format import FORMAT
from aniso.vectors._files.segment_writer import write_segment
from aniso.vectors._matching.key_edits import KeyEdits
from aniso.vectors._matching.key_matching import paired_blocks
from aniso.vectors._matching.plausibility import judge
from aniso.vectors.adapter import adapter_cells
from aniso.vectors.block import Block, Layout, Place, tied_names
from aniso.vectors.block_source import BlockSource, short_label
from aniso.vectors.delta import Delta, Dense, difference
from aniso.vectors.naming import PLAIN
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.weights import PeftAdapter, Ref, SafetensorsFile, open_weights
from aniso.weights.atomic import atomic_file
from aniso.weights.dtypes import narrowed
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
        self._relative_error = relative_error
        self._summands: tuple[TaskVector, ...] = ()
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
        require_used: bool = True,
        progress: Progress | None = None,
    ) -> TaskVector:
        """The difference of a fine-tuned model or adapter to its base.

        ``skip`` (patterns) and ``rename`` state exceptions in names; ``require_used`` makes one that
        matches nothing an error.
        Names, shapes and everything outside of the vector are compared at once. ``check`` also reads all
        values and refuses what is not finite, not different, or too different; a bank that is being
        written does this as it writes.
        """
        blocks = BlockSource.of(base)
        edits = KeyEdits(skip, rename or {})
        opened = open_weights(tuned)
        if require_used:
            edits.require_used([opened])
        source = edits.applied(opened)
        name = name or Path(short_label(source)).stem
        if isinstance(source, PeftAdapter):
            cells, provenance, dtypes = _from_adapter(blocks, source, progress)
        else:
            cells, provenance, dtypes = _from_model(blocks, blocks.like(source), edits, progress)
        if blocks.layout.scheme == PLAIN:
            note = "the base's names are not those of a CLIP: every tensor is a block of its own"
            provenance = replace(provenance, notes=(note, *provenance.notes))

        def judgement(norms: Mapping[str, float]) -> list[str]:
            known = blocks.identity().norms
            # an adapter is a difference by itself: its size says nothing about the base it came from
            distant = allow_distant or isinstance(source, PeftAdapter)
            return judge(name, blocks.layout, norms, known, dtypes, allow_distant=distant)

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
        norms, kept = {}, {}
        for block in self.blocks:
            delta = self[block.name]
            norms[block.name] = delta.norm()
            if not delta.vanishes(norms[block.name]):
                kept[block.name] = self._cells[block.name]
            if progress:
                progress(4 * block.numel)
        provenance, base = self.concluded(norms), self.base
        return TaskVector(
            self.name,
            self.layout,
            lambda: base,
            kept,
            provenance,
            {name: norms[name] for name in kept},
            self.relative_error,
        )

    def concluded(self, norms: Mapping[str, float]) -> Provenance:
        """The provenance once all norms are known, with whatever there is to say about them."""
        broken = [block for block, norm in norms.items() if not math.isfinite(norm)]
        if broken:
            raise NumericalError(
                "VECTOR-RANGE",
                f"'{self.name}' has a difference that is not a finite number",
                key=broken[0],
                fix="look for very large values with: aniso inspect --hash",
            )
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

    @property
    def relative_error(self) -> float:
        """What packing lost, as a share of the norm; errors of independent roundings add in squares."""
        if not any(v.relative_error for v in self._summands):
            return self._relative_error
        lost = math.hypot(*(v.relative_error * v.norm() for v in self._summands))
        return lost / self.norm() if self.norm() else 0.0

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
        out = TaskVector(
            name,
            self.layout,
            self._base,
            self._cells,
            self.provenance,
            self._norms,
            self._relative_error,
            self._judgement,
        )
        out._summands = self._summands
        return out

    def within(self, blocks: Collection[str]) -> TaskVector:
        """The vector in some of its blocks; the others become absent cells."""
        norms = None if self._norms is None else {n: x for n, x in self._norms.items() if n in blocks}
        cells = {name: cell for name, cell in self._cells.items() if name in blocks}
        return TaskVector(
            self.name, self.layout, self._base, cells, self.provenance, norms, self.relative_error
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
        formula = f"({self.provenance.formula}) + ({other.provenance.formula})"
        out = self._derived(f"{self.name}+{other.name}", cells, formula)
        out._summands = (self, other)
        return out

    def __radd__(self, other: int) -> TaskVector:
        """So that ``sum(vectors)`` works, which starts with 0."""
        return self if other == 0 else NotImplemented

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + (-other)

    def _derived(self, name: str, cells: Cells, formula: str) -> TaskVector:
        """A vector computed from others: it comes from no file."""
        provenance = Provenance(name, "arithmetic", formula=formula)
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
        if not self.base.is_same_as(other.base):
            raise InputError(
                "VECTOR-BASE",
                f"vectors '{self.name}' and '{other.name}' are differences to different bases",
                expected=f"{self.base.label} {self.base.fingerprint[:12]}",
                found=f"{other.base.label} {other.base.fingerprint[:12]}",
                fix="make both over the same base",
            )

    # using it

    def applied_to(
        self,
        base: Ref | BlockSource,
        coefficient: float = 1.0,
        dtype: torch.dtype = torch.float32,
        *,
        any_base: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of ``base + coefficient * vector`` under the base's own names, one at a time.

        Blocks are given in ``dtype``; what is no part of vectors stays as it is. ``any_base`` allows a model
        of the same shapes that the vector was not made over.
        """
        blocks = BlockSource.of(base)
        if blocks.layout.signature != self.layout.signature:
            raise InputError(
                "BANK-LAYOUT",
                f"vector '{self.name}' does not fit '{blocks.label}'",
                expected=f"{len(self.layout.blocks)} blocks ({self.layout.scheme})",
                found=f"{len(blocks.layout.blocks)} blocks ({blocks.layout.scheme})",
                fix="use the base that the vector was made over",
            )
        home = blocks.identity().is_same_as(self.base)
        if not home and not any_base:
            raise InputError(
                "BANK-BASE",
                f"vector '{self.name}' was not made over '{blocks.label}'",
                expected=f"{self.base.label} {self.base.fingerprint[:16]}",
                found=f"{blocks.identity().fingerprint[:16]}",
                fix="use the base that the vector was made over, or any_base=True if you are sure",
            )
        same: dict[str, list[str]] = {}  # all names of a tied tensor, which are given the same tensor
        for name, first in tied_names(blocks.source).items():
            same.setdefault(first, []).append(name)
        for key, places in blocks.layout.places.items():
            pieces = [self._rows(blocks, place, coefficient, exact=home) for place in places]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            result = narrowed(whole.contiguous(), dtype, f"the base with '{self.name}' added", key)
            for name in same.get(key, [key]):
                yield name, result
        for block in blocks.layout.outside:
            for part in block.parts:
                kept = blocks.source.read(part.key)
                for name in same.get(part.key, [part.key]):
                    yield name, kept

    def apply(
        self,
        base: Ref | BlockSource,
        coefficient: float = 1.0,
        dtype: torch.dtype = torch.float32,
        *,
        any_base: bool = False,
    ) -> dict[str, Tensor]:
        """``base + coefficient * vector`` as a state dict; see ``applied_to``.

        For models in float32 or less, 1 gives the tuned model and 0 the base, bit for bit.
        """
        return dict(self.applied_to(base, coefficient, dtype, any_base=any_base))

    def _rows(self, base: BlockSource, place: Place, coefficient: float, *, exact: bool) -> Tensor:
        """The part of a tensor that one block fills."""
        values = base.read(place.block)
        if place.block.name in self:
            delta = self[place.block.name]
            if isinstance(delta, Dense) and not exact:
                delta = Dense(delta.values)
            values = delta.applied_to(values, coefficient)
        part = place.part
        rows = values[part.start : part.stop] if place.block.shape else values
        return rows.T if part.transposed else rows

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


def stored_vector(ref: Ref | TaskVector) -> TaskVector | None:
    """A vector that was made before, given as such or as the file it was saved to."""
    if isinstance(ref, TaskVector):
        return ref
    source = open_weights(ref)
    if isinstance(source, SafetensorsFile) and source.metadata.get("format") == FORMAT:
        return TaskVector.load(source.files[0].path)
    return None


Parts = tuple[Cells, Provenance, Mapping[str, str]]
"""Cells, where they come from, and the dtype each block was stored in."""


def _from_model(base: BlockSource, tuned: BlockSource, edits: KeyEdits, progress: Progress | None) -> Parts:
    pairs, notes = paired_blocks(base, tuned, edits)

    def cell(mine: Block, theirs: Block) -> Delta:
        return difference(base.read_as_base(mine), tuned.read(theirs))

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


def _from_adapter(base: BlockSource, adapter: PeftAdapter, progress: Progress | None) -> Parts:
    cells, found = adapter_cells(base, adapter)
    notes = [*adapter.info.notes, *found]
    trained_on = adapter.settings.base_model
    # the name is a stranger's word and maybe a path of theirs: compared, never opened
    ours = (Path(base.label).name, base.label.partition("@")[0])
    if trained_on and Path(trained_on).name not in ours:
        notes.append(
            f"warning: says it was trained on '{printable(trained_on, 80)}', the base is "
            f"'{short_label(base.source)}'"
        )
    notes.append(f"{len(cells)} blocks updated, {len(base.layout.blocks) - len(cells)} absent")
    provenance = Provenance(
        short_label(adapter),
        adapter.info.format,
        adapter.sha256(progress),
        adapter.info.revision,
        formula=adapter.settings.formula(),
        notes=tuple(notes),
    )
    return cells, provenance, {}
