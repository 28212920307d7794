"""Puts composed weights where a model's modules look for them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose._engine import torch_internals
from aniso.compose._engine.coefficient_index import CoefficientIndex
from aniso.compose._engine.delta_store import DeltaStore
from aniso.compose._engine.sharded import Sharding
from aniso.compose._engine.sharded_base import ShardedBase
from aniso.compose._engine.tensor_locations import TensorLocations
from aniso.compose._engine.weight_buffer import (
    Lease,
    TensorView,
    Values,
    WeightBuffer,
    buffer_layouts,
)
from aniso.compose._layers.cached_linear import CachedLinear
from aniso.compose._layers.layer_weight import LayerWeight
from aniso.compose._layers.low_rank_linear import LowRankLinear, LowRankUpdate
from aniso.compose._layers.recomputed_linear import RecomputedLinear
from aniso.errors import NumericalError
from aniso.vectors import Layout


@final
@dataclass(frozen=True, eq=False)
class _Installed:
    """What the installed weights were composed from."""

    values: nn.Parameter
    has_graph: bool
    host: Tensor
    """The values as they were, on the CPU."""
    version: int


@final
class WeightInstaller:
    """Composes the weights of a model and installs them as attributes of its modules.

    A new one is made when the model moves to another device or dtype.
    """

    def __init__(
        self,
        locations: TensorLocations,
        layout: Layout,
        index: CoefficientIndex,
        store: DeltaStore,
        *,
        deltas_only: bool,
        sharding: Sharding | None = None,
        sharded_base: ShardedBase | None = None,
    ) -> None:
        """``deltas_only`` leaves the base out: the sum of coefficient * delta alone is composed.

        Blocks that the store's plan has as ``recomputed`` are composed when their layer runs, and not kept;
        without a graph only if ``recomputed_in_evaluation``, since the same coefficients then serve many
        batches.
        """
        self._locations = locations
        self._index = index
        self.base = {key: getattr(*places[0]) for key, places in locations.items()}
        self.installed: dict[str, Tensor] = {}
        self.buffers: list[WeightBuffer] = []
        self._low_rank: dict[int, list[LowRankUpdate]] = {}
        shares = {} if sharded_base is None else sharded_base.shares
        for buffer_layout in buffer_layouts(layout, index):
            base = [None if deltas_only else self.base[view.key] for view in buffer_layout.views]
            buffer = WeightBuffer(buffer_layout, base, store, sharding, shares)
            self.buffers.append(buffer)
            if not deltas_only:
                self._low_rank[id(buffer)] = _low_rank_updates(buffer, store)
        self._recomputed = store.plan.recomputed
        self._recomputed_in_evaluation = store.plan.recomputed_in_evaluation
        self._deltas_only = deltas_only
        self._sharding = sharding
        self._current: _Installed | None = None

    def install(self, values: nn.Parameter) -> None:
        """Compose and install the weights for these values, unless they are installed already."""
        wants_graph = torch.is_grad_enabled() and values.requires_grad
        with torch.inference_mode(False):  # it outlives the call
            # the only numbers that the host waits for: every decision below is made from this copy
            host = values.detach().to("cpu", copy=True)
        if self._is_current(values, host, wants_graph):
            return
        _require_finite(host, self._index)
        # let go of the last graph, so that its buffers may be overwritten; if this is interrupted, nothing
        # is installed
        self.uninstall()
        # buffers outlive the call: made in inference mode, they could not be used outside of it
        with torch.inference_mode(False), torch.set_grad_enabled(wants_graph):
            on_host = self._index.divided(host)
            is_here = values.device.type == "cpu"
            fixed = Values(on_host if is_here else self._index.divided(values.detach().clone()), on_host)
            coefficients = self._index.divided(self._root(values)) if wants_graph else fixed.blocks
            for buffer in self.buffers:
                tensors = self._tensors(buffer, coefficients, fixed, wants_graph)
                for view, tensor in zip(buffer.views, tensors, strict=True):
                    self.installed[view.key] = tensor
            self._current = _Installed(values, wants_graph, host, torch_internals.version(values))
        if not self._deltas_only:
            self.set_tensors(self.installed)

    def _is_current(self, values: nn.Parameter, host: Tensor, wants_graph: bool) -> bool:
        """Return True if the installed weights match these values and this grad mode."""
        current = self._current
        if current is None or current.values is not values:
            return False
        if not torch.equal(current.host, host):
            return False
        if current.has_graph and current.version != torch_internals.version(values):
            return False  # autograd does not go back through views of what was written to since
        # a graph does no harm where none is made, and checkpointed layers may still need it
        has_graph = current.has_graph
        return has_graph == wants_graph or (has_graph and not torch.is_grad_enabled())

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the modules use these tensors in place of their own."""
        for key, tensor in tensors.items():
            for module, attribute in self._locations[key]:
                torch_internals.shadow(module, attribute, tensor)

    def restore_tensors(self, keys: Iterable[str]) -> None:
        """Make the modules use their own tensors again."""
        for key in keys:
            for module, attribute in self._locations[key]:
                torch_internals.unshadow(module, attribute)

    def uninstall(self) -> None:
        """Restore the model's own tensors and drop the composed ones."""
        self.restore_tensors(self.installed)
        self._current = None
        self.installed.clear()

    def _root(self, values: Tensor) -> Tensor:
        """Return the values with a hook that notices a backward pass: a graph is used once."""
        root = values.view_as(values)
        me = weakref.ref(self)

        sharding = self._sharding

        def used(gradient: Tensor) -> Tensor:
            installer = me()
            if installer is not None:
                installer._current = None
            return sharding.summed(gradient) if sharding else gradient

        root.register_hook(used)  # type: ignore[no-untyped-call]
        return root

    def _tensors(
        self, buffer: WeightBuffer, coefficients: list[Tensor], fixed: Values, wants_graph: bool
    ) -> list[Tensor]:
        """Return the tensors over a buffer; ``fixed`` are the coefficients' values, which never change."""
        like = self.base[buffer.views[0].key]
        connected = [
            partial(_connected, buffer, fixed, coefficients, like, i) for i in range(len(buffer.views))
        ]
        recomputes = wants_graph or self._recomputed_in_evaluation
        recomputed = self._recomputed_linear(buffer, coefficients, fixed) if recomputes else None
        updates = self._low_rank.get(id(buffer), [])
        if updates and wants_graph:
            return [
                LayerWeight.wrap(
                    self.base[view.key],
                    LowRankLinear(
                        self.base[view.key],
                        update,
                        coefficients[buffer.blocks[0].position],
                        recomputed or CachedLinear(connected[i]),
                        None if recomputed else cache(partial(_composed, buffer, fixed, like, i)),
                    ),
                    connected[i],
                )
                for i, (view, update) in enumerate(zip(buffer.views, updates, strict=True))
            ]
        if recomputed:
            # at zero, the model's own tensors: torch has fast paths for attention that need these
            is_zero = not any(bool(v.any()) for v in recomputed.values.host)
            is_base = is_zero and not wants_graph and not buffer.has_shares
            return [like if is_base else LayerWeight.wrap(like, recomputed, connected[0])]
        if not wants_graph:
            return buffer.composed(fixed, like)
        return [
            self._for_layer(view, tensor)
            for view, tensor in zip(buffer.views, buffer.connected(fixed, coefficients, like), strict=True)
        ]

    def _for_layer(self, view: TensorView, tensor: Tensor) -> Tensor:
        """Return the tensor with a linear layer that skips zero rows of the gradient, on a CPU."""
        if self._deltas_only or tensor.device.type != "cpu" or tensor.ndim != 2:
            return tensor
        if not _is_linear_weight(self._locations[view.key]):
            return tensor
        layer = CachedLinear(lambda: tensor)
        return LayerWeight.wrap(tensor, layer, layer.weight)

    def _recomputed_linear(
        self, buffer: WeightBuffer, coefficients: list[Tensor], fixed: Values
    ) -> RecomputedLinear | None:
        if buffer.blocks[0].entry.block.name not in self._recomputed:
            return None
        buffer.release()
        base = self.base[buffer.views[0].key]
        return RecomputedLinear(
            buffer,
            base,
            buffer.own(coefficients),
            buffer.own_values(fixed),
            partial(_connected, buffer, fixed, coefficients, base, 0),
        )


def recomputable_blocks(
    layout: Layout, index: CoefficientIndex, locations: TensorLocations
) -> dict[str, int]:
    """Return the blocks that can be composed when their layer runs, with the elements of their matrix.

    These are the blocks of matrices that belong to one linear layer alone.
    """
    return {
        block.entry.block.name: math.prod(buffer.shape)
        for buffer in buffer_layouts(layout, index)
        if len(buffer.views) == 1 and len(buffer.shape) == 2 and not buffer.views[0].transposed
        if len(locations[buffer.views[0].key]) == 1 and _is_linear_weight(locations[buffer.views[0].key])
        for block in buffer.blocks
    }


def _is_linear_weight(locations: list[tuple[nn.Module, str]]) -> bool:
    """Return True if a linear layer or an attention uses the tensor, as far as modules tell."""
    own = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
    return any(isinstance(m, kind) and name == own[kind] for m, name in locations for kind in own)


def _require_finite(values: Tensor, index: CoefficientIndex) -> None:
    bad = (~torch.isfinite(values)).nonzero().reshape(-1).tolist()
    if bad:
        vector, block, part = next(islice(index.labels(), bad[0], None))
        raise NumericalError(
            "COEF-VALUES",
            f"{len(bad)} coefficients are NaN or infinite",
            key=block,
            first=f"vector '{vector}', part {part}",
            fix="go back to the last good coefficients and use a smaller learning rate",
        )


def _composed(buffer: WeightBuffer, values: Values, like: Tensor, i: int) -> tuple[Tensor, Lease]:
    return buffer.composed(values, like)[i], buffer.lease()


def _connected(
    buffer: WeightBuffer, values: Values, coefficients: list[Tensor], like: Tensor, i: int
) -> Tensor:
    return buffer.connected(values, coefficients, like)[i]


def _low_rank_updates(buffer: WeightBuffer, store: DeltaStore) -> list[LowRankUpdate]:
    """Return one update for each tensor over a buffer of one block that only low-rank vectors change."""
    if len(buffer.blocks) != 1 or len(buffer.shape) != 2:
        return []
    entry = buffer.blocks[0].entry
    stack = store.low_rank_stack(entry)
    if stack is None or not entry.partition.scales_ranks:
        return []
    # rows of the stack's vectors are those of the coefficients in order, since there is no other stack
    rows, columns = buffer.shape
    return [
        LowRankUpdate(
            stack.factors,
            (columns, rows) if view.transposed else (view.stop - view.start, columns),
            slice(view.start, view.stop),
            transposed=view.transposed,
        )
        for view in buffer.views
    ]
