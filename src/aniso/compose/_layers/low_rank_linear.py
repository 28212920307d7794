"""Linear layers over low-rank vectors: the coefficients' gradient without the weight's.

For ``y = x W^T`` and ``W = W0 + sum_k s_k b_k a_k`` over all ranks of all vectors, dL/ds_k is the sum over
rows of ``(x a_k) (dL/dy b_k)``: two thin products, where the weight's gradient would be a product as large as
the layer's own. So the layer runs with the composed weight, saves its input, and takes these products in the
backward pass. Where that is cheaper still, the weight is not composed and ``(x A^T) diag(s) B^T`` is added to
the base's output. Any other use of the weight gets an ordinary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from aniso.compose._engine.low_rank_stack import StackedFactors
from aniso.compose._engine.weight_buffer import Lease
from aniso.compose._layers.layer_weight import Layer, as_matrix
from aniso.errors import UsageError


@final
@dataclass(frozen=True)
class _Product:
    """``b @ diag @ a`` over some outputs and inputs of a weight."""

    outputs: slice
    b: Tensor
    inputs: slice
    a: Tensor
    factors: StackedFactors


@final
class LowRankUpdate:
    """The low-rank update of one weight matrix, ``sum of coefficient * b @ a``, as factors."""

    def __init__(
        self, factors: Sequence[StackedFactors], shape: tuple[int, int], rows: slice, *, transposed: bool
    ) -> None:
        """``factors`` belong to a block whose ``rows`` are the weight; ``shape`` is the weight's."""
        self.shape = shape
        self.factors = [
            f.cut(rows.start, rows.stop) for f in factors if f.start < rows.stop and f.stop > rows.start
        ]
        self.transposed = transposed

    @property
    def rank(self) -> int:
        """The sum of all vectors' ranks."""
        return sum(f.a.shape[0] for f in self.factors)

    def costs(self, tokens: int) -> tuple[float, float, float]:
        """Return the multiplications of three ways to run the layer, beyond the layer's own.

        They are: the update beside the base; composed, with thin products in the backward pass; composed,
        with the gradient of the weight.
        """
        outputs, inputs = self.shape
        thin = sum(2 * tokens * (f.a.numel() + f.b.numel()) for f in self.factors)
        product = sum(2 * f.a.numel() * f.b.shape[0] for f in self.factors)
        return 2 * thin, product + thin, 2 * product + 2 * tokens * inputs * outputs

    def products(self, dtype: torch.dtype) -> list[_Product]:
        """Return the factors as products ``b @ diag @ a`` over some outputs and inputs of the weight."""
        out = []
        for f in self.factors:
            b, a, rows, everything = f.b.to(dtype), f.a.to(dtype), slice(f.start, f.stop), slice(None)
            if self.transposed:
                out.append(_Product(everything, a.T, rows, b.T, f))
            else:
                out.append(_Product(rows, b, everything, a, f))
        return out

    def beside(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Return what the update adds to the output of the base's layer."""
        y = x.new_zeros(x.shape[0], self.shape[0])
        for p in self.products(x.dtype):
            scale = p.factors.scaled(coefficients).to(x.dtype)
            y[:, p.outputs] = y[:, p.outputs] + (F.linear(x[:, p.inputs], p.a) * scale) @ p.b.T
        return y

    def gradient(self, x: Tensor, grad: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the gradient of the coefficients, vectors by parts.

        It follows from the layer's input and the gradient of its output.
        """
        total = x.new_zeros(shape)
        for p in self.products(x.dtype):
            products = (x[:, p.inputs] @ p.a.T).mul_(grad[:, p.outputs] @ p.b).sum(0)
            total += p.factors.by_part(products, shape)
        return total


class _CoefficientGradient(torch.autograd.Function):
    """The identity on a layer's output; its backward pass computes the coefficients' gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, coefficients: Tensor, update: LowRankUpdate, lease: Lease
    ) -> Tensor:
        ctx.update, ctx.lease, ctx.input_requires_grad = update, lease, x.requires_grad
        ctx.shape, ctx.dtype = coefficients.shape, coefficients.dtype
        ctx.save_for_backward(x)
        ctx.mark_dirty(y)  # it is the layer's new output, and what follows may write into it
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.lease.done = True
        if torch.is_grad_enabled() and (ctx.input_requires_grad or grad.requires_grad):
            raise UsageError(
                "USAGE",
                "second derivatives are not supported by compositions of low-rank vectors",
                fix="leave out create_graph=True",
            )
        work = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            gradient = ctx.update.gradient(x.to(work), grad.to(work), ctx.shape)
        return grad, None, gradient.to(ctx.dtype), None, None


@final
class LowRankLinear:
    """A linear layer that takes the cheapest of three ways for its number of tokens, ranks and shape.

    The choice depends on the layer's input alone, so that resumed runs give the same numbers. Nothing is
    composed before it is needed.
    """

    def __init__(
        self,
        base: Tensor,
        update: LowRankUpdate,
        coefficients: Tensor,
        ordinary: Layer,
        composed: Callable[[], tuple[Tensor, Lease]] | None,
    ) -> None:
        """``ordinary`` is the layer for any vectors. ``composed`` returns the composed weight without
        a graph, with its lease; it is None where composed weights are not kept.
        """
        self._base = base
        self._update = update
        self._coefficients = coefficients
        self._ordinary = ordinary
        self._composed = composed

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return as_matrix(self._on_matrix, x, bias)

    def _on_matrix(self, x: Tensor, bias: Tensor | None) -> Tensor:
        update, coefficients = self._update, self._coefficients
        if not update.rank:
            return F.linear(x, self._base, bias)
        beside, composed, ordinary = update.costs(x.shape[0])
        if self._composed is None:
            composed = math.inf
        if beside < min(composed, ordinary):
            y = F.linear(x, self._base, bias)
            return y + update.beside(x, coefficients).to(y.dtype)  # autocast may have left it in 32 bits
        if self._composed is None or ordinary < composed:
            return self._ordinary(x, bias)
        own, lease = self._composed()
        out: Tensor = _CoefficientGradient.apply(F.linear(x, own, bias), x, coefficients, update, lease)
        return out
