"""Predictions of items that belong to no split: files and texts, a chunk at a time, some unreadable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from aniso.classes import ClassList
from aniso.data import Items, Labelled
from aniso.errors import AnisoError, InputError, UnsafeError
from aniso.learn.evaluate import require_finite
from aniso.learn.features import iterate_features
from aniso.learn.heads import Classifier
from aniso.learn.unwrap import encoder_of

Ranked = tuple[tuple[str, float], ...]
"""The most probable classes with their probabilities, the most probable one first."""


@final
@dataclass(frozen=True)
class ItemClassifier:
    """A model with a classifier and a temperature, which predicts items in chunks.

    ``items`` of a chunk are held as names or texts; images are decoded a batch at a time::

        classifier = ItemClassifier(model, model.class_weights(classes), top=3)
        for ranked in classifier.predict(items): ...
    """

    model: nn.Module
    classifier: Classifier
    top: int = 1
    temperature: float = 1.0
    batch_size: int = 256
    workers: int = 0

    def predict(self, items: Items, *, tolerant: bool = False) -> Iterator[Ranked | AnisoError]:
        """Yield the most probable classes of every item, in order.

        An unreadable item raises an error; if ``tolerant``, its error is yielded in its place.
        """
        split = Labelled("inputs", ClassList(self.classifier.names), items, (0,) * len(items))
        done = 0
        try:
            for ranked in self._ranked(split):
                yield ranked
                done += 1
            return
        except (InputError, UnsafeError):
            if not tolerant:
                raise
        # looked for one by one, in the rest of this chunk only
        errors = {i: error for i in range(done, len(items)) if (error := _error(items, i)) is not None}
        left = [i for i in range(done, len(items)) if i not in errors]
        rest = self._ranked(split.take(left)) if left else iter(())
        for i in range(done, len(items)):
            yield errors[i] if i in errors else next(rest)

    @torch.no_grad()
    def _ranked(self, split: Labelled) -> Iterator[Ranked]:
        names = self.classifier.names
        device = next(iter(encoder_of(self.model).parameters())).device
        done = 0
        for piece in iterate_features(self.model, split, batch_size=self.batch_size, workers=self.workers):
            logits = self.classifier.logits(piece.to(device))
            require_finite(logits, split, done)
            done += len(piece)
            for values, indices in zip(*self._best(logits), strict=True):
                yield tuple((names[i], value) for i, value in zip(indices, values, strict=True))

    def _best(self, logits: Tensor) -> tuple[list[list[float]], list[list[int]]]:
        shares = (logits.cpu().double() / self.temperature).softmax(-1)  # some devices have no doubles
        best = shares.topk(min(self.top, shares.shape[-1]), dim=-1)
        return best.values.tolist(), best.indices.tolist()


def _error(items: Items, index: int) -> AnisoError | None:
    """Return why an item cannot be opened; None if it can."""
    try:
        items.open(index)
    except (InputError, UnsafeError) as e:
        return e
    return None
