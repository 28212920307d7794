"""The baseline: whole vectors drawn at random."""

from __future__ import annotations

from typing import final

from aniso.data import sampling
from aniso.learn.selection.strategy import Budget, Scores, Strategy
from aniso.progress import ProgressCallback
from aniso.vectors import Bank


@final
class Random(Strategy):
    """Depends on the seed and on the vectors' names; a larger budget keeps what a smaller one did."""

    kind = "random"
    whole = True

    def __init__(
        self, budget: int | str | Budget, *, seed: int = 0, progress: ProgressCallback | None = None
    ) -> None:
        self.budget = Budget.of(budget)
        self.seed = seed
        self.progress = progress

    def scores(self, bank: Bank) -> Scores:
        order = sampling.shuffled(list(bank), "selection", self.seed)
        names = list(bank)
        rank = {names[place]: len(names) - i for i, place in enumerate(order)}
        # shared by a vector's blocks, so that their sum is its rank
        return {n: {b.name: rank[n] / len(bank[n].blocks) for b in bank[n].blocks} for n in bank}
