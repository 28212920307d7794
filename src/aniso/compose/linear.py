"""Linear layers whose backward pass leaves out what it need not look at.

Encoders end in one token of many, the class token or the end of the text. In their last layers nothing but
that token's row has a gradient, while torch multiplies all rows, zeros or not.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F


class Rows(NamedTuple):
    """What a layer's backward pass is over: all rows, or the few that have a gradient."""

    x: Tensor
    grad: Tensor
    chosen: Tensor | None
    """Which rows these are, if not all."""

    @classmethod
    def of(cls, x: Tensor, grad: Tensor) -> Rows:
        chosen = _few_rows(grad)
        return cls(x, grad, None) if chosen is None else cls(x[chosen], grad[chosen], chosen)

    def of_input(self, weight: Tensor, like: Tensor) -> Tensor:
        """The gradient of the layer's input, which is ``like`` this."""
        found = self.grad @ weight
        return found if self.chosen is None else torch.zeros_like(like).index_copy(0, self.chosen, found)


def _few_rows(grad: Tensor) -> Tensor | None:
    """The rows that are not zero, if they are fewer than half. Elsewhere than on a CPU, to ask is to wait."""
    if grad.device.type != "cpu" or not len(grad) or not grad.shape[1]:
        return None
    if 2 * int(grad[:, 0].count_nonzero()) >= len(grad):  # one column tells for most layers
        return None
    rows = grad.any(dim=1).nonzero()[:, 0]
    return rows if 2 * len(rows) < len(grad) else None


@final
class KeptLayer:
    """A linear layer with a weight that is there for the whole step."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def weight(self) -> Tensor:
        return self._weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return F.linear(x, self._weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self._weight, bias)
        out: Tensor = _Linear.apply(x, self._weight, bias)
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = Rows.of(x, grad)
        return (
            rows.of_input(weight, x) if ctx.needs_input_grad[0] else None,
            rows.grad.T @ rows.x if ctx.needs_input_grad[1] else None,
            rows.grad.sum(0) if ctx.needs_input_grad[2] else None,
        )
