"""Progress of long operations: a line on a terminal or in a notebook, unless it is switched off."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, final

ProgressCallback = Callable[[str, int, int], None]
"""Called with a description, the number of steps done, and the total."""

_FIRST = 1.0  # seconds of work before anything is shown
_PAUSE = 0.1  # seconds between two updates
_enabled: bool | None = None


def set_progress(on: bool | None) -> None:
    """Show progress always, never, or (None, the default) on terminals and in notebooks.

    Functions that get a progress callback as an argument are not affected.
    """
    global _enabled
    _enabled = on


def progress_or_default(callback: ProgressCallback | None) -> ProgressCallback:
    """Return the callback, or by default a line on standard error if progress is shown."""
    if callback is not None:
        return callback
    return ProgressLine(sys.stderr) if _is_shown() else silent


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


def _is_shown() -> bool:
    if _enabled is not None:
        return _enabled
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@final
class ProgressLine:
    """A progress line that is rewritten: ``few-shot: 12 of 40, 0:08 left``; nothing in the first second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._what = ""
        self._begun = self._shown = 0.0
        self._width = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._end()
            self._what, self._begun = what, now
        is_last = done >= total
        if now - self._begun < _FIRST or (now - self._shown < _PAUSE and not is_last):
            return
        self._shown = now
        left = (now - self._begun) / max(done, 1) * max(total - done, 0)
        text = f"{what}: {done:,} of {total:,}, {int(left) // 60}:{int(left) % 60:02d} left"
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)
        if is_last:
            self._end()

    def _end(self) -> None:
        """Clear the line, so that the next output starts on an empty one."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
        self._width = 0
