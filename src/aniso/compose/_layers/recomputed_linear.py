"""Linear layers whose weight is composed when they run, and again in the backward pass.

The coefficients' gradient needs all vectors anyway, so the second time does not read them once more. Nothing
but the layer's input is kept in memory between the two: one scratch buffer serves all layers in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from aniso.compose._engine import torch_internals
from aniso.compose._engine.scratch import scratch
from aniso.compose._engine.weight_buffer import Values, WeightBuffer
from aniso.compose._layers.cached_linear import GradientRows, is_plain
from aniso.compose._layers.layer_weight import as_matrix
from aniso.errors import UsageError


@final
class RecomputedLinear:
    """A linear layer that composes its weight in every forward and backward pass."""

    def __init__(
        self,
        buffer: WeightBuffer,
        base: Tensor,
        coefficients: Sequence[Tensor],
        values: Values,
        connected: Callable[[], Tensor],
    ) -> None:
        """``coefficients`` are those of the buffer's blocks, with a graph; ``values`` are theirs.
        ``connected`` returns an ordinary composed weight with a graph.
        """
        self.buffer = buffer
        self.base = base
        self.values = values
        self._coefficients = coefficients
        self._connected = connected

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch_internals.functorch_active():
            raise _unsupported(self, "torch.func transforms")  # their tensors cannot be written into
        return as_matrix(self._on_matrix, x, bias) if is_plain() else F.linear(x, self._connected(), bias)

    def _on_matrix(self, x: Tensor, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        casts = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
        if casts:
            x = x.to(torch.get_autocast_dtype(kind))
            bias = None if bias is None else bias.to(x.dtype)
        out: Tensor = _RecomputedLinear.apply(
            x, bias, self, x.dtype if casts else self.base.dtype, *self._coefficients
        )
        return out


class _RecomputedLinear(torch.autograd.Function):
    """``x @ W.T + bias`` with a composed W. Only x is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        layer: RecomputedLinear,
        dtype: torch.dtype,
        *coefficients: Tensor,
    ) -> Tensor:
        """``dtype`` is the dtype in which the weight is multiplied."""
        ctx.layer, ctx.dtype, ctx.dtypes = layer, dtype, [c.dtype for c in coefficients]
        ctx.learns = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(*([x] if ctx.learns else []))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, layer.buffer.recompute(layer.values, layer.base).to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise _unsupported(ctx.layer, "second derivatives (create_graph=True)")
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


def _unsupported(layer: RecomputedLinear, what: str) -> UsageError:
    return UsageError(
        "USAGE",
        f"{what} are not supported by weights that are recomputed to save memory",
        key=layer.buffer.views[0].key,
        fix="leave that out, or allow more memory, so that composed weights are kept: Runtime(memory=...)",
    )


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    layer, needs_input, needs_bias = ctx.layer, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    if not ctx.learns:
        weight = layer.buffer.recompute(layer.values, layer.base).to(ctx.dtype)
        input_grad = grad @ weight if needs_input else None
        return input_grad, grad.sum(0) if needs_bias else None, None, None, *(None for _ in ctx.dtypes)
    (x,) = ctx.saved_tensors
    rows = GradientRows.of(x, grad)
    weight_grad = scratch("weight gradient", layer.base.shape, x.dtype, x.device)
    torch.mm(rows.grad.T, rows.x, out=weight_grad)
    products, weight = layer.buffer.recompute_backward(weight_grad, layer.values, layer.base)
    return (
        rows.input_gradient(weight.to(ctx.dtype), x) if needs_input else None,
        rows.grad.sum(0) if needs_bias else None,
        None,
        None,
        *(p.to(d) for p, d in zip(products, ctx.dtypes, strict=True)),
    )
