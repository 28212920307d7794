"""The schedule of a training run: everything about the optimiser that shapes the result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from aniso.errors import UsageError, printable

LrSchedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Optimiser = Literal["adamw", "sgd"]
EpochOf = Literal["longest", "smallest", "target"]
_CHOICES = {
    "lr_schedule": ("cosine", "constant"),
    "precision": ("fp32", "bf16", "fp16"),
    "optimiser": ("adamw", "sgd"),
    "epoch_of": ("longest", "smallest", "target"),
}
_LEAST = {
    "epochs": 1,
    "batch_size": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "lr": 0,
    "max_grad_norm": 0,
    "min_steps_per_epoch": 1,
    "restarts": 0,
}
_ABOVE_ZERO = ("lr", "max_grad_norm")
_OPTIONAL = ("micro_batch", "steps", "validate_every")
_WHOLE = ("epochs", "batch_size", "warmup_steps", "min_steps_per_epoch", "restarts", *_OPTIONAL)
_ABSENT = object()


def _field(text: str, *, without: Any = _ABSENT, **default: Any) -> Any:
    """A field whose help text is also that of the command-line option.

    ``without`` is the value that means the same as a version of aniso that did not have the field.
    """
    return field(metadata={"help": text, "without": without}, **default)


@dataclass(frozen=True)
class Schedule:
    """Optimiser, learning rate and batches of a training run.

    The learning rate rises linearly for ``warmup_steps``, but never for more than a tenth of the run, since a
    short run would end while warming up; then it follows a cosine to zero, or stays constant. Every data term
    of an objective gets an equal share of each batch; an epoch is a pass over the term that takes longest,
    over the smallest, or over the target to be forgotten. Coefficients, weights and their updates always have
    32 bits or more; ``precision`` is that of the forward pass.

    >>> Schedule(epochs=10, lr=0.1, warmup_steps=0).rate(0, 100)
    0.1
    """

    epochs: int = _field("Passes over the training data.")
    lr: float = _field("Learning rate.")
    batch_size: int = _field("Images, or texts, per step.", default=128)
    weight_decay: float = _field("Weight decay of the optimiser.", default=0.1)
    warmup_steps: int = _field("Steps of linear warm-up, at most a tenth of the run.", default=500)
    max_grad_norm: float = _field("Gradients with a larger norm are scaled down to it.", default=1.0)
    lr_schedule: LrSchedule = _field("Learning rate after the warm-up.", default="cosine")
    min_steps_per_epoch: int = _field(
        "Small data sets are repeated within an epoch until it has this many steps.", default=1
    )
    precision: Precision = _field("Precision of the forward pass.", default="fp32")
    micro_batch: int | None = _field(
        "Images at once if a whole batch does not fit; same result.", default=None
    )
    optimiser: Optimiser = _field("AdamW, or SGD with momentum 0.9.", default="adamw")
    epoch_of: EpochOf = _field(
        "Split that an epoch is a pass over: the longest, the smallest, or the target of a negation.",
        default="longest",
    )
    steps: int | None = _field("Steps of the whole run, in place of --epochs.", default=None)
    validate_every: int | None = _field(
        "Also validate every so many steps within an epoch, and stop there if the keep rule says so.",
        default=None,
    )
    restarts: int = _field(
        "Coefficients: how often to start again with a third of the learning rate when predictions collapse.",
        default=3,
        without=0,
    )

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
        for name in _OPTIONAL:
            if getattr(self, name) is not None and not getattr(self, name) >= 1:
                raise _unusable(name, getattr(self, name), "at least 1")

    def share(self, terms: int) -> int:
        """Return how many items of a step belong to each of so many data terms."""
        return max(1, self.batch_size // terms)

    def rate(self, step: int, steps: int, full: float | None = None) -> float:
        """Return the learning rate of a step, counted from 0; ``full`` replaces ``lr`` as the highest."""
        lr = self.lr if full is None else full
        warm = min(self.warmup_steps, steps // 10)
        if step < warm:
            return lr * (step + 1) / warm
        if self.lr_schedule == "constant":
            return lr
        return lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def without_field_values() -> dict[str, object]:
    """Return, for every field that was added later, the value that means the same as its absence."""
    found = {item.name: item.metadata["without"] for item in fields(Schedule)}
    return {name: value for name, value in found.items() if value is not _ABSENT}


def _unusable(name: str, value: object, expected: str) -> UsageError:
    return UsageError(
        "USAGE",
        f"invalid value {printable(value)} for {name}",
        expected=expected,
        fix=f"--{name.replace('_', '-')}, or {name}= in Python",
    )
