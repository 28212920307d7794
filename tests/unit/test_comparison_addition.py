"""What a comparison of models of several tasks chooses, in closed form; folds without labels; kept rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pictures
import pytest
import torch

from aniso.data import load_task
from aniso.errors import NumericalError
from aniso.experiments.comparison.addition_candidates import (
    AdditionComparisonOptions,
    addition_candidates,
    comparable_methods,
)
from aniso.experiments.comparison.addition_choice import AdditionRow, recommend_addition
from aniso.experiments.comparison.kept_rows import KeptRows
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.experiments.settings.addition import Addition
from aniso.registry import MERGE_RULES

BASE = Addition(model="mini", bank="mini", tasks=("cars", "dtd"))
CANDIDATES = {one.label: one for one in addition_candidates(BASE, comparable_methods())}
FREE, TAUGHT, LABELS = "tsv at 1", "tsv, scale by teachers", "tsv, scale by labels"


def row(label, cars, dtd=None, **values):
    """A row with a hit where there is a 1; own vectors are right everywhere unless ``references`` differ."""
    hits = {"cars": torch.tensor(cars).bool(), "dtd": torch.tensor(cars if dtd is None else dtd).bool()}
    values.setdefault("references", {"cars": 1.0, "dtd": 1.0})
    return AdditionRow(CANDIDATES[label], hits, **values)


def test_every_merge_rule_of_the_package_is_a_candidate_without_data_and_with():
    assert set(MERGE_RULES.names) < set(comparable_methods())
    for candidate in CANDIDATES.values():
        candidate.setting.check()
    fixed = [one for one in CANDIDATES.values() if one.is_merge and one.data == "none"]
    for candidate in fixed:
        rule = MERGE_RULES.get(candidate.setting.method.name)()
        assert candidate.setting.method.scale == rule.scale
    assert {one.setting.method.name for one in fixed} == set(MERGE_RULES.names)
    assert {one.data for one in CANDIDATES.values()} == {"none", "unlabelled", "labelled"}


def test_without_labels_no_candidate_needs_them():
    left = addition_candidates(BASE, comparable_methods(), with_labels=False)
    assert {one.data for one in left} == {"none", "unlabelled"}


def test_learned_candidates_have_the_options_of_the_setting():
    own = BASE.model_copy(update={"method": LearnedCoefficients(partition="whole")})
    learned = [one for one in addition_candidates(own, ["coefficients"]) if one.data != "none"]
    assert [one.setting.method.partition for one in learned] == ["whole", "whole"]
    assert [one.setting.objective for one in learned] == ["distil", "cross-entropy"]


def test_methods_are_a_list_of_known_ones(refused):
    assert AdditionComparisonOptions(methods="coefficients, tsv").chosen == ("tsv", "coefficients")
    assert AdditionComparisonOptions().chosen == comparable_methods()
    with refused("USAGE", 2, "iso-d", "iso-c", "did you mean"):
        _ = AdditionComparisonOptions(methods="iso-d").chosen


def test_scores_are_relative_to_own_vectors_as_a_mean_over_tasks():
    found = row(FREE, [1, 0, 1, 0], [1, 1], references={"cars": 0.8, "dtd": 0.0})
    assert found.by_task == {"cars": 0.5, "dtd": 1.0} and found.share == 0.75
    assert found.score == pytest.approx((0.5 / 0.8 + 1.0) / 2)  # nothing is divided by an accuracy of 0
    assert found.error == pytest.approx(math.sqrt(0.25 / 4) / 2)


def test_the_error_of_a_difference_is_that_of_paired_items_of_every_task():
    one = row(FREE, [1, 1, 0, 0], [1, 0], references={"cars": 0.5, "dtd": 1.0})
    other = row(LABELS, [1, 0, 1, 0], [1, 0], references={"cars": 0.5, "dtd": 1.0})
    # differences of cars: 0, 1, -1, 0, each divided by two tasks and 0.5
    assert one.difference_error(other) == pytest.approx(math.sqrt(2) / 4)
    assert one.difference_error(one) == 0


def test_labels_have_to_pay_more_than_the_error():
    free = row(FREE, [1] * 50 + [0] * 50)
    close = row(LABELS, [0] * 5 + [1] * 51 + [0] * 44)
    assert 0 < close.score - free.score < close.difference_error(free)
    made = recommend_addition([free, close])
    assert made.chosen is free and "needs no data" in made.reason
    assert f"{LABELS} (the best that needs labels) is 1.0 points above, within" in made.reason
    clear = row(LABELS, [1] * 60 + [0] * 40)
    made = recommend_addition([free, clear])
    assert made.chosen is clear and made.reason.endswith("10.0 points below")


def test_the_least_data_that_suffice_are_recommended_and_of_them_the_best():
    rows = [
        row("mean at 1", [1] * 20 + [0] * 80),
        row(FREE, [1] * 30 + [0] * 70),
        row(TAUGHT, [1] * 80 + [0] * 20),
        row("ties, scale by teachers", [1] * 79 + [0] * 21),
        row(LABELS, [1] * 80 + [0] * 20),
    ]
    made = recommend_addition(rows)
    assert made.chosen is rows[2] and "items without labels" in made.reason
    assert f"{FREE} (the best that needs no data) is 50.0 points below" in made.reason


def test_the_base_is_recommended_where_nothing_is_better():
    made = recommend_addition([row("base", [1, 1, 0]), row(LABELS, [1, 1, 0])])
    assert made.chosen.candidate.label == "base" and "no method is clearly better" in made.reason


def test_a_candidate_that_failed_is_never_chosen():
    broken = row(FREE, [1, 1], failure="no convergence")
    assert recommend_addition([broken, row(LABELS, [0, 1])]).chosen.candidate.label == LABELS
    with pytest.raises(NumericalError):
        recommend_addition([broken])


def test_a_measurement_is_read_back_and_damage_is_noticed(tmp_path):
    made = row(FREE, [1, 0, 1], scale=1.5, seconds=2.5, trainable=1)
    KeptRows(tmp_path / "run", {"a": 1}, AdditionRow).write(made, "key")
    kept = KeptRows(tmp_path / "run", {"a": 1}, AdditionRow)
    found = kept.read(made.candidate, "key")
    assert found is not None and found.content("accuracy") == made.content("accuracy")
    assert all(torch.equal(found.hits[task], hits) for task, hits in made.hits.items())
    path = tmp_path / "run" / "comparison" / "key.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    kept = KeptRows(tmp_path / "run", {"a": 1}, AdditionRow)
    assert kept.read(made.candidate, "key") is None and kept.notes[0].startswith(
        "warning: tsv at 1 is measured"
    )


@pytest.mark.parametrize("count", [2, 3])
def test_folds_without_labels_are_disjoint_and_depend_on_items_alone(tmp_path, count):
    split = load_task(str(pictures.folder(tmp_path / "p", {"a": 5, "b": 6}))).split("train")
    groups = split.unlabelled_folds(count, seed=3)
    assert sorted(i for group in groups for i in group) == list(range(len(split)))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    other = replace(split, labels=tuple(math.nan for _ in split.labels))
    assert other.unlabelled_folds(count, seed=3) == groups != split.unlabelled_folds(count, seed=4)
