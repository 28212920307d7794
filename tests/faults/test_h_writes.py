"""Table H: writes that fail, processes that die while writing, disks that are full or closed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import random
import resource
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch

from aniso.errors import AnisoError, LockedError, ResourceError
from aniso.weights import append, atomic, open_weights, save_safetensors
from aniso.weights.atomic import (
    Disk,
    atomic_directory,
    atomic_file,
    locked,
    require_space,
    write_text,
)

KILLED, SKIPPED, BROKEN = 77, 78, 79
OLD = {"w": torch.arange(6.0)}
NEW = {"w": torch.ones(300), "b": torch.zeros(7, dtype=torch.bfloat16)}


def write_file(target: Path) -> None:
    save_safetensors(target, NEW, {"made": "new"}, overwrite=True)


def write_directory(target: Path) -> None:
    with atomic_directory(target, overwrite=True) as out:
        save_safetensors(out / "model.safetensors", NEW)
        write_text(out / "config.json", '{"new": true}')


def old_file(target: Path) -> None:
    save_safetensors(target, OLD)


def old_directory(target: Path) -> None:
    target.mkdir()
    save_safetensors(target / "model.safetensors", OLD)
    write_text(target / "notes.txt", "old")


def nothing(target: Path) -> None:
    pass


OUTPUTS = {
    "file": (old_file, write_file),
    "new file": (nothing, write_file),
    "directory": (old_directory, write_directory),
    "new directory": (nothing, write_directory),
}
outputs = pytest.mark.parametrize(("before", "write"), OUTPUTS.values(), ids=OUTPUTS.keys())


def content(target: Path) -> object:
    """The hashes of all that is there, or None."""
    if target.is_dir():
        return {p.name: content(p) for p in target.iterdir()}
    return hashlib.sha256(target.read_bytes()).hexdigest() if target.exists() else None


def clear(directory: Path) -> None:
    for path in directory.iterdir():
        Disk().remove(path)


class Hooked(Disk):
    """Calls ``fault`` in place of every call whose number it accepts."""

    def __init__(self, fault):
        self.calls = []
        self._fault = fault

    def _note(self, name, *args):
        self.calls.append(name)
        self._fault(len(self.calls), name, *args)

    def create(self, path):
        self._note("create")
        return super().create(path)

    def pwrite(self, fd, data, offset):
        self._note("pwrite", fd, data, offset)
        return super().pwrite(fd, data, offset)

    def open_or_create(self, path):
        self._note("open_or_create", path)
        return super().open_or_create(path)

    def truncate(self, fd, size):
        self._note("truncate")
        super().truncate(fd, size)

    def fsync(self, fd):
        self._note("fsync")
        super().fsync(fd)

    def replace(self, old, new):
        self._note("replace")
        super().replace(old, new)

    def mkdir(self, path):
        self._note("mkdir")
        super().mkdir(path)

    def rmdir(self, path):
        self._note("rmdir")
        super().rmdir(path)

    def exchange(self, a, b):
        self._note("exchange")
        super().exchange(a, b)

    def remove(self, path):
        self._note("remove")
        super().remove(path)


def test_every_call_of_the_disk_can_be_made_to_fail():
    public = {name for name in vars(Disk) if not name.startswith("_")}
    assert public <= set(vars(Hooked))


def test_H1_an_appended_file_is_old_or_complete_after_any_call(tmp_path, monkeypatch):
    """Rows that an earlier call wrote are kept, whichever call fails."""
    target, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"

    def write():
        with append.AppendedFile(target) as file:
            file.cut_incomplete_line()
            file.write(b"two\n")
            file.finish()

    def begin():
        target.write_bytes(b"old\n")
        partial.write_bytes(b"one\ntw")

    calls = []
    monkeypatch.setattr(append, "disk", Hooked(lambda *call: calls.append(call)))
    begin()
    write()
    assert target.read_bytes() == b"one\ntwo\n" and len(calls) >= 5
    for number in range(len(calls)):
        seen = []

        def fail(*call, seen=seen, number=number):
            seen.append(call)
            if len(seen) == number + 1:
                raise OSError(errno.EIO, "broken")

        begin()
        monkeypatch.setattr(append, "disk", Hooked(fail))
        with pytest.raises(ResourceError):
            write()
        assert target.read_bytes() == b"old\n"
        assert partial.read_bytes().startswith(b"one\n")


def expected_contents(tmp_path, before, write):
    """Content of the target before and after, and the calls that lead from one to the other."""
    target = tmp_path / "reference"
    before(target)
    old = content(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "disk", hooked := Hooked(lambda *call: None))
        write(target)
    new = content(target)
    clear(tmp_path)
    assert old != new
    return old, new, hooked.calls


def switch(calls: list[str]) -> int:
    """The number of the call that puts the new content in the place of the old."""
    return max(i for i, name in enumerate(calls, 1) if name in ("replace", "exchange"))


# H2, H18: a call fails


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "OUT-SPACE"), (errno.EDQUOT, "OUT-SPACE"), (errno.EIO, "OUT-WRITE")],
    ids=["full", "quota", "broken"],
)
@outputs
def test_H2_H18_one_failing_call_leaves_the_old_output(
    tmp_path, monkeypatch, refused, before, write, number, code
):
    old, new, calls = expected_contents(tmp_path, before, write)
    assert len(calls) >= 5
    target = tmp_path / "out"
    for n in range(1, len(calls) + 1):
        before(target)

        def fail(i, name, *args, n=n):
            if i == n:
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(atomic, "disk", Hooked(fail))
        with refused(code, 5, "could not be written", os.strerror(number)):
            write(target)
        monkeypatch.undo()
        # a failure behind the switch is an error as well, but the output is whole by then
        assert content(target) == (old if n <= switch(calls) else new), (n, calls[n - 1])
        assert {p.name for p in tmp_path.iterdir()} <= {"out"}
        clear(tmp_path)


@outputs
def test_H18_a_disk_that_dies_for_good_leaves_old_or_new(tmp_path, monkeypatch, before, write):
    old, new, calls = expected_contents(tmp_path, before, write)
    target = tmp_path / "out"
    for n in range(1, len(calls) + 1):
        before(target)

        def fail(i, name, *args, n=n):
            if i >= n:
                raise OSError(errno.EIO, "the disk is gone")

        monkeypatch.setattr(atomic, "disk", Hooked(fail))
        with pytest.raises(ResourceError):
            write(target)
        monkeypatch.undo()
        assert content(target) == (old if n <= switch(calls) else new), (n, calls[n - 1])
        left = {p.name for p in tmp_path.iterdir()} - {"out"}
        assert all(".partial-" in name for name in left), left
        clear(tmp_path)


@outputs
def test_H18_short_writes_are_completed(tmp_path, monkeypatch, before, write):
    _, new, _ = expected_contents(tmp_path, before, write)
    target = tmp_path / "out"
    before(target)

    class Short(Disk):
        def pwrite(self, fd, data, offset):
            return os.pwrite(fd, data[:100], offset)

    monkeypatch.setattr(atomic, "disk", Short())
    write(target)
    assert content(target) == new


# H1: the process dies


def in_child(work) -> int:
    """Exit code of a process that does ``work``: 0, the error's own, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            work()
        except AnisoError as e:
            code = e.exit_code
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            code = BROKEN
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(n: int):
    def die(i, name, *args):
        if i == n:
            if name == "pwrite":  # in the middle of it
                fd, data, offset = args
                os.pwrite(fd, data[: len(data) // 2], offset)
            os._exit(KILLED)

    return Hooked(die)


@outputs
def test_H1_a_process_that_dies_at_any_call_leaves_old_or_new(tmp_path, before, write):
    old, new, calls = expected_contents(tmp_path, before, write)
    target = tmp_path / "out"
    code, n = KILLED, 0
    while code == KILLED:
        n += 1
        before(target)

        def work(n=n):
            atomic.disk = die_at(n)
            write(target)

        code = in_child(work)
        if code == KILLED:
            assert content(target) == (old if n <= switch(calls) else new), (n, calls[n - 1])
        left = {p.name for p in tmp_path.iterdir()} - {"out"}
        assert all(".partial-" in name for name in left), left
        write(target)  # whatever was left does not hinder the next attempt, which removes it
        assert content(target) == new
        assert [p.name for p in tmp_path.iterdir()] == ["out"], (n, calls[:n])
        clear(tmp_path)
    assert (code, n) == (0, len(calls) + 1)


def test_H1_random_kills_never_leave_half_a_file(tmp_path):
    target = tmp_path / "out.safetensors"
    contents = [{"w": torch.full((2000,), float(i))} for i in range(2)]
    known = {save_safetensors(target, state, overwrite=True) for state in contents}
    chance = random.Random(0)
    for _ in range(50):
        started, finish = os.pipe()

        def work(finish=finish):
            while True:
                for state in contents:
                    save_safetensors(target, state, overwrite=True)
                    os.write(finish, b".")

        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                work()
            os._exit(BROKEN)
        os.read(started, 1)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(started)
        os.close(finish)
        assert content(target) in known
        assert open_weights(target).read("w").unique().numel() == 1
    assert len(list(tmp_path.glob(".*.partial-*"))) <= 1  # each writer removes what the one before left
    save_safetensors(target, contents[0], overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


# H2, H3, H4: real disks


def test_H2_a_file_size_limit_is_an_error_of_ours(tmp_path):
    target = tmp_path / "out.safetensors"
    old_file(target)
    old = content(target)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_file(target)

    assert in_child(work) == ResourceError.exit_code
    assert content(target) == old
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def _mount(libc, target: Path, flags: int, options: bytes) -> None:
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", flags, options) != 0:
        os._exit(SKIPPED)


def on_small_disk(tmp_path: Path, size: str, work) -> None:
    """Do ``work(directory, close)`` in a process with a disk of its own, which ``close`` locks."""
    point = tmp_path / "disk"
    point.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private, remount_read_only = 1 << 17, 1 << 28, 1 << 18 | 1 << 14, 32 | 1

    def child():
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(new_mounts | (new_user if user else 0)) != 0:
            os._exit(SKIPPED)
        if user:
            try:
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
                Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
            except OSError:
                os._exit(SKIPPED)
        libc.mount(None, b"/", None, private, None)
        _mount(libc, point, 0, f"size={size}".encode())
        work(point, lambda: _mount(libc, point, remount_read_only, f"size={size}".encode()))

    code = in_child(child)
    if code == SKIPPED:
        pytest.skip("mounting is not permitted here")
    assert code == 0


def refusal(work) -> str:
    with pytest.raises(ResourceError) as caught:
        work()
    return caught.value.code


@pytest.mark.parametrize("write", [write_file, write_directory], ids=["file", "directory"])
def test_H2_a_full_disk_leaves_the_old_output(tmp_path, write):
    def work(directory, _):
        target = directory / "out"
        (old_file if write is write_file else old_directory)(target)
        old = content(target)
        with contextlib.suppress(OSError):
            (directory / "filler").write_bytes(bytes(1 << 20))
        assert refusal(lambda: write(target)) == "OUT-SPACE"
        assert content(target) == old
        assert {p.name for p in directory.iterdir()} == {"out", "filler"}

    on_small_disk(tmp_path, "128k", work)


def test_H3_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    def work(directory, _):
        require_space(directory / "a" / "out", 1 << 19)
        assert refusal(lambda: require_space(directory / "a" / "out", 1 << 21)) == "OUT-SPACE"
        assert list(directory.iterdir()) == []

    on_small_disk(tmp_path, "1m", work)


def test_H4_a_read_only_disk_is_noticed_at_the_start(tmp_path):
    def work(directory, make_read_only):
        old_file(directory / "out")
        old = content(directory / "out")
        make_read_only()
        assert refusal(lambda: require_space(directory / "new" / "out", 1)) == "OUT-WRITE"
        assert refusal(lambda: write_file(directory / "out")) == "OUT-WRITE"
        assert refusal(lambda: write_directory(directory / "new")) == "OUT-WRITE"
        assert content(directory / "out") == old
        assert [p.name for p in directory.iterdir()] == ["out"]

    on_small_disk(tmp_path, "1m", work)


def test_H4_a_directory_without_write_permission_is_noticed_at_the_start(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(os, "access", lambda path, wanted: wanted != os.W_OK)
    with refused("OUT-WRITE", 5, tmp_path.name, "not writable"):
        require_space(tmp_path / "out", 1)


def test_H4_a_file_in_the_way_of_a_directory_is_noticed_at_the_start(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(AnisoError):
        require_space(tmp_path / "file" / "out", 1)


@pytest.mark.parametrize("write", [write_file, write_directory], ids=["file", "directory"])
@pytest.mark.parametrize("parent", ["file", "file/a/b"])
def test_H4_an_output_below_a_file_is_refused(tmp_path, refused, write, parent):
    (tmp_path / "file").write_text("x")
    with refused("OUT-WRITE", 5, "out"):
        write(tmp_path / parent / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_H4_the_work_does_not_begin_without_a_place_for_its_output(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError), atomic_file(tmp_path / "file" / "out"):
        pytest.fail("an hour of work")
    with pytest.raises(ResourceError), atomic_directory(tmp_path / "file" / "out"):
        pytest.fail("an hour of work")


@pytest.mark.parametrize("write", [write_file, write_directory], ids=["file", "directory"])
def test_H4_missing_directories_above_an_output_are_made_and_go_again_if_it_fails(
    tmp_path, monkeypatch, write
):
    target = tmp_path / "a" / "b" / "out"
    monkeypatch.setattr(atomic, "disk", hooked := Hooked(lambda *call: None))
    write(target)
    monkeypatch.undo()
    assert content(target) is not None
    last = switch(hooked.calls)
    for n in range(1, last + 1):
        clear(tmp_path)

        def fail(i, name, *args, n=n):
            if i == n:
                raise OSError(errno.EIO, "injected")

        monkeypatch.setattr(atomic, "disk", Hooked(fail))
        with pytest.raises(ResourceError):
            write(target)
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == [], (n, hooked.calls[n - 1])


def test_H4_a_made_directory_that_others_use_meanwhile_stays(tmp_path):
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "a" / "b" / "out"):
        (tmp_path / "a" / "mine").write_text("x")
        raise RuntimeError
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["a", "a/mine"]


# H12: two processes


def test_H12_a_second_process_is_refused_until_the_first_ends(tmp_path, refused):
    started, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), locked(tmp_path):
            os.write(tell, b"locked")
            signal.pause()
        os._exit(BROKEN)
    os.read(started, 6)
    try:
        with refused("OUT-LOCKED", 8, tmp_path.name, "another process"), locked(tmp_path):
            pytest.fail("both hold the lock")
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(started)
        os.close(tell)
    with locked(tmp_path):  # the lock of a dead process is no lock
        pass


def test_H12_the_lock_holds_across_processes_in_both_directions(tmp_path):
    def work():
        with locked(tmp_path):
            pass

    with locked(tmp_path):
        assert in_child(work) == LockedError.exit_code
    assert in_child(work) == 0
