"""Trackers get the numbers of every epoch, and can never stop a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from aniso.learn import EpochRow, Tracker
from aniso.learn.tracking import epoch_numbers

ROW = EpochRow(epoch=3, loss=0.5, terms={"cars train": 0.5}, accuracy={"cars val": 0.25})


class Recorder:
    """wandb's functions, which write down how they are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.api = SimpleNamespace(api_key=None)

    def init(self, **how: object) -> None:
        self.calls.append(("init", how))

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.calls.append(("log", (numbers, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_both_trackers_are_called_in_the_same_way(name, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fake, notes = Recorder(), []
    monkeypatch.setitem(sys.modules, name, fake)
    sink = Tracker(name, run="first", directory=tmp_path, config={"seed": 1}, note=notes.append)
    sink(ROW)
    sink.finish()
    (started, how), logged, (ended, _) = fake.calls
    assert (started, ended) == ("init", "finish") and not notes
    assert (how["project"], how["name"], how["config"]) == ("aniso", "first", {"seed": 1})
    assert logged == ("log", ({"accuracy/cars_val": 0.25, "loss/cars_train": 0.5, "loss": 0.5}, 3))
    if name == "wandb":  # without a key it would ask for one, and wait
        assert how["mode"] == "offline" and how["dir"] == str(tmp_path)


def test_a_key_or_a_mode_of_the_users_own_is_respected(monkeypatch):
    fake = Recorder()
    fake.api.api_key = "known"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    Tracker("wandb")
    assert "mode" not in fake.calls[0][1]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit(1)], ids=["error", "exit"])
def test_whatever_fails_is_one_note(failing, error, monkeypatch):
    def fail(*arguments: object, **how: object) -> None:
        raise error

    fake, notes = Recorder(), []
    monkeypatch.setattr(fake, failing, fail)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    sink = Tracker("trackio", note=notes.append)
    for _ in range(3):
        sink(ROW)
    sink.finish()
    assert len(notes) == 1 and notes[0].startswith("trackio is not used: ")


def test_a_missing_package_is_a_note_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails
    notes = []
    Tracker("wandb", note=notes.append)(ROW)
    assert len(notes) == 1 and "pip install wandb" in notes[0]


def test_ctrl_c_is_not_a_failure_of_a_tracker(monkeypatch):
    def interrupted(*arguments: object, **how: object) -> None:
        raise KeyboardInterrupt

    fake = Recorder()
    monkeypatch.setattr(fake, "log", interrupted)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with pytest.raises(KeyboardInterrupt):
        Tracker("trackio")(ROW)


def test_the_start_of_a_run_has_no_loss():
    assert epoch_numbers(EpochRow(epoch=0, perplexity={"a b": 2.0})) == {"perplexity/a_b": 2.0}
