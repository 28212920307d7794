"""What a rule for keeping chooses by: accuracies on pictures, perplexities on texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from aniso.data import TextDataset
from aniso.learn.evaluate import evaluate
from aniso.learn.heads import Head
from aniso.learn.keep import Keep, Measured
from aniso.learn.language import evaluate_lm
from aniso.learn.unwrap import head_for
from aniso.progress import ProgressCallback


@final
class Validation:
    """Measures a model, as it is at the time, on a rule's splits."""

    def __init__(
        self,
        model: nn.Module,
        keep: Keep,
        *,
        head: Head | None = None,
        at_once: int | None = None,
        workers: int = 0,
    ) -> None:
        """``at_once`` is how much fits into memory, if that is known to be little."""
        self._model = model
        self._splits = keep.splits
        self._heads = {split.name: head_for(model, split, head) for split in keep.splits}
        self._at_once = at_once
        self._workers = workers

    def read(self, progress: ProgressCallback | None = None) -> dict[str, dict[str, float]]:
        """Accuracies by the name of the split, and perplexities if there are texts."""
        out: dict[str, dict[str, float]] = {"accuracy": {}}
        for split in self._splits:
            batch = min(split.default_batch_size, self._at_once or split.default_batch_size)
            if isinstance(split, TextDataset):
                found = evaluate_lm(self._model, split, batch=batch, workers=self._workers, progress=progress)
                out.setdefault("perplexity", {})[split.name] = found.perplexity
                continue
            head = self._heads[split.name]
            measured = evaluate(
                self._model, split, head=head, batch=batch, workers=self._workers, progress=progress
            )
            out["accuracy"][split.name] = measured.value
        return out


def worth(row: Mapping[str, Any]) -> Measured:
    """What was read, so that higher is better: of a perplexity one by it, the likelihood of a token."""
    likely = {name: 1 / value for name, value in row.get("perplexity", {}).items()}
    return {**row["accuracy"], **likely}
