"""Validation: what a keep rule chooses an epoch by."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from aniso.data import TextDataset, Unlabelled
from aniso.learn.evaluate import evaluate
from aniso.learn.heads import Head
from aniso.learn.keep import Keep, Measured
from aniso.learn.language import evaluate_lm
from aniso.learn.teacher import agreement
from aniso.learn.unwrap import encoder_of, head_for
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
        self._teachers = keep.teachers
        self._taught: dict[str, Tensor] = {}  # by the split's name: what its teacher predicts
        self._heads = {split.name: head_for(model, split, head) for split in keep.splits}
        self._batch_size = batch_size
        self._workers = workers

    def measure(self, progress: ProgressCallback | None = None) -> dict[str, dict[str, float]]:
        """Return accuracies by the name of the split, perplexities of texts, and agreement with teachers."""
        out: dict[str, dict[str, float]] = {"accuracy": {}}
        for split in self._splits:
            size = min(split.default_batch_size, self._batch_size or split.default_batch_size)
            if isinstance(split, TextDataset):
                score = evaluate_lm(
                    self._model, split, batch_size=size, workers=self._workers, progress=progress
                )
                out.setdefault("perplexity", {})[split.name] = score.perplexity
                continue
            if isinstance(split, Unlabelled):
                out.setdefault("agreement", {})[split.name] = self._agreement(split, size, progress)
                continue
            head = self._heads[split.name]
            accuracy = evaluate(
                self._model, split, head=head, batch_size=size, workers=self._workers, progress=progress
            )
            out["accuracy"][split.name] = accuracy.value
        return out

    def _agreement(self, split: Unlabelled, size: int, progress: ProgressCallback | None) -> float:
        head = self._heads[split.name]
        assert head is not None  # an unlabelled split has classes
        if split.name not in self._taught:
            self._taught[split.name] = self._teacher_labels(split, size, progress)
        return agreement(
            self._model,
            split,
            head,
            self._taught[split.name],
            batch_size=size,
            workers=self._workers,
            progress=progress,
        )

    @torch.no_grad()
    def _teacher_labels(self, split: Unlabelled, size: int, progress: ProgressCallback | None) -> Tensor:
        """What the teacher predicts with class weights, also where the model has a head of its own."""
        features = self._teachers[split.name].features(
            split, batch_size=size, workers=self._workers, progress=progress
        )
        head = head_for(self._model, split)
        assert head is not None
        device = next(iter(encoder_of(self._model).parameters())).device
        return head.logits(features.to(device)).argmax(-1).cpu()


def scores(row: EpochRow) -> Measured:
    """Return scores where higher is better; perplexity becomes 1 / perplexity."""
    return {**row.accuracy, **row.agreement, **{name: 1 / value for name, value in row.perplexity.items()}}
