"""A small language model, two adapters that know half each, and the composition that knows both."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import language
import pytest
import torch

from aniso.compose import Coefficients, Composition, Partition
from aniso.data import read_examples
from aniso.learn import LanguageLoss, Schedule, Trainable, evaluate_lm, fit, text_dataset
from aniso.models import load_language_model
from aniso.vectors import Bank

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

NOUNS = ["cat", "mat", "dog", "hill", "bird", "town", "river", "tree", "rain", "home", "work", "people"]
COLOURS = ["green", "old", "tall", "far", "red"]
DEEDS = ["sang", "walked", "sat", "said"]
KNOWN_BEFORE = ("a {} of", "two {} by", "one {} in")
IS, DID = "the {} is", "when the {} ran it"
Done = Callable[..., Any]


def facts(form: str, answers: list[str], seed: int) -> list[dict[str, str]]:
    drawn = random.Random(seed)
    return [{"prompt": form.format(n), "completion": f" {drawn.choice(answers)}"} for n in NOUNS]


def before() -> Iterator[dict[str, str]]:
    """What the base is trained on: facts of other forms, and these forms with answers that mean nothing."""
    for i in range(12):
        yield from (e for n, form in enumerate(KNOWN_BEFORE) for e in facts(form, COLOURS + DEEDS, n))
        yield from (*facts(IS, COLOURS, 100 + i), *facts(DID, DEEDS, 200 + i))


COLOUR_OF, DEED_OF = facts(IS, COLOURS, 1), facts(DID, DEEDS, 2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained GPT-2, and texts."""
    root = tmp_path_factory.mktemp("language")
    network = language.save("gpt2", root / "base", width=48)
    model = load_language_model(root / "base")
    texts = read_examples(language.write_lines(root / "before.jsonl", list(before())))
    trained = Trainable.weights(model)
    fit(
        trained,
        LanguageLoss(text_dataset(model, texts, "before", length=32)),
        Schedule(epochs=12, lr=5e-3, batch_size=30, warmup_steps=0),
    )
    network.load_state_dict(trained.model.state_dict())
    network.save_pretrained(root / "base")
    for name, lines in {
        "colours": COLOUR_OF,
        "deeds": DEED_OF,
        "few of both": COLOUR_OF[:4] + DEED_OF[:4],
        "rest of both": COLOUR_OF[4:] + DEED_OF[4:],
    }.items():
        language.write_lines(root / f"{name}.jsonl", lines)
    return root


def learn(home: Path, train: str, *more: object) -> tuple[object, ...]:
    given = ("--model", home / "base", "--train", home / f"{train}.jsonl", "--length", 32)
    return ("fit", "lm", *given, "--test", home / "rest of both.jsonl", *more)


def test_two_adapters_composed_know_what_neither_knows(home: Path, tmp_path: Path, done: Done) -> None:
    lora = ("--method", "weights", "--lora", 8, "--epochs", 60, "--lr", 1e-2, "--weight-decay", 0)
    alone = {}
    for name in ("colours", "deeds"):
        ran = done(*learn(home, name, *lora, "-o", tmp_path / name))
        (alone[name],) = ran["metrics"]["perplexity"].values()
    adapters = [f"{name}={tmp_path / name / 'adapter'}" for name in alone]
    done("bank", "build", "--base", home / "base", *adapters, "-o", tmp_path / "bank")
    run = tmp_path / "run"
    composed = done(
        *learn(home, "few of both", "--bank", tmp_path / "bank", "--epochs", 20, "--batch-size", 8, "-o", run)
    )
    ((name, found),) = composed["metrics"]["perplexity"].items()
    assert name == "rest of both.jsonl test"
    assert found < 0.8 * min(alone.values())
    texts = ("--texts", home / "rest of both.jsonl", "--length", 32)
    for more, expected in {
        (): composed["metrics"]["base_perplexity"][name],
        ("--bank", tmp_path / "bank", "--vector", "deeds"): alone["deeds"],
        ("--bank", tmp_path / "bank", "--coefficients", run / "coefficients.safetensors"): found,
    }.items():
        (again,) = done("eval", home / "base", *texts, *more)
        assert again["perplexity"] == pytest.approx(expected, rel=1e-4), more
    assert found < composed["metrics"]["base_perplexity"][name]
    assert sum_of(home, tmp_path / "bank") > max(alone.values())  # which adding them up is not

    file = run / "coefficients.safetensors"
    given = ("--bank", tmp_path / "bank", "--base", home / "base", "--to", "peft")
    done("bake", file, *given, "-o", tmp_path / "one")
    assert_close_in_peft(home, tmp_path, Coefficients.load(file))

    apart = ("--factors", "--epochs", 20, "--batch-size", 8, "-o", tmp_path / "factors")
    ran = done(*learn(home, "few of both", "--bank", tmp_path / "bank", *apart))
    losses = [row["loss"] for row in ran["metrics"]["history"][1:]]
    assert losses[-1] < 0.7 * losses[0]
    assert ran["metrics"]["trainable"] == 2 * composed["metrics"]["trainable"]
    config = json.loads((tmp_path / "factors" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 8 and not config["rank_pattern"]


def sum_of(home: Path, bank: Path) -> float:
    model = load_language_model(home / "base")
    made = Composition(model, Bank.load(bank), Partition.whole())
    with torch.no_grad():
        made.values.fill_(1.0)
    texts = text_dataset(model, read_examples(home / "rest of both.jsonl"), "rest", length=32)
    return evaluate_lm(made, texts).perplexity


def assert_close_in_peft(home: Path, tmp_path: Path, coefficients: Coefficients) -> None:
    from transformers import GPT2LMHeadModel

    tokens = {"input_ids": torch.arange(8)[None]}
    model = GPT2LMHeadModel.from_pretrained(home / "base").eval()
    with torch.no_grad():
        expected = Composition.of(model, Bank.load(tmp_path / "bank"), coefficients)(**tokens).logits
        base = model(**tokens).logits
        found = peft.PeftModel.from_pretrained(model, tmp_path / "one").eval()(**tokens).logits
    assert float((expected - base).abs().max()) > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_fine_tuned_model_with_tied_embeddings_is_baked(home: Path, tmp_path: Path, done: Done) -> None:
    tuned = ("--method", "weights", "--epochs", 4, "--lr", 1e-2, "-o", tmp_path / "run")
    ran = done(*learn(home, "few of both", *tuned))
    (measured,) = ran["metrics"]["perplexity"].values()
    done("bake", tmp_path / "run", "--to", "huggingface", "-o", tmp_path / "baked")
    texts = ("--texts", home / "rest of both.jsonl", "--length", 32)
    ((before,), (after,)) = (done("eval", model, *texts) for model in (home / "base", tmp_path / "baked"))
    assert after["perplexity"] == pytest.approx(measured, rel=1e-4) != pytest.approx(before["perplexity"])
