"""A task vector: what fine-tuning changed, block by block, over one base."""

from __future__ import annotations

import copy
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
from aniso.vectors.block import Block, Layout, Place, tied_names
from aniso.vectors.block_source import BlockSource
from aniso.vectors.delta import Delta
from aniso.vectors.difference import Cells, Difference, NormCheck, difference_between
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.weights import Ref, SafetensorsFile, open_weights
from aniso.weights.atomic import atomic_file
from aniso.weights.dtypes import narrowed
from aniso.weights.files import Progress, RawFile


@final
class TaskVector:
    """Immutable deltas over one base, read from disk when used: a vector may be larger than memory.

    Vectors over one base can be added, subtracted and scaled::

        cars = TaskVector.between("base.pt", "cars.pt")
        model.load_state_dict((0.3 * cars - 0.1 * mnist).apply("base.pt"))
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        base: Callable[[], BaseInfo],
        cells: Cells,
        provenance: Provenance,
        norms: Mapping[str, float] | None = None,
        relative_error: float = 0.0,
        check_norms: NormCheck | None = None,
    ) -> None:
        """``check_norms`` is called once all norms are known; its notes are added to the provenance."""
        self.name = name
        self.layout = layout
        self.provenance = provenance
        self._relative_error = relative_error
        self._summands: tuple[TaskVector, ...] = ()
        self._base = base
        self._cells = cells
        self._norms = dict(norms) if norms is not None else None
        self._check_norms = check_norms

    @classmethod
    def between(
        cls,
        base: Ref | BlockSource,
        tuned: Ref,
        *,
        name: str = "",
        edits: KeyEdits | None = None,
        allow_distant: bool = False,
        check: bool = True,
        progress: Progress | None = None,
    ) -> TaskVector:
        """Return the difference of a fine-tuned model or LoRA adapter to its base.

        ``edits`` skips or renames keys of the tuned model; an edit that matches no key is an error.
        ``allow_distant`` accepts a model that differs more from the base than fine-tuning does.
        Names, shapes and tensors outside of the vector are compared now. With ``check``, all values are read
        as well, and NaN, infinity, no difference or an implausibly large one raise an error::

            vector = TaskVector.between("ViT-B-32.pt", "cars.pt", edits=KeyEdits(skip=("text_model.*",)))
        """
        blocks, edits, source = BlockSource.of(base), edits or KeyEdits(), open_weights(tuned)
        edits.require_used([source])
        difference = difference_between(
            blocks, source, edits, name=name, allow_distant=allow_distant, progress=progress
        )
        vector = cls.of_difference(difference)
        return vector.checked(progress) if check else vector

    @classmethod
    def of_difference(cls, difference: Difference) -> TaskVector:
        return cls(
            difference.name,
            difference.layout,
            difference.base,
            difference.cells,
            difference.provenance,
            check_norms=difference.check_norms,
        )

    @classmethod
    def of_segment(cls, segment: Segment, index: int) -> TaskVector:
        """Return the vector at a position of a vector file."""
        stored = segment.vector(index)
        return cls(
            stored.name,
            segment.layout,
            lambda: segment.base,
            stored.cells,
            stored.provenance,
            stored.norms,
            stored.relative_error,
        )

    def checked(self, progress: Progress | None = None) -> TaskVector:
        """Return the vector after reading and checking all of it; unchanged blocks become absent cells."""
        norms, kept = {}, {}
        for block in self.blocks:
            delta = self[block.name]
            norms[block.name] = delta.norm()
            if not delta.vanishes(norms[block.name]):
                kept[block.name] = self._cells[block.name]
            if progress:
                progress(4 * block.numel)
        provenance, base = self.checked_provenance(norms), self.base
        return TaskVector(
            self.name,
            self.layout,
            lambda: base,
            kept,
            provenance,
            {name: norms[name] for name in kept},
            self.relative_error,
        )

    def checked_provenance(self, norms: Mapping[str, float]) -> Provenance:
        """Return the provenance with notes on the norms, which are checked to be plausible."""
        broken = [block for block, norm in norms.items() if not math.isfinite(norm)]
        if broken:
            raise NumericalError(
                "VECTOR-RANGE",
                f"'{self.name}' has a delta that is NaN or infinite",
                key=broken[0],
                fix="look for very large values with: aniso inspect --hash",
            )
        notes = self._check_norms(norms) if self._check_norms else []
        return replace(self.provenance, notes=(*self.provenance.notes, *notes))

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

    def has_base_of(self, other: TaskVector) -> bool:
        """True if both were made from the same base object, so that bases need not be compared."""
        return self._base == other._base

    def __contains__(self, block: str) -> bool:
        return block in self._cells

    def __getitem__(self, block: str) -> Delta:
        """Read the delta of one block."""
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
        """Return the Euclidean norm over all blocks."""
        return math.sqrt(sum(n * n for n in self.norms.values()))

    @property
    def relative_error(self) -> float:
        """The norm of what packing rounded away, relative to the vector's norm.

        Errors of independent roundings add up in squares.
        """
        if not any(v.relative_error for v in self._summands):
            return self._relative_error
        lost = math.hypot(*(v.relative_error * v.norm() for v in self._summands))
        return lost / self.norm() if self.norm() else 0.0

    def dot(self, other: TaskVector) -> float:
        """Return the inner product with a vector over the same base."""
        self._require_same_base(other)
        return sum(self[b.name].dot(other[b.name]) for b in self.blocks if b.name in other)

    def cosine(self, other: TaskVector) -> float:
        """Return the cosine similarity with a vector over the same base; 0 if one of them is zero."""
        scale = self.norm() * other.norm()
        # rounding may carry a perfect match a hair over one
        return max(-1.0, min(1.0, self.dot(other) / scale)) if scale else 0.0

    def __repr__(self) -> str:
        return f"TaskVector({self.name!r}, {len(self.blocks)} of {len(self.layout.blocks)} blocks)"

    def renamed(self, name: str) -> TaskVector:
        """Return the same vector under another name."""
        out = copy.copy(self)
        out.name = name
        return out

    def within(self, blocks: Collection[str]) -> TaskVector:
        """Return the vector restricted to some of its blocks; the others become absent cells."""
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
        """Support ``sum(vectors)``, which starts with 0."""
        return self if other == 0 else NotImplemented

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + (-other)

    def _derived(self, name: str, cells: Cells, formula: str) -> TaskVector:
        """Return a vector computed from others, whose provenance is a formula instead of a file."""
        provenance = Provenance(name, "arithmetic", formula=formula)
        return TaskVector(
            name, self.layout, self._base, cells, provenance, relative_error=self.relative_error
        )

    def _require_same_base(self, other: TaskVector) -> None:
        if self.layout.signature != other.layout.signature:
            raise InputError(
                "BANK-LAYOUT",
                f"vectors '{self.name}' and '{other.name}' have different blocks",
                fix="make both from the same base",
            )
        if not self.base.is_same_as(other.base):
            raise InputError(
                "VECTOR-BASE",
                f"vectors '{self.name}' and '{other.name}' have different bases",
                expected=f"{self.base.label} {self.base.content[:12]}",
                found=f"{other.base.label} {other.base.content[:12]}",
                fix="make both from the same base",
            )

    def applied_to(
        self,
        base: Ref | BlockSource,
        coefficient: float = 1.0,
        dtype: torch.dtype = torch.float32,
        *,
        any_base: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of ``base + coefficient * vector`` under the base's names, one at a time.

        Blocks are converted to ``dtype``; tensors that are no part of vectors keep theirs. ``any_base``
        accepts a model of the same shapes that is not the vector's base.
        """
        blocks = BlockSource.of(base)
        if blocks.layout.signature != self.layout.signature:
            raise InputError(
                "BANK-LAYOUT",
                f"vector '{self.name}' does not fit '{blocks.label}'",
                expected=f"{len(self.layout.blocks)} blocks ({self.layout.scheme})",
                found=f"{len(blocks.layout.blocks)} blocks ({blocks.layout.scheme})",
                fix="use the base that the vector was made from",
            )
        is_base = blocks.identity().is_same_as(self.base)
        if not is_base and not any_base:
            raise InputError(
                "BANK-BASE",
                f"vector '{self.name}' was not made from '{blocks.label}'",
                expected=f"{self.base.label} {self.base.content[:16]}",
                found=f"{blocks.identity().content[:16]}",
                fix="use the base that the vector was made from, or any_base=True if you are sure",
            )
        same: dict[str, list[str]] = {}  # all names of a tied tensor, which share one tensor
        for name, first in tied_names(blocks.source).items():
            same.setdefault(first, []).append(name)
        for key, places in blocks.layout.places.items():
            pieces = [self._rows(blocks, place, coefficient, exact=is_base) for place in places]
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
        """Return ``base + coefficient * vector`` as a state dict; see ``applied_to``.

        For models in float32 or less, 1 gives the tuned model and 0 the base, bit for bit.
        """
        return dict(self.applied_to(base, coefficient, dtype, any_base=any_base))

    def _rows(self, base: BlockSource, place: Place, coefficient: float, *, exact: bool) -> Tensor:
        """Return the rows of a tensor that belong to one block."""
        values = base.read(place.block)
        if place.block.name in self:
            delta = self[place.block.name]
            if not exact:
                delta = delta.without_exact()
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
        """Write the vector to one safetensors file; returns the file's sha256."""
        with atomic_file(Path(path), overwrite=overwrite) as out:
            write_segment(out.stream, [self], storage=storage, progress=progress)
        return out.sha256

    @classmethod
    def load(cls, path: str | Path) -> TaskVector:
        """Open a file written by ``save``; deltas are read when they are used."""
        segment = Segment.open(Path(path))
        if len(segment.index.vectors) != 1:
            raise InputError(
                "VECTOR-FILE",
                f"'{printable(path)}' holds {len(segment.index.vectors)} vectors, not one",
                fix="open the bank it belongs to",
            )
        return cls.of_segment(segment, 0)


def stored_vector(ref: Ref | TaskVector) -> TaskVector | None:
    """Return a vector given as such or as the file it was saved to; None for other weights."""
    if isinstance(ref, TaskVector):
        return ref
    source = open_weights(ref)
    if isinstance(source, SafetensorsFile) and source.metadata.get("format") == FORMAT:
        file = source.files[0]
        assert isinstance(file, RawFile)  # vectors are saved to disk
        return TaskVector.load(file.path)
    return None
