"""Accuracies and coefficients as records have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aniso.compose import Coefficients
from aniso.data import Labelled
from aniso.learn.analysis import by_depth, by_kind, five_numbers
from aniso.learn.evaluate import accuracy


def summary(coefficients: Coefficients) -> dict[str, dict[str, list[float]]]:
    """Least, quartiles and most of the coefficients by kind of block and by layer."""
    groups = {"kind": by_kind(coefficients), "depth": by_depth(coefficients)}
    return {by: {name: five_numbers(v) for name, v in found.items()} for by, found in groups.items()}


def score(split: Labelled, predictions: Tensor) -> dict[str, Any]:
    found = accuracy(predictions, split)
    return {
        "correct": found.correct,
        "total": found.total,
        "accuracy": found.value,
        "per_class_accuracy": found.per_class,
        "interval": list(found.interval),
        "right": _bits(predictions == torch.tensor(split.labels)),
    }


def _bits(right: Tensor) -> str:
    """A bit for every picture, the first one lowest, as hexadecimal."""
    number = sum(1 << i for i, good in enumerate(right.tolist()) if good)
    return f"{number:0{-(-len(right) // 4)}x}"
