"""The fuzzer's cases of the default suite, and that the fuzzer itself finds what it should."""

from __future__ import annotations

import os
import random
import signal
import socket
from pathlib import Path
from typing import ClassVar

import pytest

from aniso.errors import InputError
from fuzz.mutations import MARKER
from fuzz.runner import case_of, run
from fuzz.targets import Case, Target, targets


@pytest.mark.parametrize("name", targets())
def test_damaged_and_hostile_files_end_in_our_errors_only(name, tmp_path):
    """Nothing runs, nothing is sent, no case takes 5 s of processor time or 700 MB of memory."""
    target = targets()[name]()
    result = run(target, target.quick, keep=tmp_path / "findings")
    assert not result.findings, "\n".join(map(str, result.findings))
    assert result.cases == target.quick and len(result.outcomes) > 1, result
    assert result.outcomes["ok"], "no case got past the first check"


@pytest.mark.parametrize(
    "name", [name for name in targets() if "encoders" not in name and name != "language-models"]
)
def test_cases_depend_on_the_seed_alone(name, tmp_path):
    found = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        target = targets()[name]()
        target.prepare(tmp_path / place)
        found.append([case_of(target, seed, i).files for seed in (0, 1) for i in range(5)])
    assert found[0] == found[1] and found[0][:5] != found[0][5:]


class Faulty(Target):
    """A reader that does, one case after the other, what no reader may do."""

    name: ClassVar[str] = "faulty"

    def prepare(self, place: Path) -> None:
        self.ways = [
            self._fine,
            self._bug,
            self._call,
            self._loop,
            self._memory,
            self._crash,
            self._fine,
        ]

    def case(self, rng: random.Random) -> Case:
        return Case({"way": b"x"})

    def read(self, folder: Path) -> None:
        self.ways.pop(0)()

    def _fine(self) -> None:
        raise InputError("FILE-EMPTY", "it is empty", fix="fill it")

    def _bug(self) -> None:
        raise ZeroDivisionError

    def _call(self) -> None:
        Path(MARKER).touch()

    def _loop(self) -> None:
        while True:
            pass

    def _memory(self) -> None:
        bytes(900 << 20).count(b"\1")
        self.kept = b"\1" * (900 << 20)

    def _crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _connect(self) -> None:
        socket.create_connection(("127.0.0.1", 9))


def test_the_fuzzer_finds_what_no_reader_may_do(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.runner.CASE_SECONDS", 1)
    result = run(Faulty(), 6, keep=tmp_path)
    found = {finding.case: finding.what for finding in result.findings}
    expected = {1: "ZeroDivisionError", 2: "marker", 3: "processor time", 4: "MB", 5: "ended with status"}
    assert found.keys() == expected.keys()
    assert all(expected[case] in what for case, what in found.items()), found
    assert (tmp_path / "faulty-0-1" / "way").read_bytes() == b"x"


def test_the_fuzzer_finds_connections(monkeypatch):
    monkeypatch.setattr(Faulty, "prepare", lambda self, place: setattr(self, "ways", [self._connect]))
    (finding,) = run(Faulty(), 1).findings
    assert "socket" in finding.what
