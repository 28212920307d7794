"""Random selection, the baseline."""

from __future__ import annotations

from typing import Self, final

from aniso.data import sampling
from aniso.learn.selection.selection_rule import Scores, SelectionInputs, SelectionRule
from aniso.progress import ProgressCallback
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget
from aniso.vectors import Bank


@SELECTION_RULES.register("random")
@final
class Random(SelectionRule):
    """Draw whole vectors at random, by seed and names; a larger budget keeps what a smaller one did."""

    whole = True
    needs_objective = False

    def __init__(
        self, budget: int | str | Budget, *, seed: int = 0, progress: ProgressCallback | None = None
    ) -> None:
        self.budget = Budget.of(budget)
        self.seed = seed
        self.progress = progress

    @classmethod
    def from_inputs(cls, inputs: SelectionInputs) -> Self:
        return cls(inputs.budget, seed=inputs.seed, progress=inputs.progress)

    def scores(self, bank: Bank) -> Scores:
        order = sampling.shuffled(list(bank), "selection", self.seed)
        names = list(bank)
        rank = {names[place]: len(names) - i for i, place in enumerate(order)}
        # shared by a vector's blocks, so that their sum is its rank
        return {n: {b.name: rank[n] / len(bank[n].blocks) for b in bank[n].blocks} for n in bank}
