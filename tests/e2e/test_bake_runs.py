"""``aniso bake RUN``: every kind of run becomes a directory that predicts what the run was measured by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import sentences
import torch

from aniso.models.stored_class_weights import read_class_weights
from aniso.prediction_files import PredictionFile
from aniso.weights import open_weights, save_safetensors

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

Aniso = Callable[..., Any]
Done = Callable[..., Any]
QUICK = ("--epochs", 1, "--batch-size", 3, "--min-steps-per-epoch", 2)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("bake-runs"))


def first_choices(path: Path) -> list[tuple[str, float]]:
    items = sorted(PredictionFile.open(path).items(), key=lambda item: "/".join(item.id.split("/")[-2:]))
    return [item.ranked[0] for item in items]


def require_same_predictions(done: Done, run: Path, baked: Path, items: Path) -> None:
    out = baked.with_suffix(".csv")
    done("predict", baked, items, "-o", out, "--no-calibrate")
    found, own = first_choices(out), first_choices(run / "predictions.csv")
    assert [name for name, _ in found] == [name for name, _ in own]
    assert [share for _, share in found] == pytest.approx([share for _, share in own], abs=1e-4)


LORA = ("--method", "weights", "--lora", 2)


@pytest.mark.parametrize(
    ("method", "relation"),
    [
        ((), "merge"),
        (("--head", "lpp"), "merge"),
        (("--method", "none"), "finetune"),
        (("--method", "none", "--head", "linear"), "finetune"),
        (("--method", "weights"), "finetune"),
        (("--method", "weights", "--head", "linear"), "finetune"),
        (LORA, "finetune"),
    ],
)
def test_a_baked_run_needs_nothing_but_its_directory(
    done: Done, shelf: runs.Shelf, tmp_path: Path, method: tuple[object, ...], relation: str
) -> None:
    if method == LORA:
        pytest.importorskip("peft")
    given = ("--task", shelf.data / "cars", "--shots", 2, *(() if "none" in method else QUICK))
    base = shelf.base if relation == "merge" else ("--model", shelf.model)
    done("fit", "few-shot", *base, *given, *method, "-o", tmp_path / "run")
    made = done(
        "bake", tmp_path / "run", "--to", "huggingface", "--base-model", "a/b", "-o", tmp_path / "baked"
    )
    assert (made["coefficients"] > 0) == (relation == "merge")
    require_same_predictions(done, tmp_path / "run", tmp_path / "baked", shelf.data / "cars" / "test")
    card = huggingface_hub.ModelCard((tmp_path / "baked" / "README.md").read_text())
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == (["a/b"], relation)
    assert ("merge" in data["tags"]) == (relation == "merge") and "aniso" in data["tags"]
    assert data["model-index"][0]["results"][0]["dataset"]["name"] == "cars"
    done("push", tmp_path / "baked", "owner/name", "--dry-run")


def test_a_head_alone_leaves_every_weight_of_the_base_as_it_is(
    done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2)
    done("fit", "few-shot", *given, "--method", "none", "--head", "linear", "-o", tmp_path / "run")
    done("bake", tmp_path / "run", "-o", tmp_path / "out.safetensors")
    base, out = open_weights(shelf.model), open_weights(tmp_path / "out.safetensors")
    assert set(base.tensors) == set(out.tensors)
    assert all(torch.equal(base.read(name), out.read(name)) for name in base.tensors)
    assert (tmp_path / "out.head.safetensors").is_file()


def test_a_head_alone_becomes_onnx(done: Done, shelf: runs.Shelf, tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2)
    done("fit", "few-shot", *given, "--method", "none", "--head", "linear", "-o", tmp_path / "run")
    made = done("bake", tmp_path / "run", "--to", "onnx", "-o", tmp_path / "onnx")
    assert made["classes"] == ["blue", "red"] and made["error"] < 1e-4


def test_a_file_of_coefficients_needs_its_base_and_its_bank(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    done(
        "fit",
        "few-shot",
        *shelf.base,
        "--task",
        shelf.data / "cars",
        "--shots",
        2,
        *QUICK,
        "-o",
        tmp_path / "run",
    )
    failed = aniso("bake", tmp_path / "run" / "coefficients.safetensors", "-o", tmp_path / "x.safetensors")
    assert failed.code == 2 and "--bank BANK --base BASE" in failed.err
    failed = aniso("bake", shelf.data, "-o", tmp_path / "x.safetensors")
    assert failed.code == 3 and "no directory of a run" in failed.err
    failed = aniso("bake", tmp_path / "run", "--bank", tmp_path / "none", "-o", tmp_path / "x.safetensors")
    assert failed.code != 0 and not (tmp_path / "x.safetensors").exists()


def test_a_plain_model_has_no_adapter_to_write(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2)
    done("fit", "few-shot", *given, "--method", "none", "-o", tmp_path / "run")
    failed = aniso("bake", tmp_path / "run", "--to", "peft", "-o", tmp_path / "x")
    assert failed.code == 2 and "needs a run with coefficients" in failed.err


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bake-texts")
    sentences.save(root / "base")
    sentences.write_task(root / "reviews.csv", 20)
    return root


@pytest.fixture(scope="module")
def text_bank(texts: Path) -> Path:
    from aniso.cli import main

    given = ("--model", texts / "base", "--task", texts / "reviews.csv", "--lr", "3e-2", "--no-compare")
    words = ("finetune", *given, "--epochs", 2, "--batch-size", 8, "-o", texts / "tuned")
    assert main([str(word) for word in words]) == 0
    words = ("bank", "build", f"tuned={texts / 'tuned'}", "--base", texts / "base", "-o", texts / "bank")
    assert main([str(word) for word in (*words, "--allow-distant")]) == 0
    return texts / "bank"


@pytest.mark.parametrize("head", [(), ("--head", "linear")])
def test_a_baked_sentence_encoder_keeps_the_class_weights_of_its_base(
    done: Done, texts: Path, text_bank: Path, tmp_path: Path, head: tuple[str, ...]
) -> None:
    given = ("--model", texts / "base", "--bank", text_bank, "--task", texts / "reviews.csv")
    quick = ("--epochs", 3, "--batch-size", 4, "--min-steps-per-epoch", 5, "--lr", 0.3)
    done("fit", "few-shot", *given, "--shots", 4, *quick, *head, "-o", tmp_path / "run")
    done("bake", tmp_path / "run", "--to", "sentence-transformers", "-o", tmp_path / "baked")
    measured = PredictionFile.open(tmp_path / "run" / "predictions.csv")
    own = [item.ranked[0] for item in measured.items()]
    (found,) = done(
        "eval", tmp_path / "baked", "--task", texts / "reviews.csv",
        *(("--head", tmp_path / "baked" / "head.safetensors") if head else ()),
    )  # fmt: skip
    assert found["correct"] == sum(item.label == item.prediction for item in measured.items())
    lines = [sentences.TEXTS[0], sentences.TEXTS[1]]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n")
    for name in ("run", "baked"):
        done(
            "predict",
            tmp_path / name,
            tmp_path / "texts.txt",
            "-o",
            tmp_path / f"{name}.csv",
            "--no-calibrate",
        )
    one, other = (first_choices(tmp_path / f"{name}.csv") for name in ("run", "baked"))
    assert [name for name, _ in one] == [name for name, _ in other] and own
    assert [share for _, share in one] == pytest.approx([share for _, share in other], abs=1e-4)
    assert "class_weights.safetensors" in (tmp_path / "baked" / "README.md").read_text()


def test_without_stored_class_weights_a_tuned_encoder_makes_others(
    done: Done, texts: Path, text_bank: Path, tmp_path: Path
) -> None:
    """The file matters: the same directory without it has another classifier."""
    from aniso.data import load_task
    from aniso.models import load_model

    given = ("--model", texts / "base", "--bank", text_bank, "--task", texts / "reviews.csv")
    quick = ("--epochs", 3, "--batch-size", 4, "--min-steps-per-epoch", 5, "--lr", 0.3)
    done("fit", "few-shot", *given, "--shots", 4, *quick, "-o", tmp_path / "run")
    done("bake", tmp_path / "run", "--to", "sentence-transformers", "-o", tmp_path / "baked")
    classes = load_task(texts / "reviews.csv").classes
    base = load_model(texts / "base").class_weights(classes).weight
    stored = load_model(tmp_path / "baked")
    assert torch.equal(stored.class_weights(classes).weight, base)
    (tmp_path / "baked" / "class_weights.safetensors").unlink()
    without = load_model(tmp_path / "baked")
    assert not torch.allclose(without.class_weights(classes).weight, base, atol=1e-3)
    assert without.text_fingerprint != stored.text_fingerprint


def test_a_fine_tuned_sentence_encoder_is_baked_with_its_tokenizer_and_class_weights(
    done: Done, texts: Path, text_bank: Path, tmp_path: Path
) -> None:
    done("bake", texts / "tuned", "--to", "sentence-transformers", "-o", tmp_path / "baked")
    assert {path.name for path in (tmp_path / "baked").iterdir()} >= {"modules.json", "tokenizer.json"}
    record = json.loads((texts / "tuned" / "record.json").read_text())
    (found,) = done("eval", tmp_path / "baked", "--task", texts / "reviews.csv")
    assert found["correct"] == record["metrics"]["accuracy"]["reviews"]["correct"]


def test_damaged_class_weights_are_an_error(tmp_path: Path, refused: Any) -> None:
    path = tmp_path / "class_weights.safetensors"
    save_safetensors(path, {"key": torch.zeros(2, 3)}, {"index": '{"key": ["a", "b", "c"]}'})
    with refused("HEAD-FILE", 3, "class_weights.safetensors", "a row for each class"):
        read_class_weights(tmp_path)
    save_safetensors(
        path, {"key": torch.zeros(2, 3)}, {"index": '{"key": ["a", "b"]}', "checksum": "x"}, overwrite=True
    )
    with refused("FILE-HASH", 3):
        read_class_weights(tmp_path)
    path.unlink()
    assert read_class_weights(tmp_path) == {}
