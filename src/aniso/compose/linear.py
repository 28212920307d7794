"""Linear layers whose backward pass leaves out what it need not look at.

Encoders end in one token of many, the class token or the end of the text. In their last layers nothing but
that token's row has a gradient, while torch multiplies all rows, zeros or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F


def is_plain() -> bool:
    """Whether a layer is run by torch alone: not traced, transformed or differentiated by anything else."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


class Rows(NamedTuple):
    """What a layer's backward pass is over: all rows, or the few that have a gradient."""

    x: Tensor
    grad: Tensor
    chosen: Tensor | None
    """Which rows these are, if not all."""

    @classmethod
    def of(cls, x: Tensor, grad: Tensor) -> Rows:
        """``x`` went in, as a matrix, and ``grad`` is the gradient of what came out."""
        chosen = _few_rows(grad)
        return cls(x, grad, None) if chosen is None else cls(x[chosen], grad[chosen], chosen)

    def of_input(self, weight: Tensor, like: Tensor) -> Tensor:
        """The gradient of the layer's input, which is ``like`` this."""
        found = self.grad @ weight
        return found if self.chosen is None else torch.zeros_like(like).index_copy_(0, self.chosen, found)


def _few_rows(grad: Tensor) -> Tensor | None:
    """The rows that are not zero, if they are fewer than half."""
    if grad.device.type != "cpu" or not len(grad) or not grad.shape[1]:
        return None  # elsewhere, to ask is to wait
    if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad):
        return None  # what is zero here and now may have a derivative, or be other than zero in a batch
    if 2 * int(grad[:, 0].count_nonzero()) >= len(grad):  # one column tells for most layers
        return None
    rows = grad.any(dim=1).nonzero()[:, 0]
    return rows if 2 * len(rows) < len(grad) else None


@final
class KeptLayer:
    """A linear layer with a weight that is there for the whole step."""

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
        rows = Rows.of(matrix, grad.reshape(-1, weight.shape[0]))
        return (
            rows.of_input(weight, matrix).view(x.shape) if ctx.needs_input_grad[0] else None,
            rows.grad.T @ rows.x if ctx.needs_input_grad[1] else None,
            rows.grad.sum(0) if ctx.needs_input_grad[2] else None,
        )
