"""Vectors, or cells, whose coefficients the loss would move first: exact for any number, one in memory."""

from __future__ import annotations

from typing import final

from aniso.learn.gradient import WeightGradient, cell_gradients, weight_gradient
from aniso.learn.objectives import Objective
from aniso.learn.objectives.objective import Term
from aniso.learn.selection.remembered import GradientCache
from aniso.learn.selection.strategy import Budget, Scores, Strategy
from aniso.models import Wrapped
from aniso.progress import ProgressCallback
from aniso.vectors import Bank


class Gradient(Strategy):
    """|dL/dlambda| at zero coefficients, from one gradient of the base's weights."""

    def __init__(
        self,
        encoder: Wrapped,
        objective: Objective | Term,
        budget: int | str | Budget,
        *,
        batch: int = 64,
        seed: int = 0,
        workers: int = 0,
        remembered: GradientCache | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """What is ``remembered`` of vectors is not computed again; what is computed is written there."""
        self.budget = Budget.of(budget)
        self._remembered = remembered
        self.progress = progress
        self._encoder = encoder
        self._objective = objective if isinstance(objective, Objective) else objective * 1.0
        self._how = (batch, seed, workers)
        self._found: WeightGradient | None = None

    @property
    def weight_gradient(self) -> WeightGradient:
        """Taken when first needed, once for any number of banks."""
        if self._found is None:
            batch, seed, workers = self._how
            self._found = weight_gradient(
                self._encoder,
                self._objective,
                batch=batch,
                seed=seed,
                workers=workers,
                progress=self.progress,
            )
        return self._found

    def scores(self, bank: Bank) -> Scores:
        """dL/dlambda of every cell, with its sign."""
        known = self._remembered
        found = {name: None if known is None else known.get(bank[name]) for name in bank}
        blocks = self.weight_gradient.blocks(bank) if None in found.values() else {}
        for i, name in enumerate(bank, 1):
            if found[name] is None:
                own = found[name] = cell_gradients(bank[name], blocks)
                if known is not None:
                    known.put(bank[name], own)
            if self.progress:
                self.progress("gradients of vectors", i, len(bank))
        return {name: own for name, own in found.items() if own is not None}


@final
class WholeGradient(Gradient):
    """Whole vectors, by the 1-norm of their gradient."""

    kind = "gradient"
    whole = True


@final
class BlockwiseGradient(Gradient):
    """The best cells of every block, so that more vectors take part than the budget says."""

    kind = "blockwise-gradient"
    whole = False
