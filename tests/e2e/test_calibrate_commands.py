"""Calibration after a merge, from the command line, specs and Python, to the files that others load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import runs
import torch

from aniso import merge
from aniso.compose import Coefficients
from aniso.data import load_task
from aniso.demo import write_tasks
from aniso.experiments.session import Session
from aniso.experiments.settings.addition import Addition
from aniso.experiments.spec import Experiment, cells
from aniso.experiments.strict_yaml import parse_yaml, validated
from aniso.learn import CALIBRATION_RULES, FeatureCache, calibrate_features, features, predict
from aniso.learn.teacher import Teacher, with_vector
from aniso.models import load_model
from aniso.progress import silent
from aniso.record_files import RecordStore
from aniso.report.layouts.addition import data_needed
from aniso.report.rows import results
from aniso.vectors import Bank, TaskVector

FIXED = ("--method", "task-arithmetic", "--scale", 0.5, "--no-compare")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def tasks(shelf):
    return ("--task", shelf.data / "cars", "--task", shelf.data / "dtd")


def setting(shelf, **options):
    given = {"method": "mean", "calibrate": "featcal", "compare": False, **options}
    names = tuple(str(shelf.data / name) for name in ("cars", "dtd"))
    return Addition(model=str(shelf.model), bank=str(shelf.bank), tasks=names, **given)


def test_the_names_of_rules_are_those_of_the_option():
    annotation = Addition.model_fields["calibrate"].annotation
    names = [name for part in get_args(annotation) for name in get_args(part)]
    assert names == list(CALIBRATION_RULES)


@pytest.mark.parametrize("rule", CALIBRATION_RULES)
def test_a_run_evaluates_and_writes_the_calibrated_model(done, aniso, shelf, tasks, tmp_path, rule):
    run = tmp_path / "run"
    given = ("--method", "mean", "--calibrate", rule, "--calibrate-items", 5, "--no-compare")
    record = done("fit", "addition", *shelf.base, *tasks, *given, "-o", run)
    assert record["metrics"]["supervision"] == "unlabelled"
    spec = record["spec"]
    assert (spec["calibrate"], spec["calibrate_items"]) == (rule, 5)
    defaults = CALIBRATION_RULES[rule]()
    assert str(defaults) == f"{rule}({', '.join(spec['calibrate_options'])})"
    formula = record["inputs"]["merged"][rule]
    assert formula.startswith(str(defaults)) and "5 items of cars, 5 items of dtd, without labels" in formula
    drawn = {f"{name} val (5 items, seed 0)" for name in ("cars", "dtd")}
    assert drawn <= set(record["inputs"]["content"]["learned"])
    assert TaskVector.load(run / "merged.safetensors").provenance.formula == formula
    assert Coefficients.load(run / "coefficients.safetensors").vectors == (rule,)
    # the files are the model that was measured
    place = ("--bank", shelf.bank, "--base", shelf.model)
    assert aniso("bake", run, *place, "-o", tmp_path / "model", "--to", "huggingface").code == 0
    model = load_model(tmp_path / "model")
    for name in ("cars", "dtd"):
        test = load_task(shelf.data / name).splits["test"]
        right = int((predict(model, test) == torch.tensor(test.labels)).sum())
        assert right == record["metrics"]["accuracy"][name]["correct"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"Calibrated after the merge by {rule.replace('_', '')}" in card
    assert "on at most 5 items of every task (val split), without their labels" in card


def test_the_merge_rule_comes_first(done, shelf, tasks, tmp_path):
    given = ("--method", "tsv", "--scale", 1.0, "--calibrate", "featcal", "--no-compare")
    record = done("fit", "addition", *shelf.base, *tasks, *given, "-o", tmp_path / "run")
    merged = record["inputs"]["merged"]
    assert set(merged) == {"tsv", "featcal"} and f"of {merged['tsv']}" in merged["featcal"]
    assert record["metrics"]["scale"] == 1.0


def test_a_scale_searched_with_labels_is_said_to_need_labels(done, shelf, tasks):
    given = ("--method", "tsv", "--calibrate", "featcal", "--calibrate-items", 4, "--no-compare")
    assert done("fit", "addition", *shelf.base, *tasks, *given)["metrics"]["supervision"] == "labelled"


def test_learned_coefficients_can_be_calibrated(done, shelf, tasks, tmp_path):
    quick = ("--epochs", 1, "--batch-size", 4, "--lr", 0.1, "--warmup-steps", 0)
    given = (*quick, "--objective", "distil", "--calibrate", "featcal", "--no-compare")
    record = done("fit", "addition", *shelf.base, *tasks, *given, "-o", tmp_path / "run")
    assert record["metrics"]["supervision"] == "unlabelled" and record["metrics"]["kept_epoch"] is not None
    assert "of composition" in record["inputs"]["merged"]["featcal"]


def test_a_plan_counts_the_items_and_names_the_file(done, shelf, tasks, tmp_path):
    given = (*FIXED, "--calibrate", "featcal", "--calibrate-items", 3, "--plan", "-o", tmp_path / "run")
    plan = done("fit", "addition", *shelf.base, *tasks, *given)
    assert plan["learned_from"] == {f"{name} val (3 items, seed 0)": 3 for name in ("cars", "dtd")}
    assert "merged.safetensors" in json.dumps(plan)
    assert not (tmp_path / "run").exists()


def test_specs_and_python_have_the_same_options(shelf):
    text = f"""
schema: 1
name: merges
base: {{ setting: addition, model: {shelf.model}, bank: {shelf.bank}, compare: false,
        tasks: [{shelf.data}/cars, {shelf.data}/dtd] }}
variants:
  - {{ label: plain, base: {{ method: mean }} }}
  - {{ label: calibrated, base: {{ method: mean, calibrate: featcal, calibrate_items: 8 }} }}
  - {{ label: others, base: {{ method: mean, calibrate: featcal, calibrate_options: [ridge=0.5] }} }}
"""
    document = parse_yaml(text, "spec.yaml")
    found = [cell.setting for cell in cells(validated(Experiment, document), document)]
    assert [one.calibrate for one in found] == [None, "featcal", "featcal"]
    assert found[1] == setting(shelf, calibrate_items=8)
    assert len({one.id for one in found}) == 3
    assert found[2].spec()["calibrate_options"] == ["ridge=0.5", "rho=2.2", "alpha=0.25"]


def test_a_run_without_calibration_has_the_id_that_it_had(shelf):
    plain = setting(shelf, calibrate=None)
    assert not {"calibrate", "calibrate_items", "calibrate_options"} & set(plain._identity())


def test_labels_change_nothing(shelf):
    """The items are drawn and used without their labels."""

    def weights(swap):
        made = setting(shelf, method="mean", calibrate_items=5, inputs_from="train")
        loaded = {ref: load_task(ref) for ref in made.tasks}
        session = Session(made, tasks=loaded)
        if swap:
            for task in loaded.values():
                train = task.splits["train"]
                object.__setattr__(train, "labels", tuple(1 - label for label in train.labels))
        result = made.finished(session, made.method.run(session))
        return result.calibrated.vector.norms

    assert weights(False) == weights(True)


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (("--method", "none", "--calibrate", "featcal"), "one composition of vectors"),
        (("--method", "vector", "--calibrate", "featcal"), "one composition of vectors"),
        (("--method", "tsv", "--calibrate", "regmean++"), "method mean, or featcal"),
        (("--method", "tsv", "--calibrate-items", 8), "belong to calibrate"),
        (("--method", "tsv", "--calibrate", "featcal", "--linearised"), "linearised"),
        (("--method", "tsv", "--calibrate", "best"), "regmean++"),
        (("--method", "tsv", "--calibrate", "featcal", "--calibrate-items", 0), "calibrate"),
        (("--method", "tsv", "--calibrate", "featcal", "--calibrate-option", "size=1"), "no option 'size'"),
        (("--method", "tsv", "--calibrate", "featcal", "--calibrate-option", "ridge=x"), "a number"),
        (("--method", "tsv", "--calibrate", "featcal", "--calibrate-option", "ridge=-1"), "above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(aniso, shelf, tasks, options, mentions):
    ran = aniso("fit", "addition", *shelf.base, *tasks, *options)
    assert ran.code == 2 and mentions in ran.err, ran.err


def test_a_table_tells_calibrated_rows_apart(aniso, shelf, tmp_path: Path):
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"""
schema: 1
name: merges
base: {{ setting: addition, model: {shelf.model}, bank: {shelf.bank}, compare: false, method: mean,
        tasks: [{shelf.data}/cars, {shelf.data}/dtd], calibrate: featcal }}
grid: {{ calibrate_items: [2, 4] }}
variants:
  - label: mean
""")
    assert aniso("run", spec).code == 0
    rows = results(RecordStore(tmp_path / "records").finished().values()).rows
    assert {row.name for row in rows} == {f"mean (calibrate_items: {count})" for count in (2, 4)}
    assert all(data_needed(row) == "unlabelled" for row in rows)


@pytest.mark.parametrize("rule", CALIBRATION_RULES)
def test_features_of_mini_come_closer_to_its_teachers(rule, tmp_path):
    write_tasks(tmp_path / "tasks", silent, each=10)
    made = {name: load_task(tmp_path / "tasks" / place)
            for name, place in (("mnist", "digits"), ("dtd10", "patterns"))}  # fmt: skip
    encoder, bank = load_model("mini"), Bank.load("mini").only(*made)
    merged = with_vector(encoder, Bank({"mean": merge.mean(bank)}))
    teachers = {name: Teacher.of(encoder, bank, name, cache=FeatureCache(None)) for name in made}
    splits = {name: task.splits["train"].unlabelled() for name, task in made.items()}
    found = calibrate_features(merged, teachers, splits, CALIBRATION_RULES[rule](), items=32)
    after = with_vector(encoder, Bank({rule: found.vector}))

    def distance(model, name):
        test = made[name].splits["test"].unlabelled()
        return float((features(model, test)[0] - teachers[name].features(test)).norm())

    before, now = (sum(distance(model, name) for name in made) for model in (merged, after))
    assert len(found.layers) >= 6 * 4 and now < 0.9 * before
