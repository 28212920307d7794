"""``aniso compare`` on images and texts: never by test items, and its winner is an ordinary run."""

from __future__ import annotations

import json
import shlex

import pytest
import runs
import sentences

from aniso.errors import NumericalError
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.vectors import Bank

QUICK = ("--epochs", 1, "--batch-size", 4, "--min-steps-per-epoch", 2)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def given(shelf):
    return ("compare", *shelf.base, "--task", shelf.data / "photos", "--shots", 4, *QUICK)


def labels(said):
    return [row["label"] for row in said["candidates"]]


def test_a_table_a_reason_and_the_command_to_learn_it(aniso, given):
    ran = aniso(*given)
    assert ran.code == 0, ran.err
    assert "cross-validation over the 8 shots in 4 folds" in ran.out
    assert "recommended: " in ran.out and "reason: " in ran.out and "numbers learned" in ran.out
    assert "test (not used)" not in ran.out
    assert "fold 4 of 4: coefficients + LP++" in ran.err
    (line,) = [line for line in ran.out.splitlines() if line.startswith("to learn it: ")]
    words = shlex.split(line.removeprefix("to learn it: "))
    assert words[:3] == ["aniso", "fit", "few-shot"] and words[-2:] == ["-o", "RUN"]
    assert aniso(*words[1:-2], "--print-spec").code == 0


def test_the_winner_is_the_run_that_fit_would_make(done, aniso, given, tmp_path):
    said = done(*given, "-o", tmp_path / "winner")
    names = {p.name for p in (tmp_path / "winner").iterdir()}
    assert {"spec.yaml", "record.json", "comparison.json"} <= names
    written = json.loads((tmp_path / "winner" / "comparison.json").read_text())
    assert written["chosen"] == said["chosen"] and written["reason"] == said["reason"]
    ran = aniso(*given)
    (line,) = [line for line in ran.out.splitlines() if line.startswith("to learn it: ")]
    again = done(*shlex.split(line.removeprefix("to learn it: "))[1:-1], tmp_path / "again")
    record = json.loads((tmp_path / "winner" / "record.json").read_text())
    assert again["id"] == record["id"] and again["metrics"]["accuracy"] == record["metrics"]["accuracy"]


def test_test_accuracies_are_those_of_a_run_and_are_not_used(done, given, shelf):
    said = done(*given, "--test")
    plain = done(*given)
    assert (said["chosen"], said["reason"]) == (plain["chosen"], plain["reason"])
    assert {row["test_accuracy"] for row in plain["candidates"]} == {None}
    by_label = {row["label"]: row for row in said["candidates"]}
    head = ("--method", "none", "--head", "tip")
    base = ("fit", "few-shot", *shelf.base, "--task", shelf.data / "photos", "--shots", 4)
    run = done(*base, *head)
    assert run["metrics"]["accuracy"]["photos"]["accuracy"] == by_label["Tip-Adapter"]["test_accuracy"]
    pair = done(*base, *QUICK, "--head", "linear")["metrics"]
    measured = by_label["coefficients + linear probe"]
    assert pair["accuracy"]["photos"]["accuracy"] == measured["test_accuracy"]
    assert pair["trainable"] + pair["head"]["trainable"] == measured["trainable"]
    assert pair["without_head"]["photos"] == by_label["coefficients"]["test_accuracy"]
    assert pair["head_alone"]["photos"] == by_label["linear probe"]["test_accuracy"]


def test_a_large_validation_split_is_chosen_by(done, shelf):
    words = ("compare", *shelf.base, "--task", shelf.data / "cars", *QUICK)
    said = done(*words, "--shots", 2)
    assert said["chosen_by"].startswith("the validation split, 8 images")
    assert {row["held_out"] for row in said["candidates"]} == {8}
    folds = done(*words, "--shots", 2, "--by", "folds")
    assert {row["held_out"] for row in folds["candidates"]} == {4}


def test_test_items_are_read_only_if_asked(aniso, shelf, tmp_path):
    """A test image that cannot be decoded is no trouble where it is not used."""
    root = runs.coloured(tmp_path / "odd" / "train", 6).parent
    runs.coloured(root / "test", 1)
    for path in (root / "test").rglob("*.png"):
        path.write_bytes(b"no image")
    words = ("compare", *shelf.base, "--task", root, "--shots", 3, "--by", "folds", *QUICK)
    assert aniso(*words).code == 0
    assert aniso(*words, "--test").code == 3


def test_one_shot_without_a_validation_split_says_what_is_done_instead(aniso, given):
    words = [1 if before == "--shots" else word for before, word in zip((None, *given), given, strict=False)]
    ran = aniso(*words, "--by", "folds")
    assert ran.code == 0 and "leaves none to hold out" in ran.out and "recommended: LP++" in ran.out


def test_slower_methods_and_selection(done, given):
    pytest.importorskip("peft")
    said = done(*given, "--also", "lora,weights", "--folds", 2, "--budget", 1)
    assert "LoRA, rank 16" in labels(said) and "fine-tuning + LP++" in labels(said)
    assert "coefficients of 1 selected + Tip-Adapter" in labels(said)
    sizes = {row["label"]: row["trainable"] for row in said["candidates"]}
    assert sizes["zero-shot"] == 0 < sizes["coefficients of 1 selected"] < sizes["coefficients"]


def test_a_candidate_that_diverges_is_reported_and_not_chosen(done, aniso, given, monkeypatch):
    def fail(self, session):
        raise NumericalError("LEARN-NONFINITE", "the loss is NaN", fix="a lower rate")

    monkeypatch.setattr(LearnedCoefficients, "run", fail)
    ran = aniso(*given)
    assert ran.code == 0 and "coefficients + LP++ failed: the loss is NaN" in ran.err
    said = done(*given)
    failed = {row["label"]: row["failure"] for row in said["candidates"] if row["failure"]}
    assert len(failed) == 4 and said["chosen"] not in failed


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        (("--also", "setfit"), "lora, weights"),
        (("--by", "test"), "--by"),
        (("--budget", 3), "selects nothing from 3 vectors"),
        (("--view", "sideways"), "--view"),
    ],
)
def test_mistakes_are_reported_before_anything_is_trained(aniso, given, more, mentions):
    ran = aniso(*given, *more)
    assert ran.code == 2 and mentions in ran.err and "fold 1" not in ran.err


def test_a_directory_that_exists_is_refused_at_once(aniso, given, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    ran = aniso(*given, "-o", tmp_path / "taken")
    assert ran.code == 2 and "OUT-EXISTS" in ran.err and "fold 1" not in ran.err


def test_texts_are_compared_alike(done, tmp_path):
    sentences.save(tmp_path / "model")
    others = {f"other{i}": tmp_path / f"tuned{i}" for i in range(2)}
    for i, path in enumerate(others.values(), 1):
        sentences.save(path, seed=i)
    Bank.build(tmp_path / "model", others, to=tmp_path / "bank", allow_distant=True)
    task = sentences.write_task(tmp_path / "reviews.csv", 12)
    words = ("--model", tmp_path / "model", "--bank", tmp_path / "bank", "--task", task, "--shots", 4)
    said = done("compare", *words, *QUICK, "-o", tmp_path / "winner")
    assert said["chosen"] in labels(said) and (tmp_path / "winner" / "record.json").exists()


def test_few_shot_with_a_head_shows_its_parts_alone(aniso, shelf):
    words = [word for word in shelf.few_shot("--head", "linear") if word != "--no-compare"]
    ran = aniso(*words)
    assert ran.code == 0, ran.err
    assert all(
        column in ran.out for column in ("zero-shot", "linear alone", "learned alone", "learned + linear")
    )
    joint = aniso(*(word if word != "linear" else "tip" for word in words), "--joint")
    assert "tip alone" in joint.out and "learned alone" not in joint.out  # learned together
    plain = aniso(*(word for word in words if word not in ("--head", "linear")))
    assert "alone" not in plain.out
