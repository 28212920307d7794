"""The training loop: batches in, gradient steps on whatever is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Batches, Labelled
from aniso.data.batches import View
from aniso.errors import NumericalError
from aniso.learn.schedule import Schedule
from aniso.models import ClassWeights


def train(
    model: nn.Module,
    trained: Sequence[Tensor],
    split: Labelled,
    head: ClassWeights,
    view: View,
    schedule: Schedule,
    *,
    seed: int = 0,
    workers: int = 0,
    told: Callable[[int, float], None] | None = None,
) -> tuple[float, ...]:
    """Cross-entropy on a split; returns the mean loss of every epoch.

    ``told`` is called after every epoch with its number, counted from 1, and its mean loss.
    """
    optimiser = torch.optim.AdamW(trained, lr=schedule.lr, weight_decay=schedule.weight_decay)
    device = trained[0].device
    steps, step, losses = schedule.steps(len(split)), 0, []
    model.train()
    for epoch in range(schedule.epochs):
        total = 0.0
        batches = Batches(
            split, view, size=schedule.batch, shuffle=True, seed=seed, epoch=epoch, workers=workers
        )
        for batch in batches:
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate(step, steps)
            labels: Any = batch.labels
            logits = head.logits(model(batch.images.to(device)))
            loss = functional.cross_entropy(logits, labels.to(device))
            _require_finite(loss, split, epoch, step)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, schedule.clip)
            optimiser.step()
            total += loss.item() * len(batch)
            step += 1
        losses.append(total / len(split))
        if told:
            told(epoch + 1, losses[-1])
    model.eval()
    return tuple(losses)


def _require_finite(loss: Tensor, split: Labelled, epoch: int, step: int) -> None:
    if not bool(torch.isfinite(loss)):
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the loss on {split.name} is {loss.item()} in epoch {epoch + 1}, step {step + 1}",
            fix="lower the learning rate",
        )
