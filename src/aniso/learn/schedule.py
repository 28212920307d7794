"""What shapes a training run's result: how long, how fast, in which steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from aniso.errors import UsageError, printable

Shape = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Optimiser = Literal["adamw", "sgd"]
_CHOICES = {
    "shape": ("cosine", "constant"),
    "precision": ("fp32", "bf16", "fp16"),
    "optimiser": ("adamw", "sgd"),
}
_LEAST = {"epochs": 1, "batch": 1, "warmup": 0, "weight_decay": 0, "lr": 0, "clip": 0, "least_batches": 1}
_ABOVE_ZERO = ("lr", "clip")
_WHOLE = ("epochs", "batch", "warmup", "least_batches", "micro_batch")


@dataclass(frozen=True)
class Schedule:
    """AdamW, or gradient descent, with a linear warm-up, then a cosine that falls to zero over the run, or a
    constant rate."""

    epochs: int
    lr: float
    batch: int = 128
    """Pictures in a step; every data term of an objective gets an equal share."""
    weight_decay: float = 0.1
    warmup: int = 500
    """Steps, but never more than a tenth of the run: short runs would end while warming up."""
    clip: float = 1.0
    """Largest norm of a gradient; larger ones are scaled down."""
    shape: Shape = "cosine"
    least_batches: int = 1
    """Steps that an epoch has at least: small splits are gone through several times in it."""
    precision: Precision = "fp32"
    """Of the forward pass; coefficients, weights and their updates always have 32 bits or more."""
    micro_batch: int | None = None
    """Pictures at once, if a whole batch does not fit: gradients of a step's slices are added up."""
    optimiser: Optimiser = "adamw"
    """AdamW, or gradient descent with a momentum of 0.9."""

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise _unusable(name, value, "a whole number")
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if not value >= low or (name in _ABOVE_ZERO and not value > 0) or value == math.inf:
                raise _unusable(name, value, "above 0" if name in _ABOVE_ZERO else f"at least {low}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _unusable(name, getattr(self, name), " or ".join(choices))
        if self.micro_batch is not None and not self.micro_batch >= 1:
            raise _unusable("micro_batch", self.micro_batch, "at least 1")

    def share(self, terms: int) -> int:
        """How many pictures of a step belong to each data term."""
        return max(1, self.batch // terms)

    def rate(self, step: int, steps: int, full: float | None = None) -> float:
        """The learning rate of a step, counted from 0; ``full`` is the highest, if not ``lr``."""
        lr = self.lr if full is None else full
        warm = min(self.warmup, steps // 10)
        if step < warm:
            return lr * (step + 1) / warm
        if self.shape == "constant":
            return lr
        return lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _unusable(name: str, value: object, expected: str) -> UsageError:
    return UsageError(
        "USAGE",
        f"a schedule cannot have {name} = {printable(value)}",
        expected=expected,
        fix=f"Schedule(…, {name}=…)",
    )
