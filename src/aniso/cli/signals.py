"""Requests to end (SIGTERM, SIGHUP) as exceptions, so that a command cleans up before it exits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """The process was asked to end; like Ctrl-C it passes every ``except Exception``."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Raise ``Ended`` in this process where the signal would end it without notice.

    A signal that is ignored (``nohup``) stays ignored, and one that somebody handles is left to them. Forked
    processes end as they would without us.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
        yield
        return
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            raise Ended(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    mine = [number for number in _REQUESTS if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
