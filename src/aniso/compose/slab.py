"""Composed weights in memory: buffers that are written anew whenever coefficients change.

A slab is a piece of memory that blocks fill and that the model's tensors are views of. Usually it is one
block and one tensor. Hugging Face's query, key and value are three tensors of one block; open_clip's are one
tensor, which may be three blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from aniso.compose.lease import Lease
from aniso.compose.sharded import Sharding
from aniso.compose.slots import Slot, Slots
from aniso.compose.stack import scratch
from aniso.compose.store import Store
from aniso.errors import NumericalError
from aniso.vectors import Layout, Part

_AT_ONCE = 2**63  # a backward pass takes the highest number first of all that is ready


@dataclass(frozen=True)
class Window:
    """A tensor of the model, as rows ``start:stop`` of a slab, maybe transposed."""

    key: str
    start: int
    stop: int
    transposed: bool = False

    def of(self, matrix: Tensor) -> Tensor:
        rows = matrix[self.start : self.stop] if matrix.ndim else matrix
        return rows.T if self.transposed else rows


@final
class Slab:
    """One buffer, the blocks in it and the tensors over it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        windows: Sequence[Window],
        blocks: Sequence[tuple[int, Slot, slice]],
        base: Sequence[Tensor | None],
        store: Store,
        sharding: Sharding | None = None,
    ) -> None:
        """``blocks`` are positions among all slots, the slots, and the elements each fills.

        ``base`` are the model's own tensors, or none for a composition of differences alone.
        """
        self.shape = shape
        self.windows = tuple(windows)
        self.blocks = tuple(blocks)
        self.base = tuple(base)
        self.store = store
        self._sharding = sharding
        # a tensor that lies the other way round keeps its own order: products round differently otherwise
        self._turned = self.windows[0].transposed
        self._buffer: Tensor | None = None
        self._filled_with: tuple[Tensor, ...] | None = None
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()

    def composed(self, coefficients: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The model's tensors for these coefficients, outside of any graph; ``like`` has their dtype."""
        own = tuple(coefficients[i].detach() for i, _, _ in self.blocks)
        known = self._filled_with
        if known is None or not all(torch.equal(a, b) for a, b in zip(own, known, strict=True)):
            self._fill(own, like)
        return list(self.views())

    def connected(self, coefficients: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The same with a graph, through which gradients reach the coefficients."""
        self.composed(coefficients, like)
        tensors = list(_Compose.apply(self, self.lease(), *(coefficients[i] for i, _, _ in self.blocks)))
        node = tensors[0].grad_fn
        if node is not None:
            # what was made first is gone back through last, and every weight's gradient would wait for it
            node._set_sequence_nr(_AT_ONCE)
        return tensors

    def let_go(self) -> None:
        """Of what was composed; who has a view of it keeps it."""
        self._buffer = self._filled_with = None
        self._leases.clear()

    def lease(self) -> Lease:
        """Keeps what is in the buffer now from being written over."""
        lease = Lease()
        self._leases.add(lease)
        return lease

    def views(self) -> tuple[Tensor, ...]:
        assert self._buffer is not None
        if self._turned:
            return (self._buffer.detach(),)
        return tuple(window.of(self._buffer).detach() for window in self.windows)

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradient of each block's coefficients, given those of the tensors."""
        flat = self._flat(grads)
        out = []
        for _, slot, span in self.blocks:
            total = flat.new_empty(slot.shape)
            own = self._sharding.averaged(slot, flat[span]) if self._sharding else flat[span]
            for stack in self.store.stacks(slot, backward=True):
                total[list(stack.vectors)] = stack.dots(own, slot.division)
            out.append(total)
        return out

    def passing(self, own: Sequence[Tensor], like: Tensor) -> Tensor:
        """The one tensor over this slab, in memory that the next slab writes over."""
        out = scratch("passing", self.shape, like.dtype, like.device)
        self._write(out, self._workspace(out), own)
        return out

    def passing_back(self, grad: Tensor, own: Sequence[Tensor], like: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradient of each block's coefficients, and the tensor once more: vectors are read once."""
        out, flat = scratch("passing", self.shape, like.dtype, like.device), self._flat([grad])
        work = self._workspace(out)
        start, found = self._start(work), []
        assert start is not None  # there is a base
        for (_, slot, span), values in zip(self.blocks, own, strict=True):
            total, source, target = flat.new_empty(slot.shape), start[span], work.view(-1)[span]
            for stack in self.store.stacks(slot, backward=True):
                total[list(stack.vectors)] = stack.write_and_dots(
                    target, source, values.to(work.dtype), flat[span], slot.division
                )
                source = target
            found.append(total)
        self._finish(out, work)
        return found, out

    def _fill(self, own: tuple[Tensor, ...], like: Tensor) -> None:
        self._filled_with = None
        if self._buffer is None or not all(lease.done for lease in self._leases):
            # somebody may still want to go backward through the old weights
            shape = self.shape[::-1] if self._turned else self.shape
            with torch.inference_mode(False):  # it outlives the call
                self._buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._leases.clear()
        self._write(self._buffer, self._workspace(self._buffer), own)
        self._filled_with = tuple(v.clone() for v in own)

    def _write(self, buffer: Tensor, work: Tensor, own: Sequence[Tensor]) -> None:
        with torch.no_grad(), torch.autocast(buffer.device.type, enabled=False):
            start, flat = self._start(work), work.view(-1)
            for (_, slot, span), values in zip(self.blocks, own, strict=True):
                self._add(flat[span], None if start is None else start[span], slot, values.to(work.dtype))
            self._finish(buffer, work)

    def _start(self, work: Tensor) -> Tensor | None:
        """Where sums begin, flat: the base, if it is one tensor that they fill, or a copy; none is zero."""
        base, flat = self.base[0], work.view(-1)
        filled = sum(span.stop - span.start for _, _, span in self.blocks) == work.numel()
        usual = filled and self._sharding is None
        if usual and all(own is None for own in self.base):
            return None
        usual = usual and len(self.windows) == 1 and not self._turned
        if usual and base is not None and base.is_contiguous() and base.numel() == work.numel():
            return base.detach().view(-1)
        for window, own in zip(self.windows, self.base, strict=True):
            if own is None:
                window.of(work).zero_()
            else:
                window.of(work).copy_(own)
        return flat

    def _add(self, flat: Tensor, start: Tensor | None, slot: Slot, values: Tensor) -> None:
        own = self._sharding.own(slot, flat) if self._sharding else flat
        source = own if self._sharding else start
        for stack in self.store.stacks(slot):
            stack.write_to(own, source, values, slot.division)
            source = own
        if self._sharding:
            flat.copy_(self._sharding.gathered(slot, own))

    def _finish(self, buffer: Tensor, work: Tensor) -> None:
        if work is not buffer:
            buffer.copy_(work.T if self._turned else work)
            if buffer.dtype != work.dtype:
                self._check_range(buffer, work)

    def _check_range(self, buffer: Tensor, work: Tensor) -> None:
        """Sums that 16 bits cannot hold became infinite when they were written down."""
        if not bool(torch.isfinite(buffer).all()):
            raise NumericalError(
                "VECTOR-RANGE",
                f"the composed weights leave the range of {str(buffer.dtype).removeprefix('torch.')}",
                key=self.windows[0].key,
                found=f"{float(work.abs().max()):.4g}",
                fix="load the model in float32 or bfloat16, or look for a coefficient that is too large",
            )

    def _workspace(self, buffer: Tensor) -> Tensor:
        """Sums are taken in 32 bits or more, whatever the model's format."""
        wide = torch.promote_types(buffer.dtype, torch.float32)
        if wide == buffer.dtype and not self._turned:
            return buffer
        return scratch("compose", self.shape, wide, buffer.device)

    def _flat(self, grads: Sequence[Tensor | None]) -> Tensor:
        grads = [g.to_dense() if g is not None and g.layout != torch.strided else g for g in grads]
        first = next(g for g in grads if g is not None)
        dtype = torch.promote_types(first.dtype, torch.float32)
        if len(grads) == 1 and not self.windows[0].transposed:
            return first.to(dtype).reshape(-1)
        joined = scratch("gradient", self.shape, dtype, first.device)
        for window, grad in zip(self.windows, grads, strict=True):
            if grad is None:
                window.of(joined).zero_()
            else:
                window.of(joined).copy_(grad)
        return joined.view(-1)


class _Compose(torch.autograd.Function):
    """From coefficients to weights. Nothing is saved: the gradient needs the task vectors alone."""

    @staticmethod
    def forward(ctx: Any, slab: Slab, lease: Lease, *coefficients: Tensor) -> tuple[Tensor, ...]:
        ctx.slab, ctx.lease = slab, lease
        ctx.dtypes = [c.dtype for c in coefficients]
        ctx.set_materialize_grads(False)
        return slab.views()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.lease.done = True  # type: ignore[attr-defined]
        if all(g is None for g in grads):
            return (None, None, *(None for _ in ctx.dtypes))  # type: ignore[attr-defined]
        with torch.autocast(next(g for g in grads if g is not None).device.type, enabled=False):
            found = ctx.slab.gradients(grads)  # type: ignore[attr-defined]
        return (None, None, *(g.to(d) for g, d in zip(found, ctx.dtypes, strict=True)))  # type: ignore[attr-defined]


def slabs_of(layout: Layout, slots: Slots) -> list[tuple[tuple[int, ...], list[Window], list[Any]]]:
    """Shape, windows and blocks of every slab that a model with this layout needs."""
    found: list[tuple[tuple[int, ...], list[Window], list[Any]]] = []
    shared: dict[str, tuple[tuple[int, ...], list[Window], list[Any]]] = {}
    for i, slot in enumerate(slots.blocks):
        block = layout.by_name[slot.block.name]
        places = layout.places[block.parts[0].key]
        if len(block.parts) == 1 and len(places) > 1:
            key = block.parts[0].key
            if key not in shared:
                rows = sum(place.block.shape[0] for place in places)
                shared[key] = ((rows, *block.shape[1:]), [Window(key, 0, rows)], [])
                found.append(shared[key])
            each = block.numel // max(1, block.shape[0])
            first = block.parts[0].offset * each
            shared[key][2].append((i, slot, slice(first, first + block.numel)))
            continue
        windows = [_window(part) for part in block.parts]
        found.append((block.shape, windows, [(i, slot, slice(0, block.numel))]))
    return found


def _window(part: Part) -> Window:
    return Window(part.key, part.start, part.stop, part.transposed)
