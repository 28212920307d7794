"""One coefficient per vector and row of a weight matrix."""

from __future__ import annotations

from typing import final

from aniso.compose._engine.block_partition import BlockPartition, ColumnParts, RowParts, WholeBlock
from aniso.compose.partition_rule import PartitionRule
from aniso.registry import PARTITIONS
from aniso.vectors import Block


@PARTITIONS.register("rows")
@final
class Rows(PartitionRule):
    """One coefficient per vector and row of a weight matrix, and per element of a bias."""

    def for_block(self, block: Block) -> BlockPartition:
        rows, columns = block.matrix_shape
        if rows <= 1 or columns == 0:
            return WholeBlock(block.numel)
        # one coefficient for each element of a vector: a single row, by columns
        return ColumnParts(1, rows) if columns == 1 else RowParts(rows, columns)

    def describe(self) -> str:
        return "one coefficient per vector and row"
