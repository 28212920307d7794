"""The strategy that a setting asks for, over what it learns from."""

from __future__ import annotations

from aniso.errors import UsageError
from aniso.experiments.settings import BaseSetting, Job
from aniso.learn import selection
from aniso.models import Encoder
from aniso.weights.files import Told


def strategy_of(
    setting: BaseSetting, job: Job, encoder: Encoder, *, workers: int = 0, told: Told | None = None
) -> selection.Strategy | None:
    """None if the bank is taken as it is."""
    if setting.selection is None:
        return None
    kind, budget = setting.selection
    if kind == "random":
        return selection.Random(budget, seed=setting.seed, told=told)
    if job.objective is None:
        raise UsageError("USAGE", "there is nothing to choose vectors by", fix="--select random")
    if kind == "features":
        split = job.objective.data_terms[0][1].split
        return selection.FeatureSimilarity(encoder, split, budget, workers=workers, told=told)
    by_gradient = {
        "gradient": selection.WholeGradient,
        "blockwise-gradient": selection.BlockwiseGradient,
        "pursuit": selection.Pursuit,
    }[kind]
    return by_gradient(encoder, job.objective, budget, seed=setting.seed, workers=workers, told=told)
