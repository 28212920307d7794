"""Objectives: signed sums of terms. Tasks are added, or subtracted from a control."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, final

from torch import Tensor, nn

from aniso.compose import CoefficientIndex
from aniso.data import Split, TextDataset
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.heads import Classifier, Head
from aniso.learn.objectives.companion import Companion, RunContext
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.unwrap import encoder_of, head_for, require_items
from aniso.records import JsonValue


class _Summable:
    """Arithmetic of terms and objectives. Python's ``sum`` works, too: it begins with zero."""

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
                "OBJECTIVE",
                f"{printable(weight)!r} cannot be the weight of a term",
                fix="multiply by a finite number",
            )
        return Objective(tuple((weight * own, term) for own, term in self._objective().parts))

    __rmul__ = __mul__


class Term(_Summable, ABC):
    """One loss. Terms are frozen dataclasses: their fields are the options of the loss."""

    def _objective(self) -> Objective:
        return Objective(((1.0, self),))

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the term in metrics, unique within an objective."""

    @abstractmethod
    def identity(self) -> dict[str, JsonValue]:
        """Everything the loss depends on, as JSON data: a run is only resumed if it is unchanged."""


class DataTerm(Term):
    """A loss on a split. ``split`` is a field of every such term."""

    split: Split | TextDataset
    needs_labels: ClassVar[bool]
    """True if the split must hold the targets: labels of images, or the tokens of texts."""
    uses_logits: ClassVar[bool] = True
    """False if the loss is one of features alone, so that no classifier is made for the split."""
    no_grad_views: ClassVar[int] = 0
    """How many of the first views go through the model without gradients."""
    reserved_share: ClassVar[float] = 0.0
    """The share of every batch that is filled with the companion's ``reserved_items``."""
    whole_batch: ClassVar[bool] = False
    """True if items are compared with each other, so that a batch cannot be cut into micro-batches."""
    fixed_targets: ClassVar[bool] = True
    """False if the targets are the model's own predictions, which change while it learns."""

    @property
    def selective(self) -> bool:
        """True if a batch may hold no item that counts, so that its gradient is zero."""
        return False

    @classmethod
    def companion(cls, terms: Mapping[int, Self], run: RunContext) -> Companion | None:
        """Return the companion of an objective's terms of this class, given by number; None if not needed."""
        return None

    @abstractmethod
    def views(self, model: nn.Module) -> tuple[View, ...]:
        """Return the transforms that turn an item of the split into the model's inputs, one per view."""

    def classifier(self, model: nn.Module, own: Head | None = None) -> Classifier | None:
        """Return what makes the logits of the loss, ``own`` or class weights; None if it uses none."""
        if self.uses_logits:
            return head_for(model, self.split, own)
        if not isinstance(self.split, TextDataset):
            require_items(encoder_of(model), self.split)
        return None

    def item_targets(self, model: nn.Module, items: Sequence[int]) -> Mapping[str, Tensor]:
        """Return values per item that do not change in a run and that ``loss`` finds in ``marks``.

        ``items`` are places in the split; ``model`` is the one that learns.
        """
        return {}

    averages_counted: ClassVar[bool] = False
    """True if the loss is a mean over some items of a batch only, those that ``counted`` counts."""

    def counted(self, inputs: TermInputs) -> int:
        """Return how many items of a batch the mean of ``loss`` is over."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, inputs: TermInputs) -> Tensor:
        """Return the mean loss over the items of a batch, or over those that count; zero if none does."""


class ValueTerm(Term):
    """A loss on the coefficients themselves."""

    @abstractmethod
    def loss(self, values: Tensor, index: CoefficientIndex) -> Tensor:
        """Return the loss of all coefficients; ``index`` says which block and vector each belongs to."""


@final
@dataclass(frozen=True)
class Objective(_Summable):
    """A weighted sum of terms, which ``fit`` minimises."""

    parts: tuple[tuple[float, Term], ...]

    def _objective(self) -> Objective:
        return self

    @property
    def data_terms(self) -> tuple[tuple[float, DataTerm], ...]:
        return tuple((w, term) for w, term in self.parts if isinstance(term, DataTerm))

    @property
    def target(self) -> int | None:
        """The first data term with a negative weight, which is to be forgotten, by number."""
        return next((i for i, (weight, _) in enumerate(self.data_terms) if weight < 0), None)

    @property
    def value_terms(self) -> tuple[tuple[float, ValueTerm], ...]:
        return tuple((w, term) for w, term in self.parts if isinstance(term, ValueTerm))

    def identity(self) -> list[dict[str, JsonValue]]:
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
        f"{printable(value)!r} is not a term of an objective",
        expected="CrossEntropy(split) and the like, sums and differences of them",
        fix="multiply a term by a number to weight it",
    )
