"""Derivatives of fixed samples, stored once.

The output of a linearised model is linear in the coefficients. So when the same samples are gone through many
times, the derivative of each output with respect to every coefficient can be stored, and learning is
a linear problem from then on. ``cache_choice`` says when that is cheaper, and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.compose.composition import Composition
from aniso.compose.tangent import derivative, linearised, run_tangent
from aniso.errors import UsageError


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
    if not composition.linearised:
        raise UsageError(
            "USAGE",
            "derivatives are stored for linearised models only",
            fix="Composition(Linearised(model), bank)",
        )
    engine, model, slots = composition._running(), composition._model, composition.slots
    bases, directions = [], []
    with torch.no_grad():
        for batch in batches:
            bases.append(run_tangent(engine, model, {}, (batch,), {}, linearised))
            each = []
            for i in range(slots.count):
                values = torch.zeros_like(composition.values)
                values[i] = 1
                moved = engine.tensors_moved_by(values)
                each.append(run_tangent(engine, model, moved, (batch,), {}, derivative))
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
