"""Interrupts: the first signal stops the run before the next step, a second Ctrl-C at once.

Other signals may arrive several times for one request: a scheduler sends them to every process of a group,
and a runner forwards them to its workers as well.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from aniso.errors import StoppedError

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Context manager that records Ctrl-C and termination signals; ``check`` raises for them.

    Processes that share a run end together: ``agreed`` returns the largest of the signals that they have
    received, where 0 is none.
    """

    def __init__(self, agreed: Callable[[int], int] = int) -> None:
        self.request: int | None = None
        self._agreed = agreed
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python's rule: only there
            handled = [
                n for n in REQUESTS if signal.getsignal(n) is not signal.SIG_IGN
            ]  # nohup ignores SIGHUP
            self._before = {number: signal.signal(number, self._requested) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _requested(self, number: int, frame: FrameType | None) -> None:
        if self.request is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request = self.request or number

    def check(self) -> None:
        """Raise StoppedError if a signal has arrived."""
        request = self._agreed(self.request or 0)
        if request:
            raise StoppedError("STOPPED", "the run was interrupted", signal=request, fix="run it again")
