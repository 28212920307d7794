"""Temporary buffers that are allocated once for each thread and used again."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_local = threading.local()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return this thread's buffer of that name, valid until the next call with the same name.

    Allocating fresh memory costs more than what is done with it.
    """
    buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = _local.__dict__.setdefault("buffers", {})
    size = math.prod(shape)
    buffer = buffers.get((name, dtype, device))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # it outlives the call
            buffer = torch.empty(size, dtype=dtype, device=device)
        buffers[name, dtype, device] = buffer
    return buffer[:size].view(tuple(shape))
