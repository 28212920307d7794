"""Mistakes in a table of texts, from the command to a message that names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentences
import torch

from aniso.models import load_model
from aniso.vectors import Bank
from aniso.weights import TensorMap

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text-faults")
    sentences.save(root / "base", length=12)
    encoder = load_model(root / "base")
    rng = torch.Generator().manual_seed(0)
    moved = {k: v + 0.05 * torch.randn(v.shape, generator=rng) for k, v in encoder.state_dict().items()}
    tuned = TensorMap(moved, "tuned", config=encoder.model_config)
    Bank.build(root / "base", {"a": tuned}, allow_distant=True).save(root / "bank")
    return root


@pytest.fixture
def fit(place, aniso, tmp_path):
    """Fit a table of these lines, which must be a header and rows; more files are written beside it."""

    def run(lines, *more, shots=2, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "reviews.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        given = ("--model", place / "base", "--bank", place / "bank", "--task", tmp_path / "reviews.csv")
        quick = ("--epochs", 1, "--min-steps-per-epoch", 1, "--no-compare")
        return aniso("fit", "few-shot", *given, "--shots", shots, *quick, *more)

    return run


def good(count=12):
    words = sentences.WORDS
    return [f"the {words[i]} {words[-i]},{('bird', 'town')[i % 2]}" for i in range(count)]


def test_a_missing_column_is_named_with_the_columns_that_are_there(fit):
    ran = fit(["words,label", *good()])
    assert ran.code == 3 and "DATA-FORMAT" in ran.err
    assert "words,label" in ran.err and "text, sentence, review" in ran.err


def test_empty_texts_are_counted_and_named_by_their_lines(fit):
    ran = fit(["text,label", *good(), '"  ",bird', ",town"])
    assert (
        ran.code == 3 and "DATA-TEXT" in ran.err and "2 texts are empty" in ran.err and "line 14" in ran.err
    )


def test_a_label_that_the_description_file_does_not_list_is_named(fit):
    card = {"classes": ["bird", "town"], "descriptions": ["a cat", "a town"], "prompts": ["{}"]}
    ran = fit(["text,label", *good(), "rain,weather"], card=card)
    assert ran.code == 3 and "DATA-CLASS" in ran.err and "weather" in ran.err and "bird, town" in ran.err


def test_one_class_is_an_error_where_something_is_to_be_learned(fit):
    ran = fit(["text,label", *(f"{row.split(',')[0]},bird" for row in good())])
    assert ran.code == 3 and "DATA-CLASS" in ran.err and "has one class, 'bird'" in ran.err


def test_long_texts_are_counted_among_shots_and_test_texts(fit):
    long = " ".join(sentences.WORDS[:15])
    rows = [f"{long} {word},{('bird', 'town')[i % 2]}" for i, word in enumerate(sentences.WORDS[:12])]
    ran = fit(["text,label", *rows], shots=3)
    assert ran.code == 0, ran.err
    said = ran.out + ran.err
    assert "6 of 6 texts are longer than 12 tokens: cut" in said  # the shots
    assert "texts are longer than 12 tokens: cut" in said.replace("6 of 6 texts", "", 1)  # and test texts


def test_texts_of_any_language_are_learned_from(fit):
    texts = [
        "Das Wetter war schön",
        "今日は雨です",
        "Сегодня дождь",
        "le café est fermé",
        "مرحبا بالعالم",
        "🐈 sat",
    ]
    rows = [f"{text} {i},{('bird', 'town')[i % 2]}" for i, text in enumerate(texts * 3)]
    ran = fit(["text,label", *rows], "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["metrics"]["accuracy"]["reviews"]["total"] > 0


def test_fewer_texts_than_shots_are_named_by_class(fit):
    ran = fit(["text,label", *good()], shots=50)
    assert ran.code == 3 and "DATA-SHOTS" in ran.err and "bird:" in ran.err
