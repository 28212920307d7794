"""``aniso verify-removal``: what is left of a negated target, before and after; output of negations."""

from __future__ import annotations

import json

import pytest
import runs
import torch

from aniso import evaluate, load_model, load_task
from aniso.compose import Coefficients
from aniso.experiments import removal
from aniso.experiments.removal import RemovalReport, RemovalRow, curve


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def negated(shelf, tmp_path_factory):
    """A run whose coefficients are replaced by large ones, so that something changes."""
    from aniso.cli import main

    out = tmp_path_factory.mktemp("runs") / "run"
    tasks = ("--target", shelf.data / "cars", "--control", shelf.data / "dtd")
    words = ("fit", "negation", *shelf.base, *tasks, "--epochs", 1, "--batch-size", 4, "-o", out)
    assert main([str(word) for word in words]) == 0
    file = out / "coefficients.safetensors"
    learned = Coefficients.load(file)
    values = torch.full_like(learned.values, -8.0)
    Coefficients(learned.index, values, learned.provenance).save(file, overwrite=True)
    return out


def test_every_measure_before_and_after(done, aniso, shelf, negated, monkeypatch):
    monkeypatch.setattr(removal, "RATES", (1e-3,))
    words = ("verify-removal", negated, "--related", shelf.data / "photos", "--probe-shots", 3)
    said = done(*words)
    rows = {(row["data"], row["measure"], row["shots"]): row for row in said["rows"]}
    assert [key for key in rows if key[0] == "cars"] == [
        ("cars", "zero-shot", None),
        *(("cars", "linear probe", k) for k in (1, 2, 3)),
        ("cars", "nearest neighbour", 3),
        *(("cars", "relearned", k) for k in (1, 3)),
    ]
    assert {key[1] for key in rows if key[0] == "photos"} == {
        "zero-shot",
        "linear probe",
        "nearest neighbour",
    }
    (before,) = done("eval", shelf.model, "--task", shelf.data / "cars")
    composed = ("--bank", shelf.bank, "--coefficients", negated / "coefficients.safetensors")
    (after,) = done("eval", shelf.model, "--task", shelf.data / "cars", *composed)
    row = rows["cars", "zero-shot", None]
    assert (row["before"], row["after"]) == (before["accuracy"], after["accuracy"])
    (control,) = done("eval", shelf.model, "--task", shelf.data / "dtd", *composed)
    assert rows["dtd", "zero-shot", None]["after"] == control["accuracy"]
    ran = aniso(*words)
    assert ran.code == 0 and "nearest neighbour" in ran.out and "control kept" in ran.out


def test_fine_tuned_weights_can_be_verified(shelf, tmp_path, monkeypatch, done):
    monkeypatch.setattr(removal, "RATES", (1e-3,))
    tasks = ("--target", shelf.data / "cars", "--control", shelf.data / "dtd")
    given = ("--method", "weights", "--epochs", 1, "--batch-size", 4, "--lr", 1e-3, "-o", tmp_path / "run")
    done("fit", "negation", *shelf.base, *tasks, *given)
    said = done("verify-removal", tmp_path / "run", "--probe-shots", 1)
    tuned = load_model(shelf.model, tmp_path / "run" / "weights.safetensors")
    found = evaluate(tuned, load_task(shelf.data / "cars").test)
    assert said["rows"][0]["after"] == found.value


def test_other_directories_are_refused(aniso, shelf, tmp_path):
    ran = aniso("verify-removal", tmp_path)
    assert ran.code == 3 and "RUN-FILES" in ran.err
    assert aniso(*shelf.few_shot("-o", tmp_path / "few")).code == 0
    ran = aniso("verify-removal", tmp_path / "few")
    assert ran.code == 2 and "few-shot" in ran.err
    ran = aniso("verify-removal", tmp_path / "nowhere")
    assert ran.code == 3 and "nowhere" in ran.err


def test_an_unfinished_run_is_refused(aniso, negated, tmp_path):
    (tmp_path / "spec.yaml").write_text((negated / "spec.yaml").read_text())
    ran = aniso("verify-removal", tmp_path)
    assert ran.code == 3 and "neither coefficients nor weights" in ran.err


def test_shares_and_findings_are_what_the_numbers_say():
    def row(data: str, role: str, measure: str, shots: int | None, before: float, after: float) -> RemovalRow:
        return RemovalRow(data, role, measure, shots, 0.1, before, after)

    rows = (
        row("mnist", "target", "zero-shot", None, 0.5, 0.1),
        row("svhn", "related", "zero-shot", None, 0.3, 0.4),
        row("imagenet", "control", "zero-shot", None, 0.2, 0.19),
        row("mnist", "target", "linear probe", 1, 0.2, 0.1),
        row("mnist", "target", "linear probe", 16, 0.5, 0.4),
        row("mnist", "target", "relearned", 16, 0.5, 0.45),
    )
    report = RemovalReport("mnist", "imagenet", 0.9, rows)
    assert report.control_share == pytest.approx(0.95)
    assert rows[4].kept == pytest.approx(0.75) and rows[3].kept == pytest.approx(0.0)
    findings = "\n".join(report.findings)
    assert "16 shots on mnist: 50.0% -> 40.0%; 75 % of what it reads above chance is left" in findings
    assert "svhn, related and not named in the run: 30.0% -> 40.0%" in findings
    assert "control kept 95.0 % of 20.0 (floor 90 %)" in findings
    assert json.dumps(report.content())


def test_a_curve_doubles_and_ends_where_it_was_asked_to():
    assert curve(16) == (1, 2, 4, 8, 16) and curve(6) == (1, 2, 4, 6) and curve(1) == (1,)
    assert curve(16, 4) == (1, 4, 16)


def test_a_negation_prints_what_the_control_kept_and_no_mean(aniso, shelf):
    tasks = ("--target", shelf.data / "cars", "--control", shelf.data / "dtd")
    ran = aniso("fit", "negation", *shelf.base, *tasks, "--epochs", 1, "--batch-size", 4, "--floor", 0.9)
    assert ran.code == 0, ran.err
    assert "control kept 100.0 % of 50.0 (floor 90 %)" in ran.out and "mean over" not in ran.out
