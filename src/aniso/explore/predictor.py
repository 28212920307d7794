"""Predictions at any coefficients: of the desk's items at once, of a validation sample little by little."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from aniso.compose import Composition
from aniso.data import Batches, Labelled
from aniso.data.sampling import shuffled
from aniso.explore.items import ItemList, as_split
from aniso.explore.table import CoefficientTable
from aniso.learn.evaluate import require_finite, wilson
from aniso.learn.heads import Classifier
from aniso.models import Encoder
from aniso.vectors import Bank

CHUNK = 16
"""Items of the sample in a forward pass: fixed, so that results do not depend on the machine's speed."""
_REMEMBERED = 32  # tables whose results are kept, for undo and for two tabs
TOP = 3


@final
@dataclass
class _Progress:
    """What is known at one table of coefficients."""

    done: int = 0
    """Chunks of the sample that have been predicted."""
    correct: int = 0
    version: int = -1
    """Version of the list of items that the predictions are of."""
    items: list[list[tuple[str, float]]] = field(default_factory=list)


@final
@dataclass(frozen=True, eq=False)
class _ItemInputs:
    """The items at one version of their list, and the model's inputs for them."""

    version: int = -1
    numbers: tuple[int, ...] = ()
    split: Labelled | None = None
    inputs: Tensor | None = None


@final
@dataclass(frozen=True)
class ItemPrediction:
    """The most probable classes of an item, by its number."""

    number: int
    ranked: tuple[tuple[str, float], ...]


@final
@dataclass(frozen=True)
class Measurement:
    """Predictions of items, and accuracy on as much of the sample as there was time for."""

    items: tuple[ItemPrediction, ...]
    correct: int
    done: int
    total: int
    recomposed: int
    """Blocks whose weights were composed again."""

    @property
    def is_complete(self) -> bool:
        return self.done == self.total

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the accuracy so far."""
        return wilson(self.correct, self.done) if self.done else None


@final
class Predictor:
    """A composition with a classifier; its weights follow the table that is measured.

    Only blocks whose coefficients changed are composed again. One thread measures at a time.
    """

    def __init__(
        self,
        encoder: Encoder,
        classifier: Classifier,
        bank: Bank,
        table: CoefficientTable,
        sample: Labelled | None = None,
    ) -> None:
        """``sample`` are items with classes of the classifier, in random order."""
        self.composition = Composition(encoder, bank, table.index.partition).eval()
        self.classes = classifier.names
        self.items = ItemList(encoder.transforms.kind)
        self._table = table
        self._encoder = encoder
        self._classifier = classifier
        self._device = next(iter(encoder.parameters())).device
        self._sample = sample
        self._chunks: list[tuple[Tensor, Tensor]] = []
        if sample is not None:
            batches = Batches(sample, encoder.transforms.eval, size=CHUNK)
            self._chunks = [(b.inputs, b.labels) for b in batches if b.labels is not None]
        self._item_inputs = _ItemInputs()
        self._known: OrderedDict[bytes, _Progress] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def measures_accuracy(self) -> bool:
        """True if there is a sample with classes."""
        return self._sample is not None

    @torch.no_grad()
    def measure(self, values: Tensor, seconds: float) -> Measurement:
        """Predict the items, and chunks of the sample until the time is over; at least one, if any is left.

        Called again with the same coefficients, it continues.
        """
        with self._lock:
            until = time.monotonic() + seconds
            known = self._progress(values)
            inputs = self._inputs()
            recomposed = 0
            if known.version != inputs.version or known.done < len(self._chunks):
                recomposed = self._set(values)
            if known.version != inputs.version:
                known.items, known.version = self._ranked(inputs), inputs.version
            first = True
            while known.done < len(self._chunks) and (first or time.monotonic() < until):
                known.correct += self._correct(known.done)
                known.done += 1
                first = False
            pairs = zip(inputs.numbers, known.items, strict=True)
            return Measurement(
                tuple(ItemPrediction(number, tuple(ranked)) for number, ranked in pairs),
                known.correct,
                sum(len(labels) for _, labels in self._chunks[: known.done]),
                len(self._sample) if self._sample is not None else 0,
                recomposed,
            )

    def _progress(self, values: Tensor) -> _Progress:
        key = bytes(self._table.flat(values).contiguous().numpy().tobytes())
        found = self._known.pop(key, None) or _Progress()
        self._known[key] = found
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    @torch.no_grad()
    def _set(self, values: Tensor) -> int:
        """Compose the weights; return how many blocks had to be composed again."""
        parameter = self.composition.values
        new = self._table.flat(values).to(parameter)
        pairs = zip(self._table.index.divided(parameter), self._table.index.divided(new), strict=True)
        changed = sum(not torch.equal(before, after) for before, after in pairs)
        parameter.copy_(new)
        self.composition.prepare()
        return changed

    def _inputs(self) -> _ItemInputs:
        """Return the model's inputs for the items, made again if these changed."""
        version, items = self.items.snapshot()
        if self._item_inputs.version != version:
            numbers = tuple(item.number for item in items)
            if items:
                split = as_split(items, self.classes)
                batches = Batches(split, self._encoder.transforms.eval, size=len(items))
                self._item_inputs = _ItemInputs(version, numbers, split, next(iter(batches)).inputs)
            else:
                self._item_inputs = _ItemInputs(version)
        return self._item_inputs

    def _ranked(self, items: _ItemInputs) -> list[list[tuple[str, float]]]:
        if items.inputs is None or items.split is None:
            return []
        logits = self._classifier.logits(self.composition(items.inputs.to(self._device)))
        require_finite(logits, items.split, 0)
        best = logits.cpu().double().softmax(-1).topk(min(TOP, len(self.classes)), dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[(self.classes[i], p) for i, p in zip(*row, strict=True)] for row in rows]

    def _correct(self, chunk: int) -> int:
        inputs, labels = self._chunks[chunk]
        logits = self._classifier.logits(self.composition(inputs.to(self._device)))
        assert self._sample is not None
        require_finite(logits, self._sample, chunk * CHUNK)
        return int((logits.argmax(-1).cpu() == labels).sum())


def random_sample(split: Labelled, count: int) -> Labelled:
    """Return items of a split in random order, so that any first part of them is a random sample, too."""
    return split.take(shuffled(split.ids, "explore")[:count], f"{split.name}, sample")
