"""K coefficients per vector and matrix, one for each of its largest singular components."""

from __future__ import annotations

from typing import final

from aniso.compose._engine.block_partition import BlockPartition, ComponentParts, WholeBlock
from aniso.compose.partition_rule import PartitionRule
from aniso.registry import PARTITIONS
from aniso.vectors import Block


@PARTITIONS.register("components")
@final
class Components(PartitionRule):
    """One coefficient per vector, matrix and singular component: K of them, the last for all others.

    Other blocks have one coefficient per vector. Matrices must be stored as factors.
    """

    takes_parts = True
    note_on_fewer = "are not matrices of as many components: one coefficient, or one for each component"

    def for_block(self, block: Block) -> BlockPartition:
        count = min(self.parts, block.most_components)
        return ComponentParts(block.numel, count) if count > 1 else WholeBlock(block.numel)

    def describe(self) -> str:
        if self.parts == 1:
            return "one coefficient per vector and block"
        return f"{self.parts} coefficients per vector and matrix, by singular component; one per other block"
