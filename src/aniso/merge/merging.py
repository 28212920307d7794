"""Merging: a rule over a bank gives one more task vector, block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack, final

from torch import Tensor

from aniso.errors import InputError, UsageError, printable
from aniso.merge.core_space import CoreSpace
from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import MergeRule
from aniso.merge.sources import require_sources, source_hash, source_notes
from aniso.merge.units import Unit, block_of, units_of
from aniso.vectors import Bank, Block, Delta, Dense, Kind, LowRank, Provenance, TaskVector
from aniso.vectors.singular import NOTHING
from aniso.vectors.sparse_rows import sparse_rows
from aniso.weights.files import Progress

FORMAT = "merge"
"""The format of a merged vector, in its provenance."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("stored", "fused", "split"),
    "embeddings": ("mean", "spectral"),
    "small": ("error", "mean"),
    "space": ("auto", "core", "full"),
}
"""The values of every merge option; the first is the default."""


@final
@dataclass(frozen=True)
class MergeOptions:
    """Which blocks a rule treats as matrices, and how."""

    qkv: str = "stored"
    """Query, key and value as the bank has them, as one matrix (``fused``), or as three (``split``)."""
    embeddings: str = "mean"
    """Spectral rules average embeddings, or treat them like other matrices (``spectral``)."""
    small: str = "error"
    """Matrices with fewer ranks than a rule needs are an error, or are averaged (``mean``)."""
    space: str = "auto"
    """Low-rank vectors are merged in ``core`` space, or as ``full`` matrices; ``auto`` is core space unless
    the rule works on single elements."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    "USAGE",
                    f"invalid value '{printable(getattr(self, name))}' for {name}",
                    expected=", ".join(allowed),
                    fix=f"--{name} {allowed[0]}",
                )


class MergeKeywords(TypedDict, total=False):
    """Keywords of ``merge``; those of ``MergeOptions`` are explained there."""

    name: str
    """Name of the merged vector; default: that of the rule."""
    to: str | Path
    """File to write block by block; default: the vector is kept in memory."""
    storage: str
    overwrite: bool
    progress: Progress
    qkv: str
    embeddings: str
    small: str
    space: str


def merge(bank: Bank, rule: MergeRule, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Return the vector that a rule makes of all vectors of a bank.

    It is an ordinary task vector over the same base: save it, put it into a bank, scale it, apply it. With
    ``to`` it is written to a file block by block, and read from there; the memory needed is that of one
    block, see ``plan_merge``::

        merged = merge(bank.only("cars", "dtd"), TSV(), to="merged.safetensors")
        model.load_state_dict(merged.apply("base.pt"))

    Raises UsageError MERGE-RANK if a matrix has fewer ranks than the rule needs, MERGE-VECTORS if there are
    too few vectors or two are equal, InputError VECTOR-ZERO and WEIGHT-NONFINITE for broken vectors.
    """
    vector = unread_merge(bank, rule, **how)
    to = how.get("to")
    if to is None:
        return _in_memory(vector)
    vector.save(
        to,
        storage=how.get("storage", "fp32"),
        overwrite=how.get("overwrite", False),
        progress=how.get("progress"),
    )
    return TaskVector.load(to)


def unread_merge(bank: Bank, rule: MergeRule, **how: Unpack[MergeKeywords]) -> TaskVector:
    """Return the merged vector before anything large is read: every block is merged whenever it is read."""
    options = merge_options(**how)
    require_sources(bank, rule)
    merging = Merging(bank, rule, options, how.get("progress"))
    name = how.get("name") or rule.kind
    return TaskVector(
        name,
        bank.layout,
        lambda: bank.base,
        {block.name: partial(merging.block, block) for block in merging.blocks},
        _provenance(bank, rule, options),
        relative_error=max(bank[source].relative_error for source in bank),
        check_norms=partial(_require_not_zero, rule, max(bank[source].norm() for source in bank)),
    )


def merge_options(**how: Unpack[MergeKeywords]) -> MergeOptions:
    """Return the options among keywords of ``merge``."""
    known = {field.name for field in fields(MergeOptions)}
    return MergeOptions(**{key: str(value) for key, value in how.items() if key in known})


def is_matrix(unit: Unit, options: MergeOptions) -> bool:
    """True if a rule treats the unit as a matrix."""
    averaged = unit.kind is Kind.EMBEDDING and options.embeddings == "mean"
    return len(unit.shape) == 2 and not averaged


class Merging:
    """One merge: the rule, prepared when the first block is read, and the units of all blocks."""

    def __init__(
        self, bank: Bank, rule: MergeRule, options: MergeOptions, progress: Progress | None = None
    ) -> None:
        self._bank = bank
        self._rule = rule
        self._options = options
        self._progress = progress
        self._units = units_of(bank.layout, options.qkv)
        self._changed = {block for name in bank for block, norm in bank[name].norms.items() if norm}
        self._prepared: MergeRule | None = None
        self._last: tuple[str, Delta | None] = ("", None)
        for unit in self.units:  # before anything large is read
            if is_matrix(unit, options) and unit.whole_block is not None:
                self._has_room(unit, unit.shape, len(self._present(unit)))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that any vector changes."""
        return tuple(block for block in self._bank.layout.blocks if block.name in self._changed)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of these blocks, each once."""
        found = {unit.name: unit for block in self.blocks for unit in self._units[block.name]}
        return tuple(found.values())

    def block(self, block: Block) -> Delta:
        """Return one block of the merged vector."""
        results = [(unit, self._merged(unit)) for unit in self._units[block.name]]
        found = block_of(block, results)
        return found if found is not None else LowRank(block.shape, ())

    def _merged(self, unit: Unit) -> Delta | None:
        """Return a merged unit, kept for the next block if it has rows of several."""
        if self._last[0] == unit.name:
            return self._last[1]
        self._last = ("", None)
        core = self._core(unit)
        deltas = self._matrices(unit, core) if core else self._dense(unit)
        if not len(deltas):
            return None
        rule = self._rule_of_block()
        spectral = is_matrix(unit, self._options) and self._has_room(unit, deltas.shape, len(deltas))
        result = (rule.matrix(deltas) if spectral else rule.other(deltas)) * rule.scale
        merged: Delta = core.low_rank(result) if core else Dense(result.float())
        if isinstance(merged, Dense) and unit.kind is Kind.EMBEDDING:
            merged = sparse_rows(merged)  # of a vocabulary, fine-tuning changes few rows
        if len(unit.parts) > 1:
            self._last = (unit.name, merged)
        return merged

    def _rule_of_block(self) -> MergeRule:
        if self._prepared is None:
            self._prepared = self._rule.prepared(_Blocks(self))
        return self._prepared

    def deltas_of(self, unit: Unit) -> Deltas:
        """Return the deltas that the rule gets for a unit."""
        core = self._core(unit)
        return self._matrices(unit, core) if core else self._dense(unit)

    def _dense(self, unit: Unit) -> Deltas:
        """Return the deltas of a unit as full tensors, read one at a time."""
        readers = [(name, partial(self._read, name, unit)) for name in self._present(unit)]
        return Deltas(unit.name, unit.shape, readers, len(self._bank))

    def _matrices(self, unit: Unit, core: CoreSpace) -> Deltas:
        readers = [(name, partial(_copied, matrix)) for name, matrix in core.matrices.items()]
        return Deltas(unit.name, (core.u.shape[1], core.v.shape[1]), readers, len(self._bank))

    def _core(self, unit: Unit) -> CoreSpace | None:
        """Return the core space of a unit; None if the rule gets full tensors."""
        rule, space = self._rule, self._options.space
        if space == "full" or (space == "auto" and not (rule.spectral or rule.linear)):
            return None
        # the mean is the same in core space; what another rule does with such blocks need not be
        if not is_matrix(unit, self._options) and type(rule).other is not MergeRule.other and not rule.linear:
            return None
        found: dict[str, LowRank] = {}
        for name in self._present(unit):
            delta = self._delta(name, unit)
            if not isinstance(delta, LowRank) or len(unit.shape) < 2:
                return None
            found[name] = delta
        return CoreSpace.of(found) if found else None

    def _present(self, unit: Unit) -> list[str]:
        """Return the vectors that change a unit."""
        parts = [part.block.name for part in unit.parts]
        names = [name for name in self._bank if any(self._bank[name].norms.get(part) for part in parts)]
        if unit.whole_block is not None:
            return names
        return [name for name in names if self._delta(name, unit) is not None]

    def _delta(self, name: str, unit: Unit) -> Delta | None:
        vector = self._bank[name]
        parts = [part.block.name for part in unit.parts]
        return unit.read({part: vector[part].without_exact() for part in parts if part in vector})

    def _read(self, name: str, unit: Unit) -> Tensor:
        delta = self._delta(name, unit)
        assert delta is not None
        if self._progress:
            self._progress(4 * unit.numel)
        return delta.dense().double()

    def _has_room(self, unit: Unit, shape: Sequence[int], vectors: int) -> bool:
        """Return False if a matrix has too few ranks for the rule and is averaged."""
        if self._options.small == "error":
            self._rule.require_room(unit.name, shape, vectors)
        return self._rule.has_room(min(shape), vectors)


class _Blocks:
    """The deltas of all units, for rules that look at whole vectors first; may be iterated repeatedly."""

    def __init__(self, merging: Merging) -> None:
        self._merging = merging

    def __iter__(self) -> Iterator[Deltas]:
        for unit in self._merging.units:
            yield self._merging.deltas_of(unit)


def _copied(matrix: Tensor) -> Tensor:
    return matrix.clone()


def _in_memory(vector: TaskVector) -> TaskVector:
    """Return a vector whose blocks are merged once, and kept."""
    deltas = {block.name: vector[block.name] for block in vector.blocks}
    norms = {name: delta.norm() for name, delta in deltas.items()}
    provenance, base = vector.checked_provenance(norms), vector.base
    kept: dict[str, Callable[[], Delta]] = {
        name: partial(_same, delta) for name, delta in deltas.items() if not delta.vanishes(norms[name])
    }
    return TaskVector(
        vector.name,
        vector.layout,
        lambda: base,
        kept,
        provenance,
        {name: norms[name] for name in kept},
        vector.relative_error,
    )


def _same(delta: Delta) -> Delta:
    return delta


def _provenance(bank: Bank, rule: MergeRule, options: MergeOptions) -> Provenance:
    """Return rule, options and sources; the sha256 covers all of them."""
    names = sorted(bank)
    settings = {**rule.options(), **asdict(options)}
    shown = ", ".join(f"{key}={value}" for key, value in settings.items())
    sources = ", ".join(f"{name}@{source_hash(bank, name)[:16]}" for name in names)
    digest = hashlib.sha256(f"{rule.kind}\0{shown}\0{bank.base.content}\n".encode())
    for name in names:  # norms tell apart a packed vector, or one with fewer blocks, of the same file
        norms = sorted(bank[name].norms.items())
        digest.update(f"{name}\0{source_hash(bank, name)}\0{norms}\n".encode())
    return Provenance(
        f"{rule.kind} of {len(names)} vectors",
        FORMAT,
        digest.hexdigest(),
        formula=f"{rule.kind}({shown}) of {sources}",
        notes=tuple(source_notes(bank)),
    )


def _require_not_zero(rule: MergeRule, largest: float, norms: Mapping[str, float]) -> list[str]:
    """Raise VECTOR-ZERO if nothing but roundings is left of vectors, the largest of which has this norm."""
    if max(norms.values()) <= NOTHING * abs(rule.scale) * largest:
        raise InputError(
            "VECTOR-ZERO",
            f"the vectors cancel: merge rule '{rule.kind}' gives zero in every block",
            fix="leave one of the vectors out with --vectors",
        )
    return []
