"""One coefficient per vector."""

from __future__ import annotations

from typing import final

from aniso.compose._engine.block_partition import BlockPartition, WholeBlock
from aniso.compose.partition_rule import PartitionRule
from aniso.registry import PARTITIONS
from aniso.vectors import Block


@PARTITIONS.register("whole")
@final
class Whole(PartitionRule):
    """One coefficient per vector: task arithmetic."""

    is_shared = True

    def for_block(self, block: Block) -> BlockPartition:
        return WholeBlock(block.numel)

    def describe(self) -> str:
        return "one coefficient per vector"
