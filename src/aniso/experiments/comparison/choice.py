"""Which candidate to choose from what was held out, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from aniso.experiments.comparison.candidates import Candidate
from aniso.json_value import JsonObject

MOST_GIVEN_UP = 0.01
"""Accuracy that is given up at most for a simpler candidate."""
ONE_SHOT_HEAD = "lpp"
"""The head that is recommended where nothing can be held out: the best one at one shot in our records."""


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

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {
            "label": self.candidate.label,
            "method": self.candidate.setting.method.name,
            "head": self.candidate.head,
            "select": self.candidate.setting.select,
            "accuracy": self.accuracy,
            "standard_error": self.error,
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


def difference_error(one: Measured, other: Measured) -> float:
    """Return the standard error of the difference of two accuracies on the same items.

    Items that both classify correctly, or both wrongly, do not count: what is left is as uncertain as the
    number of items on which they differ.
    """
    count = len(one.right)
    values = [int(a) - int(b) for a, b in zip(one.right, other.right, strict=True)]
    mean = sum(values) / count
    return math.sqrt(sum((value - mean) ** 2 for value in values) / count / count)


def recommend(rows: Sequence[Measured]) -> Recommendation:
    """Return the best candidate, or the simplest one that is as good, with the reason.

    Rows are sorted by simplicity. One is as good as the best if its accuracy is below by no more than the
    standard error of the difference, and by no more than one point.
    """
    known = [row for row in rows if row.accuracy is not None]
    best = max(known, key=lambda row: (row.accuracy or 0.0, -known.index(row)))
    equal = [row for row in known if _is_as_good(row, best)]
    chosen = equal[0]
    words = [_help(chosen, known)]
    if chosen is not best:
        words.append(
            f"{best.candidate.label} is {_points(best, chosen)} higher, "
            f"within the standard error of {100 * difference_error(best, chosen):.1f} and at most one point: "
            "the simpler one is preferred"
        )
    return Recommendation(chosen, "; ".join(words))


def recommend_for_one_shot(rows: Sequence[Measured]) -> Recommendation:
    """Return the head that is best at one shot in committed records: nothing can be held out."""
    chosen = next(r for r in rows if r.candidate.head == ONE_SHOT_HEAD and not r.candidate.uses_vectors)
    return Recommendation(
        chosen,
        "one shot of each class leaves none to hold out, so candidates cannot be compared on these data; "
        f"{chosen.candidate.label} alone is the best head at one shot in aniso's own experiments",
    )


def _is_as_good(row: Measured, best: Measured) -> bool:
    behind = (best.accuracy or 0.0) - (row.accuracy or 0.0)
    return behind <= min(difference_error(best, row), MOST_GIVEN_UP) + 1e-12


def _help(chosen: Measured, known: Sequence[Measured]) -> str:
    """Whether vectors of the bank help, and by how much."""
    composed = [row for row in known if row.candidate.uses_vectors]
    plain = [row for row in known if row.candidate.family == "zero-shot"]
    name = chosen.candidate.label
    if chosen.candidate.family == "zero-shot":
        alone = f"{name} alone" if chosen.candidate.head else "the base as it is"
        if not composed:
            return f"{alone} is best of the candidates"
        rival = max(composed, key=lambda row: row.accuracy or 0.0)
        return (
            f"vectors of this bank do not help here: {alone} ({_share(chosen)}; "
            f"the best with vectors, {rival.candidate.label}: {_share(rival)})"
        )
    rival = max(plain, key=lambda row: row.accuracy or 0.0)
    if chosen.candidate.uses_vectors:
        gain = f"vectors of this bank add {_points(chosen, rival)}"
    else:
        gain = f"{name} adds {_points(chosen, rival)}"
    return f"{gain}: {name} ({_share(chosen)}; the best without, {rival.candidate.label}: {_share(rival)})"


def _share(row: Measured) -> str:
    return f"{row.accuracy or 0.0:.1%}"


def _points(one: Measured, other: Measured) -> str:
    return f"{100 * ((one.accuracy or 0.0) - (other.accuracy or 0.0)):.1f} points"
