"""The small model and the banks that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pictures
import pytest
import torch

from aniso.classes import ClassList
from aniso.compose import Composition, Linearised, Partition
from aniso.models import load_model, mini_directory
from aniso.vectors import Bank, Kind

BANKS = ("mini", "mini-linearised", "mini-lora4")


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


def test_the_model_is_whole(mini):
    assert mini.has_text and mini.logit_scale > 1
    assert mini(torch.randn(2, 3, 48, 48)).shape == (2, 128)
    words = mini.class_weights(ClassList(("goldfish", "school bus", "banana")))
    cosines = torch.nn.functional.normalize(words.weight, dim=-1)
    assert (cosines @ cosines.T).fill_diagonal_(0).max() < 0.9  # its text tower tells words apart


@pytest.mark.parametrize("name", BANKS)
def test_the_banks_fit_the_model_and_are_as_recorded(mini, name):
    bank = Bank.load(name)
    assert len(bank) == 21
    assert bank.check() == []
    bank.over(mini)  # the same base
    for vector, facts in bank.facts.items():
        assert facts["task"] == vector
        assert 0 <= facts["zero_shot"] <= 1 and 0 < facts["tuned"] <= 1
    better = [f["tuned"] - f["zero_shot"] for f in bank.facts.values()]
    assert sum(gain > 0.1 for gain in better) > 10  # tens of points on most tasks


@pytest.mark.parametrize("name", BANKS)
def test_at_zero_a_composition_is_the_model(mini, name):
    base = Linearised(mini) if name.endswith("linearised") else mini
    composition = Composition(base, Bank.load(name), Partition.blocks())
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(composition(images), mini(images))
    adapted = sum(b.kind in (Kind.ATTENTION, Kind.MLP) for b in mini.layout.blocks)
    assert composition.index.count == 21 * (adapted if "lora" in name else 80)


def test_they_are_known_by_name_on_the_command_line(aniso, tmp_path):
    pictures.folder(tmp_path / "photos" / "test", {"frog": 2, "banana": 2})
    ran = aniso(
        "eval", "mini", "--task", tmp_path / "photos", "--bank", "mini", "--vector", "cifar10", "--json"
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)[0]["total"] == 4
    ran = aniso("bank", "ls", "mini")
    assert ran.code == 0, ran.err
    assert "accuracy" in ran.out
    made = aniso(
        "coefficients", "make", "mnist=0.3", "svhn=0.3", "--bank", "mini", "-o", tmp_path / "c.safetensors"
    )
    assert made.code == 0, made.err
    places = ("--bank", "mini", "--base", "mini", "-o", tmp_path / "out")
    baked = aniso("bake", tmp_path / "c.safetensors", *places, "--to", "huggingface")
    assert baked.code == 0, baked.err
    assert aniso("bank", "ls", "mini-unheard-of").code == 2


def test_what_is_written_about_it_is_what_was_measured():
    root = Path(__file__).parents[2]
    table = (root / "experiments" / "mini" / "table.md").read_text()
    bank, linear = (Bank.load(name) for name in BANKS[:2])
    assert table in (root / "docs" / "mini.md").read_text()
    assert table in (mini_directory() / "README.md").read_text()
    for line in (root / "experiments" / "mini" / "records.jsonl").read_text().splitlines():
        said = json.loads(line)
        facts = {**bank.facts, **linear.facts} if "linearised" in said["what"] else bank.facts
        if said["task"] in facts and "vector" in said["what"]:  # packing costs half a point at most
            assert abs(said["accuracy"] - facts[said["task"]]["tuned"]) < 0.005
        assert f"{said['accuracy']:.1%}" in table and said["fingerprint"] == load_model("mini").fingerprint


def test_what_is_written_about_adapters_is_what_was_measured():
    root = Path(__file__).parents[2]
    measured = json.loads((root / "experiments" / "lora-vectors" / "adapters.json").read_text())
    facts = Bank.load("mini-lora4").facts
    assert {task: own["tuned"] for task, own in measured["rank 4"].items()} == {
        task: own["tuned"] for task, own in facts.items()
    }
    for text in ("docs/mini.md", "experiments/mini.md"):
        for own in measured.values():
            mean = sum(found["tuned"] for found in own.values()) / len(own)
            assert f"{100 * mean:.1f}" in (root / text).read_text()


def test_fine_tuned_accuracies_are_what_the_bank_says(mini, mini_data):
    """On the real pictures, where they are: packing to 4 bits costs little."""
    from aniso.data import load_task
    from aniso.learn import evaluate

    bank = Bank.load("mini")
    for name in ("eurosat", "mnist"):
        task = load_task(mini_data / name)
        composition = Composition(mini, bank.only(name), Partition.whole())
        composition.values.data.fill_(1.0)
        assert abs(evaluate(mini, task.test).value - bank.facts[name]["zero_shot"]) < 1e-9
        assert abs(evaluate(composition, task.test).value - bank.facts[name]["tuned"]) < 0.03
