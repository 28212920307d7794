"""Learning rates that suit the length of the task vectors."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from aniso.models import Wrapped
from aniso.schedule import Schedule
from aniso.vectors import Bank

LR_LIMIT = 0.003
"""Most that a step of AdamW may change the weights by: learning rate times relative norm of the vectors."""


def relative_norm(bank: Bank, model: Wrapped) -> float:
    """Return the norm of a bank's vectors, as the root of their mean square, over that of the model."""
    squares = sum(norm**2 for name in bank for norm in bank[name].norms.values())
    state = model.state_dict()
    tensors = [state[part.key] for block in model.layout.blocks for part in block.parts]
    base = sum(float(torch.linalg.vector_norm(tensor.double())) ** 2 for tensor in tensors)
    return math.sqrt(squares / len(bank) / base) if base > 0 else 0.0


def limit_learning_rate(schedule: Schedule, bank: Bank, model: Wrapped) -> tuple[Schedule, str | None]:
    """Return the schedule with a learning rate that suits the vectors, and a note if it is a lower one.

    With AdamW every coefficient moves by about the learning rate in a step, so longer vectors change the
    model by more.
    """
    length = relative_norm(bank, model)
    if schedule.lr * length <= LR_LIMIT:
        return schedule, None
    rate = float(f"{LR_LIMIT / length:.2g}")
    note = (
        f"learning rate {rate:g} in place of {schedule.lr:g}: the vectors' norm is {length:.0%} of the base's"
    )
    return replace(schedule, lr=rate), f"{note} (--lr sets another)"
