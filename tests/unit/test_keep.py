"""Keep rules: pure functions of what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import colours
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aniso.learn import Best, Last, Lowest


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return colours.task(tmp_path_factory.mktemp("tasks") / "t", {"train": 2, "val": 2, "test": 1})


@pytest.fixture(scope="module")
def rules(task):
    target, control = replace(task.val, name="target"), replace(task.train, name="control")
    return {
        "last": Last(),
        "best": Best(target),
        "best of two": Best(target, control, references={"control": 0.5}),
        "lowest": Lowest(target, control),
        "lowest without stop": Lowest(target, control, floor=1.0, stop=False),
        "lowest without floor": Lowest(target, control, floor=0.0),
    }


def rows(*pairs):
    """Accuracies on target and control, epoch by epoch."""
    return [{"target": target, "control": control} for target, control in pairs]


def test_the_last_epoch_is_the_last(rules):
    for n in (1, 2, 5):
        assert rules["last"].choose([{}] * n) == n - 1
    assert rules["last"].splits == ()
    assert not rules["last"].ends([{}] * 3)


def test_the_best_is_the_highest_and_the_first_of_equals(rules):
    best = rules["best"]
    assert best.choose(rows((0.5, 0), (0.9, 0), (0.9, 1), (0.7, 0))) == 1
    assert best.choose(rows((0.5, 0), (0.5, 0))) == 0
    assert best.choose(rows((0.5, 0))) == 0
    assert not best.ends(rows((0.5, 0), (0.0, 0)))


def test_the_start_is_best_if_nothing_is_better(rules):
    assert rules["best"].choose(rows((0.8, 0), (0.7, 0), (0.8, 0))) == 0


def test_references_decide_what_a_mean_is_of(task):
    splits = replace(task.val, name="target"), replace(task.train, name="control")
    history = rows((0.5, 0.6), (0.7, 0.41))
    assert Best(*splits).choose(history) == 1
    assert Best(*splits, references={"target": 0.7, "control": 0.6}).choose(history) == 0
    assert Best(*splits, references={"target": 0.5, "control": 1.0}).choose(history) == 1


@pytest.mark.parametrize("value", [0, -0.1, math.nan])
def test_references_that_cannot_be_divided_by_are_refused(task, value, refused):
    with refused("KEEP", 2, "reference"):
        Best(task.val, references={task.val.name: value})


def test_references_for_splits_that_are_not_measured_are_refused(task, refused):
    with refused("KEEP", 2, "other"):
        Best(task.val, references={"other": 0.5})


def test_the_lowest_target_is_kept_while_the_control_holds(rules):
    lowest = rules["lowest"]
    assert lowest.choose(rows((0.9, 0.8), (0.5, 0.79), (0.3, 0.77), (0.1, 0.70))) == 2
    assert lowest.choose(rows((0.9, 0.8), (0.1, 0.1))) == 0


def test_of_equal_targets_the_better_control_wins_then_the_first(rules):
    lowest = rules["lowest"]
    assert lowest.choose(rows((0.9, 0.8), (0.5, 0.78), (0.5, 0.8), (0.5, 0.8))) == 2
    assert lowest.choose(rows((0.9, 0.8), (0.9, 0.8))) == 0


def test_a_control_at_its_floor_exactly_has_not_fallen(rules):
    for total in range(20, 220):
        for k in range(1, total // 20 + 1):
            history = rows((0.9, 20 * k / total), (0.1, 19 * k / total))
            assert rules["lowest"].choose(history) == 1, (k, total)
            assert not rules["lowest"].ends(history)


def test_a_picture_below_the_floor_is_below(rules):
    history = rows((0.9, 200_000 / 1_000_000), (0.1, 189_999 / 1_000_000))
    assert rules["lowest"].choose(history) == 0
    assert rules["lowest"].ends(history)


def test_a_run_ends_once_the_control_has_fallen_if_that_is_asked_for(rules):
    fallen = rows((0.9, 0.8), (0.5, 0.5))
    assert rules["lowest"].ends(fallen)
    assert not rules["lowest without stop"].ends(fallen)
    assert not rules["lowest"].ends([*fallen, *rows((0.5, 0.8))])
    assert not rules["lowest"].ends(rows((0.9, 0.0)))
    assert not rules["lowest without floor"].ends(rows((0.9, 0.8), (0.5, 0.0)))


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan, math.inf])
def test_floors_that_make_no_sense_are_refused(task, floor, refused):
    with refused("KEEP", 2, "floor"):
        Lowest(task.val, task.train, floor=floor)


ACCURACIES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (p[0] / 20, p[1] / 20)), min_size=2
)


@given(pairs=ACCURACIES)
def test_a_new_epoch_is_kept_or_changes_nothing(rules, pairs):
    history = rows(*pairs)
    for rule in rules.values():
        chosen = [rule.choose(history[: n + 1]) for n in range(len(history))]
        assert chosen[0] == 0
        assert all(now in (chosen[n], n + 1) for n, now in enumerate(chosen[1:]))


@given(pairs=ACCURACIES)
def test_the_start_is_always_allowed_and_what_is_kept_never_fell(rules, pairs):
    history = rows(*pairs)
    kept = history[rules["lowest"].choose(history)]
    assert kept["control"] >= 0.95 * history[0]["control"] - 1e-9
    assert kept["target"] <= history[0]["target"]


def test_nothing_is_chosen_by_a_test_split(task, refused):
    attempts = (
        lambda: Best(task.val, task.test),
        lambda: Lowest(task.test, task.val),
        lambda: Lowest(task.val, task.test.take([0])),
    )
    for attempt in attempts:
        with refused("LEARN-TEST", 2, "t test", "task.val"):
            attempt()


def test_a_choice_needs_labels_pictures_and_each_split_once(task, refused):
    attempts = (
        lambda: Best(),
        lambda: Best(task.val.unlabelled()),
        lambda: Best(task.val.take([])),
        lambda: Best(task.val, task.val),
        lambda: Lowest(task.val, task.val),
        lambda: Lowest(task.val, task.train.unlabelled()),
    )
    for attempt in attempts:
        with refused("KEEP", 2):
            attempt()


def test_rules_say_what_they_depend_on(task):
    found = [
        Last(),
        Best(task.val),
        Best(task.train),
        Best(task.val, references={task.val.name: 0.5}),
        Lowest(task.val, task.train),
        Lowest(task.train, task.val),
        Lowest(task.val, task.train, floor=0.9),
        Lowest(task.val, task.train, stop=False),
    ]
    assert len({str(rule.identity()) for rule in found}) == len(found)
    assert Best(task.val).identity() == Best(task.val).identity()
