"""The system calls that change the disk, in one place, so that tests can make any of them fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

from aniso.weights.temporary import aside_name, held

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Disk:
    """The system calls that change the disk."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_or_create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def replace(self, old: Path, new: Path) -> None:
        old.replace(new)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def exchange(self, a: Path, b: Path) -> None:
        """Swap two directories in one step, where the file system supports it."""
        libc = ctypes.CDLL(None, use_errno=True)
        done = -1
        if hasattr(libc, "renameat2"):
            done = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
        if done != 0:
            with held(b):  # or the next writer would take it for an abandoned one
                aside = aside_name(b)
                b.rename(aside)
                try:
                    a.rename(b)
                except OSError:
                    aside.rename(b)
                    raise
                aside.rename(a)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # another process removes it at the same time
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
