"""Isotropic search: one scale for all task vectors, tried at a number of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from aniso.compose import Coefficients, Composition
from aniso.errors import UsageError
from aniso.learn._training.validation import Validation, scores
from aniso.learn.keep import Keep
from aniso.progress import ProgressCallback, progress_or_default
from aniso.records import EpochRow

POINTS = tuple(i / 20 for i in range(21))
"""The default grid: 0 to 1 in steps of 0.05."""


@final
@dataclass(frozen=True)
class Search:
    """Result of ``search``: a row for every scale that was tried, and which one was kept."""

    history: tuple[EpochRow, ...]
    """Scales in order, with the accuracies they give."""
    kept: int
    """The row of the scale that was kept."""
    scale: float
    coefficients: Coefficients


def search(
    composition: Composition,
    keep: Keep,
    points: Sequence[float] = POINTS,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Search:
    """Try every scale on the splits of a keep rule; the composition is left at the scale it chooses.

    The first point must be 0, the base: control accuracies are compared with it.
    """
    if not keep.splits or not points or points[0] != 0:
        raise UsageError(
            "KEEP",
            "a search needs a keep rule with splits, and scale 0 as its first point",
            found=f"{len(keep.splits)} splits, first scale {points[0] if points else 'none'}",
            fix="keep=Best(task.val), points=(0, 0.1, …)",
        )
    progress = progress_or_default(progress)
    validation = Validation(composition, keep, workers=workers)
    history: list[EpochRow] = []
    for n, scale in enumerate(points):
        _fill(composition, scale)
        history.append(EpochRow.model_validate({"scale": float(scale), **validation.measure()}))
        progress("scales", n + 1, len(points))
        if keep.ends([scores(row) for row in history]):
            break
    kept = keep.choose([scores(row) for row in history])
    scale = float(points[kept])
    _fill(composition, scale)
    return Search(tuple(history), kept, scale, composition.coefficients)


def _fill(composition: Composition, scale: float) -> None:
    with torch.no_grad():
        composition.values.fill_(scale)
