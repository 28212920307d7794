"""Runs from the command line: learned, searched, fine-tuned, planned, recorded, and used afterwards."""

from __future__ import annotations

import json

import pictures
import pytest
import runs
import torch
from watch import contents

from aniso.compose import Coefficients
from aniso.experiments.record import rounded
from aniso.experiments.strict_yaml import as_yaml, parse_yaml
from aniso.models import load_model
from aniso.vectors import Bank


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


QUICK = ("--epochs", 2, "--batch-size", 4, "--lr", 0.1, "--warmup-steps", 0)


# few-shot


def test_few_shot_on_a_folder_with_nothing_but_class_names(aniso, shelf, tmp_path):
    out = tmp_path / "run"
    ran = aniso(*shelf.few_shot("-o", out, "--compare"))
    assert ran.code == 0, ran.err
    assert "photos" in ran.out and "coefficients" in ran.out and str(out) in ran.out
    assert "selected by seed" in ran.err and "epoch 2: loss" in ran.err
    assert sorted(p.name for p in out.iterdir()) == [
        "classes.json",
        "coefficients.safetensors",
        "images",
        "metrics.jsonl",
        "predictions.csv",
        "predictions.csv.meta.json",
        "record.json",
        "spec.yaml",
    ]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    record = json.loads((out / "record.json").read_text())
    assert record["metrics"]["history"] == rounded(rows)
    learned = Coefficients.load(out / "coefficients.safetensors")
    assert learned.vectors == ("cars", "dtd", "signs")  # all but its own
    assert learned.values.any()


def test_json_is_the_record(done, shelf, tmp_path):
    said = done(*shelf.few_shot("-o", tmp_path / "run"))
    written = json.loads((tmp_path / "run" / "record.json").read_text())
    assert said.keys() == written.keys()
    assert said["id"] == written["id"] and said["spec"] == written["spec"]
    accuracy = said["metrics"]["accuracy"]["photos"]
    assert accuracy["total"] == 5
    assert bin(int(accuracy["right"], 16)).count("1") == accuracy["correct"]


def test_what_was_learned_measures_the_same_afterwards_and_can_be_baked(aniso, done, shelf, tmp_path):
    out = tmp_path / "run"
    said = done("fit", "peft", *shelf.base, "--task", shelf.data / "cars", *QUICK, "-o", out)
    learned = said["metrics"]["accuracy"]["cars"]
    composed = ("--bank", shelf.bank, "--coefficients", out / "coefficients.safetensors")
    (again,) = done("eval", shelf.model, "--task", shelf.data / "cars", *composed)
    assert (again["correct"], again["total"]) == (learned["correct"], learned["total"])
    base = ("--bank", shelf.bank, "--base", shelf.model)
    given = (*base, "-o", tmp_path / "baked", "--to", "huggingface")
    baked = aniso("bake", out / "coefficients.safetensors", *given)
    assert baked.code == 0, baked.err
    (one,) = done("eval", shelf.model, "--weights", tmp_path / "baked", "--task", shelf.data / "cars")
    assert one["correct"] == learned["correct"]


def test_linearised_vectors_are_learned_with_and_measured(done, shelf, tmp_path):
    out = tmp_path / "run"
    said = done(*shelf.few_shot("-o", out, "--linearised"))
    assert said["spec"]["linearised"] is True
    given = ("--bank", shelf.bank, "--coefficients", out / "coefficients.safetensors", "--linearised")
    (again,) = done("eval", shelf.model, "--task", shelf.data / "photos", *given)
    assert again["correct"] == said["metrics"]["accuracy"]["photos"]["correct"]


def test_all_weights_are_trained_and_load_back(done, shelf, tmp_path):
    said = done(*shelf.few_shot("-o", tmp_path / "run", "--method", "weights", "--lr", 1e-3))
    assert said["coefficients"] is None
    assert said["metrics"]["trainable"] == sum(b.numel for b in load_model(shelf.model).layout.blocks)
    weights = tmp_path / "run" / "weights.safetensors"
    (again,) = done("eval", shelf.model, "--weights", weights, "--task", shelf.data / "photos")
    assert again["correct"] == said["metrics"]["accuracy"]["photos"]["correct"]
    Bank.build(shelf.model, {"photos": weights})  # a task vector like any other


@pytest.mark.parametrize("method", ["none", "vector", "search"])
def test_methods_without_learning(done, shelf, tmp_path, method):
    given = shelf.few_shot("--method", method, "-o", tmp_path / "run")
    said = done(*given)
    assert said["label"] == method
    assert "kept_epoch" not in said["metrics"]
    if method == "vector":
        own = ("--bank", shelf.bank, "--vector", "photos")
        (again,) = done("eval", shelf.model, "--task", shelf.data / "photos", *own)
        assert again["correct"] == said["metrics"]["accuracy"]["photos"]["correct"]


def test_the_small_model_that_comes_along_learns_from_any_folder(aniso, tmp_path):
    pictures.folder(tmp_path / "fruit", {"apple": 8, "school bus": 8})
    given = ("--model", "mini", "--bank", "mini", "--task", tmp_path / "fruit", "--shots", 2)
    quick = ("--epochs", 1, "--batch-size", 4, "--min-steps-per-epoch", 1, "--no-compare")
    ran = aniso("fit", "few-shot", *given, *quick)
    assert ran.code == 0, ran.err
    assert "1,680 trained" in ran.out


# the other settings


def test_addition_of_two_tasks_uses_the_vectors_of_their_names(done, shelf, tmp_path):
    tasks = ("--task", shelf.data / "cars", "--task", shelf.data / "dtd")
    said = done("fit", "addition", *shelf.base, *tasks, *QUICK, "-o", tmp_path / "run")
    assert Coefficients.load(tmp_path / "run" / "coefficients.safetensors").vectors == ("cars", "dtd")
    metrics = said["metrics"]
    for what in ("accuracy", "zero_shot", "reference"):
        assert metrics[what].keys() == {"cars", "dtd"}
    smaller = done("fit", "addition", *shelf.base, *tasks, *QUICK, "--norm", 5, "--no-compare")
    assert smaller["metrics"]["history"][1]["terms"].keys() - metrics["history"][1]["terms"].keys()


def test_negation_measures_target_and_control(done, shelf, tmp_path):
    tasks = ("--target", shelf.data / "cars", "--control", shelf.data / "dtd")
    said = done("fit", "negation", *shelf.base, *tasks, *QUICK, "-o", tmp_path / "run")
    assert Coefficients.load(tmp_path / "run" / "coefficients.safetensors").vectors == ("cars",)
    assert said["metrics"]["accuracy"].keys() == {"cars", "dtd"}
    assert said["metrics"]["trainable"] == 32


def test_peft_with_random_parts_has_that_many_coefficients(done, shelf, tmp_path):
    given = ("--task", shelf.data / "cars", "--partition", "random:4", "--fraction", 0.5)
    said = done("fit", "peft", *shelf.base, *given, *QUICK, "-o", tmp_path / "run")
    assert said["metrics"]["trainable"] == 3 * 32 * 4
    assert said["metrics"]["kept_epoch"] > 0
    assert len(Coefficients.load(tmp_path / "run" / "coefficients.safetensors").values) == 3 * 32 * 4


def test_more_parts_than_elements_are_said(done, shelf, tmp_path):
    given = ("--task", shelf.data / "cars", "--partition", "random:100", *QUICK)
    said = done("fit", "peft", *shelf.base, *given)
    planned = done("fit", "peft", *shelf.base, *given, "--plan")
    for notes in (said["notes"], planned["notes"]):
        assert any("blocks have fewer elements than parts" in note for note in notes)


@pytest.mark.parametrize(("kind", "last"), [("addition", 1.0), ("negation", -1.0)])
def test_search_tries_scales_and_keeps_one_of_them(done, shelf, tmp_path, kind, last):
    cars, dtd = shelf.data / "cars", shelf.data / "dtd"
    tasks = ("--task", cars, "--task", dtd) if kind == "addition" else ("--target", cars, "--control", dtd)
    said = done("search", kind, *shelf.base, *tasks, "--no-compare", "-o", tmp_path / "run")
    scales = [one["scale"] for one in said["metrics"]["history"]]
    assert (scales[0], scales[-1], len(scales)) == (0.0, last, 21)
    assert "-0" not in json.dumps(scales[:1]) and said["metrics"]["scale"] in scales
    learned = Coefficients.load(tmp_path / "run" / "coefficients.safetensors")
    assert torch.equal(learned.values, torch.full_like(learned.values, said["metrics"]["scale"]))


def test_a_bank_without_the_tasks_vectors_is_an_error_that_lists_what_it_has(aniso, shelf, tmp_path):
    runs.coloured(tmp_path / "cats" / "val", 2)
    runs.coloured(tmp_path / "cats" / "test", 2)
    for plan in ((), ("--plan",)):
        ran = aniso("search", "addition", *shelf.base, "--task", tmp_path / "cats", *plan)
        assert ran.code == 2, ran.err
        assert "cats" in ran.err and "signs" in ran.err


# plans


def test_a_plan_says_what_will_be_done_and_does_nothing(aniso, done, shelf, tmp_path):
    before = contents(tmp_path)
    given = shelf.few_shot("--plan", "-o", tmp_path / "run")
    facts = done(*given)
    assert facts["vectors"] == ["cars", "dtd", "signs"]
    assert (facts["trainable"], facts["steps"], facts["tests"]) == (96, 4, {"photos": 5})
    assert facts["memory_bytes"] > 0 and facts["disk_bytes"] > 0
    assert "in memory; weights kept" in facts["strategy"]
    said = aniso(*given)
    assert said.code == 0 and "photos (5 images)" in said.out and "record.json" in said.out
    assert contents(tmp_path) == before
    assert aniso(*shelf.few_shot("-o", tmp_path / "run")).code == 0
    assert sorted(facts["writes"]) == sorted(p.name for p in (tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("more", "code", "what"),
    [
        (("--shots", 100), 3, "DATA-SHOTS"),
        (("--task", "nowhere"), 3, "DATA-MISSING"),
        (("--bank", "nowhere"), 3, "nowhere"),
        (("--model", "nowhere"), 3, "MODEL-NAME"),
        (("--memory", "1kB"), 5, "PLAN-MEMORY"),
        (("--partition", "rond"), 2, "PARTITION"),
        (("--leave-out", "cars", "--leave-out", "dtd", "--leave-out", "signs"), 3, "BANK-NAME"),
    ],
)
def test_a_plan_that_cannot_succeed_fails_as_the_run_would(aniso, shelf, tmp_path, more, code, what):
    for plan in (("--plan",), ()):
        ran = aniso(*shelf.few_shot(*more, *plan, "-o", tmp_path / "run"))
        assert ran.code == code and what in ran.err, ran.err
        assert not (tmp_path / "run").exists()  # so that it can be tried again


# experiments


def _experiment(path, base, **more):
    variants = [{"label": "learned"}]
    path.write_text(as_yaml({"schema": 1, "name": "try", "base": base, "variants": variants, **more}))
    return path


def test_a_printed_spec_as_an_experiment_gives_the_same_record(aniso, done, shelf, tmp_path):
    printed = aniso(*shelf.few_shot("--print-spec"))
    spec = _experiment(tmp_path / "spec.yaml", parse_yaml(printed.out, "printed").data)
    first = done(*shelf.few_shot())
    ran = aniso("run", spec, "--jobs", 2)
    assert ran.code == 0, ran.err
    (record,) = runs.recorded(tmp_path / "records")
    assert record["id"] == first["id"] and record["spec"] == first["spec"]
    assert record["metrics"]["accuracy"]["photos"]["right"] == first["metrics"]["accuracy"]["photos"]["right"]
    assert (record["experiment"], record["label"]) == ("try", "learned")


@pytest.fixture
def experiment(shelf, tmp_path):
    base = {"setting": "few-shot", "model": str(shelf.model), "bank": str(shelf.bank), "task": "./photos"}
    base |= {"shots": 2, "compare": False, "schedule": {"epochs": 1, "batch_size": 4}}
    variants = [{"label": "zero", "base": {"method": "none"}, "grid": {"seed": [0]}}, {"label": "learned"}]
    spec = _experiment(tmp_path / "spec.yaml", base, grid={"seed": [0, 1]}, variants=variants)
    return "run", spec, "--data", shelf.data


def test_a_dry_run_lists_cells_and_runs_none(aniso, done, experiment, tmp_path):
    ran = aniso(*experiment, "--dry-run")
    assert ran.code == 0, ran.err
    assert "3 cells, 0 recorded" in ran.out
    assert not (tmp_path / "records").exists()
    cells = done(*experiment, "--dry-run")
    assert [(c["label"], c["status"]) for c in cells] == [("zero", "missing")] + [("learned", "missing")] * 2
    assert len({c["id"] for c in cells}) == 3


def test_values_can_be_set_from_the_command_line(done, experiment):
    before = {c["id"] for c in done(*experiment, "--dry-run")}
    (*_, last) = done(*experiment, "--dry-run", "--set", "grid.seed=[0,1,7]")
    assert last["id"] not in before and "seed 7" in last["cell"]
    after = {c["id"] for c in done(*experiment, "--dry-run", "--set", "base.schedule.lr=0.5")}
    assert len(after) == 3 and len(after & before) == 1  # zero-shot has no use for a learning rate


def test_only_some_variants_are_run_and_the_rest_later(aniso, done, experiment, tmp_path):
    assert done(*experiment, "--only", "zero")["recorded"] == 1
    assert {c["status"] for c in done(*experiment, "--dry-run")} == {"recorded", "missing"}
    ran = aniso(*experiment, "--jobs", 2, "-o", tmp_path / "records")
    assert ran.code == 0 and "[2/2]" in ran.err and "3 cells: 3 recorded" in ran.out, ran.err
    labels = [record["label"] for record in runs.recorded(tmp_path / "records")]
    assert sorted(labels) == ["learned", "learned", "zero"]


def test_two_variants_that_are_the_same_are_an_error(aniso, experiment):
    ran = aniso(*experiment, "--dry-run", "--set", "variants=[{label: a}, {label: b}]")
    assert ran.code == 2
    assert "'a' and 'b' are the same" in ran.err


def test_a_lora_is_a_baseline_of_few_shots_too(aniso, done, shelf, tmp_path):
    given = shelf.few_shot("--method", "weights", "--lora", 2, "--epochs", 1, "--batch-size", 4)
    record = done(*given, "-o", tmp_path / "run")
    assert record["spec"]["lora"] == 2 and record["spec"]["schedule"]["lr"] == 1e-3
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
    refused = aniso(*shelf.few_shot("--lora", 2))
    assert refused.code == 2 and "--method weights" in refused.err
    targets = aniso("finetune", *shelf.base[:2], "--task", shelf.data / "cars", "--targets", "mlp")
    assert targets.code == 2 and "lora" in targets.err
