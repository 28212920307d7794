"""Linearised models: f(x; theta0) + J(x; theta0) tau, by forward-mode differentiation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from aniso.compose._engine import torch_internals
from aniso.compose._engine.installer import WeightInstaller
from aniso.compose._layers.attention import self_attention
from aniso.compose.linearised.jvp_rules import jvp_rule
from aniso.errors import UsageError


@final
class Linearised(nn.Module):
    """A model to be composed in its tangent space: the output is linear in the coefficients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@final
class Tangent(nn.Module):
    """A linearised model to be trained: f(x; theta0) + J(x; theta0) tau, with tau as its parameters."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        """``names`` are the tensors that move, by the module's own names."""
        super().__init__()
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.names = tuple(names)
        self.tau = nn.ParameterList(torch.zeros_like(tensors[name]) for name in names)
        self.__dict__["_module"] = module  # theta0 is not trained, so it is no child
        self.__dict__["_base"] = {name: tensors[name].detach() for name in names}

    _module: nn.Module
    _base: dict[str, Tensor]

    def forward(self, *args: Any) -> Any:
        with _differentiable_forward(), forward_ad.dual_level(), _JvpRules():
            pairs = zip(self.names, self.tau, strict=True)
            duals = {name: forward_ad.make_dual(self._base[name], tau) for name, tau in pairs}  # type: ignore[no-untyped-call]
            return _map_tensors(torch.func.functional_call(self._module, duals, args), _primal_plus_tangent)

    def tuned(self) -> dict[str, Tensor]:
        """Return theta0 + tau by name: the checkpoint whose difference to the base is the task vector."""
        pairs = zip(self.names, self.tau, strict=True)
        return {name: self._base[name] + tau.detach() for name, tau in pairs}


def run_tangent(
    installer: WeightInstaller,
    model: nn.Module,
    tangents: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the linearised outputs of a model whose weights carry these tangents."""
    with _differentiable_forward(), forward_ad.dual_level(), _JvpRules():
        duals = {k: forward_ad.make_dual(installer.base[k], t) for k, t in tangents.items()}  # type: ignore[no-untyped-call]
        try:
            installer.set_tensors(duals)
            return _map_tensors(model(*args, **kwargs), _primal_plus_tangent)
        finally:
            installer.restore_tensors(tangents)


def _primal_plus_tangent(value: Tensor) -> Tensor:
    """Return f(x; theta0) + J(x; theta0) tau."""
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    out: Tensor = primal if tangent is None else primal + tangent
    return out


def _map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in a model's output."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):  # Hugging Face's outputs are ordered dictionaries with attributes
        items = {k: _map_tensors(v, fn) for k, v in value.items()}
        return type(value)(**items) if type(value) is not dict else items
    if isinstance(value, tuple | list):
        values = [_map_tensors(v, fn) for v in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{n: _map_tensors(getattr(value, n), fn) for n in names})
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UsageError(
        "USAGE",
        f"a linearised model returned a {type(value).__name__}, which cannot be linearised",
        expected="tensors, or tuples, lists, dictionaries or dataclasses of them",
        fix="wrap the model so that it returns its tensors",
    )


class _JvpRules(TorchFunctionMode):
    """Replaces the derivatives of some layers by faster ones than torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out: Any = jvp_rule(func, args, kwargs)
        if out is not None:
            return out
        if func is F.linear and args and args[0].dim() > 2:
            # as a matrix: for more dimensions torch's derivative multiplies sample by sample
            x = args[0]
            y = F.linear(x.reshape(-1, x.shape[-1]), *args[1:], **kwargs)
            return y.view(*x.shape[:-1], y.shape[-1])
        if func is F.multi_head_attention_forward:
            with self:
                out = self_attention(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


@functools.cache
def _load_rules() -> None:
    """Load torch's own rules now; torch warns of how it compiles them when they are first needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch_internals.load_jvp_decompositions()


@contextlib.contextmanager
def _differentiable_forward() -> Iterator[None]:
    """Use plain attention: fused attention has no forward-mode derivative on every device."""
    _load_rules()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
