"""DARE: drop random elements of every vector, and scale the others up."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Unpack, final

import numpy
import torch
from torch import Tensor

from aniso.merge.deltas import Deltas
from aniso.merge.merge_rule import ElementwiseRule
from aniso.merge.merging import MergeKeywords, merge
from aniso.merge.ties_rule import FORMS, SignVotes
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, TaskVector


@MERGE_RULES.register("dare")
@final
@dataclass(frozen=True)
class Dare(ElementwiseRule):
    """Drop random elements of every vector, scale up the others, and add the vectors (DARE)."""

    scale: float = 0.3
    keep: float = 0.5
    """Probability that an element is kept."""
    signs: bool = False
    """Average the elements that agree in sign, as TIES does, instead of adding all of them."""
    form: str = "paper"
    """``paper`` divides by ``keep``; ``mergekit`` restores the sum of absolute values of every tensor."""
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("keep", 0 < self.keep <= 1, "more than 0, up to 1")
        self.require("form", self.form in FORMS, " or ".join(FORMS))

    def elements(self, deltas: Deltas) -> Tensor:
        thinned = deltas.mapped(lambda name, values: self.dropped(values, name, deltas.block))
        if self.signs:
            return SignVotes.of(thinned).agreeing_mean(tie=1 if self.form == "mergekit" else 0)
        return thinned.total()

    def dropped(self, values: Tensor, vector: str, block: str) -> Tensor:
        """Return a delta with random elements set to zero.

        The elements depend on the seed and the names of vector and block alone, not on the order of reading.
        """
        words = f"dare\0{self.seed}\0{vector}\0{block}"
        seed = hashlib.blake2b(words.encode(), digest_size=8).digest()
        # numpy's generator is the same on every machine and in every version; torch promises neither
        drawn = numpy.random.Generator(numpy.random.Philox(int.from_bytes(seed, "big")))
        kept = torch.from_numpy(drawn.random(values.numel(), dtype=numpy.float32) < self.keep)
        thinned = values.where(kept.view(values.shape), 0.0)
        if self.form == "paper":
            return thinned / self.keep
        left = float(thinned.abs().sum())
        return thinned * (float(values.abs().sum()) / left) if left else thinned

    def workspace(self, rows: int, columns: int) -> int:
        return (16 if self.signs else 9) * rows * columns


def dare(
    bank: Bank,
    *,
    scale: float = 0.3,
    keep: float = 0.5,
    signs: bool = False,
    form: str = "paper",
    seed: int = 0,
    **how: Unpack[MergeKeywords],
) -> TaskVector:
    """Merge by DARE; keywords are those of ``merge``."""
    return merge(bank, Dare(scale, keep, signs, form, seed), **how)
