"""The layers of a network that can be calibrated: linear layers and layer norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

Keywords = dict[str, Any]
"""Keyword arguments of a module."""


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """A linear map or a layer norm of a network, and the names of its tensors in the network's state dict."""

    name: str
    module: nn.Module
    weight: str
    bias: str | None

    @property
    def is_norm(self) -> bool:
        """True for a layer norm, False for a linear map."""
        return isinstance(self.module, nn.LayerNorm)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def input(self, args: tuple[Any, ...], kwargs: Keywords) -> Tensor | None:
        """Return the input of a call of the module; None if the call is no linear map of one tensor."""
        if isinstance(self.module, nn.MultiheadAttention):
            return args[0] if _is_plain(self.module, args, kwargs) else None
        given = args[0] if args else next(iter(kwargs.values()), None)
        return given if isinstance(given, Tensor) else None

    def rows(self, given: Tensor, mask: Tensor | None) -> Tensor:
        """Return an input as rows x width, without padding; ``mask`` is False for tokens that are padding.

        The input of a layer norm is normalised, as it is before weight and bias.
        """
        module = self.module
        if isinstance(module, nn.Conv2d):
            down, right = module.stride
            given = given[:, :, ::down, ::right].movedim(1, -1)
        if isinstance(module, nn.LayerNorm):
            given = functional.layer_norm(given, module.normalized_shape, eps=module.eps)
        if mask is not None and given.shape[:-1] == mask.shape:
            return given[mask]
        return given.reshape(-1, given.shape[-1])


def calibrated_layers(network: nn.Module) -> dict[str, Layer]:
    """Return all linear maps and layer norms of a network by name.

    These are linear layers, the input projection of torch's multi-head attention, 1 x 1 convolutions and
    layer norms over one dimension.
    """
    found = {}
    for name, module in network.named_modules():
        prefix = f"{name}." if name else ""
        bias = None if getattr(module, "bias", None) is None else f"{prefix}bias"
        if isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight is not None:
                own = None if module.in_proj_bias is None else f"{prefix}in_proj_bias"
                found[f"{prefix}in_proj"] = Layer(f"{prefix}in_proj", module, f"{prefix}in_proj_weight", own)
        elif _is_linear(module) or _is_norm(module):
            found[name] = Layer(name, module, f"{prefix}weight", bias)
    return found


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1 and module.padding == (0, 0)
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1 and module.bias is not None


@contextlib.contextmanager
def explicit_attention(network: nn.Module) -> Iterator[None]:
    """Let torch's multi-head attention call its output projection, so that the projection's input is seen.

    Torch passes the projection's weights to one function for all of the attention.
    """
    changed = [module for module in network.modules() if isinstance(module, nn.MultiheadAttention)]
    for module in changed:
        module.forward = partial(_attention, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _is_plain(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Keywords) -> bool:
    """True for self-attention whose input projection is one linear map, and whose weights nobody asks for."""
    return (
        len(args) == 3
        and args[0] is args[1]
        and args[1] is args[2]
        and args[0].dim() == 3
        and not kwargs.get("need_weights", True)
        and all(v is None or v is False for k, v in kwargs.items() if k != "average_attn_weights")
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _attention(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The forward pass of torch's multi-head attention, with its output projection as a module."""
    if not _is_plain(module, args, kwargs):
        return nn.MultiheadAttention.forward(module, *args, **kwargs)
    x = args[0] if module.batch_first else args[0].transpose(0, 1)
    items, tokens, width = x.shape
    projected = functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    heads = (items, tokens, 3, module.num_heads, width // module.num_heads)
    q, k, v = projected.view(heads).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v)
    out: Tensor = module.out_proj(mixed.transpose(1, 2).reshape(items, tokens, width))
    return (out if module.batch_first else out.transpose(0, 1)), None
