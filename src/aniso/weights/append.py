"""Append-only output: rows are added to ``NAME.partial``, which becomes ``NAME`` once it is complete.

Readers of ``NAME`` see the old file or the whole new one. A process that dies leaves ``NAME.partial``, to
which the next one appends after the last complete line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self, final

from aniso.errors import LockedError, printable
from aniso.weights.atomic import disk, make_directory, os_errors, sync_directory

_PIECE = 1 << 20  # bytes read at once


@final
class AppendedFile:
    """The partial file of one output, locked against other processes while it is open."""

    def __init__(self, path: Path) -> None:
        """Create the partial file beside ``path``, or open the one that is there."""
        self.path = Path(path)
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        make_directory(self.path.absolute().parent)
        with os_errors(self.partial):
            self._fd = disk.open_or_create(self.partial)
            try:
                self._lock()
                self.size = os.fstat(self._fd).st_size
            except BaseException:
                os.close(self._fd)
                raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise LockedError(
                "OUT-LOCKED",
                f"'{printable(self.partial)}' is being written by another process",
                fix="wait for it to end, then run the command again",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def cut_incomplete_line(self) -> None:
        """Remove what follows the last line break: a line that a killed process did not finish."""
        end = self.size
        while end:
            start = max(0, end - _PIECE)
            place = os.pread(self._fd, end - start, start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        self.cut(end)

    def cut(self, size: int) -> None:
        """Remove what follows the first bytes."""
        if size != self.size:
            with os_errors(self.partial):
                disk.truncate(self._fd, size)
            self.size = size

    def write(self, data: bytes) -> None:
        """Append bytes, and wait until they are on the disk."""
        with os_errors(self.partial):
            view = memoryview(data)
            while view:
                written = disk.pwrite(self._fd, view, self.size)
                if written <= 0:
                    raise OSError(errno.EIO, "nothing could be written")
                self.size += written
                view = view[written:]
            disk.fsync(self._fd)

    def copy(self, path: Path) -> None:
        """Append the content of a file."""
        for piece in _pieces(path):
            self.write(piece)

    def finish(self) -> None:
        """Rename the partial file to the output."""
        with os_errors(self.path):
            disk.fsync(self._fd)
            disk.replace(self.partial, self.path)
            sync_directory(self.path.absolute().parent)

    def discard(self) -> None:
        """Remove the partial file."""
        with contextlib.suppress(FileNotFoundError):
            disk.remove(self.partial)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
