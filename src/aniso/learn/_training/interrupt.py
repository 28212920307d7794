"""Being asked to stop: the first request is heeded at the next step, a second Ctrl-C at once.

Other signals may come several times for one request: a scheduler sends them to every process of a group, and
a runner passes them on to its cells as well.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from aniso.errors import StoppedError

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While it is entered, Ctrl-C and requests to end do not interrupt; they are remembered."""

    def __init__(self) -> None:
        self.request: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python's rule: only there
            heard = [n for n in REQUESTS if signal.getsignal(n) is not signal.SIG_IGN]  # as nohup wants it
            self._before = {number: signal.signal(number, self._asked) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.request is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request = self.request or number

    def check(self) -> None:
        """Raise if there was a request."""
        if self.request is not None:
            raise StoppedError("STOPPED", "the run was asked to end", signal=self.request, fix="run it again")
