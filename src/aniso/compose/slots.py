"""Where each coefficient belongs: vector, block, part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from aniso.compose.division import Division
from aniso.compose.partition import Partition
from aniso.errors import InputError, printable
from aniso.vectors import Bank, Block


@final
@dataclass(frozen=True)
class Slot:
    """The coefficients of one block: a row for each vector that changes it, a column for each part."""

    block: Block
    vectors: tuple[str, ...]
    division: Division
    start: int
    """Where the block's coefficients begin among all; those of a whole vector are shared by its blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.vectors), self.division.count

    @property
    def size(self) -> int:
        return len(self.vectors) * self.division.count


@final
@dataclass(frozen=True)
class Slots:
    """All coefficients of a bank under a partition, in order: by block, by vector, by part."""

    partition: Partition
    vectors: tuple[str, ...]
    blocks: tuple[Slot, ...]

    @classmethod
    def of(cls, bank: Bank, partition: Partition) -> Slots:
        present = {b.name: tuple(n for n in bank if b.name in bank[n]) for b in bank.layout.blocks}
        return cls.made(partition, bank.names, [(b, present[b.name]) for b in bank.layout.blocks])

    @classmethod
    def made(
        cls, partition: Partition, vectors: tuple[str, ...], cells: Sequence[tuple[Block, tuple[str, ...]]]
    ) -> Slots:
        """From blocks and the vectors that change each; a cell that is absent has no coefficient."""
        blocks, start = [], 0
        for block, own in cells:
            if own and partition.covers(block):
                slot = Slot(block, own, partition.division(block), 0 if partition.is_shared else start)
                blocks.append(slot)
                start += slot.size
        return cls(partition, vectors, tuple(blocks))

    @cached_property
    def count(self) -> int:
        """How many coefficients there are."""
        if self.partition.is_shared:
            return len(self.vectors)
        return sum(slot.size for slot in self.blocks)

    @cached_property
    def by_block(self) -> dict[str, Slot]:
        return {slot.block.name: slot for slot in self.blocks}

    @property
    def capped(self) -> tuple[Slot, ...]:
        """Blocks with fewer elements than parts were asked for."""
        if self.partition.rule != "random":
            return ()
        return tuple(s for s in self.blocks if s.division.count < self.partition.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was asked for."""
        if not self.capped:
            return ()
        fewer = f"{len(self.capped)} of {len(self.blocks)} blocks have fewer elements than parts"
        return (f"{fewer}: one part each element there",)

    def divided(self, values: Tensor) -> list[Tensor]:
        """The coefficients of each block as a matrix, vectors by parts; gradients flow back to ``values``."""
        if self.partition.is_shared:
            # cut and joined, not indexed: nothing is saved, so the graph can be gone through again
            each = dict(zip(self.vectors, torch.split(values, 1), strict=True))
            return [torch.cat([each[v] for v in slot.vectors]).unsqueeze(1) for slot in self.blocks]
        # one split, so that its backward is one concatenation and not a sum of mostly empty tensors
        pieces = torch.split(values, [slot.size for slot in self.blocks])
        return [piece.view(slot.shape) for piece, slot in zip(pieces, self.blocks, strict=True)]

    def labels(self) -> Iterator[tuple[str, str, int]]:
        """Vector, block and part of every coefficient; a shared one belongs to all blocks, ``*``."""
        if self.partition.is_shared:
            yield from ((vector, "*", 0) for vector in self.vectors)
            return
        for slot in self.blocks:
            for vector in slot.vectors:
                yield from ((vector, slot.block.name, part) for part in range(slot.division.count))

    def index(self, vector: str, block: str) -> slice:
        """Where the coefficients of one cell are."""
        slot = self.by_block.get(block)
        if slot is None or vector not in slot.vectors:
            raise InputError(
                "COEF-LAYOUT",
                f"there is no coefficient of vector '{printable(vector)}' in block '{printable(block)}'",
                fix="labels() says which there are",
            )
        if self.partition.is_shared:
            at = self.vectors.index(vector)
            return slice(at, at + 1)
        first = slot.start + slot.vectors.index(vector) * slot.division.count
        return slice(first, first + slot.division.count)

    def matrix(self, values: Tensor) -> Tensor:
        """Vectors by blocks, the mean over the parts of a cell; NaN where there is no coefficient."""
        out = torch.full((len(self.vectors), len(self.blocks)), float("nan"), dtype=values.dtype)
        for j, (slot, own) in enumerate(zip(self.blocks, self.divided(values.detach().cpu()), strict=True)):
            out[[self.vectors.index(v) for v in slot.vectors], j] = own.mean(1)
        return out
