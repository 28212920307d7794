"""Running a function in a process of its own, with limits on its time and memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOM = 3 << 30
"""Bytes of address space beyond what the process has; above what is asserted, so that a test can say more."""


@dataclass(frozen=True)
class Measured:
    """What a call did and what it cost."""

    outcome: str
    """The code of the error it raised, or ``ok``."""
    exit_code: int
    message: str
    seconds: float
    """Processor time."""
    megabytes: float
    """The most memory at one time, beyond what the process had before."""


def measured(function: Callable[[], object], *, seconds: int = 60) -> Measured:
    """Call ``function`` in a forked process; the operating system ends it after ``seconds`` of work."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            limit(seconds, ROOM)
            result = _measure(function)
        except BaseException as e:
            result = Measured(f"{type(e).__name__}: {e}"[:300], 1, "", 0.0, 0.0)
        with contextlib.suppress(OSError), os.fdopen(writing, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if not data:
        return Measured(f"ended by signal {os.WTERMSIG(status)}", 1, "", float(seconds), 0.0)
    return pickle.loads(data)


def limit(seconds: int, room: int) -> None:
    """Limit this process: seconds of processor time from now on, and bytes beyond those it has."""
    used = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _measure(function: Callable[[], object]) -> Measured:
    from aniso.errors import AnisoError

    before, start = memory(reset=True), time.process_time()
    outcome, code, message = "ok", 0, ""
    try:
        kept = function()
    except AnisoError as e:
        kept, outcome, code, message = None, e.code, e.exit_code, str(e)
    seconds = time.process_time() - start
    del kept
    return Measured(outcome, code, message, seconds, memory() - before)


def memory(*, reset: bool = False) -> float:
    """Megabytes: the most so far; with ``reset``, those in use now, and the count of the most begins anew."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmRSS" if reset else "VmHWM"
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
