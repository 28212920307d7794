"""Selection by the gradient of the loss with respect to coefficients, exact for any number of vectors."""

from __future__ import annotations

from typing import Self, final

from aniso.learn.gradient import WeightGradient, cell_gradients, weight_gradient
from aniso.learn.objectives import Objective
from aniso.learn.objectives.objective import Term
from aniso.learn.selection.gradient_cache import GradientCache
from aniso.learn.selection.selection_rule import Scores, SelectionInputs, SelectionRule
from aniso.models import Wrapped
from aniso.progress import ProgressCallback
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget
from aniso.vectors import Bank


class Gradient(SelectionRule):
    """Scores cells by |dL/dlambda| at zero coefficients, from one gradient of the base's weights."""

    needs_gradient = True

    def __init__(
        self,
        encoder: Wrapped,
        objective: Objective | Term,
        budget: int | str | Budget,
        *,
        batch_size: int = 64,
        seed: int = 0,
        workers: int = 0,
        gradients: GradientCache | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """``gradients`` caches the gradients of vectors on disk."""
        self.budget = Budget.of(budget)
        self._cache = gradients
        self.progress = progress
        self._encoder = encoder
        self._objective = objective if isinstance(objective, Objective) else objective * 1.0
        self._options = (batch_size, seed, workers)
        self._gradient: WeightGradient | None = None

    @classmethod
    def from_inputs(cls, inputs: SelectionInputs) -> Self:
        assert inputs.objective is not None
        return cls(
            inputs.model,
            inputs.objective,
            inputs.budget,
            seed=inputs.seed,
            workers=inputs.workers,
            gradients=inputs.gradients,
            progress=inputs.progress,
        )

    @property
    def weight_gradient(self) -> WeightGradient:
        """The gradient of the base's weights; computed when first needed, once for any number of banks."""
        if self._gradient is None:
            batch_size, seed, workers = self._options
            self._gradient = weight_gradient(
                self._encoder,
                self._objective,
                batch_size=batch_size,
                seed=seed,
                workers=workers,
                progress=self.progress,
            )
        return self._gradient

    def scores(self, bank: Bank) -> Scores:
        """Return dL/dlambda of every cell, with its sign."""
        known = self._cache
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


@SELECTION_RULES.register("gradient")
@final
class WholeGradient(Gradient):
    """Select whole vectors by the 1-norm of their gradient."""

    whole = True


@SELECTION_RULES.register("blockwise-gradient")
@final
class BlockwiseGradient(Gradient):
    """Select the cells with the largest gradient in every block, whichever vectors they belong to."""

    whole = False
