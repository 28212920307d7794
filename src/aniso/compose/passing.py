"""Weights composed in passing: when a layer runs, and once more when its gradient comes back.

The coefficients' gradient needs all vectors anyway, so the second time costs no second reading of them, and
what stays in memory between the two is nothing: one buffer serves all layers in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from aniso.compose.linear import Rows
from aniso.compose.slab import Slab
from aniso.compose.stack import scratch


@final
class PassingLayer:
    """A linear layer at some coefficients."""

    def __init__(
        self, slab: Slab, base: Tensor, coefficients: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        """``coefficients`` of the slab's blocks, with a graph; ``values`` are the same and never change."""
        self.slab = slab
        self.base = base
        self.values = values
        self._coefficients = coefficients

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out: Tensor = _Pass.apply(x, bias, self, *self._coefficients)
        return out


class _Pass(torch.autograd.Function):
    """Only the layer's input is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: PassingLayer, *coefficients: Tensor
    ) -> Tensor:
        ctx.layer, ctx.dtypes = layer, [c.dtype for c in coefficients]
        ctx.save_for_backward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight = layer.slab.passing(layer.values, layer.base).to(x.dtype)
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        rows = Rows.of(x, grad)
        with torch.autocast(x.device.type, enabled=False):
            room = scratch("of weight", layer.base.shape, x.dtype, x.device)
            of_weight = torch.mm(rows.grad.T, rows.x, out=room)
            found, weight = layer.slab.passing_back(of_weight, layer.values, layer.base)
            of_input = rows.of_input(weight.to(x.dtype), x) if ctx.needs_input_grad[0] else None
        of_bias = rows.grad.sum(0) if ctx.needs_input_grad[1] else None
        return of_input, of_bias, None, *(g.to(d) for g, d in zip(found, ctx.dtypes, strict=True))
