"""Linearised models: f(x; theta0) + J(x; theta0) tau, by forward-mode differentiation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from aniso.compose.attention import self_attention
from aniso.compose.engine import Engine


@final
class Linearised(nn.Module):
    """A model to be composed in its tangent space: the output is linear in the coefficients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def linearised_call(engine: Engine, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """f(x; theta0) + J(x; theta0) tau for the differences that the engine has composed."""
    return run_tangent(engine, model, engine.installed, args, kwargs)


def run_tangent(
    engine: Engine,
    model: nn.Module,
    tangents: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    with _differentiable_forward(), forward_ad.dual_level(), _Flat():
        duals = {k: forward_ad.make_dual(engine.base[k], t) for k, t in tangents.items()}  # type: ignore[no-untyped-call]
        try:
            engine.put(duals)
            out = model(*args, **kwargs)
            return _mapped(out, _linear)
        finally:
            engine.unput(tangents)


def _linear(value: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    out: Tensor = primal.detach() if tangent is None else primal.detach() + tangent
    return out


def _mapped(value: Any, fn: Any) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):  # Hugging Face's outputs are ordered dictionaries with attributes
        made = {k: _mapped(v, fn) for k, v in value.items()}
        return type(value)(**made) if type(value) is not dict else made
    if isinstance(value, tuple | list):
        made_list = [_mapped(v, fn) for v in value]
        return type(value)(*made_list) if hasattr(value, "_fields") else type(value)(made_list)
    return value


class _Flat(TorchFunctionMode):
    """Linear layers on matrices: for more dimensions torch's derivative multiplies sample by sample."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args and args[0].dim() > 2:
            x = args[0]
            y = F.linear(x.reshape(-1, x.shape[-1]), *args[1:], **kwargs)
            return y.view(*x.shape[:-1], -1)
        if func is F.multi_head_attention_forward:
            with self:
                found = self_attention(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


@contextlib.contextmanager
def _differentiable_forward() -> Iterator[None]:
    """Fused attention has no forward-mode derivative on every device, so the plain one is used."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
