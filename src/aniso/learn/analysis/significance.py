"""Relative significance: how much of fine-tuning's gain on a task each single vector gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from aniso.compose import Composition, Partition
from aniso.data import Labelled
from aniso.learn.analysis.counting import ImageCounter
from aniso.learn.analysis.matrix import LabelledMatrix, Value
from aniso.learn.analysis.measures import relative_significance
from aniso.learn.evaluate import evaluate
from aniso.models import Encoder
from aniso.progress import ProgressCallback
from aniso.vectors import Bank


@final
@dataclass(frozen=True)
class Significance:
    """Relative significance, tasks by vectors, and the accuracies it is computed from.

    A row is None if the task's own vector does not change the accuracy.
    """

    matrix: LabelledMatrix
    accuracy: LabelledMatrix
    """Accuracy with one scaled vector, tasks by vectors."""
    zero_shot: Mapping[str, float]
    tuned: Mapping[str, float]
    """Accuracy of each task with its own vector at coefficient 1, which is the fine-tuned model."""
    notes: tuple[str, ...] = ()


def vector_significance(
    encoder: Encoder,
    bank: Bank,
    splits: Mapping[str, Labelled],
    *,
    scale: float = 1.0,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Significance:
    """Return (accuracy with one vector - zero-shot) / (fine-tuned - zero-shot) for all tasks and vectors.

    ``splits`` are named like the tasks' own vectors; ``scale`` is the coefficient of every vector, while the
    fine-tuned model is always the own vector at coefficient 1. One vector is in memory at a time.
    """
    bank.only(*splits)  # raises if a task has no vector
    heads = {name: encoder.class_weights(split.classes) for name, split in splits.items()}
    sizes = {name: len(split) for name, split in splits.items()}
    total = (len(bank) + 1 + (scale != 1)) * sum(sizes.values())
    counter = ImageCounter("significance: images", total, progress)

    def accuracy(model: nn.Module, name: str) -> float:
        with counter.counting(sizes[name]) as own:
            found = evaluate(model, splits[name], head=heads[name], workers=workers, progress=own)
        return found.value

    zero_shot = {name: accuracy(encoder, name) for name in splits}
    single: dict[tuple[str, str], float] = {}
    tuned: dict[str, float] = {}
    for vector in bank:
        composition = Composition(encoder, bank.only(vector), Partition.whole())
        _fill(composition, scale)
        single |= {(name, vector): accuracy(composition, name) for name in splits}
        if vector in splits:
            _fill(composition, 1.0)
            tuned[vector] = single[vector, vector] if scale == 1 else accuracy(composition, vector)
    notes = [
        f"{name}: its own vector does not change the accuracy of {zero_shot[name]:.1%}, so the relative "
        "significance is undefined"
        for name in splits
        if tuned[name] == zero_shot[name]
    ]

    def share(name: str, vector: str) -> Value:
        if tuned[name] == zero_shot[name]:
            return None
        return relative_significance(single[name, vector], zero_shot[name], tuned[name])

    rows = tuple(splits)
    return Significance(
        LabelledMatrix(rows, bank.names, tuple(tuple(share(t, v) for v in bank) for t in rows)),
        LabelledMatrix(rows, bank.names, tuple(tuple(single[t, v] for v in bank) for t in rows)),
        zero_shot,
        {name: tuned[name] for name in splits},
        tuple(notes),
    )


def _fill(composition: Composition, value: float) -> None:
    with torch.no_grad():
        composition.values.fill_(value)
