"""A pool of open file descriptors of bounded size; the most recently used ones stay open."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from dataclasses import dataclass
from typing import final

_MOST = 256
_SHARE = 4  # a quarter of the descriptors that a process may have; the rest is for other code


@final
@dataclass
class _Open:
    fd: int
    users: int = 0


@final
class OpenFiles:
    """Descriptors by key, least recently used first. Threads may share it; forked processes have their own.

    ``close`` takes no lock: it is called when the garbage collector finds a file, in any thread and at any
    time. Only removing an entry from the dictionary gives the right to close its descriptor.
    """

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._open: dict[int, _Open] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, fd: int) -> int:
        """Take over a descriptor; returns its key."""
        with self._lock:
            key = next(self._keys)
            self._open[key] = _Open(fd)
            self._make_room()
        return key

    def borrow(self, key: int) -> int | None:
        """Return a descriptor, which stays open until ``give_back``; None if it was closed."""
        with self._lock:
            found = self._open.pop(key, None)
            if found is None:
                return None
            self._open[key] = found  # the last entry is the most recently used
            found.users += 1
            return found.fd

    def lend(self, key: int, fd: int) -> int:
        """Take over a descriptor that was opened again; as ``borrow`` from then on."""
        with self._lock:
            found = self._open.get(key)
            if found is not None:  # another thread was faster
                os.close(fd)
            else:
                found = self._open[key] = _Open(fd)
            found.users += 1
            self._make_room()
            return found.fd

    def give_back(self, key: int) -> None:
        with self._lock:
            self._open[key].users -= 1

    def close(self, key: int) -> None:
        found = self._open.pop(key, None)
        if found is not None:
            os.close(found.fd)

    def close_some(self) -> bool:
        """Close half of the idle descriptors; returns False if there are none."""
        with self._lock:
            idle = self._idle()
            for key in idle[: -(-len(idle) // 2)]:
                self.close(key)
        return bool(idle)

    def _make_room(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _MOST if limit == resource.RLIM_INFINITY else max(1, min(_MOST, limit // _SHARE))
        excess = len(self._open) - most
        if excess > 0:
            for key in self._idle()[:excess]:
                self.close(key)

    def _idle(self) -> list[int]:
        """Return the keys of idle descriptors, least recently used first."""
        while True:
            try:
                return [key for key, found in self._open.items() if not found.users]
            except RuntimeError:  # the garbage collector closed one meanwhile
                continue

    def forget_threads(self) -> None:
        """Reset locks and uses in a forked process, which does not have the parent's threads."""
        self._lock = threading.RLock()
        for found in self._open.values():
            found.users = 0


open_files = OpenFiles()
os.register_at_fork(after_in_child=open_files.forget_threads)
