"""The cache directory, and a cache of file hashes that are valid until a file changes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

_VERSION = 1
_SETTLED = 2_000_000_000
"""Nanoseconds from a file's last change until its hash is cached. Some file systems store times to two
seconds: a file that was hashed sooner may change without a new time, so it is hashed again next time."""


def cache_directory(name: str) -> Path | None:
    """Return a directory below ``$ANISO_CACHE``, or ``aniso`` in the user's cache directory, or None."""
    chosen = os.environ.get("ANISO_CACHE")
    home = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "aniso"
    try:
        return home.expanduser() / name
    except RuntimeError:  # no home
        return None


@final
class HashCache:
    """The sha256 of file contents, computed once per state of a file and stored in a small database.

    A cache that cannot be read or written is no error: contents are hashed again.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._known: dict[tuple[bytes, str], tuple[str, bytes]] = {}
        self._loaded: set[bytes] = set()
        self._new: dict[tuple[bytes, str], tuple[str, bytes]] = {}

    def digest(self, path: Path, part: str, read: Callable[[], bytes]) -> bytes:
        """Return the sha256 of ``read()``, a part of a file; an unchanged file is not read again."""
        key = (os.fsencode(os.path.abspath(path)), part)  # noqa: PTH100 - of a link, not of what it leads to
        begun = time.time_ns()
        try:
            status = path.stat()
        except OSError:
            return hashlib.sha256(read()).digest()  # raises the error for it
        state = _state(status)
        self._load(os.path.dirname(key[0]))  # noqa: PTH120
        known = self._known.get(key)
        if known is not None and known[0] == state:
            return known[1]
        digest = hashlib.sha256(read()).digest()
        if begun - max(status.st_mtime_ns, status.st_ctime_ns) >= _SETTLED:
            self._known[key] = self._new[key] = (state, digest)
        return digest

    def save(self) -> None:
        """Write the hashes computed since the last call."""
        new, self._new = self._new, {}
        rows = [(*os.path.split(place), part, *found) for (place, part), found in new.items()]
        if not rows:
            return
        with contextlib.suppress(sqlite3.Error, OSError), contextlib.closing(self._database()) as database:
            database.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", rows)
            database.commit()

    def _load(self, folder: bytes) -> None:
        """Read the cached hashes of all files in a directory, when the first of them is needed."""
        if folder in self._loaded:
            return
        self._loaded.add(folder)
        with contextlib.suppress(sqlite3.Error, OSError), contextlib.closing(self._database()) as database:
            query = "SELECT name, part, state, digest FROM files WHERE folder = ?"
            for name, part, state, digest in database.execute(query, (folder,)):
                self._known.setdefault((os.path.join(folder, name), part), (state, digest))  # noqa: PTH118

    def _database(self) -> sqlite3.Connection:
        if self._directory is None:
            raise OSError("there is no cache directory")
        self._directory.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._directory / f"files-{_VERSION}.sqlite", timeout=10)
        database.execute(
            "CREATE TABLE IF NOT EXISTS files (folder BLOB, name BLOB, part TEXT, state TEXT, digest BLOB, "
            "PRIMARY KEY (folder, name, part))"
        )
        return database


def _state(status: os.stat_result) -> str:
    """Return values that change whenever a file is written or replaced; ctime cannot be set back."""
    fields = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
    return " ".join(str(getattr(status, field)) for field in fields)
