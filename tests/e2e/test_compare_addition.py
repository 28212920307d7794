"""``aniso compare addition``: merge rules and learned coefficients on validation data, never on test data."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from dataclasses import replace

import pytest
import runs
import torch

from aniso.cli import main
from aniso.data import load_task
from aniso.experiments.comparison.addition import AdditionComparison
from aniso.experiments.comparison.addition_candidates import AdditionComparisonOptions, comparable_methods
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.session import Session
from aniso.experiments.settings.addition import Addition
from aniso.records import Record
from aniso.report.layouts.addition import data_needed
from aniso.report.results import Row

QUICK = ("--epochs", 1, "--batch-size", 4, "--lr", 0.1)
LESS = ("--methods", "task-arithmetic,tsv,coefficients")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def given(shelf):
    tasks = ("--task", shelf.data / "cars", "--task", shelf.data / "dtd")
    return ("compare", "addition", *shelf.base, *tasks, *QUICK)


def by_label(said):
    return {row["label"]: row for row in said["candidates"]}


def comparison(shelf, *, poison=False, **options):
    """A comparison in Python; poisoned tasks have labels that are none."""
    names = tuple(str(shelf.data / name) for name in ("cars", "dtd"))
    method = LearnedCoefficients(schedule=ScheduleOptions(epochs=1, batch_size=4, lr=0.1))
    setting = Addition(model=str(shelf.model), bank=str(shelf.bank), tasks=names, method=method)
    made = AdditionComparison(setting, AdditionComparisonOptions(**options))
    if poison:
        for name in names:
            task = load_task(name)
            split = task.split("val")
            poisoned = replace(split, labels=tuple(math.nan for _ in split.labels))
            made._origin.tasks[name] = replace(task, val=poisoned)
    return made


def test_every_registered_rule_and_learned_coefficients_are_compared(done, given):
    said = done(*given)
    rows = by_label(said)
    assert {row["method"] for row in said["candidates"]} == {"none", *comparable_methods()}
    assert [row["data"] for row in said["candidates"] if row["method"] == "tsv"] == [
        *("none", "unlabelled", "labelled")
    ]
    assert (rows["coefficients by teachers"]["data"], rows["coefficients by labels"]["data"]) == (
        *("unlabelled", "labelled"),
    )
    for row in said["candidates"]:
        assert row["held_out"] == 16 and row["failure"] is None
        assert row["accuracy"] == pytest.approx(sum(row["by_task"].values()) / 2)
        ratios = [share / said["own_vectors"][task] for task, share in row["by_task"].items()]
        assert row["relative"] == pytest.approx(sum(ratios) / 2)
    assert rows["mean at 1"]["scale"] == 1 and "mean, scale by labels" not in rows
    assert rows["base"]["trainable"] == 0 and rows["tsv, scale by labels"]["trainable"] == 1
    assert rows["coefficients by labels"]["trainable"] > 2


def test_a_table_a_reason_and_the_command_to_learn_it(aniso, given):
    ran = aniso(*given, *LESS)
    assert ran.code == 0, ran.err
    for words in (
        "cars, dtd: accuracy on 16 validation images in 2 folds",
        "data",
        "recommended: ",
        "reason: ",
    ):
        assert words in ran.out
    (line,) = [line for line in ran.out.splitlines() if line.startswith("to learn it: ")]
    words = shlex.split(line.removeprefix("to learn it: "))
    assert words[:3] == ["aniso", "fit", "addition"] and words[-2:] == ["-o", "RUN"]
    assert aniso(*words[1:-2], "--print-spec").code == 0


def test_the_command_names_the_directory_of_data(aniso, shelf):
    words = (
        "compare",
        "addition",
        *shelf.base,
        "--data",
        shelf.data,
        "--task",
        "./cars",
        "--methods",
        "mean",
    )
    ran = aniso(*words)
    (line,) = [line for line in ran.out.splitlines() if line.startswith("to learn it: ")]
    assert aniso(*shlex.split(line.removeprefix("to learn it: "))[1:-2], "--plan").code == 0


def test_the_winner_is_the_run_that_fit_would_make(done, aniso, given, tmp_path):
    said = done(*given, *LESS, "-o", tmp_path / "winner")
    written = json.loads((tmp_path / "winner" / "comparison.json").read_text())
    assert (written["chosen"], written["reason"]) == (said["chosen"], said["reason"])
    record = json.loads((tmp_path / "winner" / "record.json").read_text())
    row = by_label(said)[said["chosen"]]
    assert record["metrics"]["supervision"] == row["data"]
    (line,) = [x for x in aniso(*given, *LESS).out.splitlines() if x.startswith("to learn it: ")]
    again = done(*shlex.split(line.removeprefix("to learn it: "))[1:-1], tmp_path / "again")
    assert again["id"] == record["id"] and again["metrics"]["accuracy"] == record["metrics"]["accuracy"]
    assert aniso("report", tmp_path / "winner", "-o", tmp_path / "page", "--no-figures").code == 0


def test_the_data_of_a_candidate_are_those_that_its_run_records(shelf):
    """The column "data" here, in records, and in the report's table of merging methods."""
    made = comparison(shelf, methods="mean,tsv,coefficients")
    for candidate in made.candidates:
        session = made._origin.sibling(candidate.setting, dict(made._fold(0)))
        assert session.problem.supervision(candidate.setting.method) == candidate.data, candidate.label
        record = Record.model_validate(
            {
                "schema": 1,
                "id": candidate.setting.id,
                "experiment": "x",
                "label": candidate.label,
                "spec": candidate.setting.spec(),
                "metrics": {"supervision": candidate.data},
                "status": "failed",
            },
            strict=False,
        )
        assert data_needed(Row(candidate.label, {}, (record,))) == candidate.data


@pytest.mark.parametrize(
    ("words", "title", "data"),
    [
        (("--method", "tsv", "--scale", 1), "merging methods, ", "none"),
        ((*QUICK, "--objective", "distil"), "", "unlabelled"),
    ],
)
def test_a_report_has_the_data_that_a_winner_needs(done, aniso, shelf, tmp_path, words, title, data):
    tasks = ("--task", shelf.data / "cars", "--task", shelf.data / "dtd")
    done("fit", "addition", *shelf.base, *tasks, *words, "-o", tmp_path / "winner")
    assert aniso("report", tmp_path / "winner", "-o", tmp_path / "page", "--no-figures").code == 0
    text = next((tmp_path / "page").rglob("*.md")).read_text()
    assert f"{title}test accuracy of one model on 2 tasks" in text
    (header,) = [line for line in text.splitlines() if line.startswith("| method |")]
    assert [cell.strip() for cell in header.split("|")][2] == "data"
    assert any(f"| {data} |" in line for line in text.splitlines())


def test_a_scale_is_the_one_that_fit_chooses(shelf):
    """By all validation items, and by those of a fold's other part."""
    made = comparison(shelf, methods="ties,task-arithmetic")
    rows = {row.candidate.label: row for row in made.run().rows}
    for row in rows.values():
        if "scale by" not in row.candidate.label:
            continue
        setting = row.candidate.setting
        whole = Session(setting, tasks={ref: load_task(ref) for ref in setting.tasks})
        assert setting.method.run(whole).metrics.scale == row.scale
        for number in range(2):
            session = Session(setting, tasks=dict(made._fold(number)))
            model = setting.method.run(session).model_for("cars")
            held = made._groups["cars"][number]
            assert torch.equal(
                made._predicted(model, "cars", held) == made._truth["cars"][held], row.hits["cars"][held]
            )


def test_without_labels_none_is_read(shelf, aniso, given):
    ran = aniso(*given, *LESS, "--without-labels")
    assert ran.code == 0, ran.err
    assert "agreement on 16 validation images" in ran.out and "no label is read" in ran.out
    assert "by labels" not in ran.out and "accuracy" not in ran.out
    options = {"methods": "tsv,coefficients", "without_labels": True}
    clean, poisoned = (comparison(shelf, poison=p, **options).run() for p in (False, True))
    assert clean.recommendation.reason == poisoned.recommendation.reason
    for one, other in zip(clean.rows, poisoned.rows, strict=True):
        assert one.by_task == other.by_task and one.scale == other.scale


def test_the_test_split_is_not_read(aniso, given, shelf, tmp_path):
    """A test image that cannot be decoded is no trouble where it is not used."""
    for name in ("cars", "dtd"):
        shutil.copytree(shelf.data / name, tmp_path / name)
        for path in (tmp_path / name / "test").rglob("*.png"):
            path.write_bytes(b"no image")
    words = [
        tmp_path / word.name if word in (shelf.data / "cars", shelf.data / "dtd") else word for word in given
    ]
    assert aniso(*words, *LESS).code == 0
    shutil.rmtree(tmp_path / "cars" / "test")
    ran = aniso(*words, *LESS, "-o", tmp_path / "run")
    assert ran.code == 3 and "no test split" in ran.err and not (tmp_path / "run").exists()


def test_an_interrupted_comparison_measures_what_is_missing(done, given, tmp_path, monkeypatch):
    given = (*given, *LESS, "-o", tmp_path / "run")
    measure, count = AdditionComparison._row, []

    def counted(self, candidate, shared):
        if len(count) == 3:
            raise KeyboardInterrupt
        count.append(candidate.label)
        return measure(self, candidate, shared)

    monkeypatch.setattr(AdditionComparison, "_row", counted)
    assert main([str(word) for word in given]) == 130
    assert len([*(tmp_path / "run" / "comparison").glob("*.safetensors")]) == 3
    monkeypatch.setattr(
        AdditionComparison, "_row", lambda *words: count.append(words[1].label) or measure(*words)
    )
    said = done(*given)
    assert len(count) == len(set(count)) == len(said["candidates"])
    assert any("3 measurements of an earlier call" in note for note in said["notes"])
    again = done(*given)
    assert len(count) == len(said["candidates"]) and again["reason"] == said["reason"]


def test_a_rule_without_a_result_is_reported_and_the_others_are_compared(done, given, shelf, monkeypatch):
    from aniso.errors import NumericalError
    from aniso.merge.tsv_rule import TSV

    def fail(self, deltas):
        raise NumericalError("LEARN-NONFINITE", "no convergence", fix="another rule")

    monkeypatch.setattr(TSV, "matrix", fail)
    said = done(*given, *LESS)
    assert by_label(said)["tsv at 1"]["failure"] == "no convergence"
    assert not said["chosen"].startswith("tsv") and any("tsv at 1 failed" in note for note in said["notes"])


@pytest.mark.parametrize(
    ("words", "code", "mentions"),
    [
        (("--methods", "tvs"), 2, "did you mean 'tsv'?"),
        (("--methods", "search"), 2, "task-arithmetic"),
        (("--folds", 1), 2, "folds"),
        (("--folds", 9), 3, "fewer images than there are folds"),
        (("--bank", "nobank"), 3, "nobank"),
        (("--lr", "nan"), 2, "lr"),
        (("--held-out", 0.1), 3, "--held-out 0.5"),
    ],
)
def test_mistakes(aniso, given, words, code, mentions):
    ran = aniso(*given, *words)
    assert ran.code == code, ran.err
    assert mentions in ran.err


def test_a_bank_and_vectors_named_like_the_tasks_are_needed(aniso, given, shelf, tmp_path):
    words = [word for word in given if word not in ("--bank", str(shelf.bank))]
    assert aniso(*words).code == 2
    for part in ("val", "test"):
        runs.coloured(tmp_path / "cats" / part, 3)
    ran = aniso(*given, "--task", tmp_path / "cats")
    assert ran.code == 2 and "cats" in ran.err, ran.err


def test_the_help_has_groups_and_few_shot_stays_the_default(aniso, given):
    ran = aniso("compare", "addition", "--help")
    assert ran.code == 0 and all(f"\n{group}:" in ran.out for group in ("Task", "Method", "Output"))
    plain, named = aniso("compare", "--help"), aniso("compare", "few-shot", "--help")
    assert plain.out == named.out and "compare addition" in plain.out
    ran = aniso("compare", "addtion", "--model", "mini")
    assert ran.code == 2 and "addtion" in ran.err


def test_mini(done, tmp_path):
    """Vectors of two tasks of the bundled bank, on a few drawn images."""
    names = ("cifar10", "mnist")
    for i, name in enumerate(names):
        for part in ("val", "test"):
            runs.coloured(tmp_path / name / part, 4, 100 * i)
    tasks = [word for name in names for word in ("--task", tmp_path / name)]
    said = done("compare", "addition", "--model", "mini", "--bank", "mini", *tasks, *LESS, "--methods", "tsv")
    assert [row["data"] for row in said["candidates"]] == ["none", "none", "unlabelled", "labelled"]
