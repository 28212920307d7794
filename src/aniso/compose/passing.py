"""Weights composed in passing: when a layer runs, and once more when its gradient comes back.

The coefficients' gradient needs all vectors anyway, so the second time costs no second reading of them, and
what stays in memory between the two is nothing: one buffer serves all layers in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from aniso.compose.slab import Slab, Window
from aniso.compose.stack import scratch


def can_pass(window: Window, places: Sequence[tuple[nn.Module, str]]) -> bool:
    """Whether only one linear layer, or an attention's, uses the tensor, as far as modules tell."""
    if len(places) != 1 or window.transposed:
        return False
    module, attribute = places[0]
    own = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
    return any(isinstance(module, kind) and attribute == name for kind, name in own.items())


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
        with torch.autocast(x.device.type, enabled=False):
            of_weight = torch.mm(grad.T, x, out=scratch("of weight", layer.base.shape, x.dtype, x.device))
            found, weight = layer.slab.passing_back(of_weight, layer.values, layer.base)
            of_input = grad @ weight.to(x.dtype) if ctx.needs_input_grad[0] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        return of_input, of_bias, None, *(g.to(d) for g, d in zip(found, ctx.dtypes, strict=True))
