"""Runs many cases of a target in a process of their own, and reports each that ends badly."""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .limits import limit, memory
from .mutations import MARKER
from .targets import Case, Target

CASE_SECONDS = 5
"""Processor time for one case. A reader that is in C at that time is ended at four times this."""
CASE_MEGABYTES = 700
_ROOM = 2 << 30
_MOST_FINDINGS = 50
_TOO_LONG = "more processor time than a case may take"
_FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.getaddrinfo", "socket.bind", "pickle.find_class", "webbrowser.open"),
)


class _BadEnd(BaseException):
    """No reader may catch this."""


@dataclass(frozen=True)
class Finding:
    """A case that did not end as it should."""

    target: str
    seed: int
    case: int
    what: str

    def __str__(self) -> str:
        repeat = f"--target {self.target} --seed {self.seed} --first {self.case} --cases 1"
        return (
            f"{self.target}, seed {self.seed}, case {self.case}: {self.what}\n  python -m tests.fuzz {repeat}"
        )


@dataclass
class Result:
    """What came of a target's cases."""

    target: str
    cases: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest: float = 0.0
    megabytes: float = 0.0


def run(
    target: Target,
    cases: int,
    seed: int = 0,
    *,
    first: int = 0,
    seconds: float = 1e9,
    keep: Path | None = None,
) -> Result:
    """Run cases ``first`` to ``first + cases``; a case that ends its process does not end the others."""
    result, end = Result(target.name), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        target.prepare(Path(place))
        at = first
        while at < first + cases and time.monotonic() < end and len(result.findings) < _MOST_FINDINGS:
            at = _batch(target, seed, at, first + cases, end, Path(place), result)
        if keep is not None:
            for finding in result.findings:
                _keep(target, finding, keep)
    return result


def _batch(target: Target, seed: int, at: int, stop: int, end: float, place: Path, result: Result) -> int:
    """Run cases in one child until all are done or one ends it; the number of the next one.

    The child writes a line before and after each case, so that nothing is lost if a case ends it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            try:
                _Child(target, seed, place, pipe).run(at, stop, end)
            except BaseException:
                pipe.write(json.dumps({"failed": traceback.format_exc()}) + "\n")
                pipe.flush()
        os._exit(0)
    os.close(writing)
    begun = None
    with os.fdopen(reading) as pipe:
        for line in pipe:
            said = json.loads(line)
            if "failed" in said:
                raise RuntimeError(f"the fuzzer itself failed in {target.name}:\n{said['failed']}")
            begun = said.get("begun")
            if begun is None:
                _add(result, Finding(target.name, seed, at, said["problem"]), said)
                at += 1
    _, status = os.waitpid(child, 0)
    if begun is not None:
        what = f"the process ended with status {status} (killed by a limit, or crashed)"
        _add(result, Finding(target.name, seed, at, what), {"outcome": "bad", "seconds": 0, "megabytes": 0})
        return at + 1
    return at if len(result.findings) < _MOST_FINDINGS and time.monotonic() < end else stop


def _add(result: Result, finding: Finding, said: dict[str, Any]) -> None:
    result.cases += 1
    result.outcomes[said["outcome"]] += 1
    result.slowest = max(result.slowest, said["seconds"])
    result.megabytes = max(result.megabytes, said["megabytes"])
    if finding.what:
        result.findings.append(finding)


class _Child:
    """The process that runs cases."""

    def __init__(self, target: Target, seed: int, place: Path, pipe: IO[str]) -> None:
        self._target, self._seed, self._pipe = target, seed, pipe
        self._folder, self._marker = place / "case", place / MARKER
        os.chdir(place)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries complain there about damaged files
        self._reading = False
        limit(10**6, _ROOM)
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGVTALRM, self._too_long)

    def run(self, at: int, stop: int, end: float) -> None:
        self._target.warm(self._folder)
        findings = 0
        for case in range(at, stop):
            if time.monotonic() > end or findings >= _MOST_FINDINGS:
                break
            self._say(begun=case)
            findings += bool(self._one(case))

    def _say(self, **words: Any) -> None:
        self._pipe.write(json.dumps(words) + "\n")
        self._pipe.flush()

    def _one(self, number: int) -> str:
        case = case_of(self._target, self._seed, number)
        write(case, self._folder)
        used = time.process_time()
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + 4 * CASE_SECONDS) + 1, hard))
        before = memory(reset=True)
        outcome, problem = self._outcome(case)
        spent, peak = time.process_time() - used, memory() - before
        if peak > CASE_MEGABYTES:
            problem = problem or f"{peak:.0f} MB of memory"
        if spent > 2 * CASE_SECONDS:
            problem = problem or _TOO_LONG
        if self._marker.exists():
            self._marker.unlink()
            problem = "the marker file appeared: something in the input was executed"
        self._say(outcome=outcome, problem=problem, seconds=spent, megabytes=peak)
        return problem

    def _outcome(self, case: Case) -> tuple[str, str]:
        from aniso.errors import AnisoError

        self._reading = True
        signal.setitimer(signal.ITIMER_VIRTUAL, CASE_SECONDS)
        try:
            self._target.read(self._folder)
            return "ok", "damage was not noticed" if case.damaged else ""
        except AnisoError as e:
            return e.code, _unfit(e)
        except _BadEnd as e:
            return "bad", str(e)
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            return "bad", f"{type(e).__name__} at {where}: {str(e)[:200]!a}"
        finally:
            self._reading = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._reading and event.startswith(_FORBIDDEN):
            raise _BadEnd(f"the reader caused {event} {str(args)[:100]}")

    def _too_long(self, *_: object) -> None:
        if self._reading:  # else it has just ended, and what it took is looked at then
            raise _BadEnd(_TOO_LONG)


def _unfit(error: Any) -> str:
    """What is wrong with an error of ours: it must be printable, and not blame aniso."""
    shown, data = str(error), json.dumps(error.to_json())
    if error.exit_code not in (2, 3, 4, 6):
        return f"{error.code} has exit code {error.exit_code}: {shown[:200]!a}"
    if not error.fix or not all(line.isprintable() for line in shown.split("\n")) or len(data) > 20_000:
        return f"an error without a fix, or that cannot be printed: {shown[:200]!a}"
    return ""


def case_of(target: Target, seed: int, number: int) -> Case:
    """The input of one case, the same whenever and wherever it is made."""
    return target.case(random.Random(f"{target.name}/{seed}/{number}"))


def write(case: Case, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _keep(target: Target, finding: Finding, keep: Path) -> None:
    folder = keep / f"{finding.target}-{finding.seed}-{finding.case}"
    write(case_of(target, finding.seed, finding.case), folder)
    (folder / "finding.txt").write_text(f"{finding}\n")
