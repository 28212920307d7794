"""Predictions on images without labels, and what they tell on their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from aniso.classes import ClassList
from aniso.data import Unlabelled
from aniso.errors import printable
from aniso.learn.features import FeatureCache, features, iterate_features
from aniso.learn.unwrap import encoder_of
from aniso.progress import ProgressCallback
from aniso.records import JsonValue


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """The predicted class of every image of a split, and its probability."""

    labels: Tensor
    confidence: Tensor
    classes: ClassList

    @property
    def counts(self) -> dict[str, int]:
        """How many images are predicted to be of each class."""
        found = torch.bincount(self.labels, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes.names, found, strict=True))

    @property
    def largest(self) -> tuple[str, float]:
        """The class that is predicted most often, and its share of the images."""
        name, count = max(self.counts.items(), key=lambda one: one[1])
        return name, count / len(self.labels)

    def compared_with(self, before: Predictions) -> dict[str, JsonValue]:
        """Return the agreement with other predictions, the mean confidence of both, and the counts."""
        return {
            "agreement": float((self.labels == before.labels).float().mean()),
            "confidence": [float(before.confidence.mean()), float(self.confidence.mean())],
            "counts": self.counts,
        }

    def doubts(self, before: Predictions) -> tuple[str, ...]:
        """Return a warning if one class has more than half of all predictions, and more than before."""
        name, share = self.largest
        even = 1 / len(self.classes)
        earlier = before.counts[name] / len(before.labels)
        if share <= 0.5 + even / 2 or share <= earlier:
            return ()
        return (
            f"warning: {share:.0%} of the predictions are '{printable(name, 40)}' ({earlier:.0%} before): "
            "training has probably collapsed; try a lower learning rate, or --objective fixmatch",
        )


@torch.no_grad()
def predict_unlabelled(
    model: nn.Module,
    split: Unlabelled,
    *,
    workers: int = 0,
    cache: FeatureCache | None = None,
    progress: ProgressCallback | None = None,
) -> Predictions:
    """Predict the class of every image with class weights from prompts; features come from ``cache``."""
    head = encoder_of(model).class_weights(split.classes, progress=progress)
    labels, confidence = [], []
    for piece in _features(model, split, workers, cache):
        best = head.logits(piece).softmax(-1).max(-1)
        labels.append(best.indices.cpu())
        confidence.append(best.values.cpu())
        if progress:
            progress(f"predictions on {split.name}", sum(map(len, labels)), len(split))
    return Predictions(torch.cat(labels), torch.cat(confidence), split.classes)


def _features(
    model: nn.Module, split: Unlabelled, workers: int, cache: FeatureCache | None
) -> Iterable[Tensor]:
    if cache is None:
        return iterate_features(model, split, workers=workers)
    return [features(model, split, workers=workers, cache=cache)[0]]
