"""A weight that brings its own linear layer along; everything else uses it as an ordinary tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.nn import functional as F

from aniso.compose._engine import torch_internals
from aniso.compose._layers.attention import self_attention

# Attributes and methods that do not touch a tensor's values.
_METADATA = {
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
"""Computes the output of a linear layer from its input and its bias."""


@final
class LayerWeight(Tensor):
    """A tensor subclass that is installed in place of a module's weight and intercepts ``F.linear``."""

    _layer: Layer
    _connected: Callable[[], Tensor]

    @staticmethod
    def wrap(like: Tensor, layer: Layer, connected: Callable[[], Tensor]) -> LayerWeight:
        """Return a weight that runs ``layer`` in ``F.linear``, and ``connected()`` in every other function.

        Code that bypasses ``__torch_function__`` (a custom function's ``apply``, compiled extensions) sees
        ``like``: the composed tensor where there is one, else the base.
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
        if func in _METADATA:
            with torch_internals.without_torch_function():
                return func(*args, **kwargs)
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            attended = self_attention(*args, **kwargs)
            if attended is not None:
                return attended
        return func(*_plain(args), **_plain(kwargs))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    if not isinstance(weight, LayerWeight):
        return F.linear(_plain(input), weight, _plain(bias))
    return weight._layer(input, bias)


def as_matrix(layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
    """Run a layer on a matrix: if the weight takes no gradient, torch multiplies sample by sample."""
    y = layer(x.reshape(-1, x.shape[-1]), bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def _plain(value: Any) -> Any:
    """Return the value with ordinary tensors in place of ``LayerWeight``, also inside of containers."""
    if isinstance(value, LayerWeight):
        return value._connected()
    if isinstance(value, tuple | list):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
