"""Measures of a composition beside its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from aniso.classes import ClassList
from aniso.compose import Coefficients, Composition
from aniso.data import Labelled
from aniso.errors import UsageError, printable
from aniso.learn.evaluate import Accuracy, accuracy, predict
from aniso.learn.heads import Head, RestrictedHead
from aniso.models import Encoder
from aniso.vectors import Block

FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)


def relative_accuracy(found: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """Return the mean over tasks of accuracy / reference accuracy, such as that of the fine-tuned model."""
    missing = [task for task in found if not reference.get(task)]
    if missing or not found:
        raise UsageError(
            "USAGE",
            f"there is no reference accuracy above 0 for {missing or 'any task'}",
            fix="evaluate the reference first",
        )
    return sum(value / reference[task] for task, value in found.items()) / len(found)


def relative_significance(alone: float, zero_shot: float, tuned: float) -> float:
    """Return the share of fine-tuning's gain on a task that one vector alone gives."""
    if tuned == zero_shot:
        raise UsageError(
            "USAGE",
            "fine-tuning gains nothing, so the share of its gain is undefined",
            fix="leave the task out",
        )
    return (alone - zero_shot) / (tuned - zero_shot)


def disentanglement(
    encoder: Encoder, composition: Composition, splits: Mapping[str, Labelled], *, workers: int = 0
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

    def predicted(vectors: Sequence[str], name: str) -> Tensor:
        with only(composition, vectors):
            return predict(composition, splits[name], head=heads[name], workers=workers)

    alone = {name: predicted([name], name) for name in splits}
    return {
        (one, two): float((predicted([one, two], one) != alone[one]).float().mean())
        for one, two in permutations(splits, 2)
    }


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


def out_of_domain(
    model: Composition | Encoder,
    learned: ClassList,
    split: Labelled,
    encoder: Encoder,
    *,
    head: Head | None = None,
    workers: int = 0,
) -> Accuracy:
    """Return the accuracy on another dataset with (some of) the classes of ``learned``.

    Predictions are restricted to the other dataset's classes, matched by name; it may not have new ones.
    """
    among = RestrictedHead(head or encoder.class_weights(learned), split.classes.names)
    return accuracy(predict(model, split, head=among, workers=workers), split, among.notes)


def by_kind(coefficients: Coefficients) -> dict[str, Tensor]:
    """Return the coefficients by kind of block, parts included."""
    return _grouped(coefficients, lambda block: str(block.kind))


def by_depth(coefficients: Coefficients) -> dict[str, Tensor]:
    """Return the coefficients by layer; blocks outside of layers are left out."""
    return _grouped(coefficients, lambda block: None if block.depth is None else str(block.depth))


def five_numbers(values: Tensor) -> list[float]:
    """Return minimum, quartiles and maximum."""
    return [float(x) for x in torch.quantile(values.double(), torch.tensor(FIVE, dtype=torch.double))]


def _grouped(coefficients: Coefficients, key: Callable[[Block], str | None]) -> dict[str, Tensor]:
    groups: dict[str, list[Tensor]] = {}
    index = coefficients.index
    for entry, own in zip(index.blocks, index.divided(coefficients.values), strict=True):
        name = key(entry.block)
        if name is not None:
            groups.setdefault(name, []).append(own.flatten())
    return {name: torch.cat(found) for name, found in groups.items()}
