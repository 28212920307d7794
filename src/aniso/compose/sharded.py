"""A bank spread over several processes: each holds its share of every vector's elements.

Each process composes its share of a block and receives the others'; on the way back it receives the mean over
all processes of its share of the gradient. So processes may work on different samples, as in data-parallel
training, and coefficients come out as in one process that sees them all. Placement and communication are
PyTorch's own (``DeviceMesh`` and ``DTensor``); start the processes with ``torchrun``.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from aniso.compose.slots import Slot
from aniso.compose.stack import Stack
from aniso.vectors.packing import GROUP


@final
class Sharding:
    """Who has what, on a mesh of one dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.world = mesh.size()
        self.rank = mesh.get_local_rank()

    def cut(self, slot: Slot, stack: Stack) -> Stack:
        """This process' share of some vectors' deltas."""
        start, stop = self._span(slot)
        return stack.cut(start, stop)

    def own(self, slot: Slot, flat: Tensor) -> Tensor:
        """This process' share of a block, as a copy."""
        start, stop = self._span(slot)
        return flat[start:stop].clone()

    def gathered(self, slot: Slot, own: Tensor) -> Tensor:
        """A whole block from all processes' shares."""
        full = self._padded(own, self._share(slot))
        spread = DTensor.from_local(full, self.mesh, [Shard(0)], run_check=False)
        return spread.full_tensor()[: slot.block.numel]

    def averaged(self, slot: Slot, flat: Tensor) -> Tensor:
        """This process' share of the mean of all processes' gradients of a block."""
        full = self._padded(flat, self._share(slot) * self.world)
        summed = DTensor.from_local(full, self.mesh, [Partial()], run_check=False)
        own = summed.redistribute(self.mesh, [Shard(0)]).to_local()
        start, stop = self._span(slot)
        return own[: stop - start] / self.world

    def summed(self, partial: Tensor) -> Tensor:
        """Products with shares of a vector, added up to the product with all of it."""
        return DTensor.from_local(partial, self.mesh, [Partial()], run_check=False).full_tensor()

    def _share(self, slot: Slot) -> int:
        """Elements of a share: whole rows, tiles and groups of packed numbers, the same for all processes."""
        unit = math.lcm(max(1, slot.block.matrix_shape[1]), slot.division.alignment, GROUP)
        return -(-slot.block.numel // (unit * self.world)) * unit

    def _span(self, slot: Slot) -> tuple[int, int]:
        share, numel = self._share(slot), slot.block.numel
        return min(self.rank * share, numel), min((self.rank + 1) * share, numel)

    def _padded(self, flat: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(flat, (0, size - flat.numel())) if flat.numel() < size else flat
