"""How a composition is executed: memory and code paths, which never change its results."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from aniso.sizes import parse_bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_CONTAINER = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_SHARE = 0.8  # of the free memory: the model's activations need the rest


@final
@dataclass(frozen=True)
class Runtime:
    """Memory limits and code paths of a composition."""

    memory: str | int | None = None
    """Bytes that composed weights and task vectors may take, such as ``"8GiB"``; default: 80 % of the free
    memory. If both do not fit, weights are recomputed when their layer runs; vectors that still do not fit
    are read from disk as they are needed."""
    stream: bool = False
    """Read all task vectors from disk as they are needed, even if they would fit."""
    fast: bool = True
    """Use compiled kernels where numba is installed."""
    shard_base: bool = False
    """Keep only a share of the base in each process of a mesh, and compose a linear layer's weight when the
    layer runs. The given model keeps its weights: delete it, or leave it on the CPU and move the composition
    to the GPU."""
    keep_freed: bool = False
    """Let the whole process keep freed memory instead of returning it to the system (glibc, CPU only).

    This calls ``mallopt`` for the process, not for the composition: from the first forward pass until the
    process ends, allocations up to 32 MiB come from the heap, up to 2 GiB of freed heap stay with the
    process, and glibc no longer adapts its thresholds. It saves 90,000 page faults and up to a second of
    system time in every training step of a ViT-B/32 (docs/adr/0005-compositions.md), since the gradient of
    a weight is freed and allocated again in each step. `aniso fit` and `aniso run` turn it on.
    """

    def budget(self, device: torch.device) -> int:
        """Return the bytes that a composition may use on a device."""
        if self.memory is not None:
            return parse_bytes(self.memory)
        return int(_SHARE * free_memory(device))


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, for the whole process; return True if it can (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the machine within the limit of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_of_machine(), _free_of_container(Path("/sys/fs/cgroup")))


def _free_of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_container(place: Path) -> int:
    """Return the free bytes by cgroup v1 or v2; without a limit, more than any machine has."""
    free = sys.maxsize
    for limit, used in _CONTAINER:
        try:
            most = (place / limit).read_text().strip()
            if most.isdecimal():
                free = min(free, max(0, int(most) - int((place / used).read_text())))
        except (OSError, ValueError):
            continue
    return free
