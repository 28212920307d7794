"""The base of selection rules: a rule scores the cells of a bank and keeps the best within a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar, final

from aniso.errors import InputError
from aniso.learn.objectives import Objective
from aniso.learn.selection.gradient_cache import GradientCache
from aniso.models import Wrapped
from aniso.progress import ProgressCallback
from aniso.records import JsonValue
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget, show_bytes
from aniso.vectors import Bank

T = TypeVar("T")
Scores = Mapping[str, Mapping[str, float]]
"""Score of every cell, by vector and block; cells with the largest absolute score are kept."""


@final
@dataclass(frozen=True)
class SelectionInputs:
    """Everything a rule may need to select vectors for a task."""

    model: Wrapped
    objective: Objective | None
    """The loss on the task; None if there is no task."""
    budget: int | str | Budget
    seed: int = 0
    workers: int = 0
    progress: ProgressCallback | None = None
    gradients: GradientCache | None = None
    """Gradients that were computed before."""


@final
@dataclass(frozen=True)
class Choice:
    """Result of a selection: the smaller bank, and the scores it was chosen by."""

    bank: Bank
    rule: str
    """The rule's name."""
    budget: Budget
    scores: Scores
    """Scores of all cells that could have been chosen."""
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> dict[str, tuple[str, ...]]:
        """The blocks that were kept of each vector."""
        return {name: tuple(block.name for block in self.bank[name].blocks) for name in self.bank}

    @property
    def nbytes(self) -> int:
        """Bytes of the chosen cells as they are stored."""
        return sum(vector_bytes(self.bank, name) for name in self.bank)

    @property
    def words(self) -> str:
        """The rule and the budget, for tables."""
        return f"{self.rule}, budget {self.budget}"

    def summary(self) -> dict[str, JsonValue]:
        """Return the choice for records: how many blocks were kept of every vector."""
        kept = {name: len(blocks) for name, blocks in self.cells.items()}
        return {
            "strategy": self.rule,
            "budget": str(self.budget),
            "vectors": kept,
            "cells": sum(kept.values()),
            "bytes": self.nbytes,
        }


class SelectionRule(ABC):
    """Scores cells, and keeps the best within a budget. The same bank gives the same choice."""

    whole: ClassVar[bool]
    """True if vectors are kept as a whole, by the sum of their cells' scores; False if cell by cell."""
    needs_objective: ClassVar[bool] = True
    """True if the rule selects for a task, given by an objective on it."""
    needs_gradient: ClassVar[bool] = False
    """True if the rule computes gradients, so that ``GradientCache`` is of use."""
    compares_vectors: ClassVar[bool] = False
    """True if vectors are compared with each other, so that they must be in a bank on disk."""
    budget: Budget
    progress: ProgressCallback | None

    @property
    def kind(self) -> str:
        """The name the rule is registered with."""
        return SELECTION_RULES.name_of(type(self))

    @classmethod
    @abstractmethod
    def from_inputs(cls, inputs: SelectionInputs) -> Self:
        """Return the rule for these inputs; ``new_selection_rule`` has checked that there is an objective."""

    @abstractmethod
    def scores(self, bank: Bank) -> Scores:
        """Return the score of every cell; the sign does not count."""

    def choose(self, bank: Bank) -> Choice:
        """Select cells of a bank within the budget."""
        found = self.scores(bank)
        kept = _whole(bank, found, self.budget) if self.whole else self.cells(bank, found)
        if not kept:
            raise self._too_small(bank)
        notes = []
        if self.budget.count is not None and self.budget.count > len(bank):
            every = sum(map(len, kept.values())) == sum(len(bank[name].blocks) for name in bank)
            rest = "all are kept" if every else "cells that add nothing are left out"
            notes.append(f"a budget of {self.budget} is more than the bank's {len(bank)} vectors: {rest}")
        return Choice(bank.only_cells(kept), self.kind, self.budget, found, tuple(notes))

    def cells(self, bank: Bank, scores: Scores) -> dict[str, list[str]]:
        """Return the blocks to keep of each vector, cell by cell."""
        return _cell_by_cell(bank, scores, self.budget)

    def _too_small(self, bank: Bank) -> InputError:
        least = min(cell_bytes(bank, name, block.name) for name in bank for block in bank[name].blocks)
        return InputError(
            "USAGE",
            f"no vector fits into a budget of {self.budget}",
            expected=f"at least {show_bytes(least)}"
            + (", and more for a whole vector" if self.whole else ""),
            fix="use a larger --budget, or a bank in a smaller format: aniso bank quantise",
        )


def cell_bytes(bank: Bank, vector: str, block: str) -> int:
    """Return the bytes of a cell as it is stored, or in memory if the bank is not on disk."""
    if bank.path is None:
        return bank[vector][block].nbytes
    return bank.only_cells({vector: [block]}).block_bytes(block)


def vector_bytes(bank: Bank, vector: str) -> int:
    """Return the bytes of all cells of a vector."""
    return sum(cell_bytes(bank, vector, block.name) for block in bank[vector].blocks)


def _whole(bank: Bank, scores: Scores, budget: Budget) -> dict[str, list[str]]:
    totals = {name: sum(abs(x) for x in scores[name].values()) for name in bank}
    order = _best_first(list(totals), totals.__getitem__)
    if budget.count is not None:
        kept = order[: budget.count]
    else:
        kept = _fitting(order, lambda name: vector_bytes(bank, name), budget)
    return {name: [block.name for block in bank[name].blocks] for name in bank if name in kept}


def _cell_by_cell(bank: Bank, scores: Scores, budget: Budget) -> dict[str, list[str]]:
    """The best cells of every block, or of all blocks together if the budget is in bytes."""
    cells = [(name, block.name) for name in bank for block in bank[name].blocks]
    order = _best_first(cells, lambda cell: abs(scores[cell[0]][cell[1]]))
    if budget.nbytes is not None:
        return gathered(bank, _fitting(order, lambda cell: cell_bytes(bank, *cell), budget))
    taken: dict[str, int] = {}
    kept = []
    for cell in order:
        taken[cell[1]] = taken.get(cell[1], 0) + 1
        if taken[cell[1]] <= (budget.count or 0):
            kept.append(cell)
    return gathered(bank, kept)


def gathered(bank: Bank, cells: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return cells grouped by vector, in the bank's order."""
    wanted = set(cells)
    found = {name: [b.name for b in bank[name].blocks if (name, b.name) in wanted] for name in bank}
    return {name: blocks for name, blocks in found.items() if blocks}


def _best_first(items: list[T], score: Callable[[T], float]) -> list[T]:
    """Items by decreasing score; of equals the first in the bank comes first."""
    return sorted(items, key=lambda item: -score(item))


def _fitting(order: Iterable[T], size: Callable[[T], int], budget: Budget) -> list[T]:
    """Items in order, each of those that still fits into the budget."""
    left, kept = budget.nbytes or 0, []
    for item in order:
        own = size(item)
        if own <= left:
            left -= own
            kept.append(item)
    return kept
