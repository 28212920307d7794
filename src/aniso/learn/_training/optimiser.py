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


def restart_optimiser(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Forget all moments, and multiply the learning rates of all groups."""
    optimiser.state.clear()
    for group in optimiser.param_groups:
        group["full_lr"] *= factor


@torch.no_grad()
def add_offsets_to_gradients(trainable: Trainable, schedule: Schedule) -> None:
    """SGD, before a step: add the weight decay of the offsets, as torch adds that of the tensors."""
    if schedule.optimiser == "sgd":
        for name, offset in trainable.decayed_offsets.items():
            gradient = trainable.tensors[name].grad
            if gradient is not None:
                gradient.add_(offset, alpha=schedule.weight_decay)


@torch.no_grad()
def decay_offsets(trainable: Trainable, schedule: Schedule, optimiser: torch.optim.Optimizer) -> None:
    """AdamW, after a step: subtract lr * decay * offset, so that offset + tensor was decayed as a whole."""
    if schedule.optimiser == "adamw":
        rate = float(optimiser.param_groups[0]["lr"]) * schedule.weight_decay
        for name, offset in trainable.decayed_offsets.items():
            if trainable.tensors[name].grad is not None:  # else torch does not decay the tensor either
                trainable.tensors[name].sub_(offset, alpha=rate)


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
