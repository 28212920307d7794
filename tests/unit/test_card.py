"""Model cards: their numbers are the record's, and model hubs can read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch

from aniso import Bank
from aniso.compose import Baked, CardDetails, Coefficients
from aniso.compose.card import learned_on
from aniso.compose.card_metadata import Export, hub_id
from aniso.record_files import read_record
from aniso.vectors.licences import agreed_licence
from aniso.weights import save_safetensors
from aniso.weights.licence import stated_licence

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("card"))


@pytest.fixture
def run(shelf: runs.Shelf, tmp_path: Path, aniso) -> Path:
    done = aniso(*shelf.few_shot("-o", str(tmp_path / "run"), "--seed", "3"))
    assert done.code == 0, done.err
    return tmp_path / "run"


def bake(aniso, shelf: runs.Shelf, source: Path, out: Path, *more: str) -> Any:
    given = ("bake", str(source), "--bank", str(shelf.bank), "--base", str(shelf.model), "-o", str(out))
    return aniso(*given, *more)


def read(directory: Path) -> Any:
    return huggingface_hub.ModelCard((directory / "README.md").read_text())


def test_the_card_says_what_the_record_says(shelf: runs.Shelf, run: Path, tmp_path: Path, aniso) -> None:
    done = bake(aniso, shelf, run, tmp_path / "out", "--to", "huggingface")
    assert done.code == 0, done.err
    record, card = read_record(run / "record.json"), read(tmp_path / "out")
    score = record.metrics.accuracy["photos"]
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", score.accuracy)
    assert score.interval is not None and result.metric_args == {"interval_95": list(score.interval)}
    assert (result.dataset_name, result.dataset_split) == ("photos", "test")
    low, high = score.interval
    row = f"| photos | {score.total} |  | {score.accuracy:.1%} | {low:.1%} to {high:.1%} |"
    assert row.replace("|  |", "| |") in card.text.replace("|  |", "| |")
    spec = record.spec.content()
    for option in ("setting", "method", "shots", "seed"):
        assert f"| {option} | {spec[option]} |" in card.text
    assert f"{record.metrics.kept_epoch} of {record.metrics.epochs}" in card.text
    assert record.inputs.class_names == {"photos": ("blue", "red")}
    assert "Classes of photos (2): blue, red" in card.text
    for value in (record.inputs.model, record.inputs.bank, record.coefficients.sha256):  # type: ignore[union-attr]
        assert f"`{value}`" in card.text
    assert read_record(tmp_path / "out" / "record.json") == record


def test_metadata_is_what_model_hubs_read(shelf: runs.Shelf, run: Path, tmp_path: Path, aniso) -> None:
    out = tmp_path / "out"
    more = ("--to", "huggingface", "--license", "mit", "--base-model", "owner/clip")
    assert bake(aniso, shelf, run, out, *more).code == 0
    data = read(out).data.to_dict()
    assert data["license"] == "mit"
    assert (data["base_model"], data["base_model_relation"]) == (["owner/clip"], "merge")
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "zero-shot-image-classification")
    assert "datasets" not in data  # a folder of one's own is no data set of a hub
    assert {"aniso", "merge"} <= set(data["tags"])
    assert bake(aniso, shelf, run, tmp_path / "x", "--to", "huggingface", "--base-model", "a/b/c").code == 2


def test_known_tasks_are_named_as_data_sets(shelf: runs.Shelf, tmp_path: Path, aniso) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    given = ("fit", "negation", *shelf.base, "--target", str(shelf.data / "cars"))
    quick = ("--epochs", "1", "--batch-size", "3", "--min-steps-per-epoch", "1", "--no-compare")
    done = aniso(*given, "--control", str(shelf.data / "dtd"), *quick, "-o", str(run))
    assert done.code == 0, done.err
    assert bake(aniso, shelf, run, out, "--to", "open_clip").code == 0
    data = read(out).data.to_dict()
    assert data["datasets"] == ["cars", "dtd"]
    assert data["library_name"] == "open_clip"
    assert [result["dataset"]["name"] for result in data["model-index"][0]["results"]] == ["cars", "dtd"]


def test_a_record_of_other_coefficients_is_refused(
    shelf: runs.Shelf, run: Path, tmp_path: Path, refused
) -> None:
    bank = Bank.load(shelf.bank)
    zero, record = Coefficients.zeros(bank), read_record(run / "record.json")
    other = Coefficients(zero.index, torch.ones(len(zero)), zero.provenance)
    with refused("RECORD", 3, "other coefficients"):
        Baked(shelf.model, bank, other).save(
            tmp_path / "x", to="huggingface", details=CardDetails(record=record)
        )
    assert not (tmp_path / "x").exists()


def test_the_licence_is_named_only_if_all_inputs_state_the_same(
    shelf: runs.Shelf, tmp_path: Path, aniso
) -> None:
    base = tiny.hf_clip_state(shelf.model)
    for seed, (name, licence) in enumerate((("base", "mit"), ("a", "mit"), ("b", "apache-2.0"))):
        home = tmp_path / name
        home.mkdir()
        (home / "README.md").write_text(f"---\ntags: [x]\nlicense: {licence}\n---\nlicense: gpl\n")
        for file in shelf.model.iterdir():
            if file.is_file():
                (home / file.name).write_bytes(file.read_bytes())
        if seed:
            moved = tiny.tuned_vision(base, tiny.is_hf_vision, seed)
            save_safetensors(home / "model.safetensors", moved, {"format": "pt"}, overwrite=True)
    assert stated_licence(tmp_path / "b") == "apache-2.0"
    names = [f"{name}={tmp_path / name}" for name in ("a", "b")]
    built = aniso("bank", "build", *names, "--base", str(tmp_path / "base"), "-o", str(tmp_path / "bank"))
    assert built.code == 0, built.err
    bank = Bank.load(tmp_path / "bank")
    assert {name: bank.facts[name]["license"] for name in bank} == {"a": "mit", "b": "apache-2.0"}
    assert agreed_licence(bank.only("a"), "mit") == "mit"
    assert agreed_licence(bank, "mit") is None and agreed_licence(bank.only("a"), None) is None
    for vectors, expected in ((("a=1",), "mit"), (("a=1", "b=1"), None)):
        mix, out = tmp_path / "mix.safetensors", tmp_path / "out"
        aniso("coefficients", "make", *vectors, "--bank", str(bank.path), "-o", str(mix), "--overwrite")
        given = ("--bank", str(bank.path), "--base", str(tmp_path / "base"), "-o", str(out))
        assert aniso("bake", str(mix), *given, "--to", "huggingface", "--overwrite").code == 0
        assert read(out).data.to_dict().get("license") == expected


def test_hub_ids_are_told_from_files() -> None:
    assert hub_id("owner/name@0123456789ab") == hub_id("owner/name") == "owner/name"
    assert [hub_id(text) for text in ("cars.safetensors", "mini", "ViT-B-32:openai", "a/b/c")] == [None] * 4


@pytest.mark.parametrize(
    ("architecture", "tag"),
    [
        ("GPT2LMHeadModel", "text-generation"),
        ("LlamaForCausalLM", "text-generation"),
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("ViTForImageClassification", "image-classification"),
        ("CLIPModel", "zero-shot-image-classification"),
        (None, None),
    ],
)
def test_the_pipeline_follows_from_the_architecture(architecture: str | None, tag: str | None) -> None:
    assert Export("huggingface", architecture).pipeline == tag
    assert Export("peft", architecture).relation == "adapter"


def test_a_file_of_weights_alone_tells_what_it_was_learned_on(
    shelf: runs.Shelf, run: Path, tmp_path: Path, aniso
) -> None:
    assert bake(aniso, shelf, run, tmp_path / "m.safetensors").code == 0
    header = (tmp_path / "m.safetensors").read_bytes()[8:8000]
    record = read_record(run / "record.json")
    assert json.dumps(learned_on(record))[1:-1].encode() in header
    told = r"few-shot on photos \(coefficients, shots 3, seed 3\): photos [\d.]+%"
    assert re.fullmatch(told, learned_on(record))
