"""Which model of several tasks to choose from what was held out, and why.

Candidates are compared by their accuracy relative to the tasks' own vectors, a mean over tasks as in the
choice of a scale. The best candidate that needs the least data is recommended unless one that needs more is
better by more than the standard error of the difference over items: labels have to pay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from aniso.errors import NumericalError
from aniso.experiments.comparison.addition_candidates import BASE, LEVELS, AdditionCandidate
from aniso.json_value import JsonObject


class _Index(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    label: str
    references: dict[str, float]
    scale: float | None
    seconds: float | None
    trainable: int
    failure: str


@final
@dataclass(frozen=True, eq=False)
class AdditionRow:
    """A candidate with what was measured on held-out items."""

    candidate: AdditionCandidate
    hits: Mapping[str, Tensor] = field(default_factory=dict)
    """For every task and held-out item, whether the class is right, or that of the task's own vector."""
    references: Mapping[str, float] = field(default_factory=dict)
    """The same share for the tasks' own vectors, each alone."""
    scale: float | None = None
    """Of a merged vector, chosen by all items."""
    seconds: float | None = None
    """To make it once: merging, the search of a scale, or training."""
    trainable: int = 0
    """Numbers that are learned, or searched."""
    failure: str = ""

    @property
    def measured(self) -> bool:
        """True if it did not fail."""
        return bool(self.hits) and not self.failure

    @property
    def by_task(self) -> dict[str, float]:
        """The share of hits for every task."""
        return {task: float(hits.double().mean()) for task, hits in self.hits.items()}

    @property
    def share(self) -> float:
        """The share of hits, a mean over tasks."""
        return sum(self.by_task.values()) / len(self.hits)

    @property
    def score(self) -> float:
        """The share of hits relative to the tasks' own vectors, a mean over tasks."""
        return sum(self._weight(task) * share for task, share in self.by_task.items())

    def _weight(self, task: str) -> float:
        return 1 / (len(self.hits) * (self.references.get(task) or 1.0))

    def difference_error(self, other: AdditionRow) -> float:
        """Return the standard error of the difference of two scores, which are of the same items."""
        found = 0.0
        for task, hits in self.hits.items():
            values = (hits.double() - other.hits[task].double()) * self._weight(task)
            found += float((values - values.mean()).square().sum()) / len(values) ** 2
        return math.sqrt(found)

    @property
    def error(self) -> float:
        """The standard error of the mean share of hits over items."""
        variances = [p * (1 - p) / len(self.hits[task]) for task, p in self.by_task.items()]
        return math.sqrt(sum(variances)) / len(self.hits)

    def stored(self) -> tuple[str, dict[str, Tensor]]:
        """Return numbers as JSON, and tensors."""
        index = _Index(
            label=self.candidate.label,
            references=dict(self.references),
            scale=self.scale,
            seconds=self.seconds,
            trainable=self.trainable,
            failure=self.failure,
        )
        return index.model_dump_json(), {task: hits.to(torch.uint8) for task, hits in self.hits.items()}

    @classmethod
    def restored(cls, candidate: AdditionCandidate, index: str, tensors: Mapping[str, Tensor]) -> AdditionRow:
        """Return the row of what ``stored`` returned; raises ValidationError if it is something else."""
        values = _Index.model_validate_json(index).model_dump(exclude={"label"})
        return replace(cls(candidate, {task: hits.bool() for task, hits in tensors.items()}), **values)

    def content(self, measure: str) -> JsonObject:
        """Return plain JSON values; ``measure`` names the share of hits."""
        return {
            "label": self.candidate.label,
            "method": self.candidate.setting.method.name,
            "data": self.candidate.data,
            measure: self.share if self.measured else None,
            "standard_error": self.error if self.measured else None,
            "relative": self.score if self.measured else None,
            "by_task": self.by_task if self.measured else {},
            "held_out": sum(len(hits) for hits in self.hits.values()),
            "scale": self.scale,
            "seconds": self.seconds,
            "trainable": self.trainable,
            "failure": self.failure or None,
        }


@final
@dataclass(frozen=True)
class AdditionRecommendation:
    """The chosen candidate and the reason, in a sentence."""

    chosen: AdditionRow
    reason: str


def recommend_addition(rows: Sequence[AdditionRow]) -> AdditionRecommendation:
    """Return the best candidate of the least data that no other one beats by more than the error."""
    known = [row for row in rows if row.measured]
    if not known:
        raise NumericalError("LEARN-NONFINITE", "every candidate failed", fix="look at the notes; lower --lr")
    best = _best(known)
    levels = [[row for row in known if row.candidate.data == level] for level in LEVELS]
    leaders = [_best(members) for members in levels if members]
    chosen = next(row for row in leaders if best.score - row.score <= best.difference_error(row))
    words = [_why(chosen)]
    for row in leaders:
        if row is chosen:
            continue
        gap = 100 * (row.score - chosen.score)
        if gap > 0:
            error = 100 * row.difference_error(chosen)
            words.append(f"{_named(row)} is {gap:.1f} points above, within the standard error ({error:.1f})")
        else:
            words.append(f"{_named(row)} is {-gap:.1f} points below")
    return AdditionRecommendation(chosen, "; ".join(words))


def _best(rows: Sequence[AdditionRow]) -> AdditionRow:
    """Return the row with the highest score, of equals the first."""
    return max(rows, key=lambda row: row.score)


_NEEDS = {"none": "no data", "unlabelled": "items without labels", "labelled": "labels"}


def _why(chosen: AdditionRow) -> str:
    needs = _NEEDS[chosen.candidate.data]
    if chosen.candidate.label == BASE:
        return f"no method is clearly better than the base as it is ({chosen.score:.1%} of own vectors)"
    return f"{chosen.candidate.label} keeps {chosen.score:.1%} of what own vectors reach, and needs {needs}"


def _named(row: AdditionRow) -> str:
    return f"{row.candidate.label} (the best that needs {_NEEDS[row.candidate.data]})"
