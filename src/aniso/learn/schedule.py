"""The schedule of a training run: how long, how fast, in which steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from aniso.errors import UsageError, printable

LRSchedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Optimiser = Literal["adamw", "sgd"]
_CHOICES = {
    "lr_schedule": ("cosine", "constant"),
    "precision": ("fp32", "bf16", "fp16"),
    "optimiser": ("adamw", "sgd"),
}
_MINIMUM = {
    "epochs": 1,
    "batch_size": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "lr": 0,
    "max_grad_norm": 0,
    "min_steps_per_epoch": 1,
}
_POSITIVE = ("lr", "max_grad_norm")
_INTEGERS = ("epochs", "batch_size", "warmup_steps", "min_steps_per_epoch", "micro_batch")


@dataclass(frozen=True)
class Schedule:
    """Everything about a training run that shapes its result: epochs, learning rate, batches, precision.

    The learning rate rises linearly over ``warmup_steps``, then falls to zero along a cosine, or stays.
    """

    epochs: int
    lr: float
    batch_size: int = 128
    """Items per step; every data term of an objective gets an equal share."""
    weight_decay: float = 0.1
    warmup_steps: int = 500
    """At most a tenth of the run is used: short runs would end while still warming up."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""
    lr_schedule: LRSchedule = "cosine"
    min_steps_per_epoch: int = 1
    """Small splits are visited several times in an epoch until it has this many steps."""
    precision: Precision = "fp32"
    """Precision of the forward pass; parameters and their updates always have 32 bits or more."""
    micro_batch: int | None = None
    """Items per forward pass if a batch does not fit into memory; gradients are accumulated."""
    optimiser: Optimiser = "adamw"
    """AdamW, or SGD with a momentum of 0.9."""

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise _invalid(name, value, "a whole number")
        for name, low in _MINIMUM.items():
            value = getattr(self, name)
            if not value >= low or (name in _POSITIVE and not value > 0) or value == math.inf:
                raise _invalid(name, value, "above 0" if name in _POSITIVE else f"at least {low}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _invalid(name, getattr(self, name), " or ".join(choices))
        if self.micro_batch is not None and not self.micro_batch >= 1:
            raise _invalid("micro_batch", self.micro_batch, "at least 1")

    def share(self, terms: int) -> int:
        """Return how many items of a step belong to each of ``terms`` data terms."""
        return max(1, self.batch_size // terms)

    def rate(self, step: int, steps: int, peak: float | None = None) -> float:
        """Return the learning rate of a step, counted from 0; ``peak`` is the highest (default: ``lr``)."""
        lr = self.lr if peak is None else peak
        warmup = min(self.warmup_steps, steps // 10)
        if step < warmup:
            return lr * (step + 1) / warmup
        if self.lr_schedule == "constant":
            return lr
        return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _invalid(name: str, value: object, expected: str) -> UsageError:
    return UsageError(
        "USAGE",
        f"a schedule cannot have {name} = {printable(value)}",
        expected=expected,
        fix=f"Schedule(…, {name}=…)",
    )
