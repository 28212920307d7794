"""Objectives: an algebra of terms, and losses against their closed forms."""

from __future__ import annotations

import math

import colours
import pictures
import pytest
import tiny
import torch
from torch import nn

from aniso.compose import CoefficientIndex, Partition
from aniso.data import load_task
from aniso.learn import CoefficientNorm, CrossEntropy, Objective
from aniso.learn.objectives import TermInputs
from aniso.vectors import Bank


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return colours.task(tmp_path_factory.mktemp("tasks") / "target", {"train": 3, "val": 2, "test": 2})


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    return colours.task(tmp_path_factory.mktemp("tasks") / "control", {"train": 3})


@pytest.fixture(scope="module")
def bank():
    base = tiny.plain()
    return Bank.build(base, {name: tiny.tuned(base, seed) for seed, name in enumerate(("a", "b", "c"), 1)})


@pytest.fixture(scope="module")
def terms(target, control):
    return CrossEntropy(target.train), CrossEntropy(control.train), CoefficientNorm()


def weights(objective):
    return [weight for weight, _ in objective.parts]


# algebra


def test_terms_add_up_in_the_order_they_are_written(terms):
    a, b, c = terms
    whole = a + b + c
    assert whole.parts == ((1.0, a), (1.0, b), (1.0, c))
    assert a + (b + c) == whole == sum(terms) == sum(terms, Objective(()))


def test_differences_negation_and_weights_go_through_sums(terms):
    a, b, c = terms
    assert weights(a - b) == [1.0, -1.0]
    assert weights(a - (b - c)) == [1.0, -1.0, 1.0]
    assert weights(-(a - b)) == [-1.0, 1.0]
    assert weights(0.5 * (a - 4 * b) * 2) == [1.0, -4.0]
    assert (a - b).parts == (a + -b).parts == (-1 * (b - a)).parts[::-1]


def test_data_terms_and_value_terms_are_told_apart(terms):
    a, b, c = terms
    whole = a + 0.1 * c - b
    assert whole.data_terms == ((1.0, a), (-1.0, b))
    assert whole.value_terms == ((0.1, c),)


def test_an_objective_says_what_it_is(terms):
    a, b, c = terms
    assert str(b - 0.5 * a + 0.01 * c) == "+1 control train -0.5 target train +0.01 coefficients' 1-norm"
    assert CoefficientNorm(2).name == "coefficients' 2-norm"


def test_identity_lists_weights_and_what_each_loss_depends_on(terms, target):
    a, _, c = terms
    assert (2 * a - c).identity() == [
        {
            "weight": 2.0,
            "loss": "cross-entropy",
            "split": target.train.manifest,
            "classes": target.classes.key,
            "view": "train",
        },
        {"weight": -1.0, "loss": "coefficient norm", "p": 1.0},
    ]


def test_identity_changes_with_pictures_prompts_and_views(target, tmp_path):
    root = colours.task(tmp_path / "target", {"train": 3, "val": 2, "test": 2}).train
    other = load_task(tmp_path / "target", prompts=("{}!",)).train
    found = [
        CrossEntropy(root),
        CrossEntropy(other),
        CrossEntropy(root.take([0])),
        CrossEntropy(root, "eval"),
    ]
    assert len({str(term.identity()) for term in found}) == 4
    assert CrossEntropy(root).identity() == CrossEntropy(target.train).identity()


@pytest.mark.parametrize("junk", [1, 0.0, None, "target", [], 3.5])
def test_what_is_no_term_cannot_be_added(terms, junk, refused):
    for attempt in (lambda: terms[0] + junk, lambda: junk + terms[0], lambda: terms[0] - junk):
        with refused("OBJECTIVE", 2, "is not a term", "CrossEntropy"):
            attempt()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, "2", None, True, torch.tensor(2.0)])
def test_what_is_no_finite_number_cannot_weigh(terms, junk, refused):
    for attempt in (lambda: terms[0] * junk, lambda: junk * (terms[0] + terms[1])):
        with refused("OBJECTIVE", 2, "cannot be the weight"):
            attempt()


def test_terms_cannot_be_multiplied(terms, refused):
    with refused("OBJECTIVE", 2, "cannot be the weight"):
        terms[0] * terms[1]


# cross-entropy


def test_cross_entropy_is_the_mean_of_minus_log_p(terms):
    logits = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 3.0]])
    labels = [0, 0, 1]
    expected = 0.0
    for row, label in zip(logits.tolist(), labels, strict=True):
        expected -= math.log(math.exp(row[label]) / sum(map(math.exp, row))) / 3
    seen = TermInputs((logits,), (logits,), torch.tensor(labels))
    assert float(terms[0].loss(seen)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("view", ["train", "few_shot", "eval"])
def test_cross_entropy_sees_each_picture_once_the_way_it_is_asked_to(target, view):
    encoder = tiny.seeing(8)
    assert CrossEntropy(target.train, view).views(encoder) == (getattr(encoder.transforms, view),)


@pytest.mark.parametrize("view", ["strong", "loss", "", "pixels"])
def test_views_that_are_not_for_labels_are_refused(target, view, refused):
    with refused("OBJECTIVE", 2, "view", "few_shot"):
        CrossEntropy(target.train, view)


def test_cross_entropy_needs_labels_and_pictures(target, refused):
    for split in (target.train.unlabelled(), target.train.take([]), target, None):
        with refused("OBJECTIVE", 2, "labels"):
            CrossEntropy(split)


def test_nothing_is_learned_from_a_test_split_or_a_part_of_it(target, refused):
    for split in (target.test, target.test.shots(1), target.test.fraction(0.5), target.test.carve("x")[0]):
        with refused("LEARN-TEST", 2, "target test", "task.train"):
            CrossEntropy(split)
    CrossEntropy(target.val)


def test_a_test_part_that_a_folder_calls_by_another_name_keeps_its_role(tmp_path, refused):
    pictures.folder(tmp_path / "test", {"cat": 2, "dog": 2})
    with refused("LEARN-TEST", 2):
        CrossEntropy(load_task(tmp_path).test)


# the norm of coefficients


def values_of(slots, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(slots.count, generator=generator))


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
@pytest.mark.parametrize("partition", ["blocks", "random:3", "rows", "whole"])
def test_the_norm_is_a_mean_over_blocks_and_parts_of_norms_over_vectors(bank, partition, p):
    slots = CoefficientIndex.of(bank, Partition.parse(partition))
    values = values_of(slots)
    cells: dict[tuple[str, int], list[float]] = {}
    for (_, block, part), value in zip(slots.labels(), values.tolist(), strict=True):
        cells.setdefault((block, part), []).append(value)
    norms = [sum(abs(v) ** p for v in cell) ** (1 / p) for cell in cells.values()]
    assert float(CoefficientNorm(p).loss(values, slots)) == pytest.approx(sum(norms) / len(norms), rel=1e-5)


def test_the_1_norm_of_equal_coefficients_is_their_size_times_the_number_of_vectors(bank):
    for partition in (Partition.blocks(), Partition.whole(), Partition.random(4, 1)):
        slots = CoefficientIndex.of(bank, partition)
        values = torch.full((slots.count,), -0.25)
        assert float(CoefficientNorm(1).loss(values, slots)) == pytest.approx(0.75)
        assert float(CoefficientNorm(2).loss(values, slots)) == pytest.approx(0.25 * math.sqrt(3))


@pytest.mark.parametrize("p", [1, 1.5, 2, 4])
def test_the_gradient_at_zero_is_finite(bank, p):
    slots = CoefficientIndex.of(bank, Partition.blocks())
    values = nn.Parameter(torch.zeros(slots.count))
    CoefficientNorm(p).loss(values, slots).backward()
    assert torch.equal(values.grad, torch.zeros(slots.count))


@pytest.mark.parametrize("p", [1, 1.5, 2, 4])
def test_the_gradient_is_finite_where_some_coefficients_are_zero(bank, p):
    slots = CoefficientIndex.of(bank, Partition.blocks())
    values = nn.Parameter(torch.arange(slots.count).remainder(3).float())
    CoefficientNorm(p).loss(values, slots).backward()
    assert bool(torch.isfinite(values.grad).all())
    assert torch.equal(values.grad != 0, values != 0)


def test_the_gradient_of_the_1_norm_is_a_sign(bank):
    slots = CoefficientIndex.of(bank, Partition.blocks())
    values = values_of(slots)
    CoefficientNorm().loss(values, slots).backward()
    torch.testing.assert_close(values.grad, values.detach().sign() / len(slots.blocks))


@pytest.mark.parametrize("p", [0, 0.5, -1, math.inf, math.nan])
def test_norms_that_are_none_are_refused(p, refused):
    with refused("OBJECTIVE", 2, "norm"):
        CoefficientNorm(p)
