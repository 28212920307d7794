"""The forward pass of a step: all terms' items go through the model together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.compose import Composition, batch_runner
from aniso.data import Batch, Pieces, cat_padded
from aniso.learn._training.companions import Companions
from aniso.learn._training.trainable import Trainable
from aniso.learn.heads import Classifier
from aniso.learn.objectives import DataTerm, Objective, TermInputs, logits_of
from aniso.schedule import Precision

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class BoundTerm:
    """A data term with its weight, and its classifier on the model that is trained."""

    weight: float
    term: DataTerm
    head: Classifier | None


def bind(objective: Objective, trainable: Trainable) -> list[BoundTerm]:
    """Return an objective's data terms with their classifiers."""
    return [
        BoundTerm(weight, term, term.classifier(trainable.model, trainable.head))
        for weight, term in objective.data_terms
    ]


@final
class Forward:
    """Computes what every term's loss needs from a batch of each."""

    def __init__(
        self, trainable: Trainable, terms: Sequence[BoundTerm], companions: Companions, precision: Precision
    ) -> None:
        self._model = trainable.model
        self._run = batch_runner(trainable.model)
        self._device = trainable.device
        self._terms = terms
        self._companions = companions
        self._dtype = _HALF.get(precision)
        model = trainable.model
        # weights that are not kept would be composed once more, or read from disk, for every piece
        self._one_pass = isinstance(model, Composition) and bool(model.plan.recomputed)

    def __call__(self, batches: Sequence[Batch], progress: float) -> list[TermInputs]:
        """Return the inputs of every term's loss; views that need no gradient go first, without one."""
        pairs = list(zip(self._terms, batches, strict=True))
        with torch.no_grad():
            frozen = iter(
                self._features([v for b, batch in pairs for v in batch.views[: b.term.no_grad_views]])
            )
        trained = iter(self._features([v for b, batch in pairs for v in batch.views[b.term.no_grad_views :]]))
        out = []
        for i, (bound, batch) in enumerate(pairs):
            count = bound.term.no_grad_views
            own = tuple(next(frozen if n < count else trained) for n in range(len(batch.views)))
            labels = None if batch.labels is None else batch.labels.to(self._device)
            targets = bound.term.item_targets(self._model, batch.indices)
            marks = {**targets, **self._companions.marks(i, batch.indices)}
            moved = {name: values.to(self._device) for name, values in marks.items()}
            out.append(TermInputs(own, logits_of(bound.head, own), labels, moved, progress))
        return out

    def _features(self, views: list[Tensor]) -> Sequence[Tensor]:
        if not views:
            return ()
        half = self._dtype is not None
        with torch.autocast(self._device.type, self._dtype or torch.bfloat16, enabled=half):
            batch = cat_padded(views)
            pieces = Pieces((batch,), None) if self._one_pass else Pieces.of(batch)
            features = pieces.joined([self._run(piece.to(self._device)).float() for piece in pieces.inputs])
        return torch.split(features, [len(view) for view in views])


def slices(batches: Sequence[Batch], size: int | None) -> list[list[Batch]]:
    """Cut a step's items, all terms in a row, into micro-batches; of some terms a slice may have none."""
    ends = list(itertools.accumulate(map(len, batches)))
    most = size or ends[-1]
    return [
        [_part(b, low - end + len(b), most) for b, end in zip(batches, ends, strict=True)]
        for low in range(0, ends[-1], most)
    ]


def _part(batch: Batch, start: int, count: int) -> Batch:
    """``count`` items from ``start`` on, which may lie before the first one."""
    low, high = max(0, start), max(0, start + count)
    if low == 0 and high >= len(batch):
        return batch
    labels = None if batch.labels is None else batch.labels[low:high]
    return Batch(tuple(view[low:high] for view in batch.views), labels, batch.indices[low:high])
