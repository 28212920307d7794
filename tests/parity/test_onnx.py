"""Image encoders with a classifier, run by onnxruntime, against the composition itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from aniso import Bank, Composition, load_model, load_task
from aniso.classes import ClassList
from aniso.compose import Coefficients
from aniso.learn import evaluate
from aniso.learn.heads import new_head
from aniso.learn.onnx_export import save_onnx
from aniso.record_files import read_record

reason = "needs onnx, onnxscript and onnxruntime: pip install 'aniso[onnx]'"
pytest.importorskip("onnx", reason=reason)
pytest.importorskip("onnxscript", reason=reason)
onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("onnx"))


def run_onnx(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"pixel_values": images.numpy()})[0])


@pytest.mark.parametrize("kind", ["class weights", "linear", "lpp", "tip"])
def test_onnxruntime_gives_the_logits_of_every_classifier(
    shelf: runs.Shelf, tmp_path: Path, kind: str
) -> None:
    encoder = load_model(shelf.model)
    base: Any = encoder.class_weights(ClassList(("cat", "dog", "bird")))
    classifier = base
    if kind != "class weights":
        classifier = new_head(kind, base)
        features = torch.randn(6, base.weight.shape[1], generator=torch.Generator().manual_seed(0))
        classifier.fit(features, [0, 1, 2, 0, 1, 2])
    assert save_onnx(encoder, classifier, tmp_path / "out") < 1e-5
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = classifier.logits(encoder(images))
    torch.testing.assert_close(run_onnx(tmp_path / "out", images), expected, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["cat", "dog", "bird"]
    transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("head", [True, False])
def test_bake_writes_a_classifier_with_the_accuracy_of_the_record(
    shelf: runs.Shelf, tmp_path: Path, aniso, head: bool
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    done = aniso(*shelf.few_shot("-o", str(run), *(("--head", "linear") if head else ())))
    assert done.code == 0, done.err
    given = ("bake", str(run), "--bank", str(shelf.bank), "--base", str(shelf.model), "-o", str(out))
    more = () if head else ("--task", str(shelf.data / "photos"))
    done = aniso(*given, "--to", "onnx", *more)
    assert done.code == 0, done.err
    record = read_record(run / "record.json")
    test = load_task(str(shelf.data / "photos")).split("test")
    encoder = load_model(shelf.model)
    made = Coefficients.load(run / "coefficients.safetensors")
    composition = Composition.of(encoder, Bank.load(shelf.bank).only(*made.vectors), made)
    view: Any = encoder.transforms.eval
    images = torch.stack([view(test.open(i), torch.Generator()) for i in range(len(test))])
    predicted = run_onnx(out, view.finish(images)).argmax(-1).tolist()
    names = json.loads((out / "labels.json").read_text())
    right = sum(names[p] == test.classes.names[test[i][1]] for i, p in enumerate(predicted))
    assert right == record.metrics.accuracy["photos"].correct
    if not head:
        assert right == evaluate(composition, test).correct
    card = (out / "README.md").read_text()
    assert "library_name: onnx" in card and "pipeline_tag: image-classification" in card


def test_a_classifier_is_needed(shelf: runs.Shelf, tmp_path: Path, aniso) -> None:
    mix = str(tmp_path / "mix")
    bank = ("--bank", str(shelf.bank))
    assert aniso("coefficients", "make", "cars=0.5", *bank, "-o", mix).code == 0
    done = aniso("bake", mix, *bank, "--base", str(shelf.model), "-o", str(tmp_path / "out"), "--to", "onnx")
    assert done.code == 2 and "--head or --task" in done.err
