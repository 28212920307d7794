"""Which candidate to choose from what was held out, and why.

With a few dozen held-out items an accuracy has a standard error of several points, and many candidates have
the same one. Candidates are therefore compared by a score that moves less by chance: the mean of the accuracy
and of the probability that is given to the right class, after one temperature per candidate has made these
probabilities comparable. The score of a method with a head is then averaged with what the method and the head
lead to expect on their own (the additive fit to the table of methods by heads): one outlier among a dozen
candidates, all measured on the same few items, is mostly luck.

What is left of luck is largest where a dozen candidates compete for the best score. The default is the linear
probe, with all vectors or without, which are the best of either kind in our records of texts. What any other
candidate is expected to gain over it is an average of what our records lead to expect, a small loss, and of
what was measured, which counts the more the smaller its standard error is (``expected_gain``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional

from aniso.errors import NumericalError
from aniso.experiments.comparison.candidates import Candidate
from aniso.json_value import JsonObject

DEFAULT_HEAD = "linear"
"""The best head at 4 and 16 shots in our records of texts, with vectors and without."""
DEFAULT_FAMILIES = ("zero-shot", "coefficients")
EXPECTED_LOSS = 0.015
"""Accuracy that coefficients with another head lose in our few-shot records of lite0 against the better
linear probe, with vectors or without: the mean over four tasks, 4 and 16 shots, LP++ and Tip-Adapter."""
EXPECTED_SPREAD = 0.03
"""Standard deviation of this loss."""
_ONE_MORE = 0.5
"""Difference of an item that is assumed beside the measured ones."""
ONE_SHOT_HEAD = "lpp"
"""The head that is recommended where nothing can be held out: the best one at one shot in our records."""


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    label: str
    seconds: float | None
    trainable: int
    test_accuracy: float | None
    failure: str


@final
@dataclass(frozen=True, eq=False)
class Measured:
    """A candidate with what was measured on held-out items."""

    candidate: Candidate
    logits: Tensor | None = None
    """Of every held-out item and class."""
    labels: tuple[int, ...] = ()
    seconds: float | None = None
    """To learn it once: features, training, head."""
    trainable: int = 0
    """Numbers that are learned."""
    test_accuracy: float | None = None
    """Not used for choosing."""
    failure: str = ""
    adjusted: tuple[float, ...] = ()
    """``scores`` after ``adjust``, if they were adjusted."""

    @cached_property
    def right(self) -> tuple[bool, ...]:
        """For every held-out item, whether it is classified correctly."""
        if self.logits is None:
            return ()
        return tuple((self.logits.argmax(-1) == torch.tensor(self.labels)).tolist())

    @property
    def accuracy(self) -> float | None:
        """Share of the held-out items that are classified correctly."""
        return sum(self.right) / len(self.right) if self.right and not self.failure else None

    @cached_property
    def scores(self) -> tuple[float, ...]:
        """For every held-out item the mean of being right (1 or 0) and of the right class's probability."""
        if self.logits is None:
            return ()
        labels = torch.tensor(self.labels)
        given = calibrated(self.logits, labels).gather(1, labels[:, None])[:, 0]
        return tuple(((given + torch.tensor(self.right)) / 2).tolist())

    @property
    def score(self) -> float:
        """The mean over held-out items, by which candidates are chosen."""
        return sum(self.compared) / len(self.compared)

    @property
    def compared(self) -> tuple[float, ...]:
        """The scores of items that candidates are compared by."""
        return self.adjusted or self.scores

    @property
    def error(self) -> float | None:
        """Standard error of the accuracy over held-out items."""
        if self.accuracy is None:
            return None
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.right))

    def joined(self, other: Measured) -> Measured:
        """Return what was measured on the items of two folds; ``seconds`` are summed."""
        both = [one for one in (self.logits, other.logits) if one is not None]
        return replace(
            self,
            logits=torch.cat(both) if both else None,
            labels=self.labels + other.labels,
            seconds=(self.seconds or 0.0) + (other.seconds or 0.0),
            failure=self.failure or other.failure,
        )

    def stored(self) -> tuple[str, dict[str, Tensor]]:
        """Return numbers as JSON, and tensors."""
        tensors = {"labels": torch.tensor(self.labels, dtype=torch.int64)}
        if self.logits is not None:
            tensors["logits"] = self.logits.detach().cpu().contiguous()
        index = _Index(
            label=self.candidate.label,
            seconds=self.seconds,
            trainable=self.trainable,
            test_accuracy=self.test_accuracy,
            failure=self.failure,
        )
        return index.model_dump_json(), tensors

    @classmethod
    def restored(cls, candidate: Candidate, index: str, tensors: Mapping[str, Tensor]) -> Measured:
        """Return the row of what ``stored`` returned; raises ValidationError if it is something else."""
        found = _Index.model_validate_json(index)
        row = cls(candidate, tensors.get("logits"), tuple(tensors["labels"].tolist()))
        return replace(
            row,
            seconds=found.seconds,
            trainable=found.trainable,
            test_accuracy=found.test_accuracy,
            failure=found.failure,
        )

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {
            "label": self.candidate.label,
            "method": self.candidate.setting.method.name,
            "head": self.candidate.head,
            "select": self.candidate.setting.select,
            "accuracy": self.accuracy,
            "standard_error": self.error,
            "score": self.score if self.accuracy is not None else None,
            "held_out": len(self.right),
            "seconds": self.seconds,
            "trainable": self.trainable,
            "test_accuracy": self.test_accuracy,
            "failure": self.failure or None,
        }


@final
@dataclass(frozen=True)
class Recommendation:
    """The chosen candidate and the reason, in a sentence."""

    chosen: Measured
    reason: str


def calibrated(logits: Tensor, labels: Tensor) -> Tensor:
    """Return probabilities at the temperature that makes the labels most likely.

    The likelihood is concave in the inverse temperature, so a search by thirds finds its maximum.
    """
    low, high = -5.0, 5.0  # of the natural logarithm of the inverse temperature

    def loss(place: float) -> float:
        return float(functional.cross_entropy(logits.double() * math.exp(place), labels))

    for _ in range(60):
        third = (high - low) / 3
        if loss(low + third) <= loss(high - third):
            high -= third
        else:
            low += third
    return (logits.double() * math.exp((low + high) / 2)).softmax(-1)


def adjust(rows: Sequence[Measured]) -> list[Measured]:
    """Average every score with the additive fit over methods and heads: method + head - mean of the table.

    Only methods that were measured with every head, and without one, are in the table; with fewer than two of
    them, and for all other candidates, scores stay.
    """
    heads = [row.candidate.head for row in rows if row.candidate.family == "zero-shot"]
    families: dict[str, list[Measured]] = {}
    for row in rows:
        families.setdefault(row.candidate.family, []).append(row)
    table = [
        members
        for members in families.values()
        if [row.candidate.head for row in members] == heads and all(r.accuracy is not None for r in members)
    ]
    if len(table) < 2:
        return list(rows)
    scores = torch.tensor([[row.scores for row in members] for members in table], dtype=torch.float64)
    fit = scores.mean(1, keepdim=True) + scores.mean(0, keepdim=True) - scores.mean((0, 1))
    values = ((scores + fit) / 2).tolist()
    found = {
        row.candidate.label: tuple(own)
        for members, of_family in zip(table, values, strict=True)
        for row, own in zip(members, of_family, strict=True)
    }
    return [replace(row, adjusted=found.get(row.candidate.label, ())) for row in rows]


def difference_error(one: Measured, other: Measured) -> float:
    """Return the standard error of the difference of two scores on the same items, before they are adjusted.

    Items that both classify alike count little: what is left is as uncertain as the items on which they
    differ are few. One more item that differs by a half is assumed, since a handful of equal differences
    proves nothing. Adjusted scores share the table's means, and would differ too little.
    """
    values = [a - b for a, b in zip(one.scores, other.scores, strict=True)]
    count = len(values)
    mean = sum(values) / count
    squares = sum((value - mean) ** 2 for value in values) + _ONE_MORE**2
    return math.sqrt(squares / max(1, count - 1) / count)


def expected_gain(row: Measured, default: Measured) -> float:
    """Return what a candidate is expected to gain over the default on new items.

    This is the posterior mean of a normal prior, ``EXPECTED_LOSS`` below the default with the standard
    deviation ``EXPECTED_SPREAD``, after the difference of both scores was measured with its standard error:
    with 30 held-out items nearly the prior, with 1,000 nearly the measured difference.
    """
    prior, noise = EXPECTED_SPREAD**2, difference_error(row, default) ** 2
    return ((row.score - default.score) * prior - EXPECTED_LOSS * noise) / (prior + noise)


def recommend(rows: Sequence[Measured]) -> Recommendation:
    """Return the default, or the candidate that is expected to gain most over it, with the reason.

    The default is the linear probe, with all vectors if that scores more.
    """
    known = [row for row in rows if row.accuracy is not None]
    if not known:
        raise NumericalError("LEARN-NONFINITE", "every candidate failed", fix="look at the notes; lower --lr")
    default = _best([row for row in known if _is_default(row)] or known)
    others = [row for row in known if row is not default]
    chosen = max(others, key=lambda row: expected_gain(row, default), default=default)
    if chosen is not default and expected_gain(chosen, default) <= 0:
        chosen = default
    words = [_help(chosen, known)]
    best = _best(known)
    if chosen.score < best.score:
        words.append(_doubt(best, default, chosen))
    return Recommendation(chosen, "; ".join(words))


def _doubt(best: Measured, default: Measured, chosen: Measured) -> str:
    """Why the candidate with the highest score is not chosen."""
    more = f"{best.candidate.label} scores {100 * (best.score - chosen.score):.1f} points more, which is"
    error = f"{100 * difference_error(best, default):.1f}"
    if chosen is default:
        return f"{more} too little for a standard error of {error}"
    return f"{more} less certain: its lead over {default.candidate.label} has a standard error of {error}"


def _best(rows: Sequence[Measured]) -> Measured:
    """Return the row with the highest score, of equals the first, which is the simplest."""
    return max(rows, key=lambda row: row.score)


def _is_default(row: Measured) -> bool:
    return row.candidate.head == DEFAULT_HEAD and row.candidate.family in DEFAULT_FAMILIES


def recommend_for_one_shot(rows: Sequence[Measured]) -> Recommendation:
    """Return the head that is best at one shot in committed records: nothing can be held out."""
    chosen = next(r for r in rows if r.candidate.head == ONE_SHOT_HEAD and not r.candidate.uses_vectors)
    return Recommendation(
        chosen,
        "one shot of each class leaves none to hold out, so candidates cannot be compared on these data; "
        f"{chosen.candidate.label} alone is the best head at one shot in aniso's own experiments",
    )


def _help(chosen: Measured, known: Sequence[Measured]) -> str:
    """Whether vectors of the bank help, and by how much."""
    composed = [row for row in known if row.candidate.uses_vectors]
    plain = [row for row in known if row.candidate.family == "zero-shot"]
    name = chosen.candidate.label
    if chosen.candidate.family == "zero-shot":
        alone = f"{name} alone" if chosen.candidate.head else "the base as it is"
        if not composed:
            return f"{alone} is best of the candidates"
        rival = _best(composed)
        return (
            f"vectors of this bank do not help here: {alone} ({_share(chosen)}; "
            f"the best with vectors, {rival.candidate.label}: {_share(rival)})"
        )
    rival = _best(plain)
    who = "vectors of this bank help" if chosen.candidate.uses_vectors else f"{name} helps"
    return f"{who}: {name} ({_share(chosen)}; the best without, {rival.candidate.label}: {_share(rival)})"


def _share(row: Measured) -> str:
    return f"{row.accuracy or 0.0:.1%}"
