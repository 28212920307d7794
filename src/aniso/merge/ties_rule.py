"""TIES: trim small elements, elect a sign for every element, average what agrees with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Unpack, final

import torch
from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import ElementwiseRule, MergeRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector

FORMS = ("paper", "mergekit")
_LOW_BITS = 15
"""A float32 without its sign has 31 bits: 2**16 bins of the high ones, then 2**15 of the low ones."""


@MERGE_RULES.register("ties")
@final
@dataclass(frozen=True)
class Ties(ElementwiseRule):
    """Average the largest elements of the vectors that agree in sign (TIES)."""

    keep: float = 0.2
    """Share of elements that each vector keeps."""
    form: str = "paper"
    """``paper`` trims whole vectors; ``mergekit`` trims every tensor by itself, and elects + for a tie."""

    reads: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("keep", 0 < self.keep <= 1, "more than 0, up to 1")
        self.require("form", self.form in FORMS, " or ".join(FORMS))

    def prepared(self, blocks: Iterable[Deltas]) -> MergeRule:
        if self.form == "mergekit":
            return self
        return TrimmedTies(self.scale, thresholds(blocks, self.keep), blocks)

    def workspace(self, rows: int, columns: int) -> int:
        return 16 * rows * columns

    def elements(self, deltas: Deltas) -> Tensor:
        """Merge one block by its own thresholds, as mergekit does."""
        limits = {
            name: _block_threshold(values, max(1, int(self.keep * values.numel())))
            for name, values in deltas.items()
        }
        return SignVotes.of(deltas, limits).agreeing_mean(tie=1)


@final
@dataclass(frozen=True)
class TrimmedTies(ElementwiseRule):
    """TIES after the pass that finds the thresholds of whole vectors."""

    limits: Mapping[str, float] = field(default_factory=dict)
    blocks: Iterable[Deltas] = ()

    def elements(self, deltas: Deltas) -> Tensor:
        votes = SignVotes.of(deltas, self.limits)
        return votes.agreeing_mean(tie=self.majority if votes.has_tie() else 0)

    @cached_property
    def majority(self) -> int:
        """The sign that most elements of the whole vector have; counted if an element has no sign itself."""
        count = sum(
            int(SignVotes.of(deltas, self.limits).total().sign().sum())
            for deltas in self.blocks
            if len(deltas)
        )
        return (count > 0) - (count < 0)


@final
@dataclass(frozen=True)
class SignVotes:
    """Sums and counts of the positive and the negative elements of all vectors, one by one."""

    positive: Tensor
    negative: Tensor
    ups: Tensor
    downs: Tensor

    @classmethod
    def of(cls, deltas: Deltas, limits: Mapping[str, float] | None = None) -> SignVotes:
        """Count elements that are no smaller than their vector's limit."""
        positive = torch.zeros(deltas.shape, dtype=torch.float64)
        votes = cls(
            positive,
            torch.zeros_like(positive),
            torch.zeros(deltas.shape, dtype=torch.int32),
            torch.zeros(deltas.shape, dtype=torch.int32),
        )
        for name, values in deltas.items():
            if limits is not None:
                values = values.where(_magnitude(values) >= limits[name], 0.0)
            votes.positive.add_(values.clamp(min=0))
            votes.negative.add_(values.clamp(max=0))
            votes.ups.add_(values > 0)
            votes.downs.add_(values < 0)
        return votes

    def total(self) -> Tensor:
        return self.positive + self.negative

    def has_tie(self) -> bool:
        """True if elements of both signs cancel exactly somewhere."""
        return bool(((self.total() == 0) & (self.ups > 0)).any())

    def agreeing_mean(self, tie: int) -> Tensor:
        """Return the mean of the elements whose sign is that of the sum; ``tie`` replaces a sign of 0."""
        sign = self.total().sign()
        sign = sign.where(sign != 0, float(tie))
        up = self.positive / self.ups.clamp(min=1)
        down = self.negative / self.downs.clamp(min=1)
        return up.where(sign > 0, 0.0) + down.where(sign < 0, 0.0)


def thresholds(blocks: Iterable[Deltas], keep: float) -> dict[str, float]:
    """Return every vector's exact threshold: its k-th largest absolute value, k = keep * elements.

    The elements are those of all blocks that any of the vectors has. Two passes of histograms, over the high
    and the low bits of float32 numbers, find it in the memory of one block.
    """
    elements = sum(deltas.numel for deltas in blocks if len(deltas))
    wanted = max(1, int(keep * elements))
    high: dict[str, Tensor] = {}
    for name, bits in _bits(blocks):
        counts = torch.bincount(bits >> _LOW_BITS, minlength=1 << 16)
        high[name] = high[name] + counts if name in high else counts
    found = {name: _bin_of(counts, wanted) for name, counts in high.items()}
    low: dict[str, Tensor] = {name: torch.zeros(1 << _LOW_BITS, dtype=torch.int64) for name in high}
    for name, bits in _bits(blocks):
        inside = bits[bits >> _LOW_BITS == found[name][0]] & ((1 << _LOW_BITS) - 1)
        low[name] += torch.bincount(inside, minlength=1 << _LOW_BITS)
    return {
        name: _as_float((first << _LOW_BITS) + _bin_of(low[name], wanted - above)[0])
        for name, (first, above) in found.items()
    }


def _bits(blocks: Iterable[Deltas]) -> Iterable[tuple[str, Tensor]]:
    for deltas in blocks:
        for name, values in deltas.items():
            yield name, _magnitude(values).view(torch.int32).reshape(-1).long()


def _bin_of(counts: Tensor, wanted: int) -> tuple[int, int]:
    """Return the bin of the ``wanted``-th largest number, and how many numbers are in higher bins.

    Vectors with fewer elements have zeros for the others, which are in the lowest bin.
    """
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, wanted))
    place = min(place, len(counts) - 1)
    return len(counts) - 1 - place, int(from_top[place - 1]) if place else 0


def _magnitude(values: Tensor) -> Tensor:
    """Return absolute values in float32, which is what deltas are stored in."""
    return values.float().abs().contiguous()


def _as_float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def _block_threshold(values: Tensor, wanted: int) -> float:
    return float(_magnitude(values).reshape(-1).kthvalue(values.numel() - wanted + 1).values)


def ties(
    bank: Bank,
    *,
    scale: float = 1.0,
    keep: float = 0.2,
    form: str = "paper",
    **how: Unpack[MergeKeywords],
) -> TaskVector:
    """Merge by TIES; keywords are those of ``merge``."""
    return merge(bank, Ties(scale, keep, form), **how)
