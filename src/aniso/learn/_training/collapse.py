"""Detection of collapse: a learning rate that is too high makes all features, or all predictions, equal."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from aniso.json_value import JsonObject
from aniso.learn.objectives import Companion, DataTerm, TermInputs
from aniso.records import JsonValue

_WINDOW = 5  # steps that are judged together, the last ones of an epoch
_LEAST_ITEMS = 16  # in these steps; fewer may be of one class by chance
_DOMINANT = 0.8  # share of one class above which a constant prediction may be right
_SPREAD = 0.15  # of the start's spread
_LOSS = 0.95  # of ln C, the loss of a prediction that says nothing


@final
@dataclass(frozen=True)
class BatchSummary:
    """What one batch of a term says about collapse."""

    spread: float
    """One minus the mean cosine between the features of two items; 0 if all features are equal."""
    loss: float | None
    """Mean cross-entropy, where there are labels."""
    predicted: dict[str, int]
    """Number of items by predicted class."""
    labels: dict[str, int]
    """Number of items by label; empty without labels."""

    @classmethod
    @torch.no_grad()
    def of(cls, inputs: TermInputs) -> BatchSummary:
        """Summarise the last view of a batch."""
        logits = inputs.logits[-1].detach().float()
        features = functional.normalize(inputs.features[-1].detach().float(), dim=-1)
        count = len(features)
        cosines = (float(features.sum(0).square().sum()) - count) / max(1, count * (count - 1))
        loss = None if inputs.labels is None else functional.cross_entropy(logits, inputs.labels).item()
        labels = {} if inputs.labels is None else _counts(inputs.labels)
        return cls(1 - cosines, loss, _counts(logits.argmax(-1)), labels)


def _counts(classes: Tensor) -> dict[str, int]:
    return {str(number): count for number, count in Counter(classes.tolist()).items()}


def collapse_reason(start: BatchSummary, last: Sequence[BatchSummary], classes: int) -> str | None:
    """Return how the last batches of a term have collapsed, compared with the first; None if they have not.

    Collapsed are features that are almost equal while the loss is that of chance, and predictions of a single
    class for items of which many have another label or, without labels, had another prediction at the start.
    """
    items = sum(sum(one.predicted.values()) for one in last)
    if classes < 2 or items < _LEAST_ITEMS:
        return None
    spread = sum(one.spread for one in last) / len(last)
    losses = [one.loss for one in last if one.loss is not None]
    chance = math.log(classes)
    if losses and spread < _SPREAD * start.spread and sum(losses) / len(losses) >= _LOSS * chance:
        loss = sum(losses) / len(losses)
        cosine = f"the mean cosine between features rose from {1 - start.spread:.2f} to {1 - spread:.2f}"
        return f"{cosine}, and the loss is {loss:.2f}, where chance is {chance:.2f}"
    constant = len({name for one in last for name in one.predicted}) == 1
    if constant and _dominant(start.predicted) <= _DOMINANT and _varied(last, start) <= _DOMINANT:
        return f"all of {items} items are predicted as one class"
    return None


def _varied(last: Sequence[BatchSummary], start: BatchSummary) -> float:
    """The share of the most frequent label; without labels, of the most frequent prediction at the start."""
    total: dict[str, int] = {}
    for one in last:
        for name, count in one.labels.items():
            total[name] = total.get(name, 0) + count
    return _dominant(total or start.predicted)


def _dominant(counts: Mapping[str, int]) -> float:
    return max(counts.values()) / sum(counts.values())


@final
class CollapseDetector(Companion):
    """Watches the batches of all terms that are minimised; costs no forward pass of its own."""

    name = "collapse"

    def __init__(self, terms: Mapping[int, DataTerm]) -> None:
        """``terms`` are those with a positive weight: a target to be forgotten may well collapse."""
        self._terms = dict(terms)
        self._start: dict[int, BatchSummary] = {}
        self._last: dict[int, deque[BatchSummary]] = {i: deque(maxlen=_WINDOW) for i in terms}

    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        if term not in self._terms or not inputs.logits or len(items) < 2:
            return
        found = BatchSummary.of(inputs)
        self._start.setdefault(term, found)
        self._last[term].append(found)

    def reason(self) -> str | None:
        """Return which term has collapsed and how, or None."""
        for i, start in self._start.items():
            split = self._terms[i].split
            classes = len(getattr(split, "classes", ()))
            found = collapse_reason(start, tuple(self._last[i]), classes)
            if found is not None:
                return f"{split.name}: {found}"
        return None

    def state_dict(self) -> dict[str, Tensor | JsonValue]:
        start: JsonObject = {str(i): asdict(one) for i, one in self._start.items()}
        last: JsonObject = {str(i): [asdict(one) for one in found] for i, found in self._last.items()}
        return {"start": start, "last": last}

    def load_state_dict(self, state: Mapping[str, Tensor | JsonValue]) -> None:
        start: Any = state["start"]
        last: Any = state["last"]
        self._start = {int(i): BatchSummary(**one) for i, one in start.items()}
        self._last = {
            int(i): deque((BatchSummary(**one) for one in found), maxlen=_WINDOW) for i, found in last.items()
        }
