"""Isotropic search: one scale for all task vectors, tried at a number of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from aniso.compose import Coefficients, Composition
from aniso.errors import UsageError
from aniso.learn._training.validation import Validation, worth
from aniso.learn.keep import Keep
from aniso.progress import ProgressCallback, progress_or_default

POINTS = tuple(i / 20 for i in range(21))
"""The usual grid: 0 to 1 in steps of a twentieth."""


@final
@dataclass(frozen=True)
class Search:
    """What was tried, in order, and what was chosen."""

    tried: tuple[tuple[float, dict[str, float]], ...]
    """Scales and the accuracies they give, by the name of the split."""
    kept: int
    coefficients: Coefficients

    @property
    def scale(self) -> float:
        return self.tried[self.kept][0]


def search(
    composition: Composition,
    keep: Keep,
    points: Sequence[float] = POINTS,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Search:
    """Try every scale on the splits of a keep rule; the composition is left at the one it chooses.

    The first point must be 0, the base: it is what control accuracies are compared with.
    """
    if not keep.splits or not points or points[0] != 0:
        raise UsageError(
            "KEEP",
            "a search needs splits to choose by, and begins at scale 0",
            found=f"{len(keep.splits)} splits, first scale {points[0] if points else 'none'}",
            fix="keep=Best(task.val), points=(0, 0.1, …)",
        )
    progress = progress_or_default(progress)
    gauge = Validation(composition, keep, workers=workers)
    tried: list[tuple[float, dict[str, float]]] = []
    for n, scale in enumerate(points):
        _fill(composition, scale)
        found = dict(worth(gauge.read()))
        tried.append((float(scale), found))
        progress("scales", n + 1, len(points))
        if keep.ends([measured for _, measured in tried]):
            break
    kept = keep.choose([measured for _, measured in tried])
    _fill(composition, tried[kept][0])
    return Search(tuple(tried), kept, composition.coefficients)


def _fill(composition: Composition, scale: float) -> None:
    with torch.no_grad():
        composition.values.fill_(scale)
