"""What shapes a training run's result: how long, how fast, in which steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aniso.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """AdamW with a linear warm-up and a cosine that falls to zero over the run."""

    epochs: int
    lr: float
    batch: int = 128
    weight_decay: float = 0.1
    warmup: int = 500
    """Steps, but never more than a tenth of the run: short runs would end while warming up."""
    clip: float = 1.0
    """Largest norm of a gradient; larger ones are scaled down."""

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch": 1, "warmup": 0, "weight_decay": 0, "lr": 0, "clip": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if not value >= low or (name in ("lr", "clip") and not value > 0) or value == math.inf:
                raise UsageError(
                    "USAGE",
                    f"a schedule cannot have {name} = {value}",
                    expected=f"at least {low}" if name not in ("lr", "clip") else "above 0",
                    fix=f"Schedule(…, {name}=…)",
                )

    def steps(self, samples: int) -> int:
        return self.epochs * -(-samples // self.batch)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = min(self.warmup, steps // 10)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
