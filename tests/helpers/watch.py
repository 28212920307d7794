"""What fault tests share: reading under watch, limits on memory and time, settings for fuzzing."""

import contextlib
import signal
import stat
import tracemalloc
from pathlib import Path

from hypothesis import HealthCheck, settings

from aniso.weights import open_weights

FUZZ = settings(
    deadline=None,
    max_examples=150,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def contents(folder):
    """What lies in a folder; large files by size and time, others in full."""
    out = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        small = stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20
        kept = path.read_bytes() if small else (status.st_size, status.st_mtime_ns)
        out[str(path)] = (status.st_mode, kept)
    return out


def read_all(path, **options):
    """The source and all of its tensors; however it ends, the folder must be as it was before."""
    folder = Path(str(path).partition("::")[0]).parent
    before = contents(folder)
    try:
        source = open_weights(path, **options)
        return source, {name: source.read(name) for name in source.tensors}
    finally:
        assert contents(folder) == before


@contextlib.contextmanager
def peak_below(megabytes):
    """Whether the block ends well or in an error, it must not have needed more memory than this."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < megabytes << 20, f"{peak >> 20} MB"


class HangError(Exception):
    pass


@contextlib.contextmanager
def no_hang(seconds=10):
    """Turns a read that never ends into a failed test."""

    def give_up(*_):
        raise HangError

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
