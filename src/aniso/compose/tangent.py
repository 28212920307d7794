"""Linearised models: f(x; theta0) + J(x; theta0) tau, by forward-mode differentiation.

The output is linear in the coefficients. So when the same samples are gone through many times, the derivative
of every sample's output with respect to every coefficient can be stored once, and learning is a linear
problem from then on. ``cache_choice`` says when that is cheaper, and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from aniso.compose.engine import Engine

if TYPE_CHECKING:
    from aniso.compose.composition import Composition


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
    with _differentiable_forward(), forward_ad.dual_level():
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


# features of fixed samples


@final
@dataclass(frozen=True, eq=False)
class TangentFeatures:
    """Outputs of some samples as a linear function of the coefficients: ``base + values @ directions``."""

    base: Tensor
    """Samples by features: the base's outputs."""
    directions: Tensor
    """Coefficients by samples by features."""

    def __call__(self, values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """The linearised outputs of these samples; gradients reach the values."""
        moved: Tensor = torch.tensordot(values, self.directions[:, rows], dims=1)
        return self.base[rows] + moved


def tangent_features(composition: Composition, batches: Iterable[Tensor]) -> TangentFeatures:
    """One derivative for each coefficient and batch; the values of the composition play no part."""
    engine, model, slots = composition._running(), composition._model, composition.slots
    bases, directions = [], []
    with torch.no_grad():
        for batch in batches:
            bases.append(run_tangent(engine, model, {}, (batch,), {}))
            each = []
            for i in range(slots.count):
                values = torch.zeros_like(composition.values)
                values[i] = 1
                moved = engine.tensors_moved_by(values)
                each.append(run_tangent(engine, model, moved, (batch,), {}) - bases[-1])
            directions.append(torch.stack(each))
    return TangentFeatures(torch.cat(bases), torch.cat(directions, dim=1))


@final
@dataclass(frozen=True)
class CacheChoice:
    """Whether to store derivatives, with both costs in passes through the base."""

    cached: bool
    storing: float
    stepping: float
    nbytes: int
    reason: str


def cache_choice(samples: int, features: int, coefficients: int, passes: int, budget: int) -> CacheChoice:
    """What learning from ``samples`` fixed samples costs with and without stored derivatives.

    Counted in matrix products per layer, of which a pass through the base takes one: a derivative takes
    three (the output, and its derivative through inputs and weights), a learning step five (two more on
    the way back). Products with stored derivatives are small beside either.
    """
    storing = 3.0 * coefficients + 1
    stepping = 5.0 * passes
    nbytes = 4 * samples * features * (coefficients + 1)
    if nbytes > budget:
        return CacheChoice(False, storing, stepping, nbytes, "stored derivatives would not fit into memory")
    if storing >= stepping:
        return CacheChoice(False, storing, stepping, nbytes, "too few passes to make up for storing them")
    return CacheChoice(True, storing, stepping, nbytes, "storing derivatives is cheaper than the passes")
