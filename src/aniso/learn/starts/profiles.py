"""Starts that need no merging: a constant, a profile over layers, and coefficients of another run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from aniso.compose import Coefficients, Partition
from aniso.errors import InputError, UsageError, printable
from aniso.learn.starts.start import Start, filled_coefficients
from aniso.vectors import Bank, Block


def constant(bank: Bank, value: float, partition: Partition | None = None) -> Start:
    """Return the start at which every coefficient has the same value, such as 0.3."""
    if not math.isfinite(value):
        raise UsageError("START", f"a coefficient cannot be {value}", expected="a finite number", fix="0.3")
    found = filled_coefficients(bank, partition or Partition.blocks(), lambda vector, block: value)
    return Start(bank, found, f"every coefficient {value:g}")


def depth_profile(bank: Bank, anchors: Sequence[float], partition: Partition | None = None) -> Start:
    """Return the start at which coefficients depend on the layer, the same for all vectors.

    The first anchor is the value in the first layer, the last that in the last; others lie at equal distances
    between them, and values between anchors are interpolated. Two anchors (a, a + b) are LiNeS; more are a
    gradient of mergekit. Blocks outside of layers, such as embeddings, have the first value.
    """
    chosen = partition or Partition.blocks()
    if chosen.is_shared:
        raise UsageError(
            "START",
            "a start by depth needs coefficients of every block",
            found=f"partition {chosen}",
            fix="--partition blocks",
        )
    if len(anchors) < 2 or not all(map(math.isfinite, anchors)):
        raise UsageError(
            "START", "a start by depth needs two finite numbers or more", found=list(anchors), fix="0.1, 0.5"
        )
    deepest = max((b.depth for b in bank.layout.blocks if b.depth is not None), default=0)

    def value(vector: str, block: Block) -> float:
        return anchors[0] if block.depth is None else interpolated(anchors, block.depth / max(1, deepest))

    shown = ", ".join(f"{anchor:g}" for anchor in anchors)
    return Start(bank, filled_coefficients(bank, chosen, value), f"by depth: {shown}")


def interpolated(anchors: Sequence[float], position: float) -> float:
    """Return the value at a position from 0 to 1 on the line through equally distant anchors."""
    place = position * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    share = place - low
    return (1 - share) * anchors[low] + share * anchors[low + 1]


def from_coefficients(bank: Bank, coefficients: Coefficients, partition: Partition | None = None) -> Start:
    """Return the start at learned coefficients; vectors and blocks that they do not have start at 0.

    The partition may be finer than that of the coefficients, whose parts then all start alike: one
    coefficient per vector can start one per block, and that one per row.
    """
    chosen = partition or coefficients.partition
    known = coefficients.for_bank(coefficients.chosen(bank))
    if known.partition != chosen and (chosen.is_shared or known.partition.rule not in ("whole", "blocks")):
        raise InputError(
            "COEF-PARTITION",
            "the coefficients to start at have a different partition, which is not a coarser one",
            expected=str(chosen),
            found=str(known.partition),
            fix="use their partition, or start at others",
        )

    def value(vector: str, block: Block) -> float | Tensor:
        entry = known.index.by_block.get(block.name)
        if entry is None or vector not in entry.vectors:
            return 0.0
        return known.of(vector, block.name)

    found = replace(filled_coefficients(bank, chosen, value), linearised=coefficients.linearised)
    return Start(bank, found, f"coefficients {printable(coefficients.content_hash[:16])}")
