"""Weights that linear layers treat in a way of their own; to everything else they are composed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from aniso.compose.attention import self_attention

# What can be asked of a tensor without touching its numbers.
_ABOUT = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "layout",
        "grad_fn",
        "is_nested",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "itemsize",
        "nbytes",
    )
} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
}


Layer = Callable[[Tensor, Tensor | None], Tensor]
"""What a linear layer does with its input and its bias."""


@final
class LayerWeight(Tensor):
    """What a module finds where its weight was."""

    _layer: Layer
    _connected: Callable[[], Tensor]

    @staticmethod
    def made(like: Tensor, layer: Layer, connected: Callable[[], Tensor]) -> LayerWeight:
        """``connected`` gives an ordinary tensor; it is called for every use but that of a linear layer.

        What does not ask tensors how they want to be treated (a custom function's ``apply``, compiled
        extensions) sees ``like``: the composed tensor itself where there is one, and else the base.
        """
        weight = like.as_subclass(LayerWeight)
        weight._layer = layer
        weight._connected = connected
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            found = self_attention(*args, **kwargs)
            if found is not None:
                return found
        return func(*_plain(args), **_plain(kwargs))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    if not isinstance(weight, LayerWeight):
        return F.linear(_plain(input), weight, _plain(bias))
    return weight._layer(input, bias)


def as_matrix(layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
    """Of a layer for matrices: with a weight that takes no gradient, torch multiplies sample by sample."""
    y = layer(x.reshape(-1, x.shape[-1]), bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def _plain(value: Any) -> Any:
    """Ordinary tensors in place of ours, inside of the containers that torch functions take."""
    if isinstance(value, LayerWeight):
        return value._connected()
    if isinstance(value, tuple | list):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
