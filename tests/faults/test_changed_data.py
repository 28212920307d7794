"""Images and texts are part of a run's identity to the byte: replacing one under its old name is noticed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path

import pictures
import pytest
import runs

from aniso.data import ImageLists, content, content_hash, load_task
from aniso.weights import caches
from aniso.weights.caches import HashCache


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def shelf(made, tmp_path):
    """One whose images may be changed."""
    shutil.copytree(made.data, tmp_path / "data")
    (tmp_path / "model").symlink_to(made.model)
    (tmp_path / "bank").symlink_to(made.bank)
    return runs.Shelf(tmp_path)


def replace(path: Path, seed: int = 999) -> None:
    """Another image of the same size in bytes, with the times of the old one, as rsync -t leaves it."""
    before = path.stat()
    data = pictures.encoded(seed)
    path.write_bytes(data + b"\0" * max(0, before.st_size - len(data)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shots_of(shelf):
    """The images that the run of ``Shelf.few_shot`` learns from."""
    split = load_task(shelf.data / "photos").train.shots(3, seed=0)
    return [Path(split.items.describe(i)) for i in range(len(split))]


def interrupted(shelf, tmp_path):
    """A run that was stopped after its first epoch."""
    out = tmp_path / "run"

    def first() -> None:
        module = importlib.import_module("aniso.learn._training.checkpointed_run")
        original = module.CheckpointedRun._save

        def save(self) -> None:
            original(self)
            if self._loop.history and self._loop.history[-1].epoch == 1:
                os._exit(9)

        module.CheckpointedRun._save = save

    with runs.child(*shelf.few_shot("-o", out), log=tmp_path / "log", first=first) as run:
        assert run.wait() == 9, run.said
    return out


def test_resume_after_a_training_image_was_replaced_is_refused_and_names_it(shelf, tmp_path, aniso):
    out = interrupted(shelf, tmp_path)
    changed = shots_of(shelf)[1]
    replace(changed)
    ran = aniso(*shelf.few_shot("-o", out, "--resume"))
    assert ran.code == 3, ran.err
    assert "RUN-CHANGED" in ran.err
    assert f"{changed.parent.name}/{changed.name}" in ran.err
    others = [path for path in shots_of(shelf) if path != changed]
    assert not any(f"{path.parent.name}/{path.name}" in ran.err for path in others)


def test_resume_with_the_same_images_elsewhere_goes_on(shelf, tmp_path, aniso):
    """Copied files have other times and inodes: in doubt their content decides."""
    out = interrupted(shelf, tmp_path)
    (tmp_path / "data").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "data")
    ran = aniso(*shelf.few_shot("-o", out, "--resume"))
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("what", ["train", "test"])
def test_a_finished_run_is_not_shown_for_images_that_were_replaced(shelf, tmp_path, aniso, what):
    given = shelf.few_shot("-o", tmp_path / "run")
    assert aniso(*given).code == 0
    assert aniso(*given, "--resume").code == 0
    split = load_task(shelf.data / "photos").splits[what]
    changed = shots_of(shelf)[0] if what == "train" else Path(split.items.describe(0))
    replace(changed)
    ran = aniso(*given, "--resume")
    assert ran.code == 3
    assert "RUN-CHANGED" in ran.err
    assert f"{changed.parent.name}/{changed.name}" in ran.err


def test_a_finished_run_whose_data_are_gone_says_that_they_were_not_compared(shelf, tmp_path, aniso):
    given = shelf.few_shot("-o", tmp_path / "run")
    assert aniso(*given).code == 0
    (tmp_path / "data").rename(tmp_path / "gone")
    ran = aniso(*given, "--resume")
    assert ran.code == 0
    assert "could not be compared" in ran.err


SPEC = """\
schema: 1
name: changed
base:
  setting: few-shot
  model: {model}
  bank: {bank}
  task: ./photos
  shots: 2
  compare: false
  schedule: {{ epochs: 1, batch_size: 4 }}
variants:
  - label: zero-shot
    base: {{ method: none }}
  - label: learned
  - label: with a head
    base: {{ head: lpp }}
"""


def test_a_grid_notices_replaced_images_and_runs_again_what_depends_on_them(shelf, tmp_path, aniso):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=shelf.model, bank=shelf.bank))
    given = ("run", spec, "--data", shelf.data, "--json")
    assert aniso(*given).code == 0
    records = runs.recorded(tmp_path / "records")
    assert len(records) == 3

    changed = Path(load_task(shelf.data / "photos").train.shots(2, seed=0).items.describe(0))
    replace(changed)
    ran = aniso(*given)
    assert ran.code == 3
    assert "RUN-CHANGED" in ran.err
    assert f"{changed.parent.name}/{changed.name}" in ran.err
    assert "zero-shot" not in ran.err  # which was measured on other images
    assert runs.recorded(tmp_path / "records") == records

    listed = json.loads(aniso(*given, "--dry-run").out)
    assert {row["label"]: row["status"] for row in listed} == {
        "zero-shot": "recorded", "learned": "changed", "with a head": "changed",
    }  # fmt: skip
    assert aniso(*given, "--rerun-changed").code == 0
    now = runs.recorded(tmp_path / "records")
    for before, record in zip(records, now, strict=True):
        same = record["inputs"]["content"] == before["inputs"]["content"]
        assert same == (record["label"] == "zero-shot")
    # the head's cell took the coefficients that were learned on the new images, not on the old ones
    learned, headed = (next(r for r in now if r["label"] == x) for x in ("learned", "with a head"))
    assert learned["coefficients"] == headed["coefficients"]
    assert aniso(*given).code == 0
    assert aniso("report", tmp_path / "records", "-o", tmp_path / "report").code == 0  # lists are no records


def test_a_grid_is_compared_only_where_its_data_are(shelf, tmp_path, aniso):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=shelf.model, bank=shelf.bank))
    assert aniso("run", spec, "--data", shelf.data).code == 0
    ran = aniso("run", spec, "--data", tmp_path / "nowhere", "--dry-run", "--json")
    assert ran.code == 0
    assert {row["status"] for row in json.loads(ran.out)} == {"recorded"}
    assert "3 recorded cells were not compared" in ran.err


@pytest.fixture
def settled(monkeypatch):
    """Files count as unchanged at once; their inode's time cannot be set back in a test."""
    monkeypatch.setattr(caches, "_SETTLED", 0)


def test_unchanged_files_are_read_once_across_processes(tmp_path, settled):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data/a.png"
    file.write_bytes(b"one")
    reads: list[str] = []

    def read() -> bytes:
        reads.append("read")
        return file.read_bytes()

    first = HashCache(tmp_path / "cache")
    digest = first.digest(file, "", read)
    assert first.digest(file, "", read) == digest
    first.save()
    assert HashCache(tmp_path / "cache").digest(file, "", read) == digest
    assert len(reads) == 1
    other = file.with_name("b.png")
    other.write_bytes(b"two")
    other.rename(file)  # another inode under the old name
    assert HashCache(tmp_path / "cache").digest(file, "", read) != digest
    assert len(reads) == 2


def test_a_file_that_was_just_written_is_hashed_again(tmp_path):
    """Within two seconds it may change under the very same time."""
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    cache = HashCache(tmp_path / "cache")
    digest = cache.digest(file, "", file.read_bytes)
    status = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.digest(file, "", file.read_bytes) != digest


@pytest.mark.parametrize("damage", [b"", b"not a database at all" * 100])
def test_a_damaged_cache_is_as_good_as_none(tmp_path, settled, damage):
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    expected = HashCache(None).digest(file, "", file.read_bytes)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/files-1.sqlite").write_bytes(damage)
    cache = HashCache(tmp_path / "cache")
    assert cache.digest(file, "", file.read_bytes) == expected
    cache.save()
    assert HashCache(Path("/proc/nowhere")).digest(file, "", file.read_bytes) == expected


@pytest.mark.parametrize("kind", ["folder", "parquet", "tar"])
def test_content_changes_with_one_byte_of_one_image_of_any_reader(tmp_path, kind):
    def task(first: int):
        root = tmp_path / f"{kind}-{first}" / "task"
        if kind == "folder":
            pictures.folder(root, {"cat": 3, "dog": 3})
            if first:
                (root / "cat/001.png").write_bytes(pictures.encoded(77))
        elif kind == "parquet":
            pictures.card(pictures.parquet(root, "train", [0, 1, 0, 1], first), ["cat", "dog"])
        else:
            tarred(root, first)
        return load_task(root).splits

    one, same, other = task(0), load_task(tmp_path / f"{kind}-0" / "task").splits, task(1)
    role = next(iter(one))
    assert content_hash(one[role]) == content_hash(same[role])
    assert content_hash(one[role]) == content_hash(one[role].unlabelled())
    assert one[role].manifest == other[role].manifest
    assert any(content_hash(one[r]) != content_hash(other[r]) for r in one)


def tarred(root: Path, first: int) -> None:
    import io
    import tarfile

    root.mkdir(parents=True)
    with tarfile.open(root / "train-000.tar", "w") as archive:
        for i in range(6):
            label = str(i % 2).encode()
            for name, data in ((f"{i}.png", pictures.encoded(i + 50 * first)), (f"{i}.cls", label)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    (root / "classnames.txt").write_text("cat\ndog\n")


def test_changed_new_and_missing_images_are_named(tmp_path):
    root = pictures.folder(tmp_path / "data", {"cat": 6, "dog": 6})
    split = load_task(root).train
    lists = ImageLists(tmp_path / "lists")
    lists.keep([split])
    before = content_hash(split)
    paths = [Path(split.items.describe(i)) for i in range(len(split))]
    replace(paths[0])
    now = load_task(root).train
    assert lists.changes(before, now) == [str(paths[0])]
    fewer = now.take(range(2, len(now)))
    names = lists.changes(before, fewer)
    assert sum("(gone)" in name for name in names) == 2
    assert lists.changes("0" * 64, now) == [f"images of {now.name}"]  # there is no list


def test_an_unlabelled_split_names_files_in_messages_alone(tmp_path):
    root = pictures.folder(tmp_path / "data", {"cat": 6, "dog": 6})
    split = load_task(root).train.unlabelled()
    lists = ImageLists(tmp_path / "lists")
    lists.keep([split])
    text = next((tmp_path / "lists").iterdir()).read_text()
    assert "cat" not in text
    assert "dog" not in text
    before = content_hash(split)
    for path in sorted((root / "cat").iterdir()):
        replace(path)
    now = load_task(root).train.unlabelled()
    assert any("cat/" in name for name in lists.changes(before, now))


def test_hashing_that_takes_long_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "_QUICK", -1.0)
    root = pictures.folder(tmp_path / "data", {"cat": 6, "dog": 6})
    split = load_task(root).train
    progress: list[tuple[str, int, int]] = []
    content.content_hashes(split, lambda *row: progress.append(row))
    assert progress[-1] == (f"hashing the images of {split.name}", len(split), len(split))
