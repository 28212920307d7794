"""Table H: runs that are killed, interrupted, poisoned, started twice, or left without a disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

import pictures
import pytest
import runs
import torch
from runs import child, slowly, until
from watch import contents

from aniso.cli.run_setting import run_setting
from aniso.experiments import session, spec
from aniso.experiments.engines import local
from aniso.experiments.grid import Grid
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.experiments.strict_yaml import read_yaml, validated
from aniso.learn._training.training_checkpoint import TrainingCheckpoints
from aniso.models import load_model
from aniso.weights import open_weights, save_safetensors
from aniso.weights.atomic import Disk, locked

KILLED, SKIPPED = 77, 78
CALLS = ("create", "pwrite", "fsync", "replace", "mkdir", "rmdir", "exchange", "remove")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(autouse=True)
def _loaded_once(shelf, monkeypatch):
    """Reading the same model a hundred times is not what is tested here."""
    monkeypatch.setattr(ImageSetting, "load_model", lambda self: _load(self.model))


_MODELS = {}


def _load(name):
    if name not in _MODELS:
        _MODELS[name] = load_model(name)
    return _MODELS[name]


def outcome(directory: Path) -> dict[str, object]:
    """What must not depend on what happened on the way."""
    record = json.loads((directory / "record.json").read_text())
    files = {
        n: (directory / n).read_bytes() for n in ("coefficients.safetensors", "metrics.jsonl", "spec.yaml")
    }
    return {**files, **{key: record[key] for key in ("id", "metrics", "coefficients", "inputs", "spec")}}


@pytest.fixture(scope="module")
def expected(shelf, tmp_path_factory):
    """The outcome of a run that nothing happened to."""
    place = tmp_path_factory.mktemp("expected")
    with child(*shelf.few_shot("-o", place / "run"), log=place / "log") as run:
        assert run.wait() == 0, run.said
    return outcome(place / "run")


@pytest.fixture
def ends_as_expected(aniso, shelf, expected):
    """The run in a directory, gone on with, ends as if nothing had happened, and leaves nothing else."""

    def check(directory: Path, *more: object) -> None:
        ran = aniso(*shelf.few_shot("-o", directory, "--resume", *more))
        assert ran.code == 0, ran.err
        assert outcome(directory) == expected
        assert not TrainingCheckpoints(directory).files()
        assert not list(directory.rglob("*.partial-*"))

    return check


def hooked(before) -> None:
    """From now on ``before(n, name, args)`` is called before the n-th call that changes the disk."""
    count = 0

    def wrapped(name, call):
        def method(self, *args):
            nonlocal count
            count += 1
            before(count, name, args)
            return call(self, *args)

        return method

    for name in CALLS:
        setattr(Disk, name, wrapped(name, getattr(Disk, name)))


def wholly_readable(directory: Path) -> None:
    """Every file that has its final name is a whole one."""
    for path in directory.rglob("*"):
        if ".partial-" in str(path) or path.is_dir():
            continue
        if path.suffix == ".safetensors":
            source = open_weights(path)
            assert all(source.read(name) is not None for name in source.tensors)
        else:
            assert path.suffix in (".json", ".jsonl", ".yaml", ".csv") and path.read_text().endswith("\n")
    assert TrainingCheckpoints(directory).newest()[1] == []


# H1: killed


def test_H1_a_run_that_dies_at_any_call_of_the_disk_goes_on_to_the_same_end(shelf, tmp_path):
    spec = {"model": str(shelf.model), "bank": str(shelf.bank), "task": str(shelf.data / "photos")}
    quick = {
        **spec,
        "shots": 2,
        "epochs": 1,
        "batch_size": 4,
        "min_steps_per_epoch": 1,
        "compare": False,
        "workers": 0,
    }

    def run(out: Path, **more: object) -> None:
        run_setting("few-shot", {**quick, "out": out, **more})

    run(tmp_path / "expected")
    expected = outcome(tmp_path / "expected")
    code, n, left = KILLED, 0, []
    while code == KILLED:
        n += 1
        out = tmp_path / str(n)

        def dying(n=n, out=out) -> int:
            def die(i, name, args):
                if i == n:
                    if name == "pwrite":  # in the middle of it
                        os.pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
                    os._exit(KILLED)

            hooked(die)
            run(out)
            return 0

        code = runs.Child(dying, tmp_path / "log").wait()
        wholly_readable(out)
        files = [p for p in out.rglob("*") if p.is_file() and ".partial-" not in str(p)]
        now = {str(p.relative_to(out)): p.read_bytes() for p in files}
        if now not in left:  # what has no final name is not looked at
            left.append(now)
            run(out, resume=True)
            assert outcome(out) == expected
            assert not TrainingCheckpoints(out).files()
            assert not list(out.rglob("*.partial-*"))
        shutil.rmtree(out, ignore_errors=True)
    assert code == 0
    assert n > 40 and len(left) > 6


def test_H1_a_run_that_is_killed_again_and_again_ends_the_same(shelf, tmp_path, ends_as_expected):
    chance = random.Random(0)
    out = tmp_path / "run"
    for _ in range(5):
        with child(*shelf.few_shot("-o", out, "--resume"), log=tmp_path / "log", first=slowly) as run:
            time.sleep(chance.uniform(0.1, 0.5))
            os.kill(run.pid, signal.SIGKILL)
            assert run.wait() in (0, -signal.SIGKILL)
        wholly_readable(out)
    ends_as_expected(out)


# H2, H3, H4: no place to write


def test_H2_a_disk_that_fills_up_costs_no_state(shelf, tmp_path, ends_as_expected):
    out = tmp_path / "run"

    def full(i, name, args):
        if TrainingCheckpoints(out).files() and name == "pwrite":
            raise OSError(errno.ENOSPC, "No space left on device")

    with child(*shelf.few_shot("-o", out), log=tmp_path / "log", first=lambda: hooked(full)) as run:
        assert run.wait() == 5
        assert "OUT-SPACE" in run.said and "free some space" in run.said
    wholly_readable(out)
    assert len(TrainingCheckpoints(out).files()) == 1
    ends_as_expected(out)


def small_disk(point: Path, megabytes: int) -> None:
    """A disk of that size, which this process alone sees; processes that may not mount end here."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 1 << 17, 1 << 18 | 1 << 14
    options = f"size={megabytes}m".encode()
    point.mkdir()
    if (
        os.geteuid() != 0
        or libc.unshare(new_mounts) != 0
        or libc.mount(None, b"/", None, private, None) != 0
        or libc.mount(b"tmpfs", os.fsencode(point), b"tmpfs", 0, options) != 0
    ):
        os._exit(SKIPPED)


@pytest.mark.parametrize("filled", ["before the start", "on the way"])
def test_H2_H3_a_disk_that_is_really_full(shelf, tmp_path, filled):
    point = tmp_path / "disk"
    out = point / "run"

    def fill(free: int) -> None:
        status = os.statvfs(point)
        with (point / "ballast").open("wb") as file:
            file.write(bytes(status.f_bavail * status.f_frsize - free))

    def on_the_way(i, name, args):
        if name == "create" and TrainingCheckpoints(out).files() and not (point / "ballast").exists():
            fill(0)

    def work():
        small_disk(point, 4)
        if filled == "before the start":
            fill(100_000)
        else:
            hooked(on_the_way)
        code = runs.main([*shelf.few_shot("-o", out)])
        if filled == "before the start":
            assert not out.exists()
        else:
            wholly_readable(out)
            assert len(TrainingCheckpoints(out).files()) == 1
            assert not [p for p in out.iterdir() if ".partial-" in p.name]
        return code

    run = runs.Child(work, tmp_path / "log")
    code = run.wait()
    if code == SKIPPED:
        pytest.skip("may not mount")
    assert code == 5, run.said
    assert "OUT-SPACE" in run.said


@pytest.fixture
def places(tmp_path, shelf, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "closed").mkdir()
    access = os.access

    def refuse(path, mode, **more):
        return access(path, mode, **more) and (mode != os.W_OK or Path(path).name != "closed")

    monkeypatch.setattr(os, "access", refuse)
    return tmp_path


@pytest.mark.parametrize(
    ("out", "code", "what"),
    [
        ("file", 2, "is a file"),
        ("mine", 2, "thesis.tex"),
        ("file/run", 5, "not writable"),
        ("closed", 5, "not writable"),
        ("closed/deep/run", 5, "not writable"),
        ("/proc/run", 5, "'/proc/run'"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--resume",), ("--plan",)])
def test_H4_a_place_that_will_not_do_is_refused_before_the_model_is_loaded(
    aniso, shelf, places, monkeypatch, out, code, what, more
):
    monkeypatch.setattr(ImageSetting, "load_model", lambda *_: pytest.fail("an hour of work"))
    before = contents(places)
    ran = aniso(*shelf.few_shot("-o", places / out, *more))
    assert ran.code == code, ran.err
    assert what in ran.err and "fix" in ran.err
    assert contents(places) == before


def test_H4_a_run_is_not_begun_over_another(aniso, shelf, tmp_path, monkeypatch):
    assert aniso(*shelf.few_shot("-o", tmp_path / "run")).code == 0
    monkeypatch.setattr(ImageSetting, "load_model", lambda *_: pytest.fail("an hour of work"))
    before = contents(tmp_path)
    ran = aniso(*shelf.few_shot("-o", tmp_path / "run", "--seed", 1))
    assert ran.code == 2 and "--resume" in ran.err
    again = aniso(*shelf.few_shot("-o", tmp_path / "run", "--resume", "--json"))
    assert again.code == 0
    assert json.loads(again.out) == json.loads((tmp_path / "run" / "record.json").read_text())
    assert contents(tmp_path) == before


# H5, H6, H7: interrupted


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_H5_H6_H7_a_run_that_is_asked_to_end_saves_its_state_and_goes_on_to_the_same_end(
    shelf, tmp_path, ends_as_expected, number, code, workers
):
    out = tmp_path / "run"
    given = shelf.few_shot("-o", out, "--workers", workers)
    with child(*given, log=tmp_path / "log", first=lambda: slowly(0.4)) as run:
        until(lambda: "a step begins" in run.said, what=run)
        os.killpg(run.pid, number)  # as a terminal does
        assert run.wait(5) == code, run.said
        until(lambda: run.alone, 5)
    assert "STOPPED" in run.said and "--resume" in run.said
    assert len(TrainingCheckpoints(out).files()) == 2
    wholly_readable(out)
    assert not (out / "record.json").exists()
    ends_as_expected(out)


def test_H5_a_second_ctrl_c_ends_at_once(shelf, tmp_path, ends_as_expected):
    out = tmp_path / "run"
    given = shelf.few_shot("-o", out, "--workers", 2)
    with child(*given, log=tmp_path / "log", first=lambda: slowly(60)) as run:
        until(lambda: "a step begins" in run.said, what=run)
        for _ in range(2):
            time.sleep(0.3)
            os.killpg(run.pid, signal.SIGINT)
        assert run.wait(5) == 130, run.said
        until(lambda: run.alone, 10)
    assert "Traceback" not in run.said
    wholly_readable(out)
    ends_as_expected(out)


@pytest.mark.parametrize("name", ["pwrite", "replace", "remove"])
def test_H5_ctrl_c_while_a_state_is_written(shelf, tmp_path, ends_as_expected, name):
    out = tmp_path / "run"
    asked = []

    def ask(i, call, args):
        if call == name and TrainingCheckpoints(out).files() and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGINT))

    with child(*shelf.few_shot("-o", out), log=tmp_path / "log", first=lambda: hooked(ask)) as run:
        assert run.wait() == 130, run.said
    assert "--resume" in run.said
    wholly_readable(out)
    ends_as_expected(out)


def test_H5_ctrl_c_while_workers_start(shelf, tmp_path, ends_as_expected):
    from torch.utils.data import DataLoader

    out = tmp_path / "run"

    def first():
        get = DataLoader._get_iterator

        def interrupted(self):
            os.killpg(os.getpid(), signal.SIGINT)
            return get(self)

        DataLoader._get_iterator = interrupted

    given = shelf.few_shot("-o", out, "--workers", 2)
    with child(*given, log=tmp_path / "log", first=first) as run:
        assert run.wait() == 130, run.said
        until(lambda: run.alone, 10)
    ends_as_expected(out)


def test_H7_two_crashes_and_another_number_of_workers(shelf, tmp_path, ends_as_expected):
    out = tmp_path / "run"
    for epoch, workers in ((0, 0), (1, 2)):
        given = shelf.few_shot("-o", out, "--resume", "--workers", workers)
        with child(*given, log=tmp_path / "log", first=lambda: slowly(0.3)) as run:
            until(lambda run=run, epoch=epoch: f"epoch {epoch}" in run.said, what=run)
            os.kill(run.pid, (signal.SIGKILL, signal.SIGTERM)[epoch])
            assert run.wait(5) in (-9, 143), run.said
    ends_as_expected(out, "--workers", 1)


# H8, H9: what is gone on with has changed


@pytest.fixture
def interrupted(shelf, tmp_path):
    """The directory of a run that was ended in its second epoch, with two states."""
    out = tmp_path / "interrupted"

    def ask(i, name, args):
        if name == "create" and "state-00002" in str(args[0]):
            os._exit(KILLED)

    with child(*shelf.few_shot("-o", out), log=tmp_path / "log", first=lambda: hooked(ask)) as run:
        assert run.wait() == KILLED
    assert [p.name for p in TrainingCheckpoints(out).files()] == [
        f"state-0000{i}-000000.safetensors" for i in (0, 1)
    ]
    return out


def _from_the_future(path: Path) -> None:
    source = open_weights(path)
    tensors = {name: source.read(name) for name in source.tensors}
    save_safetensors(path, tensors, {**source.metadata, "schema": "2"}, overwrite=True)


def _flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": _flipped,
    "future": _from_the_future,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_H8_a_damaged_state_is_said_and_the_one_before_is_used(aniso, shelf, interrupted, expected, damage):
    new = TrainingCheckpoints(interrupted).files()[-1]
    damage(new)
    ran = aniso(*shelf.few_shot("-o", interrupted, "--resume"))
    assert ran.code == 0, ran.err
    assert new.name in ran.err and "using the one before" in ran.err
    assert outcome(interrupted) == expected


def test_H8_if_no_state_is_left_whole_the_run_does_not_silently_start_anew(aniso, shelf, interrupted):
    for path in TrainingCheckpoints(interrupted).files():
        _flipped(path)
    before = contents(interrupted)
    ran = aniso(*shelf.few_shot("-o", interrupted, "--resume"))
    assert ran.code == 3 and "RUN-STATE" in ran.err
    assert contents(interrupted) == before


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("--lr", 0.2), "schedule.lr: 0.1 -> 0.2"),
        (("--seed", 1), "seed: 0 -> 1"),
        (("--partition", "rows"), "partition: blocks -> rows"),
        (("--leave-out", "signs"), "leave_out"),
    ],
)
def test_H9_other_options_are_refused_by_name(aniso, shelf, interrupted, monkeypatch, given, key):
    monkeypatch.setattr(ImageSetting, "load_model", lambda *_: pytest.fail("an hour of work"))
    before = contents(interrupted)
    ran = aniso(*shelf.few_shot("-o", interrupted, "--resume", *given))
    assert ran.code == 3, ran.err
    assert "RUN-CHANGED" in ran.err and key in ran.err
    assert contents(interrupted) == before


def test_H9_other_pictures_to_learn_from_are_refused(aniso, shelf, tmp_path):
    task = shutil.copytree(shelf.data / "photos", tmp_path / "photos")
    given = shelf.few_shot("-o", tmp_path / "run", "--task", task)
    with child(*given, log=tmp_path / "log", first=lambda: slowly(0.3)) as run:
        until(lambda: "epoch 0" in run.said, what=run)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(5) == 143
    for path in (task / "red").iterdir():
        path.rename(path.with_stem(f"new-{path.stem}"))
    ran = aniso(*given, "--resume")
    assert ran.code == 3, ran.err
    assert "RUN-CHANGED" in ran.err and "changed" in ran.err


def test_H9_another_number_of_threads_is_refused_unless_allowed_and_then_recorded(
    shelf, interrupted, tmp_path
):
    given = shelf.few_shot("-o", interrupted, "--resume")
    for more, code in (((), 3), (("--allow-env-change",), 0)):
        with child(*given, *more, log=tmp_path / "log", first=lambda: torch.set_num_threads(2)) as run:
            assert run.wait() == code, run.said
        assert "threads: 1 -> 2" in run.said
    record = json.loads((interrupted / "record.json").read_text())
    assert any("threads: 1 -> 2" in note for note in record["notes"])


# H10: numbers that are none


def test_H10_a_run_that_explodes_names_the_pictures_and_keeps_what_was_good(aniso, shelf, tmp_path):
    out = tmp_path / "run"
    ran = aniso(*shelf.few_shot("-o", out, "--lr", "1e30"))
    assert ran.code == 6, ran.err
    failure = json.loads((out / "failure.json").read_text())
    assert failure["error"] == "LEARN-NONFINITE" and failure["exit"] == 6
    assert all(Path(picture).is_file() for picture in failure["facts"]["images"])
    assert failure["facts"]["images"]
    wholly_readable(out)
    state, _ = TrainingCheckpoints(out).newest()
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())
    assert not (out / "record.json").exists()


def test_H10_a_base_with_a_value_that_is_no_number_is_not_learned_with(aniso, shelf, tmp_path):
    base = {name: open_weights(shelf.model).read(name) for name in open_weights(shelf.model).tensors}
    shutil.copytree(shelf.model, tmp_path / "model")
    name = next(name for name in base if name.startswith("vision_model") and name.endswith("weight"))
    base[name].view(-1)[0] = torch.nan
    save_safetensors(tmp_path / "model" / "model.safetensors", base, overwrite=True)
    ran = aniso(*shelf.few_shot("--model", tmp_path / "model", "-o", tmp_path / "run"))
    assert ran.code in (3, 6), ran.err
    assert name in ran.err or "LEARN-NONFINITE" in ran.err


def test_H10_no_gradient_is_an_error_after_the_first_step(aniso, shelf, tmp_path):
    pictures.folder(tmp_path / "one", {"red": 12, "Red": 12})  # to the tokenizer the same class
    ran = aniso(*shelf.few_shot("-o", tmp_path / "run", "--task", tmp_path / "one"))
    assert ran.code == 6, ran.err
    assert "LEARN-GRADIENT" in ran.err
    assert json.loads((tmp_path / "run" / "failure.json").read_text())["error"] == "LEARN-GRADIENT"


# H12: twice


def test_H12_a_second_process_in_the_same_directory_is_told_to_wait(aniso, shelf, tmp_path, ends_as_expected):
    out = tmp_path / "run"
    with child(*shelf.few_shot("-o", out), log=tmp_path / "log", first=lambda: slowly(1)) as run:
        until(lambda: "epoch 0" in run.said, what=run)
        assert aniso(*shelf.few_shot("-o", out)).code == 2
        ran = aniso(*shelf.few_shot("-o", out, "--resume"))
        assert ran.code == 8, ran.err
        assert "OUT-LOCKED" in ran.err and out.name in ran.err
    ends_as_expected(out)  # the lock of a dead process is no lock


# H13: many cells


SPEC = """\
schema: 1
name: faults
base:
  setting: few-shot
  model: {model}
  bank: {bank}
  task: ./photos
  shots: 2
  compare: false
  schedule: {{ epochs: 1, batch_size: 4 }}
variants:
  - label: hangs
    base: {{ method: none, seed: 1 }}
  - label: good
    grid: {{ seed: [0, 1] }}
  - label: missing
    base: {{ task: ./nowhere }}
  - label: killed
    base: {{ partition: whole }}
  - label: broken
    base: {{ partition: rows }}
"""


@pytest.fixture
def grid(shelf, tmp_path, monkeypatch):
    """``aniso run``'s arguments; cells are forked from this process, so that faults can be put into them."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(local.multiprocessing, "get_context", lambda kind: fork)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=shelf.model, bank=shelf.bank))
    return "run", spec, "--data", shelf.data, "--jobs", 2


def faulty(run_cell, faults):
    def run(cell, *rest):
        if cell.label in faults:
            faults[cell.label]()
        run_cell(cell, *rest)

    return run


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break() -> None:
    def broken(*_):
        raise RuntimeError("a fault of ours")

    session.Session.run = broken


REQUIRED = {"schema", "status", "id", "experiment", "label", "spec", "metrics", "inputs", "versions", "notes"}


def test_H13_cells_that_fail_cost_themselves_alone(aniso, grid, tmp_path, monkeypatch):
    faults = {"hangs": lambda: time.sleep(600), "killed": _kill, "broken": _break}
    with monkeypatch.context() as patch:
        patch.setattr(local, "run_cell", faulty(local.run_cell, faults))
        ran = aniso(*grid, "--timeout", 5)
    assert ran.code == 7, ran.err
    assert "6 cells: 2 recorded, 4 failed" in ran.out
    assert "CELLS" in ran.err and "--retry-failed" in ran.err
    records = tmp_path / "records"
    reasons = {"hangs": "too long", "missing": "nowhere", "killed": "-9", "broken": "a fault of ours"}
    for made in [json.loads(path.read_text()) for path in records.glob("*.json")]:
        assert made["spec"]["setting"] == "few-shot" and len(made["id"]) == 64
        assert reasons.pop(made["label"]) in made["message"]
    assert not reasons
    for made in runs.recorded(records):
        assert made["label"] == "good" and set(made) >= REQUIRED
        assert made["metrics"]["accuracy"]["photos"]["total"] == 5

    before = contents(records)
    again = aniso(*grid)
    assert again.code == 7
    assert "[1/" not in again.err  # nothing was run
    assert contents(records) == before

    retried = aniso(*grid, "--retry-failed")
    assert retried.code == 7, retried.err
    assert "6 cells: 5 recorded, 1 failed" in retried.out
    assert [json.loads(p.read_text())["label"] for p in records.glob("*.failed.json")] == ["missing"]
    assert not list((records / ".states").glob("*"))


def test_H13_what_a_retried_cell_died_of_is_what_is_said(aniso, grid, tmp_path, monkeypatch):
    only = ("--only", "killed")
    for fault, reason in ((_break, "a fault of ours"), (_kill, "-9")):
        with monkeypatch.context() as patch:
            patch.setattr(local, "run_cell", faulty(local.run_cell, {"killed": fault}))
            ran = aniso(*grid, *only, "--retry-failed")
        assert ran.code == 7
        (path,) = (tmp_path / "records").glob("*.failed.json")
        assert reason in json.loads(path.read_text())["message"]
        assert reason in ran.err


def test_H13_an_interrupted_experiment_goes_on_where_its_cells_stopped(aniso, grid, tmp_path):
    only = ("--only", "good")
    with child(*grid, *only, log=tmp_path / "log", first=lambda: slowly(0.3)) as run:
        until(lambda: list(tmp_path.glob("records/.states/*/state-*")), what=run)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(10) == 130, run.said
        until(lambda: run.alone, 5)
    records = tmp_path / "records"
    assert not list(records.glob("*.json"))
    assert list(records.glob(".states/*/state-*"))
    ran = aniso(*grid, *only)
    assert ran.code == 0, ran.err
    assert len(runs.recorded(records)) == 2


def _results(records: Path) -> dict[str, object]:
    """What an interruption must not change: metrics, coefficients, and which records there are."""
    made = {one["id"]: one for one in runs.recorded(records)}
    found: dict[str, object] = {
        name: {key: one[key] for key in ("id", "label", "metrics", "coefficients", "inputs", "spec")}
        for name, one in made.items()
    }
    return found | {p.name: p.read_bytes() for p in (records / "coefficients").iterdir()}


LONG = ("--only", "good", "--set", "base.schedule.epochs=6")


def test_H13_a_signal_to_the_whole_group_of_an_experiment_marks_no_cell_as_failed(
    aniso, grid, shelf, tmp_path, monkeypatch
):
    """As schedulers end a job: the runner, the server that forks the cells, and the cells all get it."""
    records, log = tmp_path / "records", tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "aniso", *map(str, (*grid, *LONG))],
            stdout=out, stderr=out, start_new_session=True, preexec_fn=runs.heeding_signals,
        )  # fmt: skip
    try:
        until(lambda: list(records.glob(".states/*/state-*")) or run.poll() is not None, 120)
        os.killpg(run.pid, signal.SIGTERM)
        assert run.wait(30) == 143, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    said = log.read_text()
    assert "STOPPED" in said and "Traceback" not in said and "KeyboardInterrupt" not in said
    assert not list(records.glob("*.failed.json"))
    assert aniso(*grid, *LONG).code == 0
    assert aniso(*grid, *LONG, "-o", tmp_path / "undisturbed").code == 0
    assert _results(records) == _results(tmp_path / "undisturbed")


def test_H13_workers_share_a_grid_and_take_over_from_one_that_was_killed(aniso, grid, tmp_path):
    records = tmp_path / "records"
    shared = (*grid, *LONG, "--claim", "--lease", 2)
    with child(*shared, log=tmp_path / "first", first=lambda: slowly(0.3)) as first:
        until(lambda: list(records.glob(".states/*/state-*")), what=first)
        with child(*shared, log=tmp_path / "second") as second:
            os.killpg(first.pid, signal.SIGKILL)
            assert second.wait(120) == 0, second.said
    assert "cells of other workers" in second.said
    assert aniso(*grid, *LONG, "-o", tmp_path / "alone").code == 0
    assert _results(records) == _results(tmp_path / "alone")
    assert not list(records.glob("*.json")) and not (records / ".claims").exists()


def test_H13_shards_of_a_grid_are_the_whole_grid(aniso, grid, tmp_path):
    only = ("--only", "good", "--only", "missing")
    for number, count in ((1, 2), (1, 3), (2, 3), (3, 3)):  # another number of shards after the first
        aniso(*grid, *only, "--shard", f"{number}/{count}")
    assert len(runs.recorded(tmp_path / "records")) == 2
    assert [json.loads(p.read_text())["label"] for p in tmp_path.glob("records/*.failed.json")] == ["missing"]
    assert aniso(*grid, *only, "-o", tmp_path / "alone").code == 7
    assert _results(tmp_path / "records") == _results(tmp_path / "alone")
    assert aniso(*grid, "--shard", "1/2", "--rerun-changed").code == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("when", ["before training", "in training"])
def test_H13_cells_that_are_interrupted_are_run_again(aniso, grid, tmp_path, monkeypatch, number, code, when):
    records = tmp_path / "records"

    def say_and_wait() -> None:
        (tmp_path / "loading").touch()
        time.sleep(30)

    def first() -> None:
        slowly(0.3)
        if when == "before training":
            local.run_cell = waiting(local.run_cell)

    def waiting(run_cell):
        def run(cell, *rest):
            session.Session.run = lambda self: say_and_wait()
            run_cell(cell, *rest)

        return run

    with child(*grid, "--only", "good", log=tmp_path / "log", first=first) as run:
        begun = "loading" if when == "before training" else "records/.states/*/state-*"
        until(lambda: list(tmp_path.glob(begun)), what=run)
        os.killpg(run.pid, number)
        assert run.wait(10) == code, run.said
        until(lambda: run.alone, 5)
    assert "Traceback" not in run.said and "KeyboardInterrupt" not in run.said, run.said
    assert not list(records.glob("*.json"))
    ran = aniso(*grid, "--only", "good")
    assert ran.code == 0, ran.err
    assert len(runs.recorded(records)) == 2 and not list(records.rglob("*.partial-*"))


def test_H13_a_cell_that_somebody_ends_is_missing_not_failed(aniso, grid, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "run", lambda self: os.kill(os.getpid(), signal.SIGTERM))
        ran = aniso(*grid, "--only", "good")
    assert ran.code == 7 and "2 missing" in ran.out and "interrupted" in ran.err
    assert not list((tmp_path / "records").glob("*.json"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_H13_an_experiment_that_has_hardly_begun_can_be_interrupted(shelf, tmp_path, number, code):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=shelf.model, bank=shelf.bank))

    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(2)\n")

    def with_a_server_of_its_own() -> None:
        for name in ("address", "alive_fd", "pid"):
            setattr(forkserver._forkserver, f"_forkserver_{name}", None)
        os.environ["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        preload = BaseContext.set_forkserver_preload
        BaseContext.set_forkserver_preload = lambda self, names: preload(self, ["slow_import"])

    given = ("run", spec, "--data", shelf.data)
    with child(*given, log=tmp_path / "log", first=with_a_server_of_its_own) as run:
        until(lambda: (tmp_path / "records").exists(), what=run)
        time.sleep(0.5)  # it imports
        os.killpg(run.pid, number)
        assert run.wait(60) == code, run.said
        until(lambda: run.alone, 30)
    assert "STOPPED" in run.said and "Traceback" not in run.said
    assert not list((tmp_path / "records").glob("*.json"))


def test_H12_H13_an_experiment_runs_once_at_a_time(aniso, grid, tmp_path):
    (tmp_path / "records").mkdir()
    with locked(tmp_path / "records"):
        ran = aniso(*grid)
    assert ran.code == 8 and "OUT-LOCKED" in ran.err
    assert not list((tmp_path / "records").iterdir())


def test_H13_a_foreign_file_in_the_place_of_a_record_is_not_taken_for_one(aniso, grid, tmp_path):
    assert aniso(*grid, "--only", "good").code == 0
    document = read_yaml(tmp_path / "spec.yaml")
    cells = [c for c in spec.cells(validated(spec.Experiment, document), document) if c.label == "good"]
    place = Grid(cells, tmp_path / "records").place(cells[0]).record
    other = next(r for r in runs.recorded(tmp_path / "records") if r["id"] != cells[0].setting.id)
    place.write_text(json.dumps(other))
    ran = aniso(*grid, "--only", "good")
    assert ran.code == 3 and "RECORD" in ran.err and place.name in ran.err
    place.write_text("{}")
    ran = aniso(*grid, "--only", "good")
    assert ran.code == 3 and "RECORD" in ran.err and place.name in ran.err


@pytest.mark.parametrize(
    ("given", "jobs", "threads"),
    [(None, 1, 8), (None, 3, 2), ("1", 1, 1), ("4", 1, 4), ("4", 4, 2), ("x", 1, 8)],
)
def test_H16_cells_share_the_cores_and_heed_omp_num_threads(monkeypatch, given, jobs, threads):
    monkeypatch.setattr(local.os, "cpu_count", lambda: 8)
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert local._threads(jobs) == threads
