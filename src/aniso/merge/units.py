"""Units: what a rule sees as one matrix.

Query, key and value may be one unit or three, whatever the bank has. The
spectral rules give different results for both, and published code differs in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from aniso.vectors import Block, Delta, Dense, Kind, Layout, LowRank
from aniso.vectors.delta import Term

_FUSED = re.compile(r"(^|[._])(in_proj_(weight|bias)|qkv\.(weight|bias))$")
"""Tensors with the rows of query, key and value one after the other."""
_TRIPLES = (
    ("in_proj_weight.q", "in_proj_weight.k", "in_proj_weight.v"),
    ("in_proj_bias.q", "in_proj_bias.k", "in_proj_bias.v"),
    ("q_proj.", "k_proj.", "v_proj."),
    ("query.", "key.", "value."),
    ("q_lin.", "k_lin.", "v_lin."),
    (".q.", ".k.", ".v."),
)
"""Parts of names by which separate blocks of query, key and value are recognised."""


@final
@dataclass(frozen=True)
class UnitPart:
    """Rows ``start:stop`` of a block."""

    block: Block
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@final
@dataclass(frozen=True)
class Unit:
    """Rows of one or more blocks that are merged as one matrix or tensor."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    parts: tuple[UnitPart, ...]

    @property
    def whole_block(self) -> str | None:
        """The name of the block that the unit is all of."""
        part = self.parts[0]
        return part.block.name if len(self.parts) == 1 and self.shape == part.block.shape else None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, vector: Mapping[str, Delta]) -> Delta | None:
        """Return the unit of a vector, given its blocks; None if the vector does not change it."""
        name = self.whole_block
        if name is not None:
            return vector.get(name)
        pieces: list[tuple[int, Delta]] = []
        offset = 0
        for part in self.parts:
            delta = vector.get(part.block.name)
            if delta is not None:
                pieces.append((offset, rows_of(delta, part.start, part.stop)))
            offset += part.rows
        joined_delta = joined(pieces, self.shape)
        return None if joined_delta is None or joined_delta.norm() == 0 else joined_delta


def units_of(layout: Layout, qkv: str) -> dict[str, tuple[Unit, ...]]:
    """Return the units of every block; ``qkv`` is ``stored``, ``fused`` or ``split``."""
    triples = _triples(layout) if qkv == "fused" else {}
    return {block.name: _units(block, triples.get(block.name), qkv) for block in layout.blocks}


def _units(block: Block, triple: Unit | None, qkv: str) -> tuple[Unit, ...]:
    if triple is not None:
        return (triple,)
    rows = block.shape[0] if block.shape else 1
    if qkv == "split" and _FUSED.search(block.name) and rows % 3 == 0:
        third = rows // 3
        return tuple(
            Unit(
                f"{block.name}.{letter}",
                (third, *block.shape[1:]),
                block.kind,
                (UnitPart(block, i * third, (i + 1) * third),),
            )
            for i, letter in enumerate("qkv")
        )
    return (Unit(block.name, block.shape, block.kind, (UnitPart(block, 0, rows),)),)


def _triples(layout: Layout) -> dict[str, Unit]:
    """Return the unit of every block that is the query, key or value of an attention layer."""
    found: dict[str, Unit] = {}
    for block in layout.blocks:
        for query, key, value in _TRIPLES:
            names = [block.name, *(_replaced(block.name, query, other) for other in (key, value))]
            blocks = [layout.by_name.get(name) for name in names]
            if query not in block.name or not all(b and b.shape[1:] == block.shape[1:] for b in blocks):
                continue
            parts = tuple(UnitPart(b, 0, b.shape[0]) for b in blocks if b is not None)
            shape = (sum(part.rows for part in parts), *block.shape[1:])
            unit = Unit("+".join(names), shape, block.kind, parts)
            found |= dict.fromkeys(names, unit)
            break
    return found


def _replaced(name: str, old: str, new: str) -> str:
    """Replace the last occurrence."""
    before, _, after = name.rpartition(old)
    return f"{before}{new}{after}"


def rows_of(delta: Delta, start: int, stop: int) -> Delta:
    """Return some rows of a delta; a low-rank one stays low-rank."""
    if not isinstance(delta, LowRank):
        return Dense(delta.dense()[start:stop])
    terms = []
    for term in delta.terms:
        low, high = max(term.start, start), min(term.stop, stop)
        if low < high:
            b = term.b[low - term.start : high - term.start]
            terms.append(Term(b, term.a, term.scale, low - start))
    return LowRank((stop - start, *delta.shape[1:]), tuple(terms))


def joined(pieces: Sequence[tuple[int, Delta]], shape: tuple[int, ...]) -> Delta | None:
    """Return one delta with pieces at their first rows; rows without a piece are zero."""
    if not pieces:
        return None
    terms: list[Term] = []
    for offset, delta in pieces:
        if not isinstance(delta, LowRank):
            break
        terms += [Term(t.b, t.a, t.scale, t.start + offset) for t in delta.terms]
    else:
        return LowRank(shape, tuple(terms))
    out = torch.zeros(shape)
    for offset, delta in pieces:
        out[offset : offset + delta.shape[0]] = delta.dense()
    return Dense(out)


def block_of(block: Block, results: Sequence[tuple[Unit, Delta | None]]) -> Delta | None:
    """Return a block of the merged vector from the merged units that have rows of it."""
    pieces = []
    for unit, delta in results:
        if delta is None:
            continue
        if unit.whole_block == block.name:
            return delta
        offset = 0
        for part in unit.parts:
            if part.block.name == block.name:
                pieces.append((part.start, rows_of(delta, offset, offset + part.rows)))
            offset += part.rows
    return joined(pieces, block.shape)
