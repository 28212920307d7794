"""From a bank to a model on the command line."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from aniso.weights import open_weights, save_safetensors


@pytest.fixture
def shelf(tmp_path, aniso):
    model = tiny.hf_clip(activation="quick_gelu")
    model.save_pretrained(tmp_path / "base")
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    tuned = {name: tiny.tuned_vision(base, tiny.is_hf_vision, i) for i, name in enumerate(("cars", "dtd"), 1)}
    files = []
    for name, state in tuned.items():
        save_safetensors(tmp_path / f"{name}.safetensors", state)
        files.append(tmp_path / f"{name}.safetensors")
    assert aniso("bank", "build", "--base", tmp_path / "base", *files, "-o", tmp_path / "bank").code == 0
    return tmp_path, base, tuned


def _make(aniso, root, *values):
    return aniso("coefficients", "make", *values, "--bank", root / "bank", "-o", root / "c.safetensors")


def test_task_arithmetic_by_hand(shelf, aniso):
    root, base, tuned = shelf
    ran = _make(aniso, root, "dtd=-0.25", "cars=0.5")
    assert ran.code == 0, ran.err
    assert "one coefficient per vector" in ran.out
    ran = aniso("bake", root / "c.safetensors", "--bank", root / "bank", "--base", root / "base",
                "-o", root / "out", "--to", "huggingface")  # fmt: skip
    assert ran.code == 0, ran.err
    made = open_weights(root / "out")
    for key, value in base.items():
        expected = value + 0.5 * (tuned["cars"][key] - value) - 0.25 * (tuned["dtd"][key] - value)
        torch.testing.assert_close(made.read(key), expected, rtol=1e-5, atol=1e-6)


def test_coefficients_are_shown_to_people_and_programs(shelf, aniso):
    root, _, _ = shelf
    _make(aniso, root, "cars=1", "dtd=0.125")
    assert "dtd" in aniso("coefficients", "show", root / "c.safetensors").out
    shown = json.loads(aniso("coefficients", "show", root / "c.safetensors", "--json").out)
    assert shown["vectors"] == ["cars", "dtd"]
    assert shown["matrix"][1][0] == 0.125
    assert len(shown["matrix"][0]) == len(shown["blocks"]) == 32


def test_one_vector_at_one_is_that_model_bit_for_bit(shelf, aniso):
    root, _, tuned = shelf
    _make(aniso, root, "cars=1")
    aniso("bake", root / "c.safetensors", "--bank", root / "bank", "--base", root / "base",
          "-o", root / "out.safetensors")  # fmt: skip
    made = open_weights(root / "out.safetensors")
    assert all(torch.equal(made.read(key), value) for key, value in tuned["cars"].items())


def test_the_plan_is_told_before_anything_is_read(shelf, aniso):
    root, _, _ = shelf
    ran = aniso("bank", "plan", root / "bank", "--partition", "random:50")
    assert ran.code == 0
    assert "fewer elements than parts" in ran.err
    plan = json.loads(aniso("bank", "plan", root / "bank", "--stream", "--json").out)
    assert plan["coefficients"] == 64
    assert plan["resident_bytes"] == 0
    assert plan["streamed_bytes_per_pass"] > 0
    ran = aniso("bank", "plan", root / "bank", "--memory", "1kB")
    assert ran.code == 5
    assert "PLAN-MEMORY" in ran.err and "--memory" in ran.err


@pytest.mark.parametrize("values", [["cars"], ["cars=much"], ["=1"]])
def test_a_coefficient_that_says_nothing_is_a_usage_error(shelf, aniso, values):
    ran = _make(aniso, shelf[0], *values)
    assert ran.code == 2
    assert "VECTOR=NUMBER" in ran.err


def test_nan_and_unknown_vectors_are_refused(shelf, aniso):
    assert _make(aniso, shelf[0], "cars=nan").code == 2
    assert _make(aniso, shelf[0], "cats=1").code == 2
    assert not (shelf[0] / "c.safetensors").exists()


def test_a_checkpoint_that_16_bits_cannot_hold_is_not_written(shelf, aniso):
    root, _, _ = shelf
    _make(aniso, root, "cars=1e8")
    ran = aniso("bake", root / "c.safetensors", "--bank", root / "bank", "--base", root / "base",
                "-o", root / "out.safetensors", "--dtype", "fp16")  # fmt: skip
    assert ran.code == 6
    assert "bf16" in ran.err
    assert not (root / "out.safetensors").exists()
