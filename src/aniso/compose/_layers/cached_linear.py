"""Linear layers whose backward pass skips rows without a gradient.

Encoders return one token of many, the class token or the end of the text. In their last layers only that
token's row has a gradient, while torch multiplies all rows, zeros or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from aniso.compose._engine import torch_internals


def is_plain() -> bool:
    """Return True in plain eager mode: no ``torch.compile``, ``torch.func`` or forward-mode derivative."""
    return not (
        torch.compiler.is_compiling()
        or torch_internals.functorch_active()
        or torch_internals.forward_ad_active()
    )


class GradientRows(NamedTuple):
    """The rows that a layer's backward pass multiplies: all, or the few that have a gradient."""

    x: Tensor
    grad: Tensor
    chosen: Tensor | None
    """Positions of these rows; None for all rows."""

    @classmethod
    def of(cls, x: Tensor, grad: Tensor) -> GradientRows:
        """Choose rows, given the layer's input as a matrix and the gradient of its output."""
        chosen = _few_rows(grad)
        return cls(x, grad, None) if chosen is None else cls(x[chosen], grad[chosen], chosen)

    def input_gradient(self, weight: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of the layer's input; ``like`` is the input."""
        grad = self.grad @ weight
        return grad if self.chosen is None else torch.zeros_like(like).index_copy_(0, self.chosen, grad)


def _few_rows(grad: Tensor) -> Tensor | None:
    """Return the positions of the rows that are not zero, or None if they are half or more."""
    if grad.device.type != "cpu" or not len(grad) or not grad.shape[1]:
        return None  # on a GPU the check would synchronise
    if torch.is_grad_enabled() or torch_internals.is_batched_by_vmap(grad):
        return None  # a zero may have a derivative, or another batch entry may not be zero
    if 2 * int(grad[:, 0].count_nonzero()) >= len(grad):  # one column is enough for most layers
        return None
    rows = grad.any(dim=1).nonzero()[:, 0]
    return rows if 2 * len(rows) < len(grad) else None


@final
class CachedLinear:
    """A linear layer whose composed weight stays in memory for the whole step."""

    def __init__(self, weight: Callable[[], Tensor]) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not is_plain() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight(), bias)
        out: Tensor = _Linear.apply(x, self.weight(), bias)
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        matrix = x.reshape(-1, x.shape[-1])
        rows = GradientRows.of(matrix, grad.reshape(-1, weight.shape[0]))
        return (
            rows.input_gradient(weight, matrix).view(x.shape) if ctx.needs_input_grad[0] else None,
            rows.grad.T @ rows.x if ctx.needs_input_grad[1] else None,
            rows.grad.sum(0) if ctx.needs_input_grad[2] else None,
        )
