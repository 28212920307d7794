"""Names of temporary outputs, and a check whether the process that writes one is still alive.

A temporary file is called ``.NAME.partial-PID-HEX``, a temporary directory ``NAME.partial-PID-HEX``; the
first eight of the sixteen digits of HEX identify the running kernel, the others are random. Its writer holds
a lock (flock) on it. The system releases the lock when the last process that has it dies, so neither a reused
process id nor one of another container can mislead. Locks of another machine need not be visible on a shared
file system: outputs of another kernel are removed only after a week without a change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = r"\.partial-(?:old|[0-9]{1,10})-[0-9a-f]{16}"  # fewer digits could be a date in a user's own name
TEMPORARY_FILE = re.compile(rf"\..+{_SUFFIX}", re.DOTALL)
TEMPORARY = re.compile(rf".+{_SUFFIX}", re.DOTALL)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONG = 7 * 24 * 3600.0  # seconds; no write pauses for that long


def temporary_name(path: Path, *, hidden: bool) -> Path:
    """Return a new name beside ``path``: hidden for a file, visible for a directory."""
    return path.with_name(f"{'.' if hidden else ''}{path.name}.partial-{os.getpid()}-{_token()}")


def aside_name(path: Path) -> Path:
    """Return a new name for an old directory that is replaced in two steps."""
    return path.with_name(f"{path.name}.partial-old-{_token()}")


def directories_of(path: Path) -> re.Pattern[str]:
    """Return a pattern for the names of temporary directories of one output."""
    return re.compile(rf"{re.escape(path.name)}{_SUFFIX}")


def _token() -> str:
    return f"{_kernel()}{secrets.token_hex(4)}"


@functools.cache
def _kernel() -> str:
    """Return eight digits shared by all processes of this running system, including containers."""
    try:
        return hashlib.sha256(_BOOT.read_bytes()).hexdigest()[:8]
    except OSError:
        return "0" * 8


def claim(fd: int, path: Path) -> bool:
    """Lock a new temporary output for as long as it is open; returns False if a cleaner was faster.

    Without locks in the file system the output is not locked: then no other process can lock it either, and
    it is never taken for abandoned.
    """
    return _lock(fd) is not False and _is_at(fd, path)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep a directory from being removed as empty while the block runs."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Yield True if the writer of a temporary output is dead; no one else can claim it in the block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _is_ours(fd, path) and _lock(fd) is True and _is_at(fd, path)
    finally:
        os.close(fd)


def _is_ours(fd: int, path: Path) -> bool:
    """True if name and kind match and it was written under this kernel, or is older than a week."""
    if not TEMPORARY.fullmatch(path.name):
        return False
    status = os.fstat(fd)
    hidden = TEMPORARY_FILE.fullmatch(path.name) is not None
    if not (stat.S_ISREG(status.st_mode) and hidden) and not stat.S_ISDIR(status.st_mode):
        return False
    digits = path.name.rpartition("-")[2]
    here = digits.startswith(_kernel()) and _kernel() != "0" * 8
    return here or time.time() - status.st_mtime > _LONG


def _lock(fd: int) -> bool | None:
    """Return True if the lock was acquired, False if another process has it, None without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return False if e.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False
