"""K coefficients per vector and block, each over a random share of the block's elements."""

from __future__ import annotations

import hashlib
from typing import final

from aniso.compose._engine.block_partition import BlockPartition, ColumnParts, RandomParts, WholeBlock
from aniso.compose.partition_rule import PartitionRule
from aniso.registry import PARTITIONS
from aniso.vectors import Block


@PARTITIONS.register("random")
@final
class Random(PartitionRule):
    """K coefficients per vector and block, each over a random share of its elements (aTLAS xK).

    The division follows from the seed, the number of parts and the block's name, so that coefficient files
    need not store it.
    """

    takes_parts = True
    takes_seed = True

    def for_block(self, block: Block) -> BlockPartition:
        if min(self.parts, block.numel) <= 1:
            return WholeBlock(block.numel)
        if self.parts >= block.numel:
            return ColumnParts(1, block.numel)  # a part for each element: nothing is random
        digest = hashlib.sha256(f"{self.seed}\0{block.name}\0{self.parts}".encode()).digest()
        return RandomParts(block.numel, self.parts, int.from_bytes(digest[:8], "big") & ~3)

    def describe(self) -> str:
        return f"{self.parts} coefficients per vector and block, at random with seed {self.seed}"
