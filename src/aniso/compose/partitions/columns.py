"""One coefficient per vector and column of a weight matrix."""

from __future__ import annotations

from typing import final

from aniso.compose._engine.block_partition import BlockPartition, ColumnParts, WholeBlock
from aniso.compose.partition_rule import PartitionRule
from aniso.registry import PARTITIONS
from aniso.vectors import Block


@PARTITIONS.register("columns")
@final
class Columns(PartitionRule):
    """One coefficient per vector and column of a weight matrix; biases and norms have one."""

    def for_block(self, block: Block) -> BlockPartition:
        rows, columns = block.matrix_shape
        return ColumnParts(rows, columns) if columns > 1 else WholeBlock(block.numel)

    def describe(self) -> str:
        return "one coefficient per vector and column"
