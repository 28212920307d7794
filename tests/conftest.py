"""What every test may rely on: one thread, no network, a way to state a refusal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COLUMNS"] = "160"
os.environ.pop("ANISO_DEBUG", None)

import pytest
import torch

from aniso.cli import main
from aniso.errors import AnisoError

# Two threads on two busy cores are slower than one, and bits depend on the number of threads.
torch.set_num_threads(1)


@dataclass
class Refusal:
    error: AnisoError | None = None


@contextlib.contextmanager
def _refused(code: str, exit_code: int, *mentions: str) -> Iterator[Refusal]:
    out = Refusal()
    with pytest.raises(AnisoError) as caught:
        yield out
    out.error = caught.value
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code), str(caught.value)
    for text in mentions:
        assert text in str(caught.value), str(caught.value)


@pytest.fixture
def refused():
    """``with refused("CKPT-SHAPE", 3, "visual.proj"):`` the block must raise that error and say that."""
    return _refused


@pytest.fixture(scope="session")
def mini_data() -> Path:
    """The directory of small real tasks, where there is one."""
    said = os.environ.get("ANISO_MINI_DATA")
    path = Path(said) if said else Path(__file__).parents[2] / "shared" / "data" / "mini"
    if not path.is_dir():
        pytest.skip("needs the mini data: set ANISO_MINI_DATA to their directory")
    return path


@pytest.fixture(scope="session")
def text_data() -> Path:
    """The directory of small real text tasks, where there is one."""
    said = os.environ.get("ANISO_TEXT_DATA")
    path = Path(said) if said else Path(__file__).parents[2] / "shared" / "data" / "texts"
    if not path.is_dir():
        pytest.skip("needs the text tasks: set ANISO_TEXT_DATA to their directory")
    return path


@pytest.fixture(scope="session")
def paper_source() -> str:
    """The paper's LaTeX, where there is a copy."""
    given = os.environ.get("ANISO_PAPER_SOURCE")
    path = Path(given) if given else Path(__file__).parents[2] / "shared" / "paper"
    files = sorted(path.glob("*.txt"))
    if not files:
        pytest.skip("needs the paper's LaTeX: set ANISO_PAPER_SOURCE to its directory")
    return "\n".join(file.read_text() for file in files)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or fills the user's cache."""
    os.environ["ANISO_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def aniso(capfd: pytest.CaptureFixture[str]):
    """Run a command in this process: ``aniso("inspect", path)`` gives its exit code and output."""

    def run(*args: object) -> Ran:
        capfd.readouterr()
        code = main([str(a) for a in args])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err, captured.err
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    """No test may leave a temporary or partial file behind."""
    yield
    left = [p for p in tmp_path.rglob("*") if ".partial-" in p.name]
    assert not left, left


class _CurrentStderr:
    """Standard error as it is when something is written."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@pytest.fixture(autouse=True)
def _transformers_logs_to_this_test() -> None:
    """Its handler keeps the standard error of the test that imported it, which is closed by now."""
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:
            handler.stream = _CurrentStderr()
            handler.flush = handler.stream.flush  # transformers binds it to the stream of then
