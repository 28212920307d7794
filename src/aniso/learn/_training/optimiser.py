"""The optimiser of a run: groups with their own learning rates, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aniso.learn._training.trainable import Trainable
from aniso.schedule import Schedule

_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
_PREFIX = "moment"


def make_optimiser(trainable: Trainable, schedule: Schedule) -> torch.optim.Optimizer:
    """Return AdamW or SGD; tensors with a learning rate of their own have no weight decay."""
    shared = [tensor for name, tensor in trainable.tensors.items() if name not in trainable.rates]
    groups = [{"params": shared, "full_lr": schedule.lr, "weight_decay": schedule.weight_decay}]
    groups += [
        {"params": [trainable.tensors[name]], "full_lr": rate, "weight_decay": 0.0}
        for name, rate in trainable.rates.items()
    ]
    if schedule.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=schedule.lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=schedule.lr)


def set_learning_rates(optimiser: torch.optim.Optimizer, schedule: Schedule, step: int, steps: int) -> None:
    """Set every group's learning rate for a step of the run, counted from 0."""
    for group in optimiser.param_groups:
        group["lr"] = schedule.rate(step, steps, group["full_lr"])


def moments(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimiser's state of named tensors, as tensors."""
    return {
        f"{_PREFIX}.{key}.{name}": value
        for name, tensor in tensors.items()
        for key, value in optimiser.state.get(tensor, {}).items()
        if value is not None
    }


def restore_moments(
    optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Restore what ``moments`` returned; ``step`` stays on the CPU, as torch has it."""
    for name, tensor in tensors.items():
        found = {key: state.get(f"{_PREFIX}.{key}.{name}") for key in _MOMENTS}
        own = {k: v if k == "step" else v.to(tensor.device) for k, v in found.items() if v is not None}
        if own:
            optimiser.state[tensor] = own
