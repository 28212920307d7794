"""Measures of a composition beside its accuracy: ratios, out-of-domain accuracy, groups of coefficients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aniso.classes import ClassList
from aniso.compose import Coefficients, Composition
from aniso.data import Labelled
from aniso.errors import UsageError
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


def by_component(coefficients: Coefficients) -> dict[str, Tensor]:
    """Return the coefficients of singular components by their number; none under another partition.

    The last number is that of all smaller components.
    """
    groups: dict[str, list[Tensor]] = {}
    index = coefficients.index
    for entry, own in zip(index.blocks, index.divided(coefficients.values), strict=True):
        if entry.partition.scales_ranks and entry.partition.count > 1:
            for number, values in enumerate(own.T):
                groups.setdefault(str(number), []).append(values)
    return {number: torch.cat(found) for number, found in groups.items()}


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
