"""The strategy that a setting asks for, over what it learns from."""

from __future__ import annotations

from aniso.data import TextDataset
from aniso.errors import UsageError
from aniso.experiments.settings import BaseSetting
from aniso.learn import Objective, selection
from aniso.models import Encoder, Wrapped
from aniso.progress import ProgressCallback


def strategy_of(
    setting: BaseSetting,
    objective: Objective | None,
    model: Wrapped,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> selection.Strategy | None:
    """None if the bank is taken as it is."""
    if setting.selection is None:
        return None
    kind, budget = setting.selection
    if kind == "random":
        return selection.Random(budget, seed=setting.seed, progress=progress)
    if objective is None:
        raise UsageError("USAGE", "there is nothing to choose vectors by", fix="--select random")
    if kind == "features":
        split = objective.data_terms[0][1].split
        assert isinstance(model, Encoder) and not isinstance(split, TextDataset)  # settings see to it
        return selection.FeatureSimilarity(model, split, budget, workers=workers, progress=progress)
    by_gradient = {
        "gradient": selection.WholeGradient,
        "blockwise-gradient": selection.BlockwiseGradient,
        "pursuit": selection.Pursuit,
    }[kind]
    return by_gradient(model, objective, budget, seed=setting.seed, workers=workers, progress=progress)
