"""``aniso bake RUN``: every kind of run becomes a directory that predicts what the run was measured by."""

from __future__ import annotations

import json
import shutil
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


def _class_weights(rows: torch.Tensor, names: object = ("a", "b"), **more: str) -> dict[str, Any]:
    return {"tensors": {"key": rows}, "metadata": {"index": json.dumps({"key": names}), **more}}


ROWS = torch.tensor([[40.0, 0, 0], [0, 0, -40.0]])


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (_class_weights(ROWS, ["a", "b", "c"]), "HEAD-FILE"),
        (_class_weights(ROWS[:, :2]), "HEAD-FILE"),
        (_class_weights(ROWS[:, :0]), "HEAD-FILE"),
        (_class_weights(ROWS * 1e30), "HEAD-FILE"),
        (_class_weights(ROWS * float("nan")), "HEAD-FILE"),
        (_class_weights(ROWS.double()), "HEAD-FILE"),
        (_class_weights(ROWS.long()), "HEAD-FILE"),
        (_class_weights(ROWS, 3), "HEAD-FILE"),
        (_class_weights(ROWS, checksum="x"), "FILE-HASH"),
    ],
)
def test_class_weights_that_do_not_fit_are_an_error(
    tmp_path: Path, refused: Any, file: dict[str, Any], code: str
) -> None:
    path = tmp_path / "class_weights.safetensors"
    save_safetensors(path, **_class_weights(ROWS))
    assert read_class_weights(tmp_path, 3, 40.0)["key"].names == ("a", "b")
    save_safetensors(path, **file, overwrite=True)
    with refused(code, 3, "class_weights.safetensors"):
        read_class_weights(tmp_path, 3, 40.0)
    path.unlink()
    assert read_class_weights(tmp_path, 3, 40.0) == {}


def test_class_weights_under_other_names_are_an_error(texts: Path, tmp_path: Path, refused: Any) -> None:
    from aniso.data import load_task
    from aniso.models import load_model

    classes = load_task(texts / "reviews.csv").classes
    shutil.copytree(texts / "base", tmp_path / "copy")
    made = load_model(texts / "base").class_weights(classes).weight
    index = json.dumps({classes.key: classes.names[::-1]})
    save_safetensors(tmp_path / "copy" / "class_weights.safetensors", {classes.key: made}, {"index": index})
    with refused("HEAD-FILE", 3, "other classes"):
        load_model(tmp_path / "copy").class_weights(classes)


# what a run began with


def _other_model(shelf: runs.Shelf, out: Path) -> Path:
    shutil.copytree(shelf.model, out)
    source = open_weights(shelf.model)
    noise = torch.Generator().manual_seed(0)
    tensors = {name: source.read(name) for name in source.tensors}
    moved = {
        name: t + 0.05 * torch.randn(t.shape, generator=noise) if t.is_floating_point() else t
        for name, t in tensors.items()
    }
    save_safetensors(out / "model.safetensors", moved, {"format": "pt"}, overwrite=True)
    return out


@pytest.mark.parametrize("method", [("--method", "none"), ("--method", "weights"), LORA])
def test_another_base_is_refused(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path, method: tuple[object, ...]
) -> None:
    if method == LORA:
        pytest.importorskip("peft")
    given = ("--task", shelf.data / "cars", "--shots", 2, *(() if "none" in method else QUICK))
    done("fit", "few-shot", "--model", shelf.model, *given, *method, "-o", tmp_path / "run")
    other = _other_model(shelf, tmp_path / "other")
    failed = aniso("bake", tmp_path / "run", "--base", other, "--to", "huggingface", "-o", tmp_path / "out")
    assert failed.code == 3 and "RUN-CHANGED" in failed.err and not (tmp_path / "out").exists()
    done("bake", tmp_path / "run", "--base", shelf.model, "--to", "huggingface", "-o", tmp_path / "out")


@pytest.mark.parametrize("method", [(), ("--method", "none", "--head", "linear"), ("--method", "weights")])
def test_weights_of_a_run_keep_the_directory_of_its_model(
    done: Done, shelf: runs.Shelf, tmp_path: Path, method: tuple[object, ...]
) -> None:
    given = ("--task", shelf.data / "cars", "--shots", 2, *(() if "none" in method else QUICK))
    other = _other_model(shelf, tmp_path / "other") / "model.safetensors"
    weights = shelf.model / "model.safetensors" if not method else other
    bank = ("--bank", shelf.bank) if not method else ()
    model = ("--model", shelf.model, "--weights", weights, *bank)
    done("fit", "few-shot", *model, *given, *method, "-o", tmp_path / "run")
    done("bake", tmp_path / "run", "--to", "huggingface", "-o", tmp_path / "baked")
    config = [json.loads((path / "config.json").read_text()) for path in (shelf.model, tmp_path / "baked")]
    heads = [one["vision_config"]["num_attention_heads"] for one in config]
    assert heads[0] == heads[1]
    require_same_predictions(done, tmp_path / "run", tmp_path / "baked", shelf.data / "cars" / "test")


@pytest.mark.parametrize(
    "method", [("--method", "weights", "--head", "linear"), ("--method", "setfit"), ("--method", "none")]
)
def test_a_base_of_half_precision_is_no_hindrance(
    done: Done, shelf: runs.Shelf, tmp_path: Path, method: tuple[object, ...]
) -> None:
    shutil.copytree(shelf.model, tmp_path / "half")
    source = open_weights(shelf.model)
    tensors = {name: source.read(name) for name in source.tensors}
    half = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    save_safetensors(tmp_path / "half" / "model.safetensors", half, {"format": "pt"}, overwrite=True)
    given = ("--model", tmp_path / "half", "--task", shelf.data / "cars", "--shots", 2)
    quick = () if "none" in method else QUICK
    done("fit", "few-shot", *given, *quick, *method, "-o", tmp_path / "run")
    done("bake", tmp_path / "run", "--to", "huggingface", "-o", tmp_path / "baked")
    require_same_predictions(done, tmp_path / "run", tmp_path / "baked", shelf.data / "cars" / "test")


def test_a_linearised_run_is_predicted_with_and_not_baked(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--lr", "3e-3", "--no-compare")
    done("finetune", *given, "--linearised", "--epochs", 2, "--batch-size", 3, "-o", tmp_path / "run")
    failed = aniso("bake", tmp_path / "run", "--to", "huggingface", "-o", tmp_path / "baked")
    assert failed.code == 3 and "CKPT-LINEARISED" in failed.err and not (tmp_path / "baked").exists()
    items = shelf.data / "cars" / "test"
    require_same_predictions(done, tmp_path / "run", tmp_path / "run", items)


def test_a_run_that_keeps_no_model_says_how_to_make_coefficients(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = (*shelf.base, "--task", "./cars", "--task", "./dtd", "--data", shelf.data, "--method", "vector")
    done("fit", "addition", *given, "-o", tmp_path / "run")
    failed = aniso("bake", tmp_path / "run", "-o", tmp_path / "out.safetensors")
    assert failed.code == 3 and "aniso coefficients make" in failed.err


def test_coefficients_without_a_spec_need_a_base_and_a_bank(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--task", shelf.data / "cars", "--shots", 2, *QUICK)
    done("fit", "few-shot", *shelf.base, *given, "-o", tmp_path / "run")
    (tmp_path / "run" / "spec.yaml").unlink()
    failed = aniso("bake", tmp_path / "run", "-o", tmp_path / "a.safetensors")
    assert failed.code == 2 and "--bank BANK --base BASE" in failed.err
    where = ("--bank", shelf.bank, "--base", shelf.model)
    done("bake", tmp_path / "run", *where, "-o", tmp_path / "a.safetensors")


def test_a_head_of_another_model_is_no_head_of_an_adapter(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2)
    done("fit", "few-shot", *given, *QUICK, *LORA, "-o", tmp_path / "lora")
    done("fit", "few-shot", *given, "--method", "none", "--head", "linear", "-o", tmp_path / "head")
    head = ("--head", tmp_path / "head" / "head.safetensors")
    failed = aniso("bake", tmp_path / "lora", *head, "--to", "huggingface", "-o", tmp_path / "baked")
    assert failed.code == 3 and "HEAD-FEATURES" in failed.err


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_a_directory_without_a_place_for_the_classifier_is_refused(
    aniso: Aniso, done: Done, shelf: runs.Shelf, texts: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "texts":
        run, wrong, right = tmp_path / "run", "huggingface", "sentence-transformers"
        done("finetune", "--model", texts / "base", "--task", texts / "reviews.csv", "--lr", "3e-2",
             "--no-compare", "--epochs", 1, "--batch-size", 8, "-o", tmp_path / "run")  # fmt: skip
    else:
        run, wrong, right = tmp_path / "run", "sentence-transformers", "huggingface"
        given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2)
        done("fit", "few-shot", *given, "--method", "none", "-o", run)
    failed = aniso("bake", run, "--to", wrong, "-o", tmp_path / "baked")
    assert failed.code == 2 and f"--to {right}" in failed.err and not (tmp_path / "baked").exists()
    done("bake", run, "--to", right, "-o", tmp_path / "baked")
