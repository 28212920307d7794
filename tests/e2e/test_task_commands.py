"""Looking at data and evaluating models on the command line."""

from __future__ import annotations

import json

import pictures
import pytest
import tiny
from PIL import Image

from aniso.weights import save_safetensors


@pytest.fixture
def pets(tmp_path):
    root = tmp_path / "pets"
    pictures.folder(root / "train", {"cat": 10, "dog": 10})
    pictures.folder(root / "test", {"cat": 5, "dog": 4}, 50)
    return root


@pytest.fixture
def model(tmp_path):
    return tiny.hf_clip_directory(tmp_path / "model")


def test_known_tasks_are_listed(aniso):
    ran = aniso("task", "ls")
    assert ran.code == 0, ran.err
    assert "EuroSAT" in ran.out and "imagenet_v2" in ran.out
    known = json.loads(aniso("task", "ls", "--json").out)
    assert known["eurosat"]["classes"] == 10


def test_a_folder_is_shown_with_counts_and_pictures(aniso, pets, tmp_path):
    sheet = tmp_path / "sheet.png"
    ran = aniso("task", "show", pets, "--images", sheet)
    assert ran.code == 0, ran.err
    assert "2 classes: cat, dog" in ran.out
    assert "val: 10% of train" in ran.err
    with Image.open(sheet) as image:
        assert image.format == "PNG" and image.width > 400
    assert aniso("task", "show", pets, "--images", sheet).code == 2  # never overwritten unasked
    said = json.loads(aniso("task", "show", pets, "--json").out)
    assert said["splits"]["test"]["counts"] == {"cat": 5, "dog": 4}


def test_checking_finds_what_is_wrong(aniso, pets):
    ran = aniso("task", "check", pets)
    assert ran.code == 0, ran.err
    assert "PNG RGB 12x12" in ran.out
    copied = (pets / "train" / "cat" / "000.png").read_bytes()
    (pets / "test" / "cat" / "leak.png").write_bytes(copied)
    ran = aniso("task", "check", pets)
    assert ran.code == 0
    assert "in both" in ran.err
    (pets / "test" / "dog" / "bad.png").write_bytes(b"\x89PNG\r\n")
    ran = aniso("task", "check", pets)
    assert ran.code == 3
    assert "bad.png" in ran.err


def test_fetching_says_what_to_do_where_no_program_can(aniso, tmp_path):
    ran = aniso("task", "fetch", "imagenet", "--data", tmp_path)
    assert ran.code == 2
    assert "image-net.org" in ran.err
    assert aniso("task", "fetch", "no-such-task").code == 2


def test_a_model_is_evaluated_on_a_folder(aniso, pets, model, tmp_path):
    ran = aniso("eval", model, "--task", pets, "--record", tmp_path / "records")
    assert ran.code == 0, ran.err
    assert "zero-shot" in ran.out and "pets" in ran.out
    (record,) = (tmp_path / "records").iterdir()
    said = json.loads(record.read_text())
    assert (said["total"], said["classes"], said["split"]) == (9, 2, "test")
    assert said["accuracy"] == said["correct"] / 9
    assert str(tmp_path) not in record.read_text()
    assert json.loads(aniso("eval", model, "--task", pets, "--json").out) == [said]
    assert aniso("eval", model, "--task", pets, "--record", tmp_path / "records").code == 2
    assert aniso("eval", model, "--task", pets, "--record", record).code == 2  # a file


def test_a_vector_and_coefficients_are_evaluated_as_the_tuned_model(aniso, pets, model, tmp_path):
    base = tiny.hf_clip_state(model)
    tuned = tiny.tuned_vision(base, tiny.is_hf_vision, 3)
    save_safetensors(tmp_path / "pets.safetensors", tuned)
    built = aniso("bank", "build", "--base", model, tmp_path / "pets.safetensors", "-o", tmp_path / "bank")
    assert built.code == 0, built.err
    made = aniso(
        "coefficients", "make", "pets=1", "--bank", tmp_path / "bank", "-o", tmp_path / "one.safetensors"
    )
    assert made.code == 0, made.err
    whole = aniso("eval", model, "--weights", tmp_path / "pets.safetensors", "--task", pets, "--json")
    assert whole.code == 0, whole.err
    for choice in (("--vector", "pets"), ("--coefficients", tmp_path / "one.safetensors")):
        ran = aniso("eval", model, "--task", pets, "--bank", tmp_path / "bank", *choice, "--json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)[0]["correct"] == json.loads(whole.out)[0]["correct"]
    assert aniso("eval", model, "--task", pets, "--bank", tmp_path / "bank").code == 2
    assert aniso("eval", model, "--task", pets, "--vector", "pets").code == 2


def test_bad_pictures_stop_or_are_left_out(aniso, pets, model):
    (pets / "test" / "dog" / "bad.png").write_text("no picture")
    ran = aniso("eval", model, "--task", pets)
    assert ran.code == 3
    assert "bad.png" in ran.err and "--on-bad-image skip" in ran.err
    ran = aniso("eval", model, "--task", pets, "--on-bad-image", "skip", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)[0]["total"] == 9
    assert "left out 1 unreadable images" in ran.err
    assert aniso("eval", model, "--task", pets, "--on-bad-image", "perhaps").code == 2


def test_a_split_that_is_not_there_is_named(aniso, pets, model):
    ran = aniso("eval", model, "--task", pets, "--split", "validation")
    assert ran.code == 2
    assert "choose train, val or test" in ran.err
