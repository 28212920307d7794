"""Outputs are old or new, never half: files, directories, locks, and the safetensors they hold."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from aniso.errors import AnisoError
from aniso.weights import SafetensorsWriter, header_room, open_weights, save_safetensors
from aniso.weights import atomic as module
from aniso.weights.atomic import (
    Disk,
    atomic_directory,
    atomic_file,
    locked,
    require_space,
    write_text,
)
from aniso.weights.dtypes import TORCH


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fill(directory: Path, **files: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


# files


def test_the_hash_handed_out_is_that_of_the_file(tmp_path):
    content = b"12345" * 1000
    with atomic_file(tmp_path / "out") as out:
        out.stream.write(content)
    assert (tmp_path / "out").read_bytes() == content
    assert out.sha256 == hashlib.sha256(content).hexdigest()
    assert names(tmp_path) == ["out"]


def test_nothing_is_in_place_before_the_block_ends(tmp_path):
    (tmp_path / "out").write_text("old")
    with atomic_file(tmp_path / "out", overwrite=True) as out:
        out.stream.write(b"new")
        assert (tmp_path / "out").read_text() == "old"
    assert (tmp_path / "out").read_text() == "new"


def test_an_empty_file_can_be_written(tmp_path):
    assert write_text(tmp_path / "out", "") == hashlib.sha256(b"").hexdigest()


def test_a_file_can_be_written_in_several_places(tmp_path):
    with atomic_file(tmp_path / "out") as out:
        out.stream.seek(4)
        out.stream.write(b"body")
        out.stream.seek(0)
        out.stream.write(b"head")
    assert (tmp_path / "out").read_bytes() == b"headbody"
    assert out.sha256 == hashlib.sha256(b"headbody").hexdigest()


@pytest.mark.parametrize("second", [2, 6], ids=["overlap", "hole"])
def test_places_must_fit_together(tmp_path, refused, second):
    with refused("OUT-WRITE", 5), atomic_file(tmp_path / "out") as out:
        out.stream.write(b"head")
        out.stream.seek(second)
        out.stream.write(b"body")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "new"),
        lambda path: save_safetensors(path, {"w": torch.ones(2)}),
    ],
    ids=["text", "safetensors"],
)
def test_nothing_is_overwritten_without_asking(tmp_path, refused, write):
    (tmp_path / "out").write_text("old")
    with refused("OUT-EXISTS", 2, "out", "--overwrite"):
        write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_the_work_does_not_begin_where_a_file_may_not_be_overwritten(tmp_path, refused):
    (tmp_path / "out").write_text("old")
    with refused("OUT-EXISTS", 2), atomic_file(tmp_path / "out"):
        pytest.fail("an hour of work")


def test_a_file_that_appears_meanwhile_is_not_overwritten_either(tmp_path, refused):
    with refused("OUT-EXISTS", 2), atomic_file(tmp_path / "out") as out:
        out.stream.write(b"ours")
        (tmp_path / "out").write_text("theirs")
    assert (tmp_path / "out").read_text() == "theirs"


def test_a_directory_is_no_output_file(tmp_path, refused):
    with refused("OUT-EXISTS", 2, "directory"):
        write_text(tmp_path, "x", overwrite=True)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_the_old_file(tmp_path, error):
    (tmp_path / "out").write_text("old")
    with pytest.raises(error), atomic_file(tmp_path / "out", overwrite=True) as out:
        out.stream.write(b"new")
        raise error
    assert (tmp_path / "out").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_I3_new_files_have_the_mode_the_umask_gives(tmp_path, umask):
    for mask in (0o022, 0o077, 0o002):
        umask(mask)
        write_text(tmp_path / f"{mask:o}", "x")
        save_safetensors(tmp_path / f"{mask:o}.safetensors", {"w": torch.ones(2)})
        assert mode(tmp_path / f"{mask:o}") == 0o666 & ~mask
        assert mode(tmp_path / f"{mask:o}.safetensors") == 0o666 & ~mask


@pytest.mark.parametrize("kept", [0o600, 0o640, 0o664])
def test_I3_an_overwritten_file_keeps_its_mode(tmp_path, umask, kept):
    write_text(tmp_path / "out", "old")
    (tmp_path / "out").chmod(kept)
    write_text(tmp_path / "out", "new", overwrite=True)
    assert mode(tmp_path / "out") == kept


# the calls


class Recorded(Disk):
    """Remembers what was called, and whether a synced descriptor was a file or a directory."""

    def __init__(self):
        self.calls = []

    def create(self, path):
        self.calls.append(f"create in {path.parent.name}")
        return super().create(path)

    def fsync(self, fd):
        self.calls.append("sync dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        super().fsync(fd)

    def mkdir(self, path):
        self.calls.append("mkdir")
        super().mkdir(path)

    def replace(self, old, new):
        self.calls.append("replace")
        super().replace(old, new)

    def exchange(self, a, b):
        self.calls.append("exchange")
        super().exchange(a, b)

    def remove(self, path):
        self.calls.append("remove")
        super().remove(path)


def test_a_file_is_synced_before_the_rename_and_its_directory_after(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "disk", recorded := Recorded())
    write_text(tmp_path / "out", "x")
    assert recorded.calls == [f"create in {tmp_path.name}", "sync file", "replace", "sync dir"]


def test_a_directory_is_synced_before_the_rename_and_its_parent_after(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "disk", recorded := Recorded())
    with atomic_directory(tmp_path / "out"):
        pass
    assert recorded.calls == ["mkdir", "sync dir", "replace", "sync dir"]


def test_an_old_directory_goes_only_after_the_new_one_is_in_place(tmp_path, monkeypatch):
    fill(tmp_path / "out", a="old")
    monkeypatch.setattr(module, "disk", recorded := Recorded())
    with atomic_directory(tmp_path / "out", overwrite=True):
        pass
    assert recorded.calls == [
        "mkdir", "sync dir", "exchange", "sync dir", "remove", "sync dir",
    ]  # fmt: skip


def test_temporary_files_are_never_opened_through_what_is_already_there(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("x")
    for name in ("link", "file"):
        with pytest.raises(FileExistsError):
            Disk().create(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_two_writers_of_one_file_use_two_temporary_files(tmp_path):
    target = tmp_path / "out"
    with atomic_file(target, overwrite=True) as a, atomic_file(target, overwrite=True) as b:
        a.stream.write(b"a" * 10)
        b.stream.write(b"b" * 20)
        assert len(names(tmp_path)) == 2
        assert all(".partial-" in name for name in names(tmp_path))
    assert target.read_bytes() == b"a" * 10


# read-back


class Flipping(Disk):
    def pwrite(self, fd, data, offset):
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 1
        return os.pwrite(fd, damaged, offset)


class Losing(Disk):
    """Says that all was written, and leaves out the end."""

    def pwrite(self, fd, data, offset):
        os.pwrite(fd, data[:-1], offset)
        return len(data)


class Lengthening(Disk):
    def pwrite(self, fd, data, offset):
        return os.pwrite(fd, bytes(data) + b"!", offset) - 1


@pytest.mark.parametrize("disk", [Flipping(), Losing(), Lengthening()], ids=lambda d: type(d).__name__)
def test_what_was_read_back_must_be_what_was_written(tmp_path, monkeypatch, refused, disk):
    (tmp_path / "out").write_text("old")
    monkeypatch.setattr(module, "disk", disk)
    with refused("OUT-WRITE", 5, "out"):
        write_text(tmp_path / "out", "the new text", overwrite=True)
    assert (tmp_path / "out").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_damaged_member_stops_the_whole_directory(tmp_path, monkeypatch, refused):
    fill(tmp_path / "out", a="old")
    monkeypatch.setattr(module, "disk", Flipping())
    with refused("OUT-WRITE", 5), atomic_directory(tmp_path / "out", overwrite=True) as out:
        write_text(out / "a", "the new text")
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert names(tmp_path) == ["out"]


# directories


def test_a_directory_appears_whole(tmp_path):
    with atomic_directory(tmp_path / "out") as out:
        write_text(out / "a", "1")
        assert not (tmp_path / "out").exists()
        write_text(out / "b", "2")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["a", "b"]


def test_an_empty_directory_may_be_filled_without_asking(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as out:
        write_text(out / "a", "1")
    assert names(tmp_path / "out") == ["a"]


def test_a_filled_directory_is_not_replaced_without_asking(tmp_path, refused):
    fill(tmp_path / "out", a="old")
    with refused("OUT-EXISTS", 2, "--overwrite"), atomic_directory(tmp_path / "out"):
        pytest.fail("the work must not begin")
    assert (tmp_path / "out" / "a").read_text() == "old"


def test_a_directory_filled_meanwhile_is_not_replaced_either(tmp_path, refused):
    with refused("OUT-EXISTS", 2), atomic_directory(tmp_path / "out") as out:
        write_text(out / "a", "ours")
        fill(tmp_path / "out", a="theirs")
    assert (tmp_path / "out" / "a").read_text() == "theirs"
    assert names(tmp_path) == ["out"]


def test_an_overwritten_directory_holds_nothing_of_the_old_one(tmp_path):
    fill(tmp_path / "out", a="old", b="old")
    with atomic_directory(tmp_path / "out", overwrite=True) as out:
        write_text(out / "c", "new")
        assert names(tmp_path / "out") == ["a", "b"]
    assert names(tmp_path / "out") == ["c"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_directory(tmp_path, error):
    fill(tmp_path / "out", a="old")
    with pytest.raises(error), atomic_directory(tmp_path / "out", overwrite=True) as out:
        write_text(out / "a", "new")
        raise error
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_file_is_no_output_directory(tmp_path, refused):
    (tmp_path / "out").write_text("x")
    with refused("OUT-EXISTS", 2, "file"), atomic_directory(tmp_path / "out", overwrite=True):
        pytest.fail("the work must not begin")


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_I3_new_directories_have_the_mode_the_umask_gives(tmp_path, umask, mask):
    umask(mask)
    with atomic_directory(tmp_path / "out") as out:
        write_text(out / "a", "1")
    assert mode(tmp_path / "out") == 0o777 & ~mask
    assert mode(tmp_path / "out" / "a") == 0o666 & ~mask


def test_I3_an_overwritten_directory_keeps_its_mode(tmp_path, umask):
    fill(tmp_path / "out", a="old").chmod(0o700)
    with atomic_directory(tmp_path / "out", overwrite=True) as out:
        write_text(out / "a", "new")
    assert mode(tmp_path / "out") == 0o700


@pytest.fixture
def no_renameat2(monkeypatch):
    """As on a file system that cannot swap two names in one step."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())


def test_directories_are_swapped_without_the_system_call_too(tmp_path, no_renameat2):
    fill(tmp_path / "out", a="old")
    with atomic_directory(tmp_path / "out", overwrite=True) as out:
        write_text(out / "b", "new")
    assert names(tmp_path / "out") == ["b"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_swap_that_fails_half_way_is_undone(tmp_path, monkeypatch, refused, no_renameat2, failing):
    fill(tmp_path / "out", a="old")
    real, calls = os.rename, []

    def rename(old, new):
        calls.append(new)
        if len(calls) == failing:
            raise OSError(errno.EIO, "injected")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with refused("OUT-WRITE", 5), atomic_directory(tmp_path / "out", overwrite=True) as out:
        write_text(out / "a", "new")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a").read_text() == "old"


# space


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path, monkeypatch, refused):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9000, 8000, 1000))
    require_space(tmp_path / "out", 1000)
    with refused("OUT-SPACE", 5, "out", "1,001 bytes", "1,000 bytes free"):
        require_space(tmp_path / "out", 1001)


def test_space_is_asked_of_the_nearest_directory_that_exists(tmp_path, monkeypatch):
    asked = []
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or real(path))
    require_space(tmp_path / "a" / "b" / "c", 1)
    assert asked == [tmp_path]
    assert names(tmp_path) == []


def test_no_disk_holds_an_exbibyte(tmp_path, refused):
    with refused("OUT-SPACE", 5):
        require_space(tmp_path / "out", 1 << 60)


def test_a_relative_output_is_asked_of_the_working_directory(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    require_space(Path("a/b"), 1)
    with refused("OUT-SPACE", 5):
        require_space(Path("a/b"), 1 << 60)


# locks


def test_a_directory_is_locked_once_at_a_time(tmp_path, refused):
    with locked(tmp_path):
        with refused("OUT-LOCKED", 8, tmp_path.name), locked(tmp_path):
            pytest.fail("locked twice")
        (tmp_path / "a").write_text("writing is not hindered")
    with locked(tmp_path):
        pass


def test_an_error_gives_the_lock_back(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    with locked(tmp_path):
        pass


def test_other_directories_are_not_locked(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with locked(tmp_path / "a"), locked(tmp_path / "b"):
        pass


def test_a_lock_on_nothing_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("missing", "file"):
        with pytest.raises(AnisoError), locked(tmp_path / name):
            pass


# safetensors


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All there is to a tensor; NaN equals itself here."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = TORCH[dtype]
    numel = torch.Size(shape).numel()
    if kind == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (numel * kind.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).reshape(shape)


tensors = st.builds(
    random_tensor,
    st.sampled_from(sorted(TORCH)),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 2**32),
)
# Without the format's own word, and without LoRA's: factors are refused where no configuration lies beside.
keys = st.text(min_size=1, max_size=12).filter(lambda key: key != "__metadata__" and "lora_" not in key)
state_dicts = st.dictionaries(keys, tensors, max_size=6)
metadata = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4)
quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@quick
@given(state_dicts, metadata)
def test_what_is_saved_is_what_is_opened(state, meta):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "out.safetensors"
        digest = save_safetensors(path, state, meta)
        assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
        source = open_weights(path)
        assert source.sha256() == digest
        assert source.metadata == meta
        assert list(source.tensors) == list(state)
        for name, tensor in state.items():
            assert bits(source.read(name)) == bits(tensor)


@quick
@given(state_dicts, metadata)
def test_the_reference_library_reads_what_is_saved(state, meta):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "out.safetensors"
        save_safetensors(path, state, meta)
        loaded = load_file(path)
        assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in state.items()}
        with safe_open(path, "pt") as file:
            assert (file.metadata() or {}) == meta


@quick
@given(state_dicts, metadata)
def test_saving_twice_gives_the_same_bytes(state, meta):
    backwards = dict(reversed(meta.items()))
    with tempfile.TemporaryDirectory() as directory:
        first, second = Path(directory) / "a", Path(directory) / "b"
        assert save_safetensors(first, state, meta) == save_safetensors(second, state, backwards)
        assert first.read_bytes() == second.read_bytes()


def test_views_are_saved_in_the_order_of_their_shape(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {"t": base.T, "part": base[1:3, ::2], "same": base.expand(2, 4, 6), "grad": base[0]}
    state["grad"] = state["grad"].clone().requires_grad_()
    save_safetensors(tmp_path / "out", state)
    loaded = load_file(tmp_path / "out")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_pieces_make_the_same_file_as_the_whole(tmp_path):
    whole = torch.arange(20, dtype=torch.bfloat16).reshape(5, 4)
    for name, pieces in {"whole": [whole], "pieces": whole.split(2)}.items():
        with atomic_file(tmp_path / name) as out:
            writer = SafetensorsWriter(out.stream, header_room(["w"]))
            writer.begin("w", "BF16")
            for piece in pieces:
                writer.append(piece)
            writer.end((5, 4))
            writer.finish({})
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    assert torch.equal(load_file(tmp_path / "pieces")["w"], whole)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda w: (w.add("a", torch.ones(1)), w.add("a", torch.ones(1))),
        lambda w: (w.begin("a", "F32"), w.begin("b", "F32")),
        lambda w: (w.begin("a", "F32"), w.append(torch.ones(2)), w.end((3,))),
        lambda w: (w.add("a" * 500, torch.ones(1)), w.finish({})),
    ],
    ids=["twice", "nested", "wrong size", "no room"],
)
def test_a_writer_used_wrongly_writes_nothing(tmp_path, misuse):
    with pytest.raises(ValueError), atomic_file(tmp_path / "out") as out:
        misuse(SafetensorsWriter(out.stream, 200))
    assert names(tmp_path) == []


def test_data_starts_at_a_multiple_of_eight(tmp_path):
    save_safetensors(tmp_path / "out", {"é": torch.ones(1)}, {"k": "v"})
    raw = (tmp_path / "out").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["é"]["data_offsets"] == [0, 4]


def test_no_file_is_written_that_could_not_be_read(tmp_path):
    with pytest.raises((AnisoError, ValueError)):
        save_safetensors(tmp_path / "out", {"__metadata__": torch.ones(2)})
    assert names(tmp_path) == []


def test_a_tensor_of_an_unusual_kind_is_refused_by_name(tmp_path, refused):
    with refused("WEIGHT-DTYPE", 3, "phase"):
        save_safetensors(tmp_path / "out", {"phase": torch.ones(2, dtype=torch.complex64)})
    assert names(tmp_path) == []
