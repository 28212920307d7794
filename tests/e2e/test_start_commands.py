"""``aniso fit --start`` and merge rules as methods of ``aniso fit addition``."""

from __future__ import annotations

import json

import pytest
import runs
import torch

import aniso as library
from aniso.compose import Coefficients
from aniso.experiments.result import RunOptions
from aniso.experiments.session import Session
from aniso.record_files import RecordStore
from aniso.registry import MERGE_RULES, METHODS
from aniso.vectors import Bank, TaskVector

QUICK = ("--epochs", "1", "--batch-size", "4")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def addition(shelf, aniso):
    def run(*more, code=0):
        tasks = ("--task", shelf.data / "cars", "--task", shelf.data / "dtd")
        ran = aniso("fit", "addition", *shelf.base, *tasks, "--no-compare", *more)
        assert ran.code == code, ran.err
        return ran

    return run


def record(path):
    return json.loads((path / "record.json").read_text())


def setting(shelf, **more):
    tasks = [str(shelf.data / name) for name in ("cars", "dtd")]
    return library.recipes.setting(
        "addition", model=str(shelf.model), bank=str(shelf.bank), tasks=tasks, compare=False, **more
    )


def test_a_run_that_starts_at_a_merge_is_recorded_baked_evaluated_and_started_from(
    shelf, addition, aniso, tmp_path
):
    out = tmp_path / "run"
    ran = addition(*QUICK, "--start", "tsv", "--start-scale", "1.5", "--stay-near", "0.1", "-o", out)
    assert "merged.safetensors" in ran.out
    found = record(out)
    assert found["spec"]["start"] == "tsv" and "small=error" in found["spec"]["merge_options"]
    assert found["inputs"]["vectors"] == ["cars", "dtd", "tsv"]
    assert found["inputs"]["bank"] == Bank.load(shelf.bank).content_hash != found["inputs"]["selected"]
    assert found["inputs"]["merged"]["tsv"].startswith("tsv(scale=1.0, qkv=stored")
    assert found["inputs"]["start"]["description"].endswith("times 1.5")
    coefficients = Coefficients.load(out / "coefficients.safetensors")
    assert coefficients.vectors == ("cars", "dtd", "tsv")
    baked = tmp_path / "model.safetensors"
    ran = aniso("bake", out, "--bank", shelf.bank, "--base", shelf.model, "-o", baked)
    assert ran.code == 0, ran.err
    evaluated = aniso("eval", shelf.model, "--bank", shelf.bank, "--coefficients", out,
                      "--task", shelf.data / "cars")  # fmt: skip
    assert evaluated.code == 0, evaluated.err
    again = tmp_path / "again"
    addition(*QUICK, "--start", out, "-o", again)
    assert record(again)["inputs"]["vectors"] == ["cars", "dtd", "tsv"]
    assert TaskVector.load(again / "merged.safetensors").provenance.formula.startswith("tsv(")


def test_the_start_is_where_training_begins_and_zero_is_the_base(shelf):
    session = Session(setting(shelf, start="mean", start_scale=2.0))
    composition = session.setting.method.composition(session)
    assert not composition.values.any()
    base = session.model.state_dict()
    assert all(torch.equal(tensor, base[key]) for key, tensor in composition.weights().items())
    assert set(session.start.coefficients.values.tolist()) == {1.0}  # 2.0 / 2 vectors


def test_starts_are_part_of_the_id_and_absent_ones_are_not(shelf):
    plain = setting(shelf)
    assert plain.id == setting(shelf, start_scale=1.0, stay_near=0.0).id
    different = [
        plain,
        setting(shelf, start="tsv"),
        setting(shelf, start="tsv", start_scale=2.0),
        setting(shelf, start="tsv", merge_options=["small=mean"]),
        setting(shelf, start="tsv", stay_near=0.1),
        setting(shelf, start=0.3),
        setting(shelf, method="tsv"),
        setting(shelf, method="tsv", scale=1.0),
    ]
    assert len({one.id for one in different}) == len(different)
    assert setting(shelf, start=0.3).id == setting(shelf, start="0.3").id
    assert setting(shelf, start="tsv").id == setting(shelf, start="tsv", merge_options=["small=error"]).id


class BrokenOffError(Exception):
    pass


def test_a_run_that_starts_at_a_merge_is_resumed_with_the_vector_that_it_wrote(shelf, tmp_path):
    made = setting(shelf, start="iso-c", schedule={"epochs": 2, "batch_size": 4, "lr": 0.05})

    def stop(row):
        if row.epoch == 1:
            raise BrokenOffError

    whole = Session(made, RunOptions(directory=tmp_path / "whole")).run()
    with pytest.raises(BrokenOffError):
        Session(made, RunOptions(directory=tmp_path / "parts", epoch_done=stop)).run()
    written = (tmp_path / "parts" / "merged.safetensors").stat()
    resumed = Session(made, RunOptions(directory=tmp_path / "parts", resume=True)).run()
    assert torch.equal(resumed.coefficients.values, whole.coefficients.values)
    assert resumed.metrics.history == whole.metrics.history
    assert (tmp_path / "parts" / "merged.safetensors").stat().st_ino == written.st_ino


def test_every_merge_rule_is_a_method_of_addition_alone():
    assert set(MERGE_RULES.names) <= set(METHODS.names)
    for name in ("few-shot", "data-fraction", "negation", "test-time", "lm"):
        assert not set(MERGE_RULES.names) & set(library.experiments.settings.SETTINGS.get(name).methods())


@pytest.mark.parametrize("rule", ["tsv", "ties"])
def test_a_merge_is_searched_for_its_scale_or_takes_one(shelf, addition, rule, tmp_path):
    addition("--method", rule, "-o", tmp_path / "searched")
    found = record(tmp_path / "searched")
    assert found["metrics"]["history"][-1]["scale"] == 3.0 and len(found["metrics"]["history"]) == 31
    assert found["inputs"]["vectors"] == [rule] and rule in found["inputs"]["merged"]
    assert found["coefficients"]["kind"]
    addition("--method", rule, "--scale", "0.5", "-o", tmp_path / "fixed")
    fixed = record(tmp_path / "fixed")
    assert fixed["metrics"]["scale"] == 0.5 and "history" not in fixed["metrics"]
    composed = Coefficients.load(tmp_path / "fixed" / "coefficients.safetensors")
    assert composed.values.tolist() == [0.5]


def test_sums_are_coefficients_of_the_vectors_themselves(shelf, addition, tmp_path):
    addition("--method", "mean", "-o", tmp_path / "mean")
    assert record(tmp_path / "mean")["metrics"]["scale"] == 1.0
    found = Coefficients.load(tmp_path / "mean" / "coefficients.safetensors")
    assert found.vectors == ("cars", "dtd") and found.values.tolist() == [0.5, 0.5]
    assert not (tmp_path / "mean" / "merged.safetensors").exists()
    arithmetic = Session(setting(shelf, method="task-arithmetic")).run()
    searched = Session(setting(shelf, method="search")).run()
    assert torch.equal(arithmetic.coefficients.values, searched.coefficients.values)


def test_specs_have_merges_and_starts_side_by_side(shelf, aniso, tmp_path):
    tasks = ", ".join(str(shelf.data / name) for name in ("cars", "dtd"))
    base = f"setting: addition, model: {shelf.model}, bank: {shelf.bank}, tasks: [{tasks}], compare: false"
    (tmp_path / "spec.yaml").write_text(f"""
schema: 1
name: merges
base: {{ {base}, schedule: {{ epochs: 1, batch_size: 4 }} }}
grid: {{ seed: [0] }}
variants:
  - {{ label: mean, base: {{ method: mean }} }}
  - {{ label: tsv, base: {{ method: tsv }} }}
  - {{ label: learned from tsv, base: {{ start: tsv }} }}
  - {{ label: learned from 0.3, base: {{ start: 0.3 }} }}
""")
    ran = aniso("run", tmp_path / "spec.yaml")
    assert ran.code == 0, ran.err
    found = {r.label: r for r in RecordStore(tmp_path / "records").finished().values()}
    assert found["learned from tsv"].inputs.vectors == ("cars", "dtd", "tsv")
    assert found["learned from 0.3"].inputs.start is not None and found["mean"].inputs.start is None
    ran = aniso("report", tmp_path / "records", "--no-figures", "-o", tmp_path / "report")
    assert ran.code == 0 and "mixes" not in ran.err + ran.out, ran.err
    texts = [path.read_text() for path in (tmp_path / "report").glob("*.md")]
    text = next(text for text in texts if text.startswith("### merges: merging methods"))
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    needed = {name.strip(): data.strip() for name, data in rows}
    assert needed["mean"] == "none"
    assert needed["tsv"] == needed["learned from tsv"] == "labelled"


@pytest.mark.parametrize(
    ("words", "code", "mention"),
    [
        (("--start", "tvs"), 2, "--start tsv"),
        (("--start", "./none"), 3, "there is nothing at"),
        (("--start-scale", "2"), 2, "belong to a start"),
        (("--start", "0.3", "--merge-option", "small=mean"), 2, "merge rule"),
        (("--start", "tsv", "--merge-option", "smal=mean"), 2, "smal"),
        (("--start", "tsv", "--factors"), 2, "not supported"),
        (("--method", "tsv", "--start", "0.3"), 2, "no effect"),
        (("--method", "tsv", "--merge-option", "scale=2"), 2, "scale"),
        (("--method", "coefficients", "--scale", "2"), 2, "no effect"),
    ],
)
def test_mistakes_are_named(addition, words, code, mention):
    assert mention in addition(*words, code=code).err


def test_too_many_vectors_for_a_rule_name_the_option_of_a_run(shelf, tmp_path, refused):
    made = setting(shelf, start="iso-cts", merge_options=["common=0.99"])
    with refused("MERGE-RANK", 2, "--merge-option small=mean"):
        Session(made).plan()


def test_plans_merge_nothing(addition, monkeypatch):
    def fail(self, block):
        raise AssertionError

    monkeypatch.setattr("aniso.merge.merging.Merging.block", fail)
    ran = addition("--start", "tsv", "--plan")
    assert "cars, dtd, tsv" in ran.out
    assert "vectors        tsv" in addition("--method", "tsv", "--plan").out


def test_a_vector_file_is_a_start(shelf, addition, aniso, tmp_path):
    vector = tmp_path / "mine.safetensors"
    ran = aniso(
        "bank", "merge", "tsv", "--bank", shelf.bank, "--vectors", "cars,dtd", "--name", "mine", "-o", vector
    )
    assert ran.code == 0, ran.err
    addition(*QUICK, "--start", vector, "-o", tmp_path / "run")
    found = record(tmp_path / "run")
    assert found["inputs"]["vectors"] == ["cars", "dtd", "mine"] and found["spec"]["start"] == vector.name
    assert found["inputs"]["merged"]["mine"].startswith("tsv(")
    assert TaskVector.load(tmp_path / "run" / "merged.safetensors").name == "mine"


def test_a_vector_of_the_rules_name_in_the_bank_is_not_mistaken_for_the_merged_one(
    shelf, addition, aniso, tmp_path
):
    bank = tmp_path / "bank"
    Bank.load(shelf.bank).save(bank)
    ran = aniso("bank", "merge", "tsv", "--bank", bank, "-o", bank)  # of all four vectors
    assert ran.code == 0, ran.err
    addition(*QUICK, "--bank", bank, "--start", "tsv", "-o", tmp_path / "run")
    sources = record(tmp_path / "run")["inputs"]["merged"]["tsv"]
    assert "cars@" in sources and "signs@" not in sources
    baked = aniso(
        "bake", tmp_path / "run", "--bank", bank, "--base", shelf.model, "-o", tmp_path / "m.safetensors"
    )
    assert baked.code == 0, baked.err


def test_few_shot_merges_the_vectors_of_other_tasks(shelf, aniso, tmp_path):
    ran = aniso(*shelf.few_shot("--start", "least-squares", "-o", tmp_path / "one"))
    assert ran.code == 0, ran.err
    ran = aniso(*shelf.few_shot("--start", "tsv", "-o", tmp_path / "two"))
    assert ran.code == 0, ran.err
    assert record(tmp_path / "two")["inputs"]["vectors"] == ["cars", "dtd", "signs", "tsv"]
    assert "photos@" not in record(tmp_path / "two")["inputs"]["merged"]["tsv"]
