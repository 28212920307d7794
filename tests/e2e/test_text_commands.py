"""Commands on a sentence encoder and a table of texts, from fine-tuning to a baked directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentences
import torch

pytest.importorskip("transformers")

QUICK = ("--epochs", "1", "--batch-size", "8", "--no-compare")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    sentences.save(root / "base")
    sentences.write_task(root / "reviews.csv", 20)
    sentences.write_task(root / "other.csv", 14)
    return root


def test_from_fine_tuning_to_a_sentence_transformers_directory(place, done):
    base, bank = place / "base", place / "bank"
    tuned = []
    for task in ("reviews", "other"):
        out = place / f"tuned-{task}"
        given = ("--model", base, "--task", place / f"{task}.csv", "--lr", "1e-3", "--weight-decay", "0")
        done("finetune", *given, *QUICK, "-o", out)
        tuned.append(f"{task}={out / 'weights.safetensors'}")
    done("bank", "build", *tuned, "--base", base, "-o", bank, "--allow-distant")
    run = place / "run"
    given = ("--model", base, "--bank", bank, "--task", place / "reviews.csv", "--shots", "4")
    made = done("fit", "few-shot", *given, *QUICK, "-o", run)
    assert made["metrics"]["accuracy"]["reviews"]["total"] > 0
    both = ("--task", place / "reviews.csv", "--task", place / "other.csv", "--choose-by", "last")
    teachers = ("--objective", "distil", "--rounds", "2")
    taught = done("fit", "addition", "--model", base, "--bank", bank, *both, *QUICK, *teachers)["metrics"]
    assert taught["supervision"] == "unlabelled" and taught["history"][-1]["round"] == 2
    coefficients = run / "coefficients.safetensors"
    evaluated = done(
        "eval", base, "--bank", bank, "--coefficients", coefficients, "--task", place / "reviews.csv"
    )
    baked = place / "baked"
    done("bake", coefficients, "--bank", bank, "--base", base, "--to", "sentence-transformers", "-o", baked)
    same = done("eval", base, "--weights", baked, "--task", place / "reviews.csv")
    assert same[0]["correct"] == evaluated[0]["correct"]
    assert {p.name for p in baked.iterdir()} >= {"modules.json", "1_Pooling", "tokenizer.json", "config.json"}
    from aniso.models import load_model

    found = load_model(baked)
    with torch.no_grad():
        rows = found(found.family.tokens(sentences.TEXTS)[0])
    assert torch.allclose(rows, sentences.embedded(baked, sentences.TEXTS), atol=1e-5)


def test_zero_shot_accuracy_equals_that_of_a_plain_script(place, done):
    (found,) = done("eval", place / "base", "--task", place / "reviews.csv", "--split", "train")
    from aniso.data import load_task

    split = load_task(place / "reviews.csv").train
    weights = torch.stack([sentences.embedded(place / "base", [name])[0] for name in split.classes.names])
    features = sentences.embedded(place / "base", [split.open(i) for i in range(len(split))])
    correct = (features @ weights.T).argmax(-1).eq(torch.tensor(split.labels)).sum()
    assert (found["correct"], found["total"]) == (int(correct), len(split))


def test_test_time_adaptation_learns_from_texts_without_labels(place, done):
    bank = place / "bank-test-time"
    given = ("--model", place / "base", "--task", place / "reviews.csv", "--lr", "1e-3")
    done("finetune", *given, *QUICK, "-o", place / "tuned-test-time")
    weights = place / "tuned-test-time/weights.safetensors"
    done("bank", "build", f"a={weights}", "--base", place / "base", "-o", bank, "--allow-distant")
    given = ("--model", place / "base", "--bank", bank, "--task", place / "reviews.csv")
    made = done("fit", "test-time", *given, *QUICK)
    assert made["metrics"]


def test_a_task_of_texts_is_shown_and_checked(place, done):
    shown = done("task", "show", place / "reviews.csv")
    assert shown["classes"] == ["bird", "town"]
    checked = done("task", "check", place / "reviews.csv")
    assert not checked["unreadable"]
    assert json.dumps(checked)


def test_an_image_encoder_refuses_texts_and_the_other_way_round(place, aniso):
    ran = aniso("eval", "mini", "--task", place / "reviews.csv")
    assert ran.code == 3 and "texts" in ran.err and "DATA-ITEM" in ran.err
