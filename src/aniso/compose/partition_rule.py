"""The interface of partitions: how a rule divides one block, describes itself, and is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from aniso.compose._engine.block_partition import BlockPartition
from aniso.vectors import Block


class PartitionRule(ABC):
    """Divides every block into parts, each with one coefficient per vector.

    A rule is one file in ``compose/partitions``, or an entry point of the group ``aniso.partitions``::

        @PARTITIONS.register("rows")
        class Rows(PartitionRule):
            ...

    ``Partition.parse("rows@weight")`` and ``--partition rows@weight`` then use it.
    """

    takes_parts: ClassVar[bool] = False
    """True if the rule is written with a number of parts after a colon, as in ``random:4``."""
    takes_seed: ClassVar[bool] = False
    """True if the division depends on a seed."""
    is_shared: ClassVar[bool] = False
    """True if all blocks of a vector share one coefficient."""
    note_on_fewer: ClassVar[str] = "have fewer elements than parts: one part each element there"
    """What to tell about blocks with fewer coefficients than were asked for."""

    def __init__(self, parts: int = 1, seed: int = 0) -> None:
        self.parts = parts
        self.seed = seed

    @abstractmethod
    def for_block(self, block: Block) -> BlockPartition:
        """Return the partition of one block; it must depend on the block, ``parts`` and ``seed`` alone."""

    @abstractmethod
    def describe(self) -> str:
        """Return a phrase such as "one coefficient per vector and row"."""
