"""Choosing vectors under a budget: a strategy looks at a bank and gives a smaller one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, final

from aniso.compose import parse_bytes, show_bytes
from aniso.errors import InputError, UsageError, printable
from aniso.progress import ProgressCallback
from aniso.vectors import Bank

T = TypeVar("T")
Scores = Mapping[str, Mapping[str, float]]
"""By vector and block: the larger a cell's, in size, the more speaks for it."""


@final
@dataclass(frozen=True)
class Budget:
    """So many vectors, or cells of each block; or so many bytes as the bank stores them."""

    count: int | None = None
    nbytes: int | None = None

    @classmethod
    def of(cls, said: int | str | Budget) -> Budget:
        """``5``, or ``"200MB"``."""
        if isinstance(said, Budget):
            return said
        plain = isinstance(said, int) and not isinstance(said, bool)
        try:
            words = str(said).strip()
            counts = plain or (words.isascii() and words.isdigit())
            made = cls(count=int(said)) if counts else cls(nbytes=parse_bytes(said))
        except UsageError:
            made = cls(count=0)
        if (made.count or 0) < 1 and (made.nbytes or 0) < 1:
            raise UsageError(
                "USAGE",
                f"with a budget of {printable(said)} nothing is left to compose",
                expected="a number of vectors from 1 on, or an amount of memory such as 200MB",
                fix="--budget 5",
            )
        return made

    def __str__(self) -> str:
        if self.nbytes is not None:
            return show_bytes(self.nbytes)
        return f"{self.count}"


@final
@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    bank: Bank
    strategy: str
    budget: Budget
    scores: Scores
    """Of everything that could have been chosen."""
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> dict[str, tuple[str, ...]]:
        """The blocks that are kept of each vector that is."""
        return {name: tuple(block.name for block in self.bank[name].blocks) for name in self.bank}

    @property
    def nbytes(self) -> int:
        """What the chosen cells take as they are stored."""
        return sum(vector_bytes(self.bank, name) for name in self.bank)

    @property
    def words(self) -> str:
        return f"{self.strategy}, budget {self.budget}"

    def summary(self) -> dict[str, Any]:
        """As plain data, for records: how many blocks were kept of every vector."""
        kept = {name: len(blocks) for name, blocks in self.cells.items()}
        return {
            "strategy": self.strategy,
            "budget": str(self.budget),
            "vectors": kept,
            "cells": sum(kept.values()),
            "bytes": self.nbytes,
        }


class Strategy(ABC):
    """Scores cells, and keeps the best within the budget. The same bank gives the same choice."""

    kind: ClassVar[str]
    whole: ClassVar[bool]
    """Whether vectors are kept as a whole, by the sum of their cells' scores; else cell by cell."""
    budget: Budget
    progress: ProgressCallback | None

    @abstractmethod
    def scores(self, bank: Bank) -> Scores:
        """Of every cell; gradients have signs, which do not count."""

    def choose(self, bank: Bank) -> Choice:
        found = self.scores(bank)
        kept = _whole(bank, found, self.budget) if self.whole else self.cells(bank, found)
        if not kept:
            raise self._too_small(bank)
        notes = []
        if self.budget.count is not None and self.budget.count > len(bank):
            every = sum(map(len, kept.values())) == sum(len(bank[name].blocks) for name in bank)
            rest = "all are kept" if every else "those that add nothing are left out"
            notes.append(f"a budget of {self.budget} is more than the bank's {len(bank)} vectors: {rest}")
        return Choice(bank.only_cells(kept), self.kind, self.budget, found, tuple(notes))

    def cells(self, bank: Bank, scores: Scores) -> dict[str, list[str]]:
        return _cell_by_cell(bank, scores, self.budget)

    def _too_small(self, bank: Bank) -> InputError:
        least = min(cell_bytes(bank, name, block.name) for name in bank for block in bank[name].blocks)
        return InputError(
            "USAGE",
            f"nothing fits into {self.budget}",
            expected=f"at least {show_bytes(least)}"
            + (", and more for a whole vector" if self.whole else ""),
            fix="a larger --budget, or a bank in a smaller format: aniso bank quantise",
        )


def cell_bytes(bank: Bank, vector: str, block: str) -> int:
    """What a cell takes as it is stored, or as it is if it is not in a bank on disk yet."""
    if bank.path is None:
        return bank[vector][block].nbytes
    return bank.only_cells({vector: [block]}).block_bytes(block)


def vector_bytes(bank: Bank, vector: str) -> int:
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
    """The best of every block, or of all blocks together if the budget is in bytes."""
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
    """Cells by vector, everything in the bank's order."""
    wanted = set(cells)
    found = {name: [b.name for b in bank[name].blocks if (name, b.name) in wanted] for name in bank}
    return {name: blocks for name, blocks in found.items() if blocks}


def _best_first(items: list[T], score: Callable[[T], float]) -> list[T]:
    """By score; of equals the one that comes first in the bank."""
    return sorted(items, key=lambda item: -score(item))


def _fitting(order: Iterable[T], size: Callable[[T], int], budget: Budget) -> list[T]:
    """In order, each that still fits."""
    left, kept = budget.nbytes or 0, []
    for item in order:
        own = size(item)
        if own <= left:
            left -= own
            kept.append(item)
    return kept
