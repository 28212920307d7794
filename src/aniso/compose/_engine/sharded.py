"""A bank sharded over several processes: each holds its share of every vector's elements.

In the forward pass each process composes its share of a block and gathers the others'; in the backward pass
it receives its share of the gradient, averaged over all processes. So processes may work on different
samples, as in data-parallel training, and coefficients come out as in one process that sees them all.
Placement and communication are PyTorch's own (``DeviceMesh`` and ``DTensor``); start the processes with
``torchrun``, or with ``--devices``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from aniso.compose._engine.coefficient_index import BlockCoefficients
from aniso.compose._engine.delta_stack import DeltaStack
from aniso.vectors.packing import GROUP


@final
class Sharding:
    """The shares of blocks and their collectives, on a mesh of one dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.world = mesh.size()
        self.rank = mesh.get_local_rank()

    def cut(self, entry: BlockCoefficients, stack: DeltaStack) -> DeltaStack:
        """Return this process' share of a stack."""
        start, stop = self._span(entry)
        return stack.cut(start, stop)

    def own(self, entry: BlockCoefficients, flat: Tensor) -> Tensor:
        """Return a copy of this process' share of a block."""
        start, stop = self._span(entry)
        return flat[start:stop].clone()

    def gathered(self, entry: BlockCoefficients, own: Tensor) -> Tensor:
        """Return a whole block, gathered from all processes' shares."""
        full = self._padded(own, self._share(entry))
        spread = DTensor.from_local(full, self.mesh, [Shard(0)], run_check=False)
        return spread.full_tensor()[: entry.block.numel]

    def averaged(self, entry: BlockCoefficients, flat: Tensor) -> Tensor:
        """Return this process' share of a block's gradient, averaged over all processes."""
        full = self._padded(flat, self._share(entry) * self.world)
        summed = DTensor.from_local(full, self.mesh, [Partial()], run_check=False)
        own = summed.redistribute(self.mesh, [Shard(0)]).to_local()
        start, stop = self._span(entry)
        return own[: stop - start] / self.world

    def summed(self, partial: Tensor) -> Tensor:
        """Return the sum over all processes of the products with their shares."""
        return DTensor.from_local(partial, self.mesh, [Partial()], run_check=False).full_tensor()

    def run(self, model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        """Run a model on this process' share of a batch, and return the outputs for all of it.

        A loss of the outputs is the same on all processes, whatever it compares; its gradient reaches each
        process' share, and averaging over the processes gives the gradient of the whole batch.
        """
        size = -(-len(batch) // self.world)
        places = torch.arange(self.rank * size, (self.rank + 1) * size)  # beyond the end: the last item again
        own = model(batch[places.clamp(max=len(batch) - 1).to(batch.device)])
        outputs: Tensor = _Gathered.apply(own, self)
        return outputs[: len(batch)]

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that the processes have."""
        own = torch.tensor([number], device=self.mesh.device_type)
        return int(DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False).full_tensor().max())

    def _share(self, entry: BlockCoefficients) -> int:
        """Return the elements of a share: whole rows, tiles and packed groups, the same for all processes."""
        unit = math.lcm(max(1, entry.block.matrix_shape[1]), entry.partition.alignment, GROUP)
        return -(-entry.block.numel // (unit * self.world)) * unit

    def _span(self, entry: BlockCoefficients) -> tuple[int, int]:
        share, numel = self._share(entry), entry.block.numel
        return min(self.rank * share, numel), min((self.rank + 1) * share, numel)

    def _padded(self, flat: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(flat, (0, size - flat.numel())) if flat.numel() < size else flat


@final
class _Gathered(torch.autograd.Function):
    """All processes' rows, one after another; every process computes the same gradient of them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding, ctx.size = sharding, len(own)
        return DTensor.from_local(own.detach(), sharding.mesh, [Shard(0)], run_check=False).full_tensor()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), rank, world = gradients, ctx.sharding.rank, ctx.sharding.world
        # gradients are averaged over processes: each share counts as often as there are processes
        return gradient[rank * ctx.size : (rank + 1) * ctx.size] * world, None
