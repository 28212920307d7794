"""Progress on terminals: shown after a second, on one line, never where it was switched off."""

from __future__ import annotations

import io

import pytest

import aniso
from aniso import progress
from aniso.progress import ProgressLine, progress_or_default, silent


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_quick_work_shows_nothing(clock):
    out = io.StringIO()
    line = ProgressLine(out)
    for i in range(10):
        clock[0] += 0.05
        line("images", i + 1, 10)
    assert out.getvalue() == ""


def test_long_work_shows_one_line_with_the_time_left_and_clears_it(clock):
    out = io.StringIO()
    line = ProgressLine(out)
    for i in range(4):
        line("images", i + 1, 4)
        clock[0] += 30
    shown = out.getvalue()
    assert "images: 2 of 4, 0:30 left" in shown
    assert "\n" not in shown
    assert shown.endswith("\r")


def test_it_is_silent_away_from_terminals_unless_asked_for(monkeypatch):
    monkeypatch.setattr(progress, "_enabled", None)
    assert progress_or_default(None) is silent
    aniso.set_progress(True)
    assert isinstance(progress_or_default(None), ProgressLine)
    aniso.set_progress(False)
    assert progress_or_default(None) is silent


def test_a_callback_of_ones_own_wins():
    def own(what: str, done: int, total: int) -> None: ...

    assert progress_or_default(own) is own
