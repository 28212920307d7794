"""What a run needs, small: a model, a bank with vectors named like tasks, pictures of two colours."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pictures
import pytest
import tiny
from PIL import Image, ImageChops

from aniso.cli import main
from aniso.errors import StoppedError
from aniso.learn._training.loop import Loop
from aniso.record_files import RecordStore
from aniso.vectors import Bank

VECTORS = ("cars", "dtd", "signs", "photos")
COLOURS = {"red": (190, 20, 20), "blue": (20, 20, 190)}


@dataclass(frozen=True)
class Shelf:
    """Directories of a model and a bank, and tasks below ``data``: photos, and cars and dtd with splits."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def bank(self) -> Path:
        return self.root / "bank"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def base(self) -> tuple[str, ...]:
        return "--model", str(self.model), "--bank", str(self.bank)

    def few_shot(self, *more: object) -> tuple[str, ...]:
        """A short run that learns something."""
        trained = not {"none", "vector", "search", "gradient-free"} & {*map(str, more)}
        quick = ("--epochs", 2, "--batch-size", 3, "--min-steps-per-epoch", 2) if trained else ()
        given = ("fit", "few-shot", *self.base, "--task", self.data / "photos", "--shots", 3, "--no-compare")
        given += (*quick, *more)
        return tuple(map(str, given))


def shelf(root: Path) -> Shelf:
    made = Shelf(root)
    base = tiny.hf_clip_state(tiny.hf_clip_directory(made.model))
    tuned = {name: tiny.tuned_vision(base, tiny.is_hf_vision, i) for i, name in enumerate(VECTORS, 1)}
    Bank.build(made.model, tuned, to=made.bank)
    coloured(made.data / "photos", 12)
    for name, first in (("cars", 100), ("dtd", 200)):
        for part, count in (("train", 4), ("val", 4), ("test", 6)):
            coloured(made.data / name / part, count, first)
            first += 20
    return made


def coloured(root: Path, count: int, first: int = 0) -> Path:
    """So many reddish pictures and so many bluish ones."""
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            drawn = pictures.picture(first + i).point(lambda v: v // 4)
            ImageChops.add(drawn, Image.new("RGB", drawn.size, colour)).save(root / name / f"{i}.png")
    return root


def recorded(directory: Path) -> list[dict[str, Any]]:
    """The finished records of an experiment, sorted by id."""
    return [record.content() for record in RecordStore(directory).finished().values()]


class At:
    """Asks the run to stop at the n-th report of progress."""

    def __init__(self, n: int) -> None:
        self.n, self.calls = n, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls += 1
        if self.calls == self.n:
            os.kill(os.getpid(), signal.SIGTERM)


BROKEN = 79


def heeding_signals() -> None:
    """Undo what ``nohup``, or a shell that starts something in the background, makes every child ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Child:
    """Work in a forked process, in a session of its own: nothing is imported again, any signal may hit it."""

    def __init__(self, work: Callable[[], int], log: Path) -> None:
        self.log = log
        self.code: int | None = None
        log.touch()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)

    def _run(self, work: Callable[[], int]) -> None:
        code = BROKEN
        try:
            os.setsid()
            heeding_signals()
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
            code = work()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float = 60) -> int:
        until(lambda: self.poll() is not None, seconds, self)
        assert self.code is not None
        return self.code

    @property
    def alone(self) -> bool:
        """Whether no process of its session is left."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


@contextlib.contextmanager
def child(*args: object, log: Path, first: Callable[[], object] = lambda: None) -> Iterator[Child]:
    """``aniso ARGS`` in a child that calls ``first`` before; it does not outlive the block."""

    def work() -> int:
        first()
        return main([str(a) for a in args])

    started = Child(work, log)
    try:
        yield started
    finally:
        started.end()


def until(happened: Callable[[], object], seconds: float = 60, what: Child | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"nothing after {seconds} s: {what.said if what else ''}")
        time.sleep(0.01)


def slowly(seconds: float = 0.1) -> None:
    """From now on every step says that it begins, and takes so long."""
    step = Loop._take_step

    def slow(self, batches):
        os.write(2, b"a step begins\n")
        time.sleep(seconds)
        step(self, batches)

    Loop._take_step = slow


class StopAfterSteps:
    """A progress callback that interrupts a run after a number of steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self, what: str, done: int, total: int) -> None:
        self._left -= what.startswith("epoch")
        if self._left == 0:
            raise StoppedError("STOPPED", "enough", signal=2)
