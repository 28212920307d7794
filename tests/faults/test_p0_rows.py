"""Rows of docs/faults.md that no other test covers: outputs in other libraries, equal bytes, secrets."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys

import pytest
import runs
import tiny
import torch

from aniso.compose import Coefficients
from aniso.models import load_model
from aniso.weights import save_safetensors

open_clip = pytest.importorskip("open_clip")
transformers = pytest.importorskip("transformers")

TOKEN = "hf_" + "s3cr3tPlanted" * 3


@pytest.fixture
def shelf(tmp_path):
    return runs.shelf(tmp_path / "planted-home")


@pytest.fixture
def coefficients(aniso, shelf, tmp_path):
    """A coefficient for every vector, in a file."""
    path = tmp_path / "mix.safetensors"
    ran = aniso("coefficients", "make", "cars=0.7", "dtd=-0.4", "--bank", shelf.bank, "-o", path)
    assert ran.code == 0, ran.err
    assert Coefficients.load(path).values.any()
    return path


def features_of(shelf, path):
    """Image features of three images by ``aniso.load_model`` on the base and the composed weights."""
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        base, composed = load_model(shelf.model), load_model(shelf.model, weights=path)
        assert (base(images) - composed(images)).abs().max() > 1e-3
        return images, composed(images)


def test_I1_a_baked_directory_loads_in_transformers_with_the_same_features(
    aniso, shelf, coefficients, tmp_path
):
    given = ("bake", coefficients, "--bank", shelf.bank, "--base", shelf.model)
    assert aniso(*given, "-o", tmp_path / "file.safetensors").code == 0
    assert aniso(*given, "--to", "huggingface", "-o", tmp_path / "hf").code == 0
    images, expected = features_of(shelf, tmp_path / "file.safetensors")
    with torch.no_grad():
        whole = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
        found = whole.visual_projection(whole.vision_model(images).pooler_output)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        vision = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "hf").eval()
        torch.testing.assert_close(vision(images).image_embeds, expected, rtol=1e-5, atol=1e-5)


def test_I1_a_baked_directory_loads_in_open_clip_with_the_same_features(aniso, shelf, coefficients, tmp_path):
    given = ("bake", coefficients, "--bank", shelf.bank, "--base", shelf.model)
    assert aniso(*given, "-o", tmp_path / "file.safetensors").code == 0
    assert aniso(*given, "--to", "open_clip", "-o", tmp_path / "oc").code == 0
    images, expected = features_of(shelf, tmp_path / "file.safetensors")
    model = open_clip.create_model(f"local-dir:{tmp_path / 'oc'}").eval()
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(images), expected, rtol=1e-5, atol=1e-5)


ALL = "import json, sys; from aniso.cli import main; sys.exit(max(map(main, json.loads(sys.argv[1]))))"


def test_H16_outputs_depend_on_no_hash_seed_time_zone_or_locale(aniso, shelf, tmp_path):
    state = tiny.hf_clip_state(shelf.model)
    for i in range(2):
        save_safetensors(tmp_path / f"{i}.safetensors", tiny.tuned_vision(state, tiny.is_hf_vision, i + 1))
    tuned = [f"v{i}={tmp_path / f'{i}.safetensors'}" for i in range(2)]

    def commands(out):
        bank = out / "bank"
        build = ["bank", "build", "--base", shelf.model, *tuned, "-o", bank, "--storage", "residual4"]
        make = ["coefficients", "make", "v0=0.7", "v1=0.2", "--bank", bank, "-o", out / "c.safetensors"]
        return build, make

    here, there = tmp_path / "here", tmp_path / "there"
    assert all(aniso(*command).code == 0 for command in commands(here))
    env = {**os.environ, "PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    command = [sys.executable, "-c", ALL, json.dumps(commands(there), default=str)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    first, second = ({p.name: p.read_bytes() for p in out.rglob("*.*")} for out in (here, there))
    assert first == second and len(first) == 3


def test_I6_no_output_holds_tokens_paths_or_the_name_of_the_machine(
    aniso, shelf, coefficients, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(shelf.root))
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-machine")
    monkeypatch.setattr(platform, "node", lambda: "planted-machine")
    run, made = tmp_path / "run", tmp_path / "made"
    task = ("--task", shelf.data / "photos")
    tuned = tmp_path / "planted-home" / "tuned.safetensors"
    save_safetensors(tuned, tiny.tuned_vision(tiny.hf_clip_state(shelf.model), tiny.is_hf_vision, 9))
    for given in (
        shelf.few_shot("-o", run),
        ("bake", run / "coefficients.safetensors", "--bank", shelf.bank, "--base", shelf.model,
         "--to", "huggingface", "-o", made / "hf"),
        ("bake", coefficients, "--bank", shelf.bank, "--base", shelf.model, "-o", made / "m.safetensors"),
        ("bank", "build", "--base", shelf.model, f"a={tuned}", "-o", made / "bank"),
        ("vector", "make", "--base", shelf.model, tuned, "-o", made / "v.safetensors"),
        ("eval", shelf.model, *task, "--record", made / "records"),
        ("report", run / "record.json", "-o", made / "report", "--no-figures"),
    ):  # fmt: skip
        ran = aniso(*given)
        assert ran.code == 0, (given, ran.err)
    written = [path for root in (run, made) for path in root.rglob("*") if path.is_file()]
    assert len(written) > 12
    for path in written:
        paths = (
            () if path.name == "spec.yaml" else ("planted-home", str(tmp_path))
        )  # it repeats what was typed
        for secret in (TOKEN, "planted-machine", *paths):
            assert secret.encode() not in path.read_bytes(), (path.name, secret)
