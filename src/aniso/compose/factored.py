"""Weights composed of low-rank vectors alone: their coefficients' gradient, without the weight's.

For ``y = x W^T`` and ``W = W0 + sum_k s_k b_k a_k`` over all ranks of all vectors, dL/ds_k is the sum over
rows of ``(x a_k) (dL/dy b_k)``: two thin products, where the weight's gradient would be a product as large as
the layer's own. So a composed weight that meets a linear layer lets the layer run, and looks at what goes in
and at the gradient of what comes out. Where that is cheaper still, the weight is not even composed and
``(x A^T) diag(s) B^T`` is added to what the base gives. Any other use of the weight makes an ordinary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from aniso.compose.layer_weight import Layer, as_matrix
from aniso.compose.lease import Lease
from aniso.compose.stacked_factors import StackedFactors
from aniso.errors import UsageError


@final
class Factorisation:
    """The factors over one weight matrix, and the choice of how to use them."""

    def __init__(
        self, factors: Sequence[StackedFactors], shape: tuple[int, int], rows: slice, *, transposed: bool
    ) -> None:
        """``factors`` of a block, of which the weight is some rows; ``shape`` is the weight's."""
        self.shape = shape
        self.factors = [
            f.cut(rows.start, rows.stop) for f in factors if f.start < rows.stop and f.stop > rows.start
        ]
        self.transposed = transposed

    @property
    def rank(self) -> int:
        return sum(f.a.shape[0] for f in self.factors)

    def costs(self, tokens: int) -> tuple[float, float, float]:
        """Multiplications beyond the layer's own: beside the base; composed; composed, with its gradient."""
        outputs, inputs = self.shape
        thin = sum(2 * tokens * (f.a.numel() + f.b.numel()) for f in self.factors)
        product = sum(2 * f.a.numel() * f.b.shape[0] for f in self.factors)
        return 2 * thin, product + thin, 2 * product + 2 * tokens * inputs * outputs

    def pairs(self, dtype: torch.dtype) -> list[tuple[slice, Tensor, slice, Tensor, StackedFactors]]:
        """For each group: outputs and ``b``, inputs and ``a``, with the weight ``b @ diag @ a``."""
        out = []
        for f in self.factors:
            b, a, rows, everything = f.b.to(dtype), f.a.to(dtype), slice(f.start, f.stop), slice(None)
            out.append((everything, a.T, rows, b.T, f) if self.transposed else (rows, b, everything, a, f))
        return out

    def beside(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """What the vectors add to the output of the base's layer."""
        y = x.new_zeros(x.shape[0], self.shape[0])
        for outputs, b, inputs, a, f in self.pairs(x.dtype):
            scale = f.scaled(coefficients[:, 0]).to(x.dtype)
            y[:, outputs] = y[:, outputs] + (F.linear(x[:, inputs], a) * scale) @ b.T
        return y

    def gradient(self, x: Tensor, grad: Tensor, vectors: int) -> Tensor:
        """Of the coefficients, from what went into the layer and the gradient of what came out."""
        total = x.new_zeros(vectors)
        for outputs, b, inputs, a, f in self.pairs(x.dtype):
            products = (x[:, inputs] @ a.T).mul_(grad[:, outputs] @ b).sum(0)
            total += f.by_vector(products, vectors)
        return total.unsqueeze(1)


class _Watch(torch.autograd.Function):
    """Passes a layer's output on, and takes the coefficients' gradient on the way back."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, coefficients: Tensor, factorisation: Factorisation, lease: Lease
    ) -> Tensor:
        ctx.factorisation, ctx.lease, ctx.moves = factorisation, lease, x.requires_grad
        ctx.shape, ctx.dtype = coefficients.shape, coefficients.dtype
        ctx.save_for_backward(x)
        ctx.mark_dirty(y)  # it is fresh from the layer, and what follows may write into it
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.lease.done = True
        if torch.is_grad_enabled() and (ctx.moves or grad.requires_grad):
            raise UsageError(
                "USAGE",
                "second derivatives do not go through the gradient of low-rank coefficients",
                fix="leave out create_graph=True",
            )
        work = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            found = ctx.factorisation.gradient(x.to(work), grad.to(work), ctx.shape[0])
        return grad, None, found.to(ctx.dtype), None, None


@final
class FactoredLayer:
    """A linear layer at some coefficients.

    What pays is decided by the layer's input alone, so that runs that were interrupted end the same; nothing
    is composed before it is needed.
    """

    def __init__(
        self,
        base: Tensor,
        factorisation: Factorisation,
        coefficients: Tensor,
        ordinary: Layer,
        composed: Callable[[], tuple[Tensor, Lease]] | None,
    ) -> None:
        """``ordinary`` is the layer as it is for any vectors. ``composed`` gives the composed weight without
        a graph, and what keeps it from being written over; or there is no room for that.
        """
        self._base = base
        self._factorisation = factorisation
        self._coefficients = coefficients
        self._ordinary = ordinary
        self._composed = composed

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return as_matrix(self._on_matrix, x, bias)

    def _on_matrix(self, x: Tensor, bias: Tensor | None) -> Tensor:
        made, coefficients = self._factorisation, self._coefficients
        if not made.rank:
            return F.linear(x, self._base, bias)
        beside, composed, ordinary = made.costs(x.shape[0])
        if self._composed is None:
            composed = math.inf
        if beside < min(composed, ordinary):
            y = F.linear(x, self._base, bias)
            return y + made.beside(x, coefficients).to(y.dtype)  # which autocast may have left wide
        if self._composed is None or ordinary < composed:
            return self._ordinary(x, bias)
        own, lease = self._composed()
        watched: Tensor = _Watch.apply(F.linear(x, own, bias), x, coefficients, made, lease)
        return watched
