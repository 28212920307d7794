"""Feature distributions of tasks in two dimensions: PCA of the mean features, with covariances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.data import Split
from aniso.errors import UsageError
from aniso.learn.features import features
from aniso.models import Encoder
from aniso.progress import ProgressCallback


@final
@dataclass(frozen=True, eq=False)
class FeatureDistribution:
    """Mean and covariance of a task's image features; the covariance is None where only the mean is known."""

    name: str
    mean: Tensor
    covariance: Tensor | None = None
    images: int | None = None

    @classmethod
    def of(cls, name: str, rows: Tensor) -> FeatureDistribution:
        """Return the distribution of features, images x width; one image has a covariance of zero."""
        wide = rows.double()
        centred = wide - wide.mean(0)
        return cls(name, wide.mean(0), centred.T @ centred / max(1, len(rows) - 1), len(rows))


@final
@dataclass(frozen=True)
class ProjectedTask:
    """A task in the plane: the projected mean P'mu and covariance P' Sigma P."""

    name: str
    mean: tuple[float, float]
    covariance: tuple[tuple[float, float], tuple[float, float]] | None
    images: int | None


@final
@dataclass(frozen=True)
class Projection:
    """Tasks in the plane of the first two principal components of their mean features."""

    tasks: tuple[ProjectedTask, ...]
    explained: tuple[float, float]
    """Share of the variance of the mean features along each component."""


def feature_distribution(
    encoder: Encoder,
    split: Split,
    name: str,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> FeatureDistribution:
    """Return mean and covariance of the features of a split's images, without augmentation."""
    return FeatureDistribution.of(name, features(encoder, split, workers=workers, progress=progress)[0])


def project_distributions(distributions: Sequence[FeatureDistribution]) -> Projection:
    """Project feature distributions onto the first two principal components of their means.

    Coordinates are relative to the mean of all means. The means of two tasks lie on a line; the second axis
    is then the direction across it in which images vary most.
    """
    if len(distributions) < 2:
        raise UsageError(
            "USAGE",
            "principal components need the features of two tasks or more",
            found=", ".join(own.name for own in distributions) or "no task",
            fix="add a task",
        )
    means = torch.stack([own.mean.double() for own in distributions])
    centred = means - means.mean(0)
    _, singular, components = torch.linalg.svd(centred, full_matrices=False)
    variances = singular.square()
    total = float(variances.sum())
    axes = torch.zeros(2, means.shape[1], dtype=torch.float64)
    rank = int((singular > 1e-9 * singular[0]).sum()) if total else 0
    axes[: min(2, rank)] = components[: min(2, rank)]
    known = [own.covariance.double() for own in distributions if own.covariance is not None]
    for missing in range(min(2, rank), 2):
        if known:
            axes[missing] = _widest(torch.stack(known).mean(0), axes[:missing])
    axes = torch.stack([_oriented(axis) for axis in axes])
    shares = [float(v) / total if total else 0.0 for v in variances[:2]]
    return Projection(
        tuple(
            _projected(own, point, axes)
            for own, point in zip(distributions, (centred @ axes.T).tolist(), strict=True)
        ),
        (shares[0], shares[1] if rank > 1 else 0.0),
    )


def _widest(covariance: Tensor, others: Tensor) -> Tensor:
    """Return the direction of largest variance that is orthogonal to other directions."""
    across = torch.eye(len(covariance), dtype=torch.float64) - others.T @ others
    _, directions = torch.linalg.eigh(across @ covariance @ across)
    widest: Tensor = directions[:, -1]
    return widest


def _oriented(axis: Tensor) -> Tensor:
    """Return the axis with its largest entry positive: the sign of a component is arbitrary."""
    return -axis if float(axis[axis.abs().argmax()]) < 0 else axis


def _projected(own: FeatureDistribution, point: Sequence[float], axes: Tensor) -> ProjectedTask:
    covariance = None
    if own.covariance is not None:
        (a, b), (c, d) = (axes @ own.covariance.double() @ axes.T).tolist()
        covariance = ((a, b), (c, d))
    return ProjectedTask(own.name, (point[0], point[1]), covariance, own.images)
