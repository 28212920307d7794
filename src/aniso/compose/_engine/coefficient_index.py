"""The index of all coefficients: which vector, block and part each one scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import BlockPartition
from aniso.compose.partition import Partition
from aniso.errors import InputError, printable
from aniso.vectors import Bank, Block


@final
@dataclass(frozen=True)
class BlockCoefficients:
    """The index entry of one block: a row for each vector that changes it, a column for each part."""

    block: Block
    vectors: tuple[str, ...]
    partition: BlockPartition
    start: int
    """Position of the block's first coefficient; 0 if a vector's blocks share one coefficient."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.vectors), self.partition.count

    @property
    def size(self) -> int:
        return len(self.vectors) * self.partition.count


@final
@dataclass(frozen=True)
class CoefficientIndex:
    """The coefficients of a bank under a partition, in order: by block, by vector, by part."""

    partition: Partition
    vectors: tuple[str, ...]
    blocks: tuple[BlockCoefficients, ...]

    @classmethod
    def of(cls, bank: Bank, partition: Partition) -> CoefficientIndex:
        """Build the index for a bank and a partition."""
        present = {b.name: tuple(n for n in bank if b.name in bank[n]) for b in bank.layout.blocks}
        return cls.from_cells(partition, bank.names, [(b, present[b.name]) for b in bank.layout.blocks])

    @classmethod
    def from_cells(
        cls, partition: Partition, vectors: tuple[str, ...], cells: Sequence[tuple[Block, tuple[str, ...]]]
    ) -> CoefficientIndex:
        """Build from blocks and the vectors that change each; an absent cell has no coefficient."""
        blocks, start = [], 0
        for block, own in cells:
            if own and partition.covers(block):
                entry = BlockCoefficients(
                    block, own, partition.for_block(block), 0 if partition.is_shared else start
                )
                blocks.append(entry)
                start += entry.size
        return cls(partition, vectors, tuple(blocks))

    @cached_property
    def count(self) -> int:
        """The number of coefficients."""
        if self.partition.is_shared:
            return len(self.vectors)
        return sum(entry.size for entry in self.blocks)

    @cached_property
    def by_block(self) -> dict[str, BlockCoefficients]:
        return {entry.block.name: entry for entry in self.blocks}

    @property
    def capped(self) -> tuple[BlockCoefficients, ...]:
        """Blocks with fewer coefficients per vector than the partition has parts."""
        return tuple(s for s in self.blocks if s.partition.count < self.partition.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the user: where the partition differs from what was asked for."""
        if not self.capped:
            return ()
        return (f"{len(self.capped)} of {len(self.blocks)} blocks {self.partition.note_on_fewer}",)

    def divided(self, values: Tensor) -> list[Tensor]:
        """Return each block's coefficients as a matrix, vectors by parts; gradients reach ``values``."""
        if self.partition.is_shared:
            # split and concatenated, not indexed: nothing is saved, so backward can run again
            each = dict(zip(self.vectors, torch.split(values, 1), strict=True))
            return [torch.cat([each[v] for v in entry.vectors]).unsqueeze(1) for entry in self.blocks]
        # one split, so that its backward is one concatenation and not a sum of mostly empty tensors
        pieces = torch.split(values, [entry.size for entry in self.blocks])
        return [piece.view(entry.shape) for piece, entry in zip(pieces, self.blocks, strict=True)]

    def labels(self) -> Iterator[tuple[str, str, int]]:
        """Yield vector, block and part of every coefficient; the block of a shared one is ``*``."""
        if self.partition.is_shared:
            yield from ((vector, "*", 0) for vector in self.vectors)
            return
        for entry in self.blocks:
            for vector in entry.vectors:
                yield from ((vector, entry.block.name, part) for part in range(entry.partition.count))

    def cell(self, vector: str, block: str) -> slice:
        """Return the positions of the coefficients of one vector in one block."""
        entry = self.by_block.get(block)
        if entry is None or vector not in entry.vectors:
            raise InputError(
                "COEF-LAYOUT",
                f"there is no coefficient of vector '{printable(vector)}' in block '{printable(block)}'",
                fix="labels() lists all coefficients",
            )
        if self.partition.is_shared:
            at = self.vectors.index(vector)
            return slice(at, at + 1)
        first = entry.start + entry.vectors.index(vector) * entry.partition.count
        return slice(first, first + entry.partition.count)

    def matrix(self, values: Tensor) -> Tensor:
        """Return a table, vectors by blocks: the mean over a cell's parts, NaN where there is none."""
        out = torch.full((len(self.vectors), len(self.blocks)), float("nan"), dtype=values.dtype)
        for j, (entry, own) in enumerate(zip(self.blocks, self.divided(values.detach().cpu()), strict=True)):
            out[[self.vectors.index(v) for v in entry.vectors], j] = own.mean(1)
        return out
