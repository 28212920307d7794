"""The base of selection rules: a rule scores the cells of a bank and keeps the best within a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, final

from aniso.errors import InputError
from aniso.learn.objectives import Objective
from aniso.learn.selection.cell_table import CellTable
from aniso.learn.selection.gradient_cache import GradientCache
from aniso.models import Wrapped
from aniso.progress import ProgressCallback
from aniso.records import JsonValue
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget, show_bytes
from aniso.vectors import Bank

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


class ChosenCells(ABC):
    """Result of a selection: cells, their size, and the scores they were chosen by."""

    rule: str
    """The rule's name."""
    budget: Budget
    scores: Scores
    notes: tuple[str, ...]

    @property
    @abstractmethod
    def cells(self) -> Mapping[str, tuple[str, ...]]:
        """The blocks that were kept of each vector."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the chosen cells as they are stored."""

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


@final
@dataclass(frozen=True)
class Choice(ChosenCells):
    """Result of a selection from a bank: the smaller bank, and the scores it was chosen by."""

    bank: Bank
    rule: str
    budget: Budget
    scores: Scores
    """Scores of all cells that could have been chosen."""
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(block.name for block in self.bank[name].blocks) for name in self.bank}

    @property
    def nbytes(self) -> int:
        return sum(vector_bytes(self.bank, name) for name in self.bank)


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
        kept = _kept(bank, found, self.budget, whole=True) if self.whole else self.cells(bank, found)
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
        return _kept(bank, scores, self.budget, whole=False)

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


def _kept(bank: Bank, scores: Scores, budget: Budget, *, whole: bool) -> dict[str, list[str]]:
    cells = [(name, block.name) for name in bank for block in bank[name].blocks]
    table = CellTable.of(cells, [scores[name][block] for name, block in cells])
    return table.kept(budget, lambda i: cell_bytes(bank, *cells[i]), whole=whole)


def gathered(bank: Bank, cells: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return cells grouped by vector, in the bank's order."""
    wanted = set(cells)
    found = {name: [b.name for b in bank[name].blocks if (name, b.name) in wanted] for name in bank}
    return {name: blocks for name, blocks in found.items() if blocks}
