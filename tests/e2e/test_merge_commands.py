"""``aniso bank merge`` on the command line."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from adapters import random_adapter

from aniso.merge import TSV, merge
from aniso.vectors import Bank, LowRank, TaskVector
from aniso.weights import open_weights, save_safetensors


@pytest.fixture
def shelf(tmp_path):
    model = tiny.hf_clip(activation="quick_gelu")
    model.save_pretrained(tmp_path / "base")
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    tuned = {
        n: tiny.tuned_vision(base, tiny.is_hf_vision, i) for i, n in enumerate(("cars", "dtd", "mnist"), 1)
    }
    Bank.build(tmp_path / "base", tuned, to=tmp_path / "bank")
    return tmp_path


def test_a_vector_file(shelf, aniso):
    out = shelf / "tsv.safetensors"
    ran = aniso("bank", "merge", "tsv", "--bank", shelf / "bank", "-o", out, "--vectors", "dtd,cars")
    assert ran.code == 0, ran.err
    assert "tsv of 2 vectors" in ran.out and "cars" in ran.out and "mnist" not in ran.out
    found = TaskVector.load(out)
    expected = merge(Bank.load(shelf / "bank").only("cars", "dtd"), TSV())
    assert found.provenance == expected.provenance
    for block in expected.blocks:
        assert torch.equal(found[block.name].dense(), expected[block.name].dense())


def test_json_has_norms_and_provenance(shelf, aniso):
    ran = aniso("bank", "merge", "ties", "--bank", shelf / "bank", "-o", shelf / "t.safetensors", "--as",
                "mergekit", "--option", "keep=0.5", "--scale", "0.7", "--name", "mine", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["name"] == "mine" and found["norm"] > 0 and set(found["sources"]) == {"cars", "dtd", "mnist"}
    assert "ties(scale=0.7, keep=0.5, form=mergekit" in found["origin"]["formula"]


def test_a_vector_is_added_to_the_bank_itself(shelf, aniso):
    before = Bank.load(shelf / "bank")
    ran = aniso("bank", "merge", "iso-c", "--bank", shelf / "bank", "-o", shelf / "bank")
    assert ran.code == 0, ran.err
    after = Bank.load(shelf / "bank")
    assert after.names == (*before.names, "iso-c") and after.check() == []
    assert after["iso-c"].provenance.format == "merge"
    assert (
        json.loads(aniso("bank", "ls", shelf / "bank", "--json").out)["vectors"][3]["from"]
        == "iso-c of 3 vectors"
    )
    again = aniso("bank", "merge", "iso-c", "--bank", shelf / "bank", "-o", shelf / "bank")
    assert again.code == 2 and "already has a vector 'iso-c'" in again.err
    other = ("bank", "merge", "mean", "--bank", shelf / "bank", "-o", shelf / "bank")
    assert aniso(*other, "--overwrite").code == 2
    noted = aniso(*other)
    assert noted.code == 0 and "itself a merge" in noted.err


def test_a_new_bank(shelf, aniso):
    ran = aniso("bank", "merge", "mean", "--bank", shelf / "bank", "-o", shelf / "new", "--storage", "fp16")
    assert ran.code == 0, ran.err
    assert Bank.load(shelf / "new").names == ("mean",) and Bank.load(shelf / "new").storage == "fp16"


@pytest.mark.parametrize("to", ["safetensors", "huggingface"])
def test_a_baked_checkpoint(shelf, aniso, to):
    out = shelf / ("model.safetensors" if to == "safetensors" else "model")
    ran = aniso(
        "bank", "merge", "tsv", "--bank", shelf / "bank", "--bake", out, "--base", shelf / "base", "--to", to
    )
    assert ran.code == 0, ran.err
    made, vector = open_weights(out), merge(Bank.load(shelf / "bank"), TSV())
    for key, value in vector.apply(shelf / "base").items():
        torch.testing.assert_close(made.read(key), value)


def test_an_adapter(shelf, aniso):
    from transformers import CLIPModel

    pytest.importorskip("peft")
    for seed, rank in ((1, 2), (2, 3)):
        model = CLIPModel.from_pretrained(shelf / "base")
        random_adapter(model, shelf / f"a{seed}", seed, r=rank, target_modules=r"vision_model.*fc\d")
    loras = Bank.build(
        shelf / "base", {f"a{seed}": shelf / f"a{seed}" for seed in (1, 2)}, to=shelf / "loras"
    )
    ran = aniso("bank", "merge", "tsv", "--bank", shelf / "loras", "--bake", shelf / "merged", "--to", "peft",
                "--base", shelf / "base", "-o", shelf / "v.safetensors")  # fmt: skip
    assert ran.code == 0, ran.err
    merged = TaskVector.load(shelf / "v.safetensors")
    assert all(isinstance(merged[block.name], LowRank) for block in merged.blocks)
    adapter = TaskVector.between(shelf / "base", shelf / "merged")
    assert {b.name for b in adapter.blocks} == {b.name for b in loras["a1"].blocks}
    for block in merged.blocks:
        torch.testing.assert_close(adapter[block.name].dense(), merged[block.name].dense())


def test_the_plan_writes_nothing(shelf, aniso):
    ran = aniso("bank", "merge", "cart", "--bank", shelf / "bank", "--plan")
    assert ran.code == 0 and "memory    about" in ran.out
    plan = json.loads(aniso("bank", "merge", "cart", "--bank", shelf / "bank", "--plan", "--json").out)
    assert plan["vectors"] == 3 and plan["memory_bytes"] > 0
    assert sorted(path.name for path in shelf.iterdir()) == ["bank", "base"]


def test_existing_files_are_kept_without_overwrite(shelf, aniso):
    out = shelf / "v.safetensors"
    save_safetensors(out, {"x": torch.zeros(1)})
    words = ("bank", "merge", "mean", "--bank", shelf / "bank", "-o", out)
    ran = aniso(*words)
    assert ran.code == 2 and "OUT-EXISTS" in ran.err
    assert aniso(*words, "--overwrite").code == 0
    assert TaskVector.load(out).name == "mean"


@pytest.mark.parametrize(
    ("words", "mentions"),
    [
        (("tsvm", "-o", "x.safetensors"), "'tsv'"),
        (("tsv",), "-o FILE.safetensors"),
        (("tsv", "-o", "x.safetensors", "--qkv", "both"), "--qkv"),
        (("tsv", "-o", "x.safetensors", "--scale", "0"), "--scale"),
        (("tsv", "-o", "x.safetensors", "--scale", "nan"), "--scale"),
        (("tsv", "-o", "x.safetensors", "--option", "keep"), "--option keep=0.2"),
        (("tsv", "-o", "x.safetensors", "--option", "keep=1"), "no option 'keep'"),
        (("ties", "-o", "x.safetensors", "--option", "keep=much"), "keep"),
        (("tsv", "-o", "x.safetensors", "--as", "mergekit"), "no option 'form'"),
        (("tsv", "-o", "x.safetensors", "--vectors", "cars,cats"), "cats"),
        (("tsv", "--bake", "x"), "--base"),
        (("iso-cts", "-o", "x.safetensors", "--vectors", "cars"), "2 vectors or more"),
    ],
)
def test_mistakes_are_usage_errors(shelf, aniso, monkeypatch, words, mentions):
    monkeypatch.chdir(shelf)
    ran = aniso("bank", "merge", *words, "--bank", "bank")
    assert ran.code == 2 and mentions in ran.err, ran.err
    assert not (shelf / "x.safetensors").exists()


def test_a_missing_bank(aniso, tmp_path):
    ran = aniso("bank", "merge", "tsv", "--bank", tmp_path, "-o", tmp_path / "x.safetensors")
    assert ran.code == 3 and "manifest.json" in ran.err
