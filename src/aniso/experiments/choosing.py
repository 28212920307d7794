"""The selection rule that a setting asks for, on what it learns from."""

from __future__ import annotations

from aniso.experiments.settings import BaseSetting
from aniso.learn import Objective, selection
from aniso.models import Wrapped
from aniso.progress import ProgressCallback


def strategy_of(
    setting: BaseSetting,
    objective: Objective | None,
    model: Wrapped,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> selection.SelectionRule | None:
    """Return the rule, or None if all vectors of the bank are used."""
    if setting.selection is None:
        return None
    name, budget = setting.selection
    inputs = selection.SelectionInputs(
        model, objective, budget, seed=setting.seed, workers=workers, progress=progress
    )
    return selection.new_selection_rule(name, inputs)
