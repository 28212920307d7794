"""Uploading an exported model, against a fake of the hub: no connection is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import runs
from adapters import random_adapter

from aniso.vectors import Bank

transformers = pytest.importorskip("transformers")


class FakeApi:
    """Records the calls that a push makes; files are read as the hub would."""

    def __init__(self) -> None:
        self.created: list[tuple[str, bool | None, bool]] = []
        self.files: dict[str, bytes] = {}
        self.fails = False

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> str:
        if self.fails:
            raise huggingface_hub.errors.LocalTokenNotFoundError("no token")
        self.created.append((repo_id, private, exist_ok))
        return f"https://hub.example/{repo_id}"

    def create_commit(self, repo_id: str, operations: Any, *, commit_message: str) -> None:
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return fake


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("push"))


def bake(aniso, shelf: runs.Shelf, out: Path, *more: str) -> Path:
    mix = out.with_suffix(".mix")
    bank = ("--bank", str(shelf.bank))
    assert aniso("coefficients", "make", "cars=0.5", *bank, "-o", str(mix)).code == 0
    done = aniso("bake", str(mix), *bank, "--base", str(shelf.model), "-o", str(out), *more)
    assert done.code == 0, done.err
    return out


@pytest.mark.parametrize("private", [False, True])
def test_all_files_are_uploaded_as_they_are(
    shelf: runs.Shelf, tmp_path: Path, aniso, hub: FakeApi, private: bool
) -> None:
    out = bake(aniso, shelf, tmp_path / "m", "--to", "huggingface")
    done = aniso("push", str(out), "me/model", *(["--private"] if private else []))
    assert done.code == 0, done.err
    assert hub.created == [("me/model", private, True)]
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert "https://hub.example/me/model" in done.out


def test_a_dry_run_shows_files_and_calls_nothing(
    shelf: runs.Shelf, tmp_path: Path, aniso, hub: FakeApi
) -> None:
    out = bake(aniso, shelf, tmp_path / "m", "--to", "huggingface")
    done = aniso("push", str(out), "me/model", "--dry-run", "--json")
    assert done.code == 0, done.err
    listed = json.loads(done.out)
    assert listed["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert listed["url"] is None and hub.created == [] and hub.files == {}


def test_open_clip_finds_the_tokenizer_in_the_repository(
    shelf: runs.Shelf, tmp_path: Path, aniso, hub: FakeApi
) -> None:
    out = bake(aniso, shelf, tmp_path / "m", "--to", "open_clip")
    assert aniso("push", str(out), "me/model").code == 0
    config = json.loads(hub.files["open_clip_config.json"])
    assert config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] == "me/model"
    own = json.loads((out / "open_clip_config.json").read_text())
    own["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "me/model"
    assert config == own


def test_other_directories_and_stray_files_are_refused(
    shelf: runs.Shelf, tmp_path: Path, aniso, hub: FakeApi
) -> None:
    assert "is not a model that aniso exported" in aniso("push", str(shelf.model), "me/model").err
    assert "is not a model that aniso exported" in aniso("push", str(shelf.bank), "me/model").err
    out = bake(aniso, shelf, tmp_path / "m", "--to", "huggingface")
    (out / ".env").write_text("TOKEN=secret")
    done = aniso("push", str(out), "me/model")
    assert done.code == 3 and ".env" in done.err
    (out / ".env").unlink()
    (out / "vocab.txt").symlink_to(out / "README.md")
    assert aniso("push", str(out), "me/model").code == 3
    for name in ("model", "a/b/c", "../x", "me/"):
        assert aniso("push", str(out), name).code == 2
    assert hub.created == [] and hub.files == {}


def test_errors_of_the_hub_and_being_offline_are_reported(
    shelf: runs.Shelf, tmp_path: Path, aniso, hub: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = bake(aniso, shelf, tmp_path / "m", "--to", "huggingface")
    hub.fails = True
    done = aniso("push", str(out), "me/model")
    assert done.code == 3 and "hf auth login" in done.err
    hub.fails = False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = aniso("push", str(out), "me/model")
    assert done.code == 3 and "HUB-OFFLINE" in done.err and hub.files == {}


def test_an_adapter_must_name_a_base_that_others_can_load(
    shelf: runs.Shelf, tmp_path: Path, aniso, hub: FakeApi
) -> None:
    pytest.importorskip("peft")
    fresh = transformers.CLIPModel.from_pretrained(shelf.model)
    random_adapter(fresh, tmp_path / "a", r=2, target_modules=r"vision_model.*\.(q_proj|fc1)")
    Bank.build(shelf.model, {"a": tmp_path / "a"}, to=tmp_path / "bank")
    bank = ("--bank", str(tmp_path / "bank"))
    mix, out = str(tmp_path / "mix"), tmp_path / "one"
    assert aniso("coefficients", "make", "a=0.5", *bank, "-o", mix).code == 0
    given = ("bake", mix, *bank, "--base", str(shelf.model), "-o", str(out), "--to", "peft", "--overwrite")
    assert aniso(*given).code == 0
    done = aniso("push", str(out), "me/model")
    assert done.code == 3 and "--base-model" in done.err and hub.files == {}
    assert aniso(*given, "--base-model", "owner/clip").code == 0
    assert aniso("push", str(out), "me/model").code == 0
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "owner/clip"
