"""Task addition without labels, from the command line, specs and Python: teachers and entropy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch

from aniso.compose import Coefficients
from aniso.data import Unlabelled, load_task
from aniso.experiments.session import Session
from aniso.experiments.settings.addition import Addition
from aniso.experiments.spec import Experiment, cells
from aniso.experiments.strict_yaml import parse_yaml, validated
from aniso.learn import Agreement, Distil, Entropy, Last

QUICK = ("--epochs", 2, "--batch-size", 4, "--lr", 0.1, "--warmup-steps", 0)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def tasks(shelf):
    return ("--task", shelf.data / "cars", "--task", shelf.data / "dtd")


def setting(shelf, **options):
    given = {"method": "coefficients", "objective": "distil", "compare": False, **options}
    names = tuple(str(shelf.data / name) for name in ("cars", "dtd"))
    return Addition(model=str(shelf.model), bank=str(shelf.bank), tasks=names, **given)


# commands


@pytest.mark.parametrize("match", ["kl", "features", "cosine", "labels"])
def test_coefficients_are_learned_from_teachers(done, shelf, tasks, tmp_path, match):
    given = (*shelf.base, *tasks, *QUICK, "--objective", "distil", "--match", match, "--no-compare")
    record = done("fit", "addition", *given, "-o", tmp_path / "run")
    metrics = record["metrics"]
    assert metrics["supervision"] == "unlabelled"
    assert record["spec"]["objective"] == "distil" and record["spec"]["match"] == match
    assert set(metrics["history"][1]["terms"]) == {"cars val, distil", "dtd val, distil"}
    for row in metrics["history"]:
        assert row["accuracy"] == {}
        assert set(row["agreement"]) == {"cars val (held out)", "dtd val (held out)"}
    assert Coefficients.load(tmp_path / "run" / "coefficients.safetensors").vectors == ("cars", "dtd")
    assert set(record["inputs"]["content"]["learned"]) == {
        *("cars val", "dtd val", "cars val (held out)", "dtd val (held out)")
    }


def test_a_run_says_that_it_used_no_label(aniso, shelf, tasks):
    ran = aniso("fit", "addition", *shelf.base, *tasks, *QUICK, "--objective", "distil", "--no-compare")
    assert ran.code == 0, ran.err
    assert "no label was used" in ran.out and "as its teacher" in ran.err
    ran = aniso("fit", "addition", *shelf.base, *tasks, *QUICK, "--no-compare")
    assert ran.code == 0 and "no label was used" not in ran.out


def test_the_last_epoch_needs_no_teacher_and_holds_nothing_out(done, shelf, tasks):
    given = (*shelf.base, *tasks, *QUICK, "--objective", "entropy", "--choose-by", "last", "--no-compare")
    metrics = done("fit", "addition", *given)["metrics"]
    assert metrics["supervision"] == "unlabelled" and metrics["kept_epoch"] == 2
    assert set(metrics["history"][1]["terms"]) == {"cars val, entropy", "dtd val, entropy"}
    assert all("agreement" not in row for row in metrics["history"])


@pytest.mark.parametrize("by", ["labels", "teachers"])
def test_the_scale_of_a_search_is_chosen_by_labels_or_by_teachers(done, shelf, tasks, by):
    more = () if by == "labels" else ("--choose-by", by)
    metrics = done("search", "addition", *shelf.base, *tasks, *more, "--no-compare")["metrics"]
    field, other = ("accuracy", "agreement") if by == "labels" else ("agreement", "accuracy")
    assert metrics["supervision"] == ("labelled" if by == "labels" else "unlabelled")
    assert len(metrics["history"]) == 21
    for row in metrics["history"]:
        assert set(row[field]) == {"cars val", "dtd val"} and not row.get(other)
    if by == "teachers":  # of equals the first
        means = [sum(row["agreement"].values()) for row in metrics["history"]]
        assert metrics["scale"] == metrics["history"][means.index(max(means))]["scale"]


def test_methods_without_data_say_so(done, shelf, tasks):
    metrics = done("fit", "addition", *shelf.base, *tasks, "--method", "vector", "--no-compare")["metrics"]
    assert metrics["supervision"] == "none"


def test_a_run_is_not_resumed_with_another_match(aniso, shelf, tasks, tmp_path):
    given = (*shelf.base, *tasks, *QUICK, "--objective", "distil", "--no-compare")
    assert aniso("fit", "addition", *given, "-o", tmp_path / "run").code == 0
    again = aniso("fit", "addition", *given, "--match", "cosine", "-o", tmp_path / "run", "--resume")
    assert again.code == 3 and "match" in again.err, again.err


# labels never decide anything


@pytest.mark.parametrize(
    "options",
    [{"match": "kl"}, {"match": "labels"}, {"objective": "entropy"}, {"method": "search", "by": "teachers"}],
    ids=lambda options: "-".join(options.values()),
)
def test_poisoned_labels_change_nothing(shelf, options):
    options = dict(options)
    if options.pop("by", None):
        options |= {"objective": "cross-entropy", "choose_by": "teachers"}

    def learned(poison):
        made = setting(shelf, **options, fraction=0.75)
        loaded = {ref: load_task(ref) for ref in made.tasks}
        if poison:
            loaded = {ref: _poisoned(task) for ref, task in loaded.items()}
        session = Session(made, tasks=loaded)
        result = made.method.run(session)
        return result.coefficients.values, [row.content() for row in result.metrics.history]

    clean, poisoned = learned(False), learned(True)
    assert torch.equal(clean[0], poisoned[0]) and clean[1] == poisoned[1]


def _poisoned(task):
    """The task with labels of its validation and training items that are no labels at all."""
    splits = {
        role: split if role == "test" else replace(split, labels=tuple(math.nan for _ in split.labels))
        for role, split in task.splits.items()
    }
    return replace(task, **splits)


# problems


def test_held_out_items_are_not_learned_from(shelf):
    made = setting(shelf, held_out=0.25)
    problem = Session(made).problem
    assert isinstance(problem.keep, Agreement)
    for (_, term), kept in zip(problem.objective.data_terms, problem.keep.splits, strict=True):
        assert isinstance(term, Distil) and isinstance(term.split, Unlabelled)
        assert (len(term.split), len(kept)) == (6, 2)
        assert not {*term.split.keys} & {*kept.keys}
        assert term.teacher.vector == term.split.name.split()[0]


@pytest.mark.parametrize(("split", "count"), [("val", 8), ("train", 8), ("test", 12)])
def test_items_come_from_the_split_that_is_named(shelf, split, count):
    problem = Session(setting(shelf, objective="entropy", choose_by="last", inputs_from=split)).problem
    assert isinstance(problem.keep, Last)
    for _, term in problem.objective.data_terms:
        assert isinstance(term, Entropy) and isinstance(term.split, Unlabelled)
        assert len(term.split) == count and split in term.split.name


def test_the_problem_is_posed_without_loading_the_model(shelf):
    session = Session(setting(shelf))
    assert session.content.learned and "model" not in session.__dict__


# specs


def test_specs_name_the_objective_and_its_options(shelf):
    text = f"""
schema: 1
name: teachers
base: {{ setting: addition, model: {shelf.model}, bank: {shelf.bank}, tasks: [./cars, ./dtd] }}
variants:
  - label: labels
  - label: teachers
    base: {{ objective: distil, match: features }}
  - label: scale
    base: {{ method: search, choose_by: teachers }}
"""
    document = parse_yaml(text, "spec")
    found = {cell.label: cell.setting for cell in cells(validated(Experiment, document), document)}
    assert (found["teachers"].objective, found["teachers"].match) == ("distil", "features")
    assert found["scale"].choose_by == "teachers"
    assert len({one.id for one in found.values()}) == 3


def test_ids_of_runs_with_labels_are_those_from_before_these_options(shelf):
    plain = setting(shelf, objective="cross-entropy")
    new = {"objective", "match", "temperature", "confidence", "choose_by", "inputs_from", "held_out"}
    assert not new & plain._identity().keys() and new <= plain.spec().keys()
    assert json.dumps(plain.spec())


# mistakes


@pytest.mark.parametrize(
    ("words", "mentions"),
    [
        (("--objective", "distil", "--choose-by", "labels"), "uses no labels"),
        (("--method", "search", "--choose-by", "last"), "no last epoch"),
        (("--method", "search", "--objective", "distil"), "choose_by teachers"),
        (("--objective", "image-text"), "does not fit"),
        (("--objective", "entropy", "--match", "labels"), "objective distil"),
        (("--inputs-from", "train"), "without labels"),
        (("--objective", "distill"), "distil"),
        (("--objective", "distil", "--match", "logits"), "features"),
        (("--objective", "distil", "--temperature", 0), "temperature"),
        (("--objective", "distil", "--held-out", 1), "held"),
    ],
)
def test_options_that_do_not_fit_are_refused(aniso, shelf, tasks, words, mentions):
    ran = aniso("fit", "addition", *shelf.base, *tasks, *words)
    assert ran.code == 2, ran.err
    assert mentions in ran.err


def test_teachers_need_a_bank(aniso, shelf, tasks):
    given = ("fit", "addition", "--model", shelf.model, *tasks, "--method", "weights")
    ran = aniso(*given, "--objective", "distil")
    assert ran.code == 2 and "own vectors" in ran.err and "--bank" in ran.err


def test_a_task_without_a_vector_of_its_own_is_named(aniso, shelf, tmp_path):
    for part in ("val", "test"):
        runs.coloured(tmp_path / "cats" / part, 3)
    for more in (("--objective", "distil"), ("--method", "search", "--choose-by", "teachers")):
        ran = aniso("fit", "addition", *shelf.base, "--task", tmp_path / "cats", *more)
        assert ran.code == 2, ran.err
        assert "cats" in ran.err and "signs" in ran.err


def test_a_share_that_leaves_nothing_to_choose_by_is_an_error(aniso, shelf, tasks):
    ran = aniso("fit", "addition", *shelf.base, *tasks, "--objective", "distil", "--held-out", 0.01)
    assert ran.code == 3, ran.err
    assert "holding out 0.01 of cars val" in ran.err and "--choose-by last" in ran.err


def test_a_task_without_the_split_that_is_learned_from_is_an_error(aniso, shelf, tmp_path):
    data = Path(tmp_path / "cars")
    runs.coloured(data / "test", 3)
    ran = aniso("fit", "addition", *shelf.base, "--task", data, "--objective", "distil", "--plan")
    assert ran.code == 3 and "val" in ran.err


def test_test_time_adaptation_has_no_teacher(aniso, shelf):
    given = ("fit", "test-time", *shelf.base, "--task", shelf.data / "cars", "--objective", "distil")
    ran = aniso(*given)
    assert ran.code == 2 and "fit addition" in ran.err
