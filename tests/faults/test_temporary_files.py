"""H17: what killed processes left behind is removed by the next one, and nothing else is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import tiny
import torch

from aniso.vectors import Bank
from aniso.weights import atomic, save_safetensors, temporary
from aniso.weights.atomic import atomic_directory, atomic_file, sweep, write_text

DAY = 24 * 3600


@contextlib.contextmanager
def writing(target: Path, kind: str):
    """Another process that is in the middle of writing; it is killed when the block ends."""
    started, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if kind == "file":
                with atomic_file(target, overwrite=True) as out:
                    out.stream.write(b"half")
                    os.write(tell, b".")
                    signal.pause()
            with atomic_directory(target, overwrite=True) as place:
                write_text(place / "a", "half")
                os.write(tell, b".")
                signal.pause()
        os._exit(1)
    assert os.read(started, 1) == b"."
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(started)
        os.close(tell)


def write(target: Path, kind: str) -> None:
    if kind == "file":
        write_text(target, "whole", overwrite=True)
        return
    with atomic_directory(target, overwrite=True) as place:
        write_text(place / "a", "whole")


def left(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.rglob("*") if ".partial-" in p.name)


kinds = pytest.mark.parametrize("kind", ["file", "directory"])


@kinds
def test_h17_what_a_killed_writer_left_goes_with_the_next_write(tmp_path, kind):
    target = tmp_path / "out"
    for _ in range(3):
        with writing(target, kind):
            pass
    assert len(left(tmp_path)) == 1  # each writer removed what the one before had left
    write(target, kind)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@kinds
def test_h17_what_a_living_writer_has_stays(tmp_path, kind):
    target = tmp_path / "out"
    with writing(target, kind):
        before = left(tmp_path)
        assert len(before) == 1
        write(target, kind)
        sweep(tmp_path)
        assert left(tmp_path) == before
    write(target, kind)
    assert left(tmp_path) == []


@kinds
def test_h17_a_process_id_that_was_given_away_again_does_not_protect_a_dead_writer(tmp_path, kind):
    with writing(tmp_path / "out", kind) as pid:
        pass
    (name,) = left(tmp_path)
    assert f".partial-{pid}-" in name
    (tmp_path / name).rename(tmp_path / name.replace(f"-{pid}-", f"-{os.getpid()}-"))  # of a living process
    write(tmp_path / "out", kind)
    assert left(tmp_path) == []


@kinds
def test_h17_a_descendant_that_still_writes_protects_it(tmp_path, kind):
    """A lock belongs to the open file: a forked child that goes on writing has it, too."""
    target = tmp_path / "out"
    with writing(target, kind):
        pass
    (name,) = left(tmp_path)
    fd = os.open(tmp_path / name, os.O_RDONLY)
    assert temporary.claim(fd, tmp_path / name)
    write(target, kind)
    assert left(tmp_path) == [name]
    os.close(fd)
    write(target, kind)
    assert left(tmp_path) == []


@kinds
def test_h17_what_another_machine_may_be_writing_stays_for_a_week(tmp_path, kind):
    dot = "." if kind == "file" else ""
    theirs = tmp_path / f"{dot}out.partial-1-0123abcd89abcdef"
    theirs.touch() if kind == "file" else theirs.mkdir()
    write(tmp_path / "out", kind)
    assert theirs.exists()
    os.utime(theirs, (time.time() - 8 * DAY,) * 2)
    write(tmp_path / "out", kind)
    assert not theirs.exists()


@pytest.mark.parametrize(
    "name",
    [
        "thesis.partial",
        ".thesis.partial-12",
        ".thesis.partial-12-0123abc",
        ".thesis.partial-12-0123ABCD",
        ".thesis.partial-x-0123abcd",
        ".thesis.partial-12-0123abcd.txt",
        "thesis.partial-12-0123abcd",  # ours are hidden
    ],
)
def test_h17_a_file_of_the_users_own_is_never_removed(tmp_path, name):
    mine = tmp_path / name
    mine.write_text("years of work")
    os.utime(mine, (1, 1))
    write(tmp_path / "out", "file")
    write(tmp_path / "thesis", "file")
    write(tmp_path / "thesis-2", "directory")
    sweep(tmp_path)
    assert mine.read_text() == "years of work"
    mine.unlink()


def test_h17_links_and_pipes_with_such_a_name_are_not_followed_or_opened_for_ever(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").write_text("x")
    link, pipe = (tmp_path / f".{n}.partial-1-{temporary._token()}" for n in ("link", "pipe"))
    link.symlink_to(tmp_path / "mine")
    os.mkfifo(pipe)
    write(tmp_path / "out", "file")
    sweep(tmp_path)
    assert (tmp_path / "mine/thesis").read_text() == "x"
    assert link.is_symlink() and pipe.exists()
    link.unlink()
    pipe.unlink()


def test_h17_a_writer_whose_file_a_cleaner_takes_first_begins_again(tmp_path, monkeypatch):
    real, taken = atomic.claim, []

    def too_late(fd, path):
        if not taken:
            taken.append(path)
            with temporary.abandoned(path) as dead:
                assert dead  # not locked yet
                path.unlink() if path.is_file() else path.rmdir()
        return real(fd, path)

    monkeypatch.setattr(atomic, "claim", too_late)
    write(tmp_path / "out", "file")
    taken.clear()
    write(tmp_path / "more", "directory")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["more", "out"]


def test_h17_without_locks_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    def no_locks(fd, how):
        raise OSError(95, "Operation not supported")

    with writing(tmp_path / "out", "file"):
        pass
    monkeypatch.setattr(temporary.fcntl, "flock", no_locks)
    before = left(tmp_path)
    write(tmp_path / "out", "file")
    assert left(tmp_path) == before and (tmp_path / "out").read_text() == "whole"
    monkeypatch.undo()
    write(tmp_path / "out", "file")
    assert left(tmp_path) == []


def test_h1_an_old_directory_that_was_put_aside_comes_back(tmp_path, monkeypatch, refused):
    """Where two names cannot be swapped in one step, there is a moment without the output."""
    write(tmp_path / "out", "directory")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
            real, calls = os.rename, []

            def die(old, new):
                calls.append(new)
                if len(calls) == 2:
                    os._exit(77)
                real(old, new)

            monkeypatch.setattr(os, "rename", die)
            write(tmp_path / "out", "directory")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77
    assert not (tmp_path / "out").exists() and len(left(tmp_path)) == 2
    with refused("OUT-EXISTS", 2), atomic_directory(tmp_path / "out"):
        pytest.fail("the old one is there")
    assert (tmp_path / "out/a").read_text() == "whole"
    write(tmp_path / "out", "directory")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# commands


@pytest.fixture
def bank(tmp_path):
    base = tiny.plain()
    save_safetensors(tmp_path / "base.safetensors", base)
    for i in (1, 2):
        save_safetensors(tmp_path / f"{i}.safetensors", tiny.tuned(base, i))
    return Bank.build(tmp_path / "base.safetensors", {"a": tmp_path / "1.safetensors"}, to=tmp_path / "bank")


def test_h17_an_orphan_inside_a_bank_does_not_hinder_overwriting_it(aniso, bank, tmp_path):
    with writing(bank.path / "vectors-001.safetensors", "file"):
        pass
    assert left(bank.path)
    build = ("bank", "build", "--base", tmp_path / "base.safetensors", f"a={tmp_path / '2.safetensors'}")
    ran = aniso(*build, "-o", bank.path, "--overwrite")
    assert ran.code == 0, ran.err
    assert left(tmp_path) == []


def test_h17_what_somebody_is_adding_to_a_bank_is_not_overwritten(aniso, bank, tmp_path):
    with writing(bank.path / "vectors-001.safetensors", "file"):
        build = ("bank", "build", "--base", tmp_path / "base.safetensors", f"a={tmp_path / '2.safetensors'}")
        ran = aniso(*build, "-o", bank.path, "--overwrite")
        assert ran.code == 2 and "vectors-001" in ran.err
    sweep(bank.path)


def test_h1_a_bank_whose_adding_was_killed_before_the_manifest_ends_the_same(bank, tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "2.safetensors"
    (bank.path / "vectors-001.safetensors").write_bytes(b"of an addition that never was")
    added = bank.add(base, {"b": tuned})
    assert sorted(p.name for p in bank.path.iterdir()) == [
        "manifest.json", "vectors-000.safetensors", "vectors-001.safetensors",
    ]  # fmt: skip
    assert added.names == ("a", "b") and added.check() == []


def test_h1_features_whose_writing_was_killed_leave_nothing(bank):
    for name in ("features-000.safetensors", "features-007.safetensors"):
        (bank.path / name).write_bytes(b"of features that never were")
    bank.with_features({"a": torch.ones(4)})
    again = bank.with_features({"a": torch.zeros(4)})
    assert [p.name for p in bank.path.glob("features-*")] == ["features-001.safetensors"]
    assert torch.equal(again.features["a"], torch.zeros(4)) and again.check() == []


@pytest.mark.parametrize(
    "name",
    [".notes.partial-1-20240101", ".backup.partial-old-12345678", ".x.partial-7-deadbeef"],
)
def test_h17_names_with_a_date_or_a_short_number_are_the_users_own(tmp_path, name):
    """However old they are, and although the pattern is nearly ours."""
    (tmp_path / name).write_text("mine")
    (tmp_path / f"{name}-dir").mkdir()
    old = time.time() - 30 * 24 * 3600
    os.utime(tmp_path / name, (old, old))
    write_text(tmp_path / "out.txt", "new")
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()  # every test must leave none such
    (tmp_path / f"{name}-dir").rmdir()
