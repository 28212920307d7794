"""Commands read what other commands wrote: runs, heads, coefficients, baked models and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import language
import pytest
import runs
import torch
from adapters import random_adapter

from aniso.record_files import read_record
from aniso.vectors import Bank

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def run(shelf: runs.Shelf, tmp_path: Path, aniso) -> Path:
    done = aniso(*shelf.few_shot("-o", str(tmp_path / "run"), "--head", "linear"))
    assert done.code == 0, done.err
    return tmp_path / "run"


def shown(aniso, path: Path | str) -> tuple[str, Any]:
    """What inspect prints, for people and for programs."""
    text, data = aniso("inspect", str(path)), aniso("inspect", str(path), "--json")
    assert text.code == data.code == 0, text.err + data.err
    return text.out, json.loads(data.out)


def test_inspect_tells_what_a_run_learned_and_wrote(run: Path, aniso) -> None:
    text, data = shown(aniso, run)
    record = read_record(run / "record.json")
    assert "few-shot on photos (coefficients, shots 3, seed 0, head linear)" in text
    assert f"{record.accuracy('photos'):.1%}" in text
    assert record.inputs.model in text and record.inputs.bank in text  # type: ignore[operator]
    assert "head.safetensors" in text and data["record"] == record.content()
    (run / "record.json").unlink()
    text, data = shown(aniso, run)
    assert "has not finished" in text and "record" not in data


def test_inspect_knows_coefficients_and_heads(run: Path, aniso) -> None:
    text, data = shown(aniso, run / "coefficients.safetensors")
    assert "one coefficient per vector and block" in text and data["kind"] == "coefficients"
    assert {row["name"] for row in data["vectors"]} == {"cars", "dtd", "signs"}
    hashes = data["coefficients"]
    text, data = shown(aniso, run / "head.safetensors")
    assert "head linear for 2 classes: blue, red" in text
    assert data["features"]["coefficients"] == hashes


@pytest.mark.parametrize("to", ["huggingface", "open_clip", "safetensors"])
def test_inspect_tells_the_story_of_a_baked_model(
    shelf: runs.Shelf, run: Path, tmp_path: Path, aniso, to: str
) -> None:
    out = tmp_path / ("m.safetensors" if to == "safetensors" else "m")
    given = ("bake", str(run), "--bank", str(shelf.bank), "--base", str(shelf.model), "--to", to)
    assert aniso(*given, "-o", str(out)).code == 0
    text, data = shown(aniso, out)
    record = read_record(run / "record.json")
    assert "a composition of 3 vectors" in text and "cars" in text
    assert "learned: few-shot on photos (coefficients, shots 3" in text
    for value in (record.inputs.model, record.inputs.bank, record.coefficients.sha256):  # type: ignore[union-attr]
        assert str(value) in text
    assert "blocks" in data and data["aniso"]["kind"] == "composition"  # and the tensors, as of any model


def test_inspect_knows_mini_and_its_banks(aniso) -> None:
    text, data = shown(aniso, "mini")
    assert "80 blocks" in text and data["activation"] == "gelu"
    assert "mnist" in shown(aniso, "mini-lora4")[0]


def test_runs_are_read_wherever_a_file_of_theirs_is(
    shelf: runs.Shelf, run: Path, tmp_path: Path, aniso
) -> None:
    record = read_record(run / "record.json")
    given = ("eval", str(shelf.model), "--task", str(shelf.data / "photos"), "--bank", str(shelf.bank))
    done = aniso(*given, "--coefficients", str(run), "--head", str(run), "--json")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)
    assert found["correct"] == record.metrics.accuracy["photos"].correct
    assert found["bank"] == record.inputs.bank
    assert found["coefficients"] == record.coefficients.sha256  # type: ignore[union-attr]
    assert aniso("coefficients", "show", str(run)).code == 0
    baked = aniso("bake", str(run), "--bank", str(shelf.bank), "--base", str(shelf.model), "-o",
                  str(tmp_path / "m"), "--to", "huggingface")  # fmt: skip
    assert baked.code == 0 and (tmp_path / "m" / "head.safetensors").is_file()
    lacking = aniso("coefficients", "show", str(tmp_path))
    assert lacking.code == 3 and "has no coefficients.safetensors" in lacking.err


@pytest.mark.parametrize("lora", [False, True])
def test_a_bank_is_built_from_what_fine_tuning_wrote(
    shelf: runs.Shelf, tmp_path: Path, aniso, lora: bool
) -> None:
    if lora:
        pytest.importorskip("peft")
    run = tmp_path / "tuned"
    quick = ("--epochs", "1", "--batch-size", "4", *(("--lora", "2") if lora else ()))
    given = ("finetune", "--model", str(shelf.model), "--task", str(shelf.data / "cars"))
    done = aniso(*given, *quick, "-o", str(run))
    assert done.code == 0, done.err
    base = ("--base", str(shelf.model))
    done = aniso("bank", "build", str(run), *base, "-o", str(tmp_path / "bank"))
    assert done.code == 0, done.err
    bank = Bank.load(tmp_path / "bank")
    assert bank.names == ("tuned",)
    done = aniso("vector", "make", str(run), *base, "-o", str(tmp_path / "v.safetensors"))
    assert done.code == 0, done.err
    weights = ("--weights", str(run)) if not lora else ("--adapter", str(run))
    done = aniso("eval", str(shelf.model), "--task", str(shelf.data / "cars"), *weights, "--json")
    assert done.code == 0, done.err
    record = read_record(run / "record.json")
    assert json.loads(done.out)[0]["correct"] == record.metrics.accuracy["cars"].correct


# language models


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, three adapters as a bank, and a file of examples."""
    pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("texts")
    network = language.save("gpt2", root / "base")
    for seed in range(3):
        fresh = type(network).from_pretrained(root / "base")
        random_adapter(fresh, root / f"a{seed}", seed, r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    Bank.build(root / "base", {f"a{seed}": root / f"a{seed}" for seed in range(3)}, to=root / "bank")
    language.write_lines(root / "few.jsonl", [{"prompt": "the cat", "completion": " sat on a mat"}] * 3)
    return root


def test_eval_reads_an_exported_adapter_back(texts: Path, tmp_path: Path, aniso) -> None:
    mix = tmp_path / "mix.safetensors"
    bank, base = ("--bank", str(texts / "bank")), str(texts / "base")
    assert aniso("coefficients", "make", "a0=0.7", "a1=-1", *bank, "-o", str(mix)).code == 0
    done = aniso("bake", str(mix), *bank, "--base", base, "-o", str(tmp_path / "one"), "--to", "peft")
    assert done.code == 0, done.err
    given = ("eval", base, "--texts", str(texts / "few.jsonl"), "--json")
    losses = {}
    for name, more in (
        ("base", ()),
        ("composed", (*bank, "--coefficients", str(mix))),
        ("adapter", ("--adapter", str(tmp_path / "one"))),
    ):
        done = aniso(*given, *more)
        assert done.code == 0, done.err
        losses[name] = json.loads(done.out)[0]["loss"]
    assert losses["adapter"] == pytest.approx(losses["composed"], rel=1e-5)
    assert abs(losses["adapter"] - losses["base"]) > 1e-4
    assert aniso(*given, *bank, "--coefficients", str(mix), "--adapter", str(tmp_path / "one")).code == 2
    text, data = shown(aniso, tmp_path / "one")
    assert "a composition of 2 vectors" in text and data["aniso"]["kind"] == "composition"


def test_vectors_are_selected_for_a_language_model(texts: Path, tmp_path: Path, aniso) -> None:
    given = ("select", "--model", str(texts / "base"), "--bank", str(texts / "bank"))
    few = ("--texts", str(texts / "few.jsonl"))
    cache = ("--gradients", str(tmp_path / "g.jsonl"))
    done = aniso(
        *given, *few, "--strategy", "gradient", "--budget", "2", *cache, "-o", str(tmp_path / "b"), "--json"
    )
    assert done.code == 0, done.err
    chosen = [row["vector"] for row in json.loads(done.out)["chosen"]]
    assert len(chosen) == 2 and list(Bank.load(tmp_path / "b").names) == chosen
    again = aniso(*given, *few, "--strategy", "gradient", "--budget", "1", *cache, "--json")
    rows = json.loads(done.out)["chosen"]
    best = max(rows, key=lambda row: row["score"])
    assert [row["vector"] for row in json.loads(again.out)["chosen"]] == [best["vector"]]
    assert aniso(*given, *few, "--task", "mnist", "--budget", "1").code == 2
    assert aniso(*given, "--length", "8", "--budget", "1").code == 2


def test_scores_of_a_language_model_are_the_derivatives_of_its_loss(texts: Path, aniso) -> None:
    from aniso.compose import Composition, Partition
    from aniso.data import read_examples
    from aniso.learn import evaluate_lm, text_dataset
    from aniso.models import load_language_model

    given = ("select", "--model", str(texts / "base"), "--bank", str(texts / "bank"), "--budget", "3")
    done = aniso(*given, "--texts", str(texts / "few.jsonl"), "--strategy", "gradient", "--json")
    scores = {row["vector"]: row["score"] for row in json.loads(done.out)["chosen"]}
    model, bank = load_language_model(texts / "base"), Bank.load(texts / "bank")
    dataset = text_dataset(model, read_examples(texts / "few.jsonl"), "few")
    composition = Composition(model.double(), bank, Partition.blocks())
    rise = {}
    for name in bank:
        total = 0.0
        for block in bank[name].blocks:
            loss = []
            for step in (1e-3, -1e-3):
                with torch.no_grad():
                    composition.values.zero_()
                    composition.values[composition.index.cell(name, block.name)] = step
                loss.append(evaluate_lm(composition, dataset).loss)
            total += abs(loss[0] - loss[1]) / 2e-3
        rise[name] = total
    for name in bank:
        assert scores[name] == pytest.approx(rise[name], rel=2e-2)


def test_learning_prints_the_vectors_that_were_selected(texts: Path, tmp_path: Path, aniso) -> None:
    given = ("fit", "lm", "--model", str(texts / "base"), "--bank", str(texts / "bank"))
    rest = language.write_lines(tmp_path / "rest.jsonl", [{"prompt": "a dog", "completion": " ran home"}] * 2)
    more = ("--select", "gradient", "--budget", "1", "--epochs", "1", "--test", str(rest))
    done = aniso(*given, "--train", str(texts / "few.jsonl"), *more, "-o", str(tmp_path / "run"))
    assert done.code == 0, done.err
    record = read_record(tmp_path / "run" / "record.json")
    assert record.metrics.selection is not None
    ((name, count),) = record.metrics.selection.vectors.items()
    budget = record.metrics.selection.budget
    assert f"selected by gradient, budget {budget}: {name} ({count} blocks)" in done.out
    baked = aniso("bake", str(tmp_path / "run"), "--bank", str(texts / "bank"), "--base", str(texts / "base"),
                  "-o", str(tmp_path / "m"), "--to", "huggingface")  # fmt: skip
    assert baked.code == 0, baked.err
    card = (tmp_path / "m" / "README.md").read_text()
    perplexity = record.metrics.perplexity["rest.jsonl test"]
    assert f"| {perplexity:.2f} |" in card and "pipeline_tag: text-generation" in card
