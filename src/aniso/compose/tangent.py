"""Linearised models: f(x; theta0) + J(x; theta0) tau, by forward-mode differentiation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from aniso.compose.attention import self_attention
from aniso.compose.dual import by_hand
from aniso.compose.engine import Engine
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
        with _differentiable_forward(), forward_ad.dual_level(), _ByHand():
            pairs = zip(self.names, self.tau, strict=True)
            duals = {name: forward_ad.make_dual(self._base[name], tau) for name, tau in pairs}  # type: ignore[no-untyped-call]
            return _mapped(torch.func.functional_call(self._module, duals, args), linearised)

    def tuned(self) -> dict[str, Tensor]:
        """theta0 + tau by name: the checkpoint whose difference to the base is the linearised task vector."""
        pairs = zip(self.names, self.tau, strict=True)
        return {name: self._base[name] + tau.detach() for name, tau in pairs}


def run_tangent(
    engine: Engine,
    model: nn.Module,
    tangents: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Callable[[Tensor], Tensor],
) -> Any:
    """Run the model with weights that carry these tangents; ``result`` says what to make of outputs."""
    with _differentiable_forward(), forward_ad.dual_level(), _ByHand():
        duals = {k: forward_ad.make_dual(engine.base[k], t) for k, t in tangents.items()}  # type: ignore[no-untyped-call]
        try:
            engine.put(duals)
            return _mapped(model(*args, **kwargs), result)
        finally:
            engine.unput(tangents)


def linearised(value: Tensor) -> Tensor:
    """f(x; theta0) + J(x; theta0) tau."""
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    out: Tensor = primal if tangent is None else primal + tangent
    return out


def derivative(value: Tensor) -> Tensor:
    """J(x; theta0) tau alone."""
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    out: Tensor = torch.zeros_like(primal) if tangent is None else tangent
    return out


def _mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A function of every tensor in what a model returns."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):  # Hugging Face's outputs are ordered dictionaries with attributes
        made = {k: _mapped(v, fn) for k, v in value.items()}
        return type(value)(**made) if type(value) is not dict else made
    if isinstance(value, tuple | list):
        items = [_mapped(v, fn) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{n: _mapped(getattr(value, n), fn) for n in names})
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UsageError(
        "USAGE",
        f"a linearised model returned a {type(value).__name__}, in which derivatives cannot be found",
        expected="tensors, or tuples, lists, dictionaries or dataclasses of them",
        fix="wrap the model so that it returns its tensors",
    )


class _ByHand(TorchFunctionMode):
    """Takes layers that have a faster derivative than torch's to it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found: Any = by_hand(func, args, kwargs)
        if found is not None:
            return found
        if func is F.linear and args and args[0].dim() > 2:
            # as a matrix: for more dimensions torch's derivative multiplies sample by sample
            x = args[0]
            y = F.linear(x.reshape(-1, x.shape[-1]), *args[1:], **kwargs)
            return y.view(*x.shape[:-1], y.shape[-1])
        if func is F.multi_head_attention_forward:
            with self:
                found = self_attention(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


@functools.cache
def _load_rules() -> None:
    """torch compiles some of its derivatives when first needed, with a way of its own that it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._decomp.decompositions_for_jvp")


@contextlib.contextmanager
def _differentiable_forward() -> Iterator[None]:
    """Fused attention has no forward-mode derivative on every device, so the plain one is used."""
    _load_rules()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
