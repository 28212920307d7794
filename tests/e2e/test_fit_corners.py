"""Corners of learning that a user meets: devices, memory, boards, own vectors, linearised results."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import runs
import torch

from aniso.compose import Coefficients
from aniso.models import Encoder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


def test_H11_a_step_that_does_not_fit_says_how_it_would(aniso, shelf, monkeypatch):
    forward = Encoder.forward

    def large(self, images):
        if len(images) > 2 and torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return forward(self, images)

    monkeypatch.setattr(Encoder, "forward", large)
    given = shelf.few_shot("--method", "weights", "--batch-size", 4)
    ran = aniso(*given)
    assert ran.code == 5 and "OUT-MEMORY" in ran.err and "--micro-batch 2" in ran.err
    assert aniso(*given, "--micro-batch", 2).code == 0


def test_a_device_that_is_not_there_is_named(aniso, shelf):
    ran = aniso(*shelf.few_shot("--device", "cuda:77"))
    assert ran.code == 2 and "cuda:77" in ran.err and "--device cpu" in ran.err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a graphics card")
def test_a_graphics_card_is_used_if_there_is_one(aniso, shelf):
    ran = aniso(*shelf.few_shot("--json"))
    assert ran.code == 0 and json.loads(ran.out)["environment"]["device"] == "cuda"


def test_epochs_are_written_for_tensorboard_where_it_is_installed(aniso, shelf, tmp_path):
    ran = aniso(*shelf.few_shot("--tensorboard", "-o", tmp_path / "run"))
    assert ran.code == 0 and "--tensorboard is now --track tensorboard" in ran.err
    assert (tmp_path / "run/record.json").exists()
    if importlib.util.find_spec("tensorboard") is None:
        assert "pip install tensorboard" in ran.err  # a note, and the run goes on
    else:
        assert list((tmp_path / "run/tensorboard").iterdir())


def test_a_tracker_that_fails_in_the_middle_does_not_stop_a_run(aniso, shelf, tmp_path, monkeypatch):
    def log(numbers, step):
        raise ConnectionError("no answer")

    calls = SimpleNamespace(init=lambda **how: print("hello"), log=log, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", calls)
    ran = aniso(*shelf.few_shot("--track", "wandb", "-o", tmp_path / "run", "--json"))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["metrics"]["epochs"] == 2  # nothing of the tracker's is in it
    assert ran.err.count("wandb is not used: ConnectionError: no answer") == 1
    plain = aniso(*shelf.few_shot("--json"))
    assert json.loads(plain.out)["metrics"]["accuracy"] == json.loads(ran.out)["metrics"]["accuracy"]


def test_a_tasks_own_vector_is_left_out_however_it_is_spelt(aniso, shelf, tmp_path):
    shutil.copytree(shelf.data / "photos", tmp_path / "Pho_Tos")
    given = [str(tmp_path / "Pho_Tos") if word.endswith("photos") else word for word in shelf.few_shot()]
    ran = aniso(*given, "--plan", "--json")
    assert json.loads(ran.out)["vectors"] == ["cars", "dtd", "signs"]


def test_what_was_learned_over_the_linearised_model_is_not_taken_for_weights(aniso, shelf, tmp_path):
    ran = aniso(*shelf.few_shot("--linearised", "-o", tmp_path / "run"))
    assert ran.code == 0, ran.err
    file = tmp_path / "run/coefficients.safetensors"
    assert Coefficients.load(file).linearised
    ran = aniso("bake", file, "--bank", shelf.bank, "--base", shelf.model, "-o", tmp_path / "out.safetensors")
    assert ran.code == 3 and "CKPT-LINEARISED" in ran.err and not (tmp_path / "out.safetensors").exists()
    evaluate = (
        "eval",
        shelf.model,
        "--bank",
        shelf.bank,
        "--coefficients",
        file,
        "--task",
        shelf.data / "photos",
    )
    assert aniso(*evaluate).code == 3
    assert aniso(*evaluate, "--linearised").code == 0


def test_negation_does_not_add_the_vector(aniso, shelf):
    tasks = ("--target", shelf.data / "cars", "--control", shelf.data / "dtd")
    ran = aniso("fit", "negation", *shelf.base, *tasks, "--method", "vector")
    assert ran.code == 2 and "does not take it out" in ran.err


def test_the_papers_rates_are_those_of_its_targets(aniso, shelf):
    for target, lr, epochs in (("mnist", 0.003, 7), ("dtd", 0.01, 20), ("./own", 0.005, 10)):
        ran = aniso("fit", "negation", *shelf.base, "--target", target, "--control", "x", "--print-spec")
        assert f"lr: {lr}\n" in ran.out and f"epochs: {epochs}\n" in ran.out
    ran = aniso(
        "fit", "negation", *shelf.base, "--target", "mnist", "--control", "x", "--lr", 1, "--print-spec"
    )
    assert "lr: 1.0\n" in ran.out and "epochs: 7\n" in ran.out


def test_fine_tuning_known_tasks_takes_the_papers_epochs(aniso, shelf):
    ran = aniso("finetune", "--model", "m", "--task", "eurosat", "--print-spec")
    assert "epochs: 12\n" in ran.out and "lr: 1e-05\n" in ran.out
    ran = aniso("finetune", "--model", "m", "--task", "eurosat", "--lora", 16, "--print-spec")
    assert "lr: 0.001\n" in ran.out


def test_a_baked_directory_brings_its_card_coefficients_and_tokenizer(aniso, shelf, tmp_path):
    assert aniso(*shelf.few_shot("-o", tmp_path / "run")).code == 0
    file = tmp_path / "run/coefficients.safetensors"
    given = ("bake", file, "--bank", shelf.bank, "--base", shelf.model, "--to", "huggingface")
    assert aniso(*given, "-o", tmp_path / "out").code == 0
    assert aniso(*given, "-o", tmp_path / "out", "--overwrite").code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "coefficients.safetensors", "model.safetensors", "tokenizer.json"} <= names
    learned = Coefficients.load(tmp_path / "out/coefficients.safetensors")
    assert torch.equal(learned.values, Coefficients.load(file).values)
    card = (tmp_path / "out/README.md").read_text()
    assert str(tmp_path) not in card and "| signs |" in card
    record = json.loads((tmp_path / "run/record.json").read_text())
    ran = aniso("eval", tmp_path / "out", "--task", shelf.data / "photos", "--json")
    assert json.loads(ran.out)[0]["correct"] == record["metrics"]["accuracy"]["photos"]["correct"]
