"""What a comparison chooses, in closed form; folds; features that are computed once."""

from __future__ import annotations

import math
from dataclasses import replace

import pictures
import pytest
import torch

from aniso.data import load_task
from aniso.experiments.comparison.candidates import (
    RECIPE,
    RULE,
    Candidate,
    candidates,
    default_budget,
    parse_also,
)
from aniso.experiments.comparison.choice import (
    Measured,
    adjust,
    difference_error,
    expected_gain,
    recommend,
    recommend_for_one_shot,
)
from aniso.experiments.comparison.kept_rows import KeptRows
from aniso.experiments.methods.zero_shot import ZeroShot
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.settings.few_shot import FewShot
from aniso.learn import ItemFeatures, features
from aniso.models import load_model

BASE = FewShot(model="mini", bank="mini", task="photos", shots=4, method=ZeroShot())


def all_candidates(**how: object) -> list[Candidate]:
    return candidates(BASE, ScheduleOptions(), **how)


def measured(right: dict[str, list[int]]) -> list[Measured]:
    """Rows in which a candidate classifies an item correctly where there is a 1."""
    rows = []
    for candidate in all_candidates(also=("weights",)):
        if candidate.label in right:
            truth = torch.tensor(right[candidate.label])
            rows.append(Measured(candidate, torch.stack([truth, 1 - truth], 1).float(), (0,) * len(truth)))
    return rows


# candidates


def test_candidates_are_every_head_with_and_without_coefficients():
    labels = [candidate.label for candidate in all_candidates()]
    assert labels == [
        "zero-shot",
        *("linear probe", "LP++", "Tip-Adapter"),
        "coefficients",
        *("coefficients + linear probe", "coefficients + LP++", "coefficients + Tip-Adapter"),
    ]
    for candidate in all_candidates(budget=2, also=("lora", "weights")):
        candidate.setting.check()


def test_selection_and_fine_tuning_are_candidates_if_asked_for():
    found = {one.label: one for one in all_candidates(budget=2, also=("lora", "weights"))}
    chosen = found["coefficients of 2 selected"].setting
    assert (chosen.select, chosen.budget) == (RULE, 2)
    assert found["LoRA, rank 16"].setting.method.lora == 16
    assert "fine-tuning + linear probe" in found


def test_without_a_bank_only_heads_are_compared():
    alone = candidates(BASE.model_copy(update={"bank": None}), ScheduleOptions())
    assert {one.family for one in alone} == {"zero-shot"}


def test_options_replace_the_recipe_and_a_rate_is_that_of_coefficients():
    found = candidates(BASE, ScheduleOptions(epochs=7, lr=0.5), also=("weights",))
    by_label = {one.label: one.setting.method.schedule for one in found if one.family != "zero-shot"}
    assert by_label["coefficients"].lr == 0.5 and by_label["fine-tuning"].lr is None
    assert {schedule.epochs for schedule in by_label.values()} == {7}
    assert {schedule.batch_size for schedule in by_label.values()} == {RECIPE["batch_size"]}


def test_the_default_budget_is_a_quarter_and_needs_four_vectors():
    assert [default_budget(n) for n in (1, 3, 4, 20)] == [None, None, 1, 5]


def test_also_is_a_list_of_known_methods(refused):
    assert parse_also("weights, lora") == ("lora", "weights") and parse_also(None) == ()
    with refused("USAGE", 2, "setfit", "lora, weights"):
        parse_also("lora,setfit")


# choice


def test_vectors_that_do_not_help_are_not_recommended():
    rows = measured(
        {"zero-shot": [0] * 20, "linear probe": [1] * 20, "coefficients + linear probe": [1] * 20}
    )
    made = recommend(rows)
    assert made.chosen.candidate.label == "linear probe"
    assert made.reason.startswith("vectors of this bank do not help here: linear probe alone (100.0%")


def test_vectors_that_help_are_recommended_with_their_gain():
    half = [1, 0] * 100
    rows = measured({"linear probe": half, "coefficients + linear probe": [1] * 200})
    made = recommend(rows)
    assert made.chosen.candidate.label == "coefficients + linear probe"
    assert "vectors of this bank help: coefficients + linear probe (100.0%; the best without" in made.reason


def test_a_score_is_the_mean_of_accuracy_and_of_the_right_class_probability():
    """Two logits whose sign is right in three items of four: the best temperature gives p = 3/4."""
    (row,) = measured({"linear probe": [1, 1, 1, 0]})
    assert row.scores == pytest.approx([(1 + 0.75) / 2] * 3 + [0.25 / 2], abs=1e-6)
    assert row.score == pytest.approx((0.75 + (3 * 0.75 + 0.25) / 4) / 2, abs=1e-6)


def test_the_scale_of_logits_does_not_matter():
    logits, labels = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), (0, 1) * 25
    logits = logits + torch.nn.functional.one_hot(torch.tensor(labels), 4)
    candidate = all_candidates()[0]
    one, other = (Measured(candidate, scale * logits, labels) for scale in (0.3, 3.0))
    assert one.scores == pytest.approx(other.scores, abs=1e-6)


def test_the_error_of_a_difference_is_that_of_the_mean_of_paired_scores():
    one, other = measured({"linear probe": [1, 1, 0, 0, 1], "coefficients": [1, 0, 1, 0, 1]})
    assert one.score == pytest.approx(other.score)
    # p = 3/5 for both: two items differ, by (1 + 0.6) / 2 - (0 + 0.4) / 2 and its negative
    # and one more that differs by a half is assumed
    assert difference_error(one, other) == pytest.approx(math.sqrt((2 * 0.6**2 + 0.25) / 4 / 5), abs=1e-6)


def test_another_candidate_is_chosen_only_if_it_is_expected_to_gain():
    linear = [1] * 50 + [0] * 50
    close = [0] * 15 + [1] * 51 + [0] * 34  # 31 items differ: one more is right
    rows = measured({"linear probe": linear, "Tip-Adapter": close})
    error = difference_error(*rows)
    assert rows[1].score > rows[0].score and expected_gain(rows[1], rows[0]) < 0
    made = recommend(rows)
    assert made.chosen is rows[0] and "Tip-Adapter scores" in made.reason
    assert f"too little for a standard error of {100 * error:.1f}" in made.reason
    clear = recommend(measured({"linear probe": linear, "Tip-Adapter": [1] * 60 + [0] * 40}))
    assert clear.chosen.candidate.label == "Tip-Adapter" and "standard error" not in clear.reason


def test_an_expected_gain_is_between_the_prior_and_what_was_measured():
    """Conjugate normals: precisions add, and means are weighted by them."""
    linear, tip = measured(
        {"linear probe": [1] * 50 + [0] * 50, "Tip-Adapter": [0] * 5 + [1] * 53 + [0] * 42}
    )
    precision = {"prior": 0.03**-2, "measured": difference_error(tip, linear) ** -2}
    mean = -0.015 * precision["prior"] + (tip.score - linear.score) * precision["measured"]
    assert expected_gain(tip, linear) == pytest.approx(mean / sum(precision.values()))
    assert -0.015 < expected_gain(tip, linear) < tip.score - linear.score


@pytest.mark.parametrize("items", [1, 4, 8])
def test_a_handful_of_equal_differences_is_not_enough(items):
    rows = measured({"linear probe": [1] * items, "coefficients + Tip-Adapter": [1] * items})
    unsure = replace(rows[0], logits=0.02 * rows[0].logits)
    assert 0.02 < rows[1].score - unsure.score < 0.03  # all right, with less confidence
    assert difference_error(rows[1], unsure) >= 0.5 / items
    assert expected_gain(rows[1], unsure) < 0


def test_the_same_difference_on_more_items_is_enough():
    linear, close = [1] * 50 + [0] * 50, [0] * 15 + [1] * 51 + [0] * 34
    few = recommend(measured({"linear probe": linear, "Tip-Adapter": close}))
    many = recommend(measured({"linear probe": linear * 20, "Tip-Adapter": close * 20}))
    assert [few.chosen.candidate.label, many.chosen.candidate.label] == ["linear probe", "Tip-Adapter"]


def test_a_steady_gain_is_preferred_to_a_larger_one_that_is_less_certain():
    linear = [1] * 100 + [0] * 100
    steady, erratic = [1] * 112 + [0] * 88, [0] * 70 + [1] * 113 + [0] * 17
    rows = measured({"linear probe": linear, "LP++": steady, "Tip-Adapter": erratic})
    assert rows[2].score > rows[1].score
    made = recommend(rows)
    error = 100 * difference_error(rows[2], rows[0])
    assert made.chosen is rows[1]
    assert f"its lead over linear probe has a standard error of {error:.1f}" in made.reason


def test_the_linear_probe_has_vectors_if_these_score_more_however_little():
    plain, one_more = [1] * 50 + [0] * 50, [0] * 5 + [1] * 51 + [0] * 44
    labels = ("linear probe", "coefficients + linear probe")
    for right, chosen in (((plain, one_more), labels[1]), ((one_more, plain), labels[0])):
        made = recommend(measured(dict(zip(labels, right, strict=True))))
        assert made.chosen.candidate.label == chosen


def test_without_the_default_the_best_is_chosen():
    rows = measured({"zero-shot": [0, 0, 0, 1], "LP++": [1, 1, 0, 0]})
    assert recommend(rows).chosen is rows[1]


def test_scores_are_averaged_with_the_additive_fit_over_methods_and_heads():
    generator = torch.Generator().manual_seed(2)
    rows = [
        Measured(candidate, torch.randn(6, 3, generator=generator), (0, 1, 2) * 2)
        for candidate in all_candidates()
    ]
    table = torch.tensor([row.score for row in rows], dtype=torch.float64).view(2, 4)  # methods by heads
    fit = table.mean(1, keepdim=True) + table.mean(0, keepdim=True) - table.mean()
    found = torch.tensor([row.score for row in adjust(rows)], dtype=torch.float64)
    assert torch.allclose(found, ((table + fit) / 2).flatten(), atol=1e-9)


def test_an_additive_table_is_not_changed():
    """One method is better on every item by as much with every head: here, equal to the other."""
    logits, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)), (0, 1, 2) * 2
    rows = [Measured(candidate, logits, labels) for candidate in all_candidates()]
    assert [row.score for row in adjust(rows)] == pytest.approx([row.score for row in rows])


def test_methods_that_failed_or_have_no_heads_keep_their_scores():
    generator = torch.Generator().manual_seed(4)
    rows = [
        Measured(candidate, torch.randn(6, 3, generator=generator), (0, 1, 2) * 2)
        for candidate in all_candidates(also=("lora",))
    ]
    assert adjust(rows)[-1].adjusted == () and adjust(rows)[0].adjusted
    failed = [replace(row, failure="NaN") if row.candidate.label == "coefficients" else row for row in rows]
    assert not any(row.adjusted for row in adjust(failed))


def test_a_candidate_that_failed_is_never_chosen():
    rows = measured({"zero-shot": [0] * 4, "coefficients": [1] * 4})
    broken = Measured(rows[1].candidate, rows[1].logits, rows[1].labels, failure="the loss is NaN")
    assert recommend([rows[0], broken]).chosen is rows[0]


def test_one_shot_has_a_rule_of_its_own():
    rows = [Measured(candidate) for candidate in all_candidates()]
    made = recommend_for_one_shot(rows)
    assert made.chosen.candidate.label == "LP++" and "leaves none to hold out" in made.reason


# measurements that are kept


def test_a_measurement_is_read_back_and_damage_is_noticed(tmp_path):
    (row,) = measured({"linear probe": [1, 0, 1]})
    row = replace(row, seconds=1.5, trainable=7, test_accuracy=0.25)
    KeptRows(tmp_path / "run", {"a": 1}, Measured).write(row, "key")
    kept = KeptRows(tmp_path / "run", {"a": 1}, Measured)
    found = kept.read(row.candidate, "key")
    assert found is not None and torch.equal(found.logits, row.logits)
    assert replace(found, logits=None).content() == replace(row, logits=None).content()
    assert kept.read(row.candidate, "other") is None and (kept.reused, kept.notes) == (1, [])
    path = tmp_path / "run" / "comparison" / "key.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""):
        path.write_bytes(damaged)
        kept = KeptRows(tmp_path / "run", {"a": 1}, Measured)
        assert kept.read(row.candidate, "key") is None
        assert kept.notes[0].startswith("warning: linear probe is measured again: ")


def test_a_failure_is_kept_and_nothing_is_kept_without_a_directory(tmp_path):
    row = Measured(all_candidates()[0], failure="the loss is NaN")
    KeptRows(tmp_path, {}, Measured).write(row, "key")
    found = KeptRows(tmp_path, {}, Measured).read(row.candidate, "key")
    assert found is not None and (found.failure, found.accuracy) == ("the loss is NaN", None)
    nowhere = KeptRows(None, {}, Measured)
    nowhere.write(row, "key")
    assert nowhere.read(row.candidate, "key") is None


def test_measurements_of_another_comparison_are_refused(tmp_path, refused):
    KeptRows(tmp_path, {"shots": 4}, Measured).write(Measured(all_candidates()[0]), "key")
    with refused("RUN-CHANGED", 3, "other options"):
        KeptRows(tmp_path, {"shots": 8}, Measured)


def test_a_directory_of_something_else_is_refused_and_an_empty_one_is_not(tmp_path, refused):
    (tmp_path / "comparison").mkdir()  # killed before the first measurement was written
    KeptRows(tmp_path, {}, Measured).write(Measured(all_candidates()[0]), "key")
    assert KeptRows(tmp_path, {}, Measured).read(all_candidates()[0], "key") is not None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "record.json").write_text("{}")
    with refused("OUT-EXISTS", 2, "no comparison"):
        KeptRows(tmp_path / "other", {}, Measured)


# folds and features


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory):
    root = pictures.folder(tmp_path_factory.mktemp("photos"), {"a": 9, "b": 9, "c": 9})
    return load_task(str(root)).train


@pytest.mark.parametrize("count", [2, 3, 4])
def test_folds_are_disjoint_complete_and_balanced(photos, count):
    shots = photos.shots(4, seed=1)
    folds = shots.folds(count, seed=5)
    assert sorted(name for _, held in folds for name in held.ids) == sorted(shots.ids)
    for train, held in folds:
        assert sorted([*train.ids, *held.ids]) == sorted(shots.ids)
        assert min(train.counts.values()) >= 1
    sizes = [len(held) for _, held in folds]
    assert max(sizes) - min(sizes) <= 1
    again = photos.shots(4, seed=1).folds(count, seed=5)
    assert [held.ids for _, held in again] == [held.ids for _, held in folds]
    assert [held.ids for _, held in shots.folds(count, seed=6)] != [held.ids for _, held in folds]


def test_the_only_item_of_a_class_is_always_learned_from(photos):
    shots = photos.shots(2)
    alone = shots.without([shots.labels.index(2)])
    assert alone.counts["c"] == 1
    for train, held in alone.folds(2):
        assert train.counts["c"] == 1 and held.counts["c"] == 0


def test_features_of_items_are_computed_once_and_equal_those_of_the_split(photos, monkeypatch):
    model, shared, seen = load_model("mini"), ItemFeatures(), []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, x: (seen.append(len(x)), forward(self, x))[1])
    shots = photos.shots(4)
    whole = features(model, shots, view="few_shot", views=2, seed=3, cache=shared)
    assert sum(seen) == 2 * len(shots)
    for train, held in shots.folds(2):
        for part in (train, held):
            found = features(model, part, view="few_shot", views=2, seed=3, cache=shared)
            places = [shots.ids.index(name) for name in part.ids]
            assert torch.equal(found, whole[:, places])
    assert sum(seen) == 2 * len(shots)
    assert shared.charged == pytest.approx(3 * shared.seconds)
    shared.keep_only(model)
    features(model, shots, view="few_shot", views=2, seed=3, cache=shared)
    assert sum(seen) == 2 * len(shots)
