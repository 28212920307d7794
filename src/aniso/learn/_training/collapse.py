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
    def of(cls, inputs: TermInputs) -> BatchSummary:
        """Summarise the last view of a batch."""
        return _Unread.of(inputs).read()


@final
@dataclass(frozen=True)
class _Unread:
    """A summary whose numbers are still on the device: reading them would wait for it in every step."""

    numbers: Tensor
    """The square of the sum of all features, the predictions; with labels, these and the loss."""
    items: int
    has_labels: bool

    @classmethod
    @torch.no_grad()
    def of(cls, inputs: TermInputs) -> _Unread:
        """Summarise the last view of a batch."""
        logits = inputs.logits[-1].detach().float()
        features = functional.normalize(inputs.features[-1].detach().float(), dim=-1)
        found = [features.sum(0).square().sum().view(1), logits.argmax(-1).float()]
        if inputs.labels is not None:
            found += [inputs.labels.float(), functional.cross_entropy(logits, inputs.labels).view(1)]
        return cls(torch.cat(found), len(features), inputs.labels is not None)

    def read(self) -> BatchSummary:
        squared, *numbers = self.numbers.tolist()
        count = self.items
        cosines = (squared - count) / max(1, count * (count - 1))
        loss = numbers[-1] if self.has_labels else None
        labels = _counts(numbers[count : 2 * count]) if self.has_labels else {}
        return BatchSummary(1 - cosines, loss, _counts(numbers[:count]), labels)


def _counts(classes: Sequence[float]) -> dict[str, int]:
    return {str(int(number)): count for number, count in Counter(classes).items()}


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
        self._first: dict[int, BatchSummary] = {}
        self._last: dict[int, deque[BatchSummary]] = {i: deque(maxlen=_WINDOW) for i in terms}
        self._unread_start: dict[int, _Unread] = {}
        self._unread: dict[int, deque[_Unread]] = {i: deque(maxlen=_WINDOW) for i in terms}

    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        if term not in self._terms or not inputs.logits or len(items) < 2:
            return
        found = _Unread.of(inputs)
        if term not in self._first:
            self._unread_start.setdefault(term, found)
        self._unread[term].append(found)

    def _read(self) -> None:
        """Read the numbers of all batches since the last call."""
        self._first |= {i: one.read() for i, one in self._unread_start.items()}
        self._unread_start.clear()
        for i, own in self._unread.items():
            self._last[i].extend(one.read() for one in own)
            own.clear()

    @property
    def _start(self) -> dict[int, BatchSummary]:
        """The first batch of each term."""
        self._read()
        return self._first

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
        self._unread_start.clear()
        for own in self._unread.values():
            own.clear()
        start: Any = state["start"]
        last: Any = state["last"]
        self._first = {int(i): BatchSummary(**one) for i, one in start.items()}
        self._last = {
            int(i): deque((BatchSummary(**one) for one in found), maxlen=_WINDOW) for i, found in last.items()
        }
