"""Being asked to stop: the first request is heeded at the next step, the second at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from aniso.errors import StoppedError

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """While it is entered, Ctrl-C and requests to end do not interrupt; they are remembered."""

    def __init__(self) -> None:
        self.request: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python's rule: only there
            heard = [n for n in _REQUESTS if signal.getsignal(n) is not signal.SIG_IGN]  # as nohup wants it
            self._before = {number: signal.signal(number, self._asked) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.request is not None:
            raise KeyboardInterrupt
        self.request = number

    def check(self) -> None:
        """Raise if there was a request."""
        if self.request is not None:
            raise StoppedError("STOPPED", "the run was asked to end", signal=self.request, fix="run it again")
