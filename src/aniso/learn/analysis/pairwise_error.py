"""Pairwise disentanglement error: predictions that change when a second vector is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from aniso.compose import Composition
from aniso.data import Labelled
from aniso.errors import UsageError, printable
from aniso.learn.analysis.counting import ImageCounter
from aniso.learn.analysis.matrix import LabelledMatrix
from aniso.learn.evaluate import predict
from aniso.models import Encoder
from aniso.progress import ProgressCallback


def disentanglement(
    encoder: Encoder,
    composition: Composition,
    splits: Mapping[str, Labelled],
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> dict[tuple[str, str], float]:
    """Return for ordered pairs (1, 2) the share of task 1's images whose prediction changes when the scaled
    vector of task 2 is added to the scaled vector of task 1.

    ``splits`` are named like the vectors of the composition.
    """
    unknown = [name for name in splits if name not in composition.bank]
    if unknown:
        raise UsageError(
            "BANK-NAME",
            f"the composition has no vector '{printable(unknown[0])}'",
            expected=", ".join(composition.bank.names),
            fix="name splits like vectors",
        )
    heads = {name: encoder.class_weights(split.classes) for name, split in splits.items()}
    images = sum(len(split) for split in splits.values())
    counter = ImageCounter("disentanglement: images", len(splits) * images, progress)

    def predicted(vectors: Sequence[str], name: str) -> Tensor:
        with only(composition, vectors), counter.counting(len(splits[name])) as own:
            return predict(composition, splits[name], head=heads[name], workers=workers, progress=own)

    alone = {name: predicted([name], name) for name in splits}
    return {
        (one, two): float((predicted([one, two], one) != alone[one]).float().mean())
        for one, two in permutations(splits, 2)
    }


def disentanglement_matrix(
    encoder: Encoder,
    composition: Composition,
    splits: Mapping[str, Labelled],
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> LabelledMatrix:
    """Return ``disentanglement`` as a matrix: task 1 by added vector 2; None on the diagonal."""
    errors = disentanglement(encoder, composition, splits, workers=workers, progress=progress)
    names = tuple(splits)
    return LabelledMatrix(names, names, tuple(tuple(errors.get((i, j)) for j in names) for i in names))


class only:  # noqa: N801 (reads as a phrase: with only(composition, ["cars"]))
    """Context manager that sets the coefficients of all but some vectors to zero."""

    def __init__(self, composition: Composition, vectors: Sequence[str]) -> None:
        self._composition = composition
        kept = set(vectors)
        self._mask = torch.tensor([vector in kept for vector, *_ in composition.index.labels()])

    def __enter__(self) -> None:
        values = self._composition.values
        self._before = values.detach().clone()
        with torch.no_grad():
            values.mul_(self._mask.to(values))

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            self._composition.values.copy_(self._before)
