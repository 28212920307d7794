"""How a composition is carried out: never what comes out of it."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from aniso.errors import UsageError, printable

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for what can be set
_CONTAINER = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_SHARE = 0.8  # of the memory that is free: the model's activations need some, too


@final
@dataclass(frozen=True)
class Runtime:
    """Memory and code paths."""

    memory: str | int | None = None
    """Bytes that composed weights and task vectors may take, such as ``"8GiB"``; most of what is free if
    not said. Where both do not fit, weights are composed as their layer runs; vectors that do not fit either
    are read from disk as they are needed."""
    stream: bool = False
    """Read all task vectors from disk as they are needed, even if they would fit."""
    fast: bool = True
    """Use compiled code where numba is installed."""
    keep_freed: bool = True
    """Let the process keep memory that it frees, up to 2 GB, for the next step. Otherwise the gradient of
    every weight is given back to the system and asked for again, a page at a time, in every step (those
    above 32 MiB still are)."""

    def budget(self, device: torch.device) -> int:
        if self.memory is not None:
            return parse_bytes(self.memory)
        return int(_SHARE * free_memory(device))


def keep_freed_memory() -> bool:
    """Ask the C library not to give freed memory back at once. True if it can be asked (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def parse_bytes(text: str | int) -> int:
    """``8GiB``, ``500 MB`` or a plain number of bytes."""
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if found is None or found[2] not in _UNITS:
        raise UsageError(
            "USAGE",
            f"'{printable(text)}' is not an amount of memory",
            expected="a number of bytes, such as 8GiB or 500MB",
            fix="write it with a unit: --memory 8GiB",
        )
    return int(float(found[1]) * _UNITS[found[2]])


def show_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def free_memory(device: torch.device) -> int:
    """What can be had now: of the graphics card, or of the machine as far as a container lets us."""
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
    """By either version of control groups; without a limit, more than any machine has."""
    free = sys.maxsize
    for limit, used in _CONTAINER:
        try:
            most = (place / limit).read_text().strip()
            if most.isdecimal():
                free = min(free, max(0, int(most) - int((place / used).read_text())))
        except (OSError, ValueError):
            continue
    return free
