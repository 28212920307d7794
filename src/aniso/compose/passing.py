"""Weights composed in passing: when a layer runs, and once more when its gradient comes back.

The coefficients' gradient needs all vectors anyway, so the second time costs no second reading of them, and
what stays in memory between the two is nothing: one buffer serves all layers in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from aniso.compose.layer_weight import as_matrix
from aniso.compose.linear import Rows, is_plain
from aniso.compose.slab import Slab
from aniso.compose.stack import scratch
from aniso.errors import UsageError


@final
class PassingLayer:
    """A linear layer at some coefficients."""

    def __init__(
        self,
        slab: Slab,
        base: Tensor,
        coefficients: Sequence[Tensor],
        values: Sequence[Tensor],
        connected: Callable[[], Tensor],
    ) -> None:
        """``coefficients`` of the slab's blocks, with a graph; ``values`` are the same and never change.
        ``connected`` gives an ordinary weight.
        """
        self.slab = slab
        self.base = base
        self.values = values
        self._coefficients = coefficients
        self._connected = connected

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            raise _needs_room(self, "transforms of functions")  # whose tensors cannot be composed into
        return as_matrix(self._on_matrix, x, bias) if is_plain() else F.linear(x, self._connected(), bias)

    def _on_matrix(self, x: Tensor, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        casts = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
        if casts:
            x = x.to(torch.get_autocast_dtype(kind))
            bias = None if bias is None else bias.to(x.dtype)
        out: Tensor = _Pass.apply(x, bias, self, x.dtype if casts else self.base.dtype, *self._coefficients)
        return out


class _Pass(torch.autograd.Function):
    """Only the layer's input is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        layer: PassingLayer,
        dtype: torch.dtype,
        *coefficients: Tensor,
    ) -> Tensor:
        """``dtype`` is what the weight is used in."""
        ctx.layer, ctx.dtype, ctx.dtypes = layer, dtype, [c.dtype for c in coefficients]
        ctx.learns = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(*([x] if ctx.learns else []))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, layer.slab.passing(layer.values, layer.base).to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise _needs_room(ctx.layer, "second derivatives (create_graph=True)")
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


def _needs_room(layer: PassingLayer, what: str) -> UsageError:
    return UsageError(
        "USAGE",
        f"{what} do not go through weights that are composed in passing",
        key=layer.slab.windows[0].key,
        fix="leave that out, or allow more memory, so that composed weights are kept: Runtime(memory=...)",
    )


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    layer, needs_input, needs_bias = ctx.layer, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    if not ctx.learns:
        weight = layer.slab.passing(layer.values, layer.base).to(ctx.dtype)
        of_input = grad @ weight if needs_input else None
        return of_input, grad.sum(0) if needs_bias else None, None, None, *(None for _ in ctx.dtypes)
    (x,) = ctx.saved_tensors
    rows = Rows.of(x, grad)
    of_weight = scratch("of weight", layer.base.shape, x.dtype, x.device)
    torch.mm(rows.grad.T, rows.x, out=of_weight)
    products, weight = layer.slab.passing_back(of_weight, layer.values, layer.base)
    return (
        rows.of_input(weight.to(ctx.dtype), x) if needs_input else None,
        rows.grad.sum(0) if needs_bias else None,
        None,
        None,
        *(p.to(d) for p, d in zip(products, ctx.dtypes, strict=True)),
    )
