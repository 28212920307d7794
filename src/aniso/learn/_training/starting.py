"""Putting a start into a composition, and what a keep rule has to know of the base then."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from aniso.compose import Coefficients, Composition
from aniso.errors import UsageError
from aniso.learn._training.validation import Validation, scores
from aniso.learn.keep import Keep, Lowest
from aniso.learn.starts import Start, constant
from aniso.records import EpochRow


def start_coefficients(model: nn.Module, start: Start | Coefficients | float) -> Coefficients:
    """Return the coefficients of a start for a composition; a number is that of every coefficient."""
    composition = _require_composition(model)
    if isinstance(start, Start):
        return start.coefficients
    if isinstance(start, Coefficients):
        return start
    return constant(composition.bank, start, composition.partition).coefficients


def begin_at(model: nn.Module, start: Coefficients, keep: Keep, *, workers: int = 0) -> Keep:
    """Set a composition to its start; return the keep rule, which then knows the base's accuracy.

    A rule with a floor for the control compares with the base, which the first row is no longer.
    """
    composition = _require_composition(model)
    if isinstance(keep, Lowest) and keep.reference is None:
        with torch.no_grad():
            composition.values.zero_()
        row = EpochRow.model_validate(Validation(composition, keep, workers=workers).measure())
        keep = replace(keep, reference=scores(row)[keep.control.name])
    composition.load(start)
    return keep


def _require_composition(model: nn.Module) -> Composition:
    if isinstance(model, Composition):
        return model
    raise UsageError("START", "coefficients have a start, but weights are trained", fix="leave start out")
