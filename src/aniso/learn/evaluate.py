"""Accuracy on labelled splits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from aniso.data import Labelled
from aniso.errors import InputError, NumericalError, UsageError, printable
from aniso.learn.features import FeatureCache, ItemFeatures, features, iterate_features
from aniso.learn.heads import Classifier
from aniso.learn.predictions import Predictions
from aniso.learn.unwrap import encoder_of
from aniso.progress import ProgressCallback, progress_or_default


@dataclass(frozen=True)
class Accuracy:
    """The number of correct predictions, in total and for each class."""

    correct: int
    total: int
    by_class: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ValueError("accuracy of no predictions")

    @property
    def value(self) -> float:
        return self.correct / self.total

    @property
    def per_class(self) -> float:
        """Mean accuracy over the classes that occur, each with the same weight."""
        shares = [right / count for right, count in self.by_class.values() if count]
        return sum(shares) / len(shares)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval."""
        return wilson(self.correct, self.total)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({low:.1%} to {high:.1%}), {self.correct:,} of {self.total:,}"


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of an accuracy, which also holds near 0 and 1."""
    z, n, p = 1.959964, total, correct / total
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    model: nn.Module,
    split: Labelled,
    *,
    head: Classifier | None = None,
    batch_size: int = 256,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Accuracy:
    """Return the accuracy of a model or composition on a split; ``head`` defaults to class weights."""
    _require_labelled(split)
    progress = progress_or_default(progress)
    head = head or encoder_of(model).class_weights(split.classes, progress=progress)
    found = predict(model, split, head=head, batch_size=batch_size, workers=workers, progress=progress)
    cut = encoder_of(model).transforms.notes(split.items, split.name)
    return accuracy(found, split, notes=(*head.notes, *cut))


def predict(
    model: nn.Module,
    split: Labelled,
    *,
    head: Classifier | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: FeatureCache | ItemFeatures | None = None,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Return the predicted class of every item of a split, in order."""
    found = classify(
        model, split, head=head, batch_size=batch_size, workers=workers, cache=cache, progress=progress
    )
    return found.labels


def classify(
    model: nn.Module,
    split: Labelled,
    *,
    head: Classifier | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: FeatureCache | ItemFeatures | None = None,
    progress: ProgressCallback | None = None,
) -> Predictions:
    """Return the predicted class of every item of a split, in order, with its probability."""
    pieces = iterate_logits(
        model, split, head=head, batch_size=batch_size, workers=workers, cache=cache, progress=progress
    )
    # classes by logits: of probabilities that round to the same number the first would win
    best = [(logits.argmax(-1).cpu(), logits.softmax(-1).amax(-1).cpu()) for logits in pieces]
    labels, confidence = (torch.cat(column) for column in zip(*best, strict=True))
    return Predictions(labels, confidence, split.classes)


@torch.no_grad()
def iterate_logits(
    model: nn.Module,
    split: Labelled,
    *,
    head: Classifier | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: FeatureCache | ItemFeatures | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of every item of a split, in order, a batch at a time; raises if one is not finite."""
    _require_labelled(split)
    encoder = encoder_of(model)
    head = head or encoder.class_weights(split.classes, progress=progress)
    _require_same_classes(head, split)
    device = next(iter(encoder.parameters())).device
    if cache is not None:
        whole = features(
            model, split, batch_size=batch_size, workers=workers, cache=cache, progress=progress
        )[0]
        pieces = iter(torch.split(whole, batch_size))
    else:
        pieces = iterate_features(model, split, batch_size=batch_size, workers=workers)
    done = 0
    for piece in pieces:
        logits = head.logits(piece.to(device))
        require_finite(logits, split, done)
        yield logits
        done += len(piece)
        if progress:
            progress(split.name, done, len(split))


def accuracy(predictions: Tensor, split: Labelled, notes: tuple[str, ...] = ()) -> Accuracy:
    """Return the accuracy of predictions for the items of a split, in order."""
    classes = len(split.classes)
    pairs = torch.tensor(split.labels) * classes + predictions
    confusion = torch.bincount(pairs, minlength=classes**2).view(classes, classes)  # true x predicted class
    right, counts = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    by_class = dict(zip(split.classes.names, zip(right, counts, strict=True), strict=True))
    doubts = (*_permuted(confusion, split), *_one_class(confusion, split))
    return Accuracy(sum(right), sum(counts), by_class, (*notes, *doubts))


def _require_labelled(split: object) -> None:
    if not isinstance(split, Labelled) or not len(split):
        raise UsageError(
            "DATA-SPLIT",
            "accuracy needs a split with labels and at least one item",
            found=printable(split),
            fix="task.test, or another labelled split",
        )


def _permuted(confusion: torch.Tensor, split: Labelled) -> tuple[str, ...]:
    """Return a warning if classes are separated well, but under each other's names."""
    total, classes = int(confusion.sum()), len(confusion)
    accuracy = float(confusion.diagonal().sum()) / total
    best = (
        float(confusion.max(0).values.sum()) / total
    )  # if every predicted class were renamed to the true class it is predicted for most
    common = float(confusion.sum(1).max()) / total  # what predicting one class always would give
    if total >= 10 * classes and accuracy <= 1.5 / classes and best >= max(0.5, common + 0.25):
        return (
            f"warning: {split.name}: {accuracy:.0%} correct, but {best:.0%} if classes were renamed: "
            "are the labels those of other classes?",
        )
    return ()


def _one_class(confusion: torch.Tensor, split: Labelled) -> tuple[str, ...]:
    """A warning if every item is predicted to be of one class: features have collapsed."""
    predicted = (confusion.sum(0) > 0).sum()
    if int(predicted) > 1 or int((confusion.sum(1) > 0).sum()) < 2:
        return ()
    name = split.classes.names[int(confusion.sum(0).argmax())]
    return (f"warning: {split.name}: every item is predicted to be '{printable(name, 40)}'",)


def _require_same_classes(head: Classifier, split: Labelled) -> None:
    if head.names != split.classes.names:
        odd = [n for n in split.classes.names if n not in head.names][:5]
        raise InputError(
            "DATA-CLASS",
            f"the classifier has other classes than {split.name}",
            expected=f"{len(split.classes)} classes: {', '.join(split.classes.names[:5])} …",
            found=f"{len(head.names)} classes: {', '.join(head.names[:5])} …",
            missing=", ".join(odd),
            fix="build class weights from split.classes: names and order must agree",
        )


def require_finite(logits: torch.Tensor, split: Labelled, start: int) -> None:
    """Raise LEARN-NONFINITE for logits of the items of a split, from the item ``start`` on."""
    bad = (~torch.isfinite(logits).all(-1)).nonzero().flatten().tolist()
    if bad:
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the features of {len(bad)} {split.item_kind} of {split.name} are NaN or infinite",
            first=split.items.describe(start + bad[0]),
            fix="look for coefficients or weights that are too large: aniso coefficients show",
        )
