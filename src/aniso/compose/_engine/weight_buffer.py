"""Buffers that hold composed weights and are written again whenever the coefficients change.

Usually a buffer holds one block, and one tensor of the model is a view of it. Hugging Face's query, key and
value are three tensors over one block; open_clip's are one tensor, which may be three blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from aniso.compose._engine import torch_internals
from aniso.compose._engine.coefficient_index import BlockCoefficients, CoefficientIndex
from aniso.compose._engine.delta_store import DeltaStore
from aniso.compose._engine.scratch import scratch
from aniso.compose._engine.sharded import Sharding
from aniso.errors import NumericalError
from aniso.vectors import Layout, Part

_RANGE = 1e38  # bfloat16 has the range of float32: only sums in float16 are checked


@final
@dataclass(frozen=True)
class TensorView:
    """A tensor of the model as rows ``start:stop`` of a buffer, transposed if the block stores it so."""

    key: str
    start: int
    stop: int
    transposed: bool = False

    def of(self, matrix: Tensor) -> Tensor:
        """Return the view of a tensor that has the buffer's shape."""
        rows = matrix[self.start : self.stop] if matrix.ndim else matrix
        return rows.T if self.transposed else rows

    @classmethod
    def of_part(cls, part: Part) -> TensorView:
        return cls(part.key, part.start, part.stop, part.transposed)


@final
@dataclass(frozen=True)
class BufferBlock:
    """A block in a buffer."""

    position: int
    """Position of the block in the coefficient index."""
    entry: BlockCoefficients
    span: slice
    """The elements of the flat buffer that the block fills."""


@final
@dataclass(frozen=True)
class BufferLayout:
    """The shape of a buffer, the model's tensors over it and the blocks in it."""

    shape: tuple[int, ...]
    views: tuple[TensorView, ...]
    blocks: tuple[BufferBlock, ...]


def buffer_layouts(layout: Layout, index: CoefficientIndex) -> list[BufferLayout]:
    """Return the layout of every buffer that a model needs; blocks that share a tensor share a buffer."""
    groups: dict[str, list[BufferBlock]] = {}
    for position, entry in enumerate(index.blocks):
        block = layout.by_name[entry.block.name]
        key, start = block.parts[0].key, 0
        if len(block.parts) == 1 and len(layout.places[key]) > 1:
            start = block.parts[0].offset * (block.numel // max(1, block.shape[0]))
        else:
            key = f"{key}\0{position}"  # a buffer of its own
        groups.setdefault(key, []).append(BufferBlock(position, entry, slice(start, start + block.numel)))
    return [_buffer_layout(layout, blocks) for blocks in groups.values()]


def _buffer_layout(layout: Layout, blocks: list[BufferBlock]) -> BufferLayout:
    block = layout.by_name[blocks[0].entry.block.name]
    places = layout.places[block.parts[0].key]
    if len(block.parts) > 1 or len(places) == 1:
        return BufferLayout(block.shape, tuple(map(TensorView.of_part, block.parts)), tuple(blocks))
    # also if only some of the blocks of a fused tensor have coefficients, the buffer holds all of it
    rows = sum(place.block.shape[0] for place in places)
    return BufferLayout((rows, *block.shape[1:]), (TensorView(block.parts[0].key, 0, rows),), tuple(blocks))


@final
@dataclass(frozen=True)
class Values:
    """Coefficients of blocks, without a graph, that never change; decisions are made from those on the CPU.

    So one copy of all coefficients is all that the host waits for.
    """

    blocks: list[Tensor]
    host: list[Tensor]


@final
class Lease:
    """A mark held by a graph that may still go backward through what is in a buffer."""

    done = False


@final
class WeightBuffer:
    """One buffer of composed weights, with the gradient of its blocks' coefficients."""

    def __init__(
        self,
        layout: BufferLayout,
        base: Sequence[Tensor | None],
        store: DeltaStore,
        sharding: Sharding | None = None,
        shares: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``base`` has the model's own tensor for each view, or None where deltas alone are summed.

        Of blocks in ``shares``, these are all of the base that this process has.
        """
        self.shape = layout.shape
        self.views = layout.views
        self.blocks = layout.blocks
        self.base = tuple(base)
        self.store = store
        self._sharding = sharding
        own = [(shares or {}).get(block.entry.block.name) for block in layout.blocks]
        self._shares = {block.position: share for block, share in zip(layout.blocks, own, strict=True)}
        self.has_shares = any(share is not None for share in own)
        # a transposed tensor keeps its own memory order: products round differently otherwise
        self._transposed = self.views[0].transposed
        self._buffer: Tensor | None = None
        self._filled_with: list[Tensor] | None = None
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()

    def own(self, coefficients: Sequence[Tensor]) -> list[Tensor]:
        """Return the coefficients of this buffer's blocks, out of those of all blocks."""
        return [coefficients[block.position] for block in self.blocks]

    def own_values(self, values: Values) -> Values:
        """Return the values of this buffer's blocks, out of those of all blocks."""
        return Values(self.own(values.blocks), self.own(values.host))

    def composed(self, values: Values, like: Tensor) -> list[Tensor]:
        """Return the model's tensors for all blocks' coefficients, without a graph, in the dtype of ``like``.

        They are views of the buffer, which is written only if its blocks' coefficients changed.
        """
        own = self.own_values(values)
        known = self._filled_with
        if known is None or not all(torch.equal(a, b) for a, b in zip(own.host, known, strict=True)):
            self._fill(own, like)
        return list(self.tensors())

    def connected(self, values: Values, coefficients: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return the same tensors with a graph, through which gradients reach ``coefficients``."""
        self.composed(values, like)
        tensors = list(_Compose.apply(self, self.lease(), *self.own(coefficients)))
        torch_internals.run_first_in_backward(tensors[0])
        return tensors

    def release(self) -> None:
        """Free the buffer; whoever has a view of it keeps it."""
        self._buffer = self._filled_with = None
        self._leases.clear()

    def lease(self) -> Lease:
        """Return a mark that keeps the buffer from being overwritten until it is done or deleted."""
        lease = Lease()
        self._leases.add(lease)
        return lease

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the model's tensors as views of the buffer."""
        assert self._buffer is not None
        if self._transposed:
            return (self._buffer.detach(),)
        return tuple(view.of(self._buffer).detach() for view in self.views)

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradient of each block's coefficients, <delta, gradient>, given those of the tensors."""
        flat = self._flat(grads)
        out = []
        for block in self.blocks:
            entry, grad = block.entry, flat[block.span]
            total = flat.new_empty(entry.shape)
            grad = self._sharding.averaged(entry, grad) if self._sharding else grad
            for stack in self.store.stacks(entry, backward=True):
                total[stack.rows] = stack.dots(grad, entry.partition)
            out.append(total)
        return out

    def recompute(self, own: Values, like: Tensor) -> Tensor:
        """Return the one tensor over this buffer, in memory that the next recomputed tensor overwrites."""
        out = scratch("recomputed", self.shape, like.dtype, like.device)
        self._write(out, self._workspace(out), own)
        return out

    def recompute_backward(self, grad: Tensor, own: Values, like: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the gradient of each block's coefficients, and the tensor again; deltas are read once."""
        if self._sharding is not None:
            return self.gradients([grad]), self.recompute(own, like)
        out, flat = scratch("recomputed", self.shape, like.dtype, like.device), self._flat([grad])
        work = self._workspace(out)
        start, gradients = self._start(work), []
        assert start is not None  # there is a base
        for block, values, host in zip(self.blocks, own.blocks, own.host, strict=True):
            entry, span = block.entry, block.span
            total, source, target = flat.new_empty(entry.shape), start[span], work.view(-1)[span]
            for stack in self.store.stacks(entry, backward=True):
                total[stack.rows] = stack.write_and_dots(
                    target, source, values.to(work.dtype), flat[span], entry.partition, host
                )
                source = target
            gradients.append(total)
        self._finish(out, work)
        return gradients, out

    def _fill(self, own: Values, like: Tensor) -> None:
        self._filled_with = None
        if self._buffer is None or not all(lease.done for lease in self._leases):
            # a graph may still go backward through the old weights
            shape = self.shape[::-1] if self._transposed else self.shape
            with torch.inference_mode(False):  # it outlives the call
                self._buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._leases.clear()
        self._write(self._buffer, self._workspace(self._buffer), own)
        self._filled_with = own.host

    def _write(self, buffer: Tensor, work: Tensor, own: Values) -> None:
        with torch.no_grad(), torch.autocast(buffer.device.type, enabled=False):
            start, flat = self._start(work), work.view(-1)
            for block, values, host in zip(self.blocks, own.blocks, own.host, strict=True):
                source = None if start is None else start[block.span]
                self._add(flat[block.span], source, block, values.to(work.dtype), host)
            self._finish(buffer, work)

    def _start(self, work: Tensor) -> Tensor | None:
        """Return the flat tensor that sums start from; None stands for zeros.

        It is the base itself if that is one contiguous tensor which the blocks fill, else a copy in ``work``.
        """
        base, flat = self.base[0], work.view(-1)
        if self.has_shares:
            return flat
        filled = sum(block.span.stop - block.span.start for block in self.blocks) == work.numel()
        simple = filled and self._sharding is None
        if simple and all(own is None for own in self.base):
            return None
        simple = simple and len(self.views) == 1 and not self._transposed
        if simple and base is not None and base.is_contiguous() and base.numel() == work.numel():
            return base.detach().view(-1)
        for view, own in zip(self.views, self.base, strict=True):
            if own is None:
                view.of(work).zero_()
            else:
                view.of(work).copy_(own)
        return flat

    def _add(
        self, flat: Tensor, start: Tensor | None, block: BufferBlock, values: Tensor, host: Tensor
    ) -> None:
        entry, share = block.entry, self._shares[block.position]
        if share is not None:
            own = share.to(flat.dtype, copy=True)
        else:
            own = self._sharding.own(entry, flat) if self._sharding else flat
        source = own if self._sharding else start
        for stack in self.store.stacks(entry):
            stack.write_to(own, source, values, entry.partition, host)
            source = own
        if self._sharding:
            flat.copy_(self._sharding.gathered(entry, own))

    def _finish(self, buffer: Tensor, work: Tensor) -> None:
        if work is not buffer:
            buffer.copy_(work.T if self._transposed else work)
            if torch.finfo(buffer.dtype).max < _RANGE:
                self._check_range(buffer, work)

    def _check_range(self, buffer: Tensor, work: Tensor) -> None:
        """Sums that 16 bits cannot hold became infinite when they were rounded."""
        if not bool(torch.isfinite(buffer).all()):
            raise NumericalError(
                "VECTOR-RANGE",
                f"the composed weights leave the range of {str(buffer.dtype).removeprefix('torch.')}",
                key=self.views[0].key,
                found=f"{float(work.abs().max()):.4g}",
                fix="load the model in float32 or bfloat16, or look for a coefficient that is too large",
            )

    def _workspace(self, buffer: Tensor) -> Tensor:
        """Return where sums are taken: in 32 bits or more, whatever the model's dtype."""
        wide = torch.promote_types(buffer.dtype, torch.float32)
        if wide == buffer.dtype and not self._transposed:
            return buffer
        return scratch("compose", self.shape, wide, buffer.device)

    def _flat(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of the tensors as one flat gradient of the buffer."""
        grads = [g.to_dense() if g is not None and g.layout != torch.strided else g for g in grads]
        first = next(g for g in grads if g is not None)
        dtype = torch.promote_types(first.dtype, torch.float32)
        if len(grads) == 1 and not self.views[0].transposed:
            return first.to(dtype).reshape(-1)
        joined = scratch("gradient", self.shape, dtype, first.device)
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.of(joined).zero_()
            else:
                view.of(joined).copy_(grad)
        return joined.view(-1)


class _Compose(torch.autograd.Function):
    """The map from coefficients to weights. Nothing is saved: the gradient needs the task vectors alone."""

    @staticmethod
    def forward(ctx: Any, buffer: WeightBuffer, lease: Lease, *coefficients: Tensor) -> tuple[Tensor, ...]:
        ctx.buffer, ctx.lease = buffer, lease
        ctx.dtypes = [c.dtype for c in coefficients]
        ctx.set_materialize_grads(False)
        return buffer.tensors()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.lease.done = True  # type: ignore[attr-defined]
        if all(g is None for g in grads):
            return (None, None, *(None for _ in ctx.dtypes))  # type: ignore[attr-defined]
        with torch.autocast(next(g for g in grads if g is not None).device.type, enabled=False):
            gradients = ctx.buffer.gradients(grads)  # type: ignore[attr-defined]
        return (None, None, *(g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True)))  # type: ignore[attr-defined]
