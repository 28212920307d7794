"""Claims on cells, by which several machines share a grid: one small file per cell, with a heartbeat.

Nothing depends on locks of the file system, which networks do not always keep, nor on clocks that agree:
a claim is stale if its text has not changed for a whole lease, on the clock of the one who looks. Two workers
can still run the same cell, after a pause that was longer than the lease; both then find the same, and one
record is kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

LEASE = 600.0
"""Seconds without a heartbeat after which a cell is taken over."""
_BEATS = 10  # per lease
CLAIMS = ".claims"


@final
class Claims:
    """The claims of one worker, below the directory of records; a context that gives them up when it ends."""

    def __init__(
        self, directory: Path, lease: float = LEASE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory / CLAIMS
        self._lease = lease
        self._clock = clock
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._held: dict[str, int] = {}
        self._seen: dict[str, tuple[str, float]] = {}
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, daemon=True)
        self.lost: set[str] = set()
        """Cells that another worker took over, because this one had no heartbeat for too long."""

    def __enter__(self) -> Claims:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for cell in list(self._held):
            self.release(cell)
        with contextlib.suppress(OSError):  # others still have claims
            self._directory.rmdir()

    def take(self, cell: str) -> bool:
        """Claim a cell by its id; False if another worker has it, and seems to be alive."""
        with self._guard:
            if cell in self._held:
                return True
            if self._create(cell):
                return True
            text = self._read(cell)
            if text is None:  # given up between the two
                return self._create(cell)
            seen, since = self._seen.get(cell, (None, 0.0))
            if seen != text:
                self._seen[cell] = (text, self._clock())
                return False
            return self._clock() - since >= self._lease and self._take_over(cell, text)

    def release(self, cell: str) -> None:
        """Give a claim up, if it is still this worker's."""
        with self._guard:
            if self._held.pop(cell, None) is not None and self._is_own(self._read(cell)):
                self._path(cell).unlink(missing_ok=True)

    def beat(self) -> None:
        """Show that this worker is alive, in all of its claims; note which it has lost."""
        with self._guard:
            for cell, count in list(self._held.items()):
                text = self._read(cell)
                if not (self._create(cell) if text is None else self._is_own(text)):
                    del self._held[cell]
                    self.lost.add(cell)
                    continue
                self._held[cell] = count + 1
                fresh = self._aside(cell)
                fresh.write_text(self._text(count + 1))
                fresh.replace(self._path(cell))

    def _beat_until_stopped(self) -> None:
        while not self._stop.wait(self._lease / _BEATS):
            with contextlib.suppress(
                OSError
            ):  # a network that is away for a while; the next beat may succeed
                self.beat()

    def _create(self, cell: str) -> bool:
        try:
            file = os.open(self._path(cell), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "w") as stream:
            stream.write(self._text(0))
        self._held[cell] = 0
        self._seen.pop(cell, None)
        return True

    def _take_over(self, cell: str, stale: str) -> bool:
        """Move a stale claim aside, which one of several workers can do; put it back if it was alive."""
        aside = self._aside(cell)
        try:
            self._path(cell).rename(aside)
        except FileNotFoundError:
            return False
        alive = aside.read_text(errors="replace") != stale
        if alive:
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._path(cell))
        aside.unlink(missing_ok=True)
        return not alive and self._create(cell)

    def _read(self, cell: str) -> str | None:
        try:
            return self._path(cell).read_text(errors="replace")
        except FileNotFoundError:
            return None

    def _is_own(self, text: str | None) -> bool:
        return text is not None and text.partition("\n")[0] == self.worker

    def _text(self, beats: int) -> str:
        return f"{self.worker}\n{beats}\n"

    def _path(self, cell: str) -> Path:
        return self._directory / cell

    def _aside(self, cell: str) -> Path:
        return self._directory / f"{cell}.{self.worker}"
