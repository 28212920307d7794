"""Append-only output: old or new, never half; whatever call of the disk fails."""

from __future__ import annotations

import errno

import pytest

from aniso.weights import append, atomic
from aniso.weights.append import AppendedFile


def appended(path, *pieces):
    with AppendedFile(path) as file:
        for piece in pieces:
            file.write(piece)
        file.finish()


def test_the_output_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "out.csv"
    with AppendedFile(path) as file:
        file.write(b"one\n")
        assert not path.exists() and file.partial.read_bytes() == b"one\n"
        file.write(b"two\n")
        file.finish()
    assert path.read_bytes() == b"one\ntwo\n"
    assert [p.name for p in path.parent.iterdir()] == ["out.csv"]


def test_an_old_output_stays_until_then(tmp_path):
    path = tmp_path / "out.csv"
    appended(path, b"old\n")
    with AppendedFile(path) as file:
        file.write(b"new\n")
        assert path.read_bytes() == b"old\n"
        file.finish()
    assert path.read_bytes() == b"new\n"


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "kept"), [(b"", b""), (b"one", b""), (b"one\ntw", b"one\n"), (b"one\ntwo\n", b"one\ntwo\n")]
)
def test_a_line_that_was_cut_short_is_removed(tmp_path, monkeypatch, content, kept, piece):
    monkeypatch.setattr(append, "_PIECE", piece)
    (tmp_path / "out.csv.partial").write_bytes(content)
    with AppendedFile(tmp_path / "out.csv") as file:
        file.cut_incomplete_line()
        file.write(b"next\n")
    assert (tmp_path / "out.csv.partial").read_bytes() == kept + b"next\n"


def test_two_processes_cannot_append_at_once(tmp_path, refused):
    with AppendedFile(tmp_path / "out.csv"), refused("OUT-LOCKED", 8, "out.csv.partial"):
        AppendedFile(tmp_path / "out.csv")
    with AppendedFile(tmp_path / "out.csv"):
        pass


@pytest.mark.parametrize("call", ["open_or_create", "pwrite", "fsync", "replace", "truncate"])
def test_a_full_disk_leaves_the_old_output(tmp_path, monkeypatch, refused, call):
    path = tmp_path / "out.csv"
    appended(path, b"old\n")
    (tmp_path / "out.csv.partial").write_bytes(b"new\nha")

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(atomic.disk, call, full)
    with refused("OUT-SPACE", 5, "out.csv"), AppendedFile(path) as file:
        file.cut_incomplete_line()
        file.write(b"more\n")
        file.finish()
    assert path.read_bytes() == b"old\n"
    assert (tmp_path / "out.csv.partial").read_bytes().startswith(b"new\n")


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = atomic.disk.pwrite
    monkeypatch.setattr(atomic.disk, "pwrite", lambda fd, data, offset: real(fd, data[:2], offset))
    appended(tmp_path / "out", b"one\ntwo\n")
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"
    monkeypatch.setattr(atomic.disk, "pwrite", lambda *_: 0)
    with AppendedFile(tmp_path / "other") as file, pytest.raises(Exception, match="OUT-WRITE"):
        file.write(b"x")
