"""A base model sharded over several processes: each holds its share of every block that is composed.

A process composes its share of a weight from its shares of the base and of the vectors, and gathers the
others', so one exchange serves both. The modules' own tensors become placeholders that take no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from aniso.compose._engine.coefficient_index import CoefficientIndex
from aniso.compose._engine.sharded import Sharding
from aniso.compose._engine.tensor_locations import TensorLocations
from aniso.compose._engine.weight_buffer import BufferLayout, buffer_layouts
from aniso.errors import UsageError
from aniso.models import Wrapped
from aniso.vectors import Layout


@final
class ShardedBase:
    """This process' share of the base, by block.

    A tensor is left whole if some of its elements are in no block that has coefficients.
    """

    def __init__(
        self, locations: TensorLocations, layout: Layout, index: CoefficientIndex, sharding: Sharding
    ) -> None:
        """Take the shares out of a model's tensors, and put placeholders in their places."""
        self.shares: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        for buffer in buffer_layouts(layout, index):
            if sum(b.span.stop - b.span.start for b in buffer.blocks) == math.prod(buffer.shape):
                self._take(buffer, locations, sharding)
        for key in self._shapes:
            _put(locations, key, getattr(*locations[key][0]).detach().new_full((), math.nan))
        self._expand(locations)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        locations: TensorLocations,
        layout: Layout,
        index: CoefficientIndex,
        mesh: DeviceMesh | None,
    ) -> ShardedBase:
        """Share out a model over the processes of a mesh; None is refused."""
        if mesh is None:
            raise UsageError(
                "USAGE",
                "only a standard composition over several processes can share the base among them",
                fix="leave shard_base out (on the command line --shard-base), or give a mesh (--devices)",
            )
        if isinstance(model, Wrapped):
            model.known_fingerprint = model.fingerprint
        return cls(locations, layout, index, Sharding(mesh))

    def move(self, fn: Callable[[Tensor], Tensor], locations: TensorLocations, model: nn.Module) -> None:
        """Apply a function that moves or casts tensors to the shares and to the rest of the model."""
        for key in self._shapes:  # an expanded tensor would be moved at its full size
            placeholder = getattr(*locations[key][0]).detach()
            _put(locations, key, placeholder.new_full((), math.nan))
        model._apply(fn)  # type: ignore[no-untyped-call]
        self.shares = {name: fn(share) for name, share in self.shares.items()}
        self._expand(locations)

    def _take(self, buffer: BufferLayout, locations: TensorLocations, sharding: Sharding) -> None:
        tensors = [getattr(*locations[view.key][0]).detach() for view in buffer.views]
        whole = tensors[0].new_empty(buffer.shape)
        for view, tensor in zip(buffer.views, tensors, strict=True):
            view.of(whole).copy_(tensor)
            self._shapes[view.key] = tensor.shape
        for block in buffer.blocks:
            self.shares[block.entry.block.name] = sharding.own(block.entry, whole.view(-1)[block.span])

    def _expand(self, locations: TensorLocations) -> None:
        """Give placeholders the shapes of the tensors; they are NaN, so that no use of one goes unnoticed."""
        for key, shape in self._shapes.items():
            _put(locations, key, getattr(*locations[key][0]).detach().expand(shape))


def _put(locations: TensorLocations, key: str, tensor: Tensor) -> None:
    """Register a tensor in place of a parameter or a buffer."""
    for module, attribute in locations[key]:
        is_parameter = isinstance(getattr(module, attribute), nn.Parameter)
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
