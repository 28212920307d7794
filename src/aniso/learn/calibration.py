"""Temperature scaling: logits are divided by one number, fitted on validation data (Guo et al. 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Labelled
from aniso.errors import UsageError, printable
from aniso.learn.evaluate import iterate_logits
from aniso.learn.features import FeatureCache
from aniso.learn.heads import Classifier
from aniso.prediction_files import NOT_CALIBRATED
from aniso.progress import ProgressCallback

MOST_ITEMS = 1000
"""Items that a temperature is fitted on: one number needs no more."""
_HALVINGS = 60  # of an interval of 20: below the spacing of floats
_WIDEST = 10.0  # logarithm of the largest temperature, and of the inverse of the smallest


@final
@dataclass(frozen=True)
class Calibration:
    """The temperature of a classifier, and what it was fitted on; 1 and a reason if there is none."""

    temperature: float = 1.0
    split: str = ""
    items: int = 0
    loss: tuple[float, float] | None = None
    """Mean cross-entropy on these items before and after."""
    reason: str = ""
    """Why there is no calibration."""

    def __str__(self) -> str:
        if self.loss is None:
            return f"{NOT_CALIBRATED}: {self.reason}" if self.reason else NOT_CALIBRATED
        before, after = self.loss
        return (
            f"temperature {self.temperature:.4g}, fitted on {self.items:,} items of {self.split}: "
            f"cross-entropy {before:.4g} -> {after:.4g}"
        )


def fit_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """Return the temperature with the least mean cross-entropy; None if there is none.

    The loss is convex in the inverse temperature b, with the derivative mean(E[z] - z_label) under
    softmax(b z). It has no minimum if no item has a class with a larger logit than its label's (b would
    grow without bound), or if labels have on average no larger logits than other classes (b would be 0).
    """
    z = logits.double().cpu()
    own = z.gather(1, labels.view(-1, 1).long()).squeeze(1)

    def slope(b: float) -> float:
        return float(((b * z).softmax(-1).mul(z).sum(-1) - own).mean())

    if slope(0.0) >= 0 or bool((own >= z.max(-1).values).all()):
        return None
    low, high = -_WIDEST, _WIDEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if slope(math.exp(middle)) < 0:
            low = middle
        else:
            high = middle
    return math.exp(-(low + high) / 2)


def calibrate(
    model: nn.Module,
    split: Labelled,
    *,
    head: Classifier | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: FeatureCache | None = None,
    progress: ProgressCallback | None = None,
) -> Calibration:
    """Fit a temperature on at most a thousand items of a labelled split, drawn by class.

    Test splits are refused: probabilities would be tuned to the data that they are judged by.
    """
    if split.role == "test":
        raise UsageError(
            "LEARN-TEST",
            f"a temperature cannot be fitted on {printable(split.name)}",
            fix="use a validation split",
        )
    part = split if len(split) <= MOST_ITEMS else split.carve("calibration", most=MOST_ITEMS)[0]
    pieces = iterate_logits(
        model, part, head=head, batch_size=batch_size, workers=workers, cache=cache, progress=progress
    )
    logits, labels = torch.cat([piece.cpu() for piece in pieces]), torch.tensor(part.labels)
    found = fit_temperature(logits, labels)
    if found is None:
        right = float((logits.argmax(-1) == labels).double().mean())
        return Calibration(reason=f"no temperature fits {split.name}, where {right:.0%} are correct")
    losses = [float(functional.cross_entropy(logits.double() / t, labels)) for t in (1.0, found)]
    return Calibration(found, split.name, len(part), (losses[0], losses[1]))
