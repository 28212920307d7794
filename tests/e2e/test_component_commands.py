"""Coefficients of singular components from the command line: store, plan, learn, show, bake."""

from __future__ import annotations

import json

import pictures
import pytest

from aniso.compose import Coefficients, Composition, Partition
from aniso.models import load_model
from aniso.vectors import Bank
from aniso.weights import open_weights

VECTORS = ("mnist", "svhn")


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    """Two vectors of the bank that comes along, as stored there."""
    path = tmp_path_factory.mktemp("component-commands") / "bank"
    Bank.load("mini").only(*VECTORS).save(path)
    return path


def test_a_bank_is_stored_as_components_and_their_coefficients_are_learned(bank, aniso, tmp_path):
    ran = aniso("bank", "quantise", bank, "--storage", "svd:6", "-o", tmp_path / "svd", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report["storage"] == "svd:6"
    stored = Bank.load(tmp_path / "svd")
    for row in report["vectors"]:
        assert 0.1 < row["relative_error"] == stored[row["name"]].relative_error < 1
        assert row["storage"] == "svd:6"
    shown = aniso("bank", "ls", tmp_path / "svd")
    assert f"{stored['mnist'].relative_error:.2%}" in shown.out

    planned = aniso("bank", "plan", tmp_path / "svd", "--partition", "components:4", "--json")
    pictures.folder(tmp_path / "fruit", {"apple": 8, "school bus": 8})
    given = ("--model", "mini", "--bank", tmp_path / "svd", "--task", tmp_path / "fruit", "--shots", 2)
    quick = ("--epochs", 2, "--batch-size", 4, "--min-steps-per-epoch", 1, "--no-compare")
    run = tmp_path / "run"
    ran = aniso("fit", "few-shot", *given, *quick, "--partition", "components:4", "-o", run)
    assert ran.code == 0, ran.err
    found = Coefficients.load(run / "coefficients.safetensors")
    assert found.partition == Partition.components(4)
    assert json.loads(planned.out)["coefficients"] == len(found)
    assert f"{len(found):,} trained" in ran.out
    for vector in VECTORS:
        assert len(set(found.of(vector, "visual.proj").tolist())) == 4  # each has moved by itself

    shown = aniso("coefficients", "show", run, "--json")
    components = json.loads(shown.out)["components"]
    assert [row["component"] for row in components] == [0, 1, 2, 3]
    assert all(row["min"] <= row["mean"] <= row["max"] for row in components)
    assert "mean size" in aniso("coefficients", "show", run).out

    baked = aniso(
        "bake",
        run,
        "--bank",
        tmp_path / "svd",
        "--base",
        "mini",
        "-o",
        tmp_path / "out.safetensors",
        "--dtype",
        "fp32",
    )
    assert baked.code == 0, baked.err
    weights = Composition.of(load_model("mini"), stored, found).weights()
    source = open_weights(tmp_path / "out.safetensors")
    key = next(name for name in source.tensors if name.endswith("visual_projection.weight"))
    own = next(name for name in weights if name.endswith("visual_projection.weight"))
    assert (source.read(key) - weights[own]).abs().max() < 1e-6


def test_vectors_that_are_not_stored_as_factors_and_rounds_are_refused(bank, aniso, tmp_path):
    pictures.folder(tmp_path / "fruit", {"apple": 8, "school bus": 8})
    given = ("--model", "mini", "--bank", bank, "--task", tmp_path / "fruit", "--shots", 2)
    ran = aniso("fit", "few-shot", *given, "--partition", "components:4")
    assert ran.code == 3
    assert "PARTITION" in ran.err and "aniso bank quantise" in ran.err
    ran = aniso("fit", "few-shot", *given, "--partition", "components:4", "--rounds", 2)
    assert ran.code == 2
    assert "rounds are not supported with partition components" in ran.err
    ran = aniso("bank", "quantise", bank, "--storage", "svd:0", "-o", tmp_path / "svd")
    assert ran.code == 2
    assert "svd:K" in ran.err
