"""Signed sums of terms. Every setting is one: tasks are added, or taken away from a control."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from aniso.compose import CoefficientIndex
from aniso.data import Split, TextDataset
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.heads import Classifier


@dataclass(frozen=True)
class Seen:
    """What a term gets to see of a batch."""

    features: tuple[Tensor, ...]
    """For every view, not normalised; of texts what a language model says of them."""
    logits: tuple[Tensor, ...]
    """For every view, over the split's classes; texts have none."""
    labels: Tensor | None
    """None for an unlabelled split, always."""
    trusted: Tensor | None = None
    """The class that each picture is trusted to show, -1 for none; None where nothing is trusted."""
    reliable: Tensor | None = None
    """Which pictures counted before the step to where the loss is worst; None if there was none."""
    progress: float = 0.0
    """How much of the run is over."""


def answered(head: Classifier | None, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Logits of every view; none where nothing answers."""
    return () if head is None else tuple(head.logits(view) for view in features)


class _Summable:
    """What sums are made of. Python's own ``sum`` works, too: it begins with zero."""

    def _objective(self) -> Objective:
        raise NotImplementedError

    def __add__(self, other: object) -> Objective:
        return Objective(self._objective().parts + _parts(other))

    def __radd__(self, other: object) -> Objective:
        return Objective(_parts(other) + self._objective().parts)

    def __sub__(self, other: object) -> Objective:
        return self + -1.0 * Objective(_parts(other))

    def __neg__(self) -> Objective:
        return -1.0 * self._objective()

    def __mul__(self, weight: float) -> Objective:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UsageError(
                "OBJECTIVE", f"{printable(weight)!r} cannot weigh a term", fix="multiply by a finite number"
            )
        return Objective(tuple((weight * own, term) for own, term in self._objective().parts))

    __rmul__ = __mul__


class Term(_Summable, ABC):
    """One loss."""

    def _objective(self) -> Objective:
        return Objective(((1.0, self),))

    @property
    @abstractmethod
    def name(self) -> str:
        """What metrics call it, unique within an objective."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the loss depends on, as plain data: a run goes on only under the same."""


class DataTerm(Term):
    """A loss on a split, which is a field of every such term."""

    split: Split | TextDataset
    looks: ClassVar[int] = 0
    """So many of the first views are only looked at: no gradient goes through them."""
    trusted_share: ClassVar[float] = 0.0
    """The share of every batch that is drawn from trusted pictures, which ``trust`` chooses in each epoch."""
    selective: ClassVar[bool] = False
    """Whether a batch may hold nothing that counts."""
    whole_batch: ClassVar[bool] = False
    """Whether pictures are compared with each other, so that a batch cannot be cut into slices."""

    def trust(self, logits: Tensor) -> Tensor:
        """From the logits of all pictures: the class that each is trusted to show, -1 for none."""
        raise NotImplementedError

    @abstractmethod
    def views(self, model: nn.Module) -> tuple[View, ...]:
        """How every picture, or text, is to be seen by a model."""

    @abstractmethod
    def loss(self, seen: Seen) -> Tensor:
        """A mean over the pictures, or texts, seen."""


class ValueTerm(Term):
    """A loss on the coefficients themselves."""

    @abstractmethod
    def loss(self, values: Tensor, index: CoefficientIndex) -> Tensor: ...


@final
@dataclass(frozen=True)
class Objective(_Summable):
    """Terms with their weights: what is minimised is the weighted sum."""

    parts: tuple[tuple[float, Term], ...]

    def _objective(self) -> Objective:
        return self

    @property
    def data_terms(self) -> tuple[tuple[float, DataTerm], ...]:
        return tuple((w, term) for w, term in self.parts if isinstance(term, DataTerm))

    @property
    def value_terms(self) -> tuple[tuple[float, ValueTerm], ...]:
        return tuple((w, term) for w, term in self.parts if isinstance(term, ValueTerm))

    def identity(self) -> list[dict[str, Any]]:
        return [{"weight": weight, **term.identity()} for weight, term in self.parts]

    def __str__(self) -> str:
        return " ".join(f"{weight:+g} {term.name}" for weight, term in self.parts)


def _parts(value: object) -> tuple[tuple[float, Term], ...]:
    if isinstance(value, _Summable):
        return value._objective().parts
    if isinstance(value, int) and value == 0:  # where sum() begins
        return ()
    raise UsageError(
        "OBJECTIVE",
        f"{printable(value)!r} is no term",
        expected="CrossEntropy(split) and the like, sums and differences of them",
        fix="multiply a term by a number to weigh it",
    )
