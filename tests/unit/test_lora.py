"""LoRA adapters made by us are what PEFT reads, and what a bank reads back."""

from __future__ import annotations

import colours
import pytest
import tiny
import torch

from aniso.compose import Composition, Partition
from aniso.learn import CrossEntropy, Schedule, evaluate, fit
from aniso.learn.lora import adapter
from aniso.models import load_model
from aniso.vectors import Bank, LowRank
from aniso.vectors.convert import convert
from aniso.weights import open_weights

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load_model(tiny.hf_clip_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return colours.task(tmp_path_factory.mktemp("task"), {"train": 8, "test": 6})


@pytest.fixture(scope="module")
def made(encoder, task, tmp_path_factory):
    one = adapter(encoder, 4, seed=3)
    fit(one.trained, CrossEntropy(task.train), Schedule(epochs=3, lr=1e-2, batch_size=8))
    place = tmp_path_factory.mktemp("lora") / "adapter"
    one.save(place)
    return one, place


def test_an_adapter_that_was_not_trained_changes_nothing(encoder):
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(adapter(encoder, 2).trained.model(images), encoder(images))


def test_only_factors_of_the_image_encoders_matrices_are_trained(encoder):
    names = list(adapter(encoder, 2).trained.tensors)
    assert names and all("vision_model" in name and "lora_" in name for name in names)
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names}
    assert layers == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}


@pytest.mark.parametrize(
    ("which", "expected"),
    [("attention", {"q_proj", "k_proj", "v_proj", "out_proj"}), ("mlp", {"fc1", "fc2"})],
)
def test_layers_can_be_named(encoder, which, expected):
    names = adapter(encoder, 2, layers=which).trained.tensors
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names} == expected


def test_the_saved_adapter_gives_the_trained_model_back_and_stays_low_rank(encoder, task, made):
    one, place = made
    bank = Bank.build(encoder, {"lora": place}, allow_distant=True)
    deltas = [bank["lora"][block.name] for block in bank["lora"].blocks]
    assert deltas and all(isinstance(delta, LowRank) for delta in deltas)
    composition = Composition(encoder, bank, Partition.whole())
    with torch.no_grad():
        composition.values.fill_(1.0)
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(composition(images), one.trained.model(images), rtol=1e-4, atol=1e-5)
    assert not torch.equal(one.trained.model(images), encoder(images))
    assert evaluate(composition, task.test).correct == evaluate(one.trained.model, task.test).correct


def test_peft_loads_what_was_saved(made):
    import peft

    one, place = made
    loaded = peft.PeftModel.from_pretrained(tiny.hf_clip(), place)
    theirs = {k: v for k, v in loaded.state_dict().items() if "lora_" in k}
    ours = {k.replace("base_model.model.", ""): v for k, v in theirs.items()}
    for name, tensor in one.trained.tensors.items():
        assert torch.equal(ours[name], tensor), name


def test_seeds_draw_the_first_factors_and_nothing_else_is_drawn(encoder):
    before = torch.random.get_rng_state()
    a, b, c = (adapter(encoder, 2, seed=s).trained.copied() for s in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_saving_asks_no_network(made, tmp_path, monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    made[0].save(tmp_path / "again")
    assert "adapter_config.json" in {path.name for path in (tmp_path / "again").iterdir()}


def test_fused_attention_is_refused_by_name(tmp_path, refused):
    own = tiny.hf_clip_directory(tmp_path / "own")
    convert(open_weights(own), tmp_path / "fused", to="open_clip")
    with refused("LORA-KIND", 2, "one tensor"):
        adapter(load_model(tmp_path / "fused"), 2)


def test_a_rank_below_one_is_refused(encoder, refused):
    with refused("USAGE", 2, "rank 0"):
        adapter(encoder, 0)
