"""Validation: what a keep rule chooses an epoch by."""

from __future__ import annotations

from typing import final

from torch import nn

from aniso.data import TextDataset
from aniso.learn.evaluate import evaluate
from aniso.learn.heads import Head
from aniso.learn.keep import Keep, Measured
from aniso.learn.language import evaluate_lm
from aniso.learn.unwrap import head_for
from aniso.progress import ProgressCallback
from aniso.records import EpochRow


@final
class Validation:
    """Measures a model, as it is at the time, on a keep rule's splits."""

    def __init__(
        self,
        model: nn.Module,
        keep: Keep,
        *,
        head: Head | None = None,
        batch_size: int | None = None,
        workers: int = 0,
    ) -> None:
        """``batch_size`` is the most that fits into memory, if it is known to be little."""
        self._model = model
        self._splits = keep.splits
        self._heads = {split.name: head_for(model, split, head) for split in keep.splits}
        self._batch_size = batch_size
        self._workers = workers

    def measure(self, progress: ProgressCallback | None = None) -> dict[str, dict[str, float]]:
        """Return accuracies by the name of the split, and perplexities if there are texts."""
        out: dict[str, dict[str, float]] = {"accuracy": {}}
        for split in self._splits:
            size = min(split.default_batch_size, self._batch_size or split.default_batch_size)
            if isinstance(split, TextDataset):
                score = evaluate_lm(
                    self._model, split, batch_size=size, workers=self._workers, progress=progress
                )
                out.setdefault("perplexity", {})[split.name] = score.perplexity
                continue
            head = self._heads[split.name]
            accuracy = evaluate(
                self._model, split, head=head, batch_size=size, workers=self._workers, progress=progress
            )
            out["accuracy"][split.name] = accuracy.value
        return out


def scores(row: EpochRow) -> Measured:
    """Return scores where higher is better; perplexity becomes 1 / perplexity."""
    return {**row.accuracy, **{name: 1 / value for name, value in row.perplexity.items()}}
