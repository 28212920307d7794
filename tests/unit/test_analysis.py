"""Search, and measures with known answers."""

from __future__ import annotations

import math
from dataclasses import replace

import colours
import pytest
import tiny
import torch

from aniso.classes import ClassList
from aniso.compose import Coefficients, Partition
from aniso.data import Labelled
from aniso.learn import Best, Last, Lowest, evaluate
from aniso.learn.analysis import (
    by_depth,
    by_kind,
    disentanglement,
    five_numbers,
    only,
    out_of_domain,
    relative_accuracy,
    relative_significance,
)
from aniso.learn.evaluate import predict
from aniso.learn.keep import Keep
from aniso.learn.search import POINTS, search
from aniso.vectors import Bank


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


def filled(composition, scale):
    with torch.no_grad():
        composition.values.fill_(scale)
    return composition


# search


class Chosen(Keep):
    """Keeps a place that it is told; ends after so many."""

    def __init__(self, split, place, most=99):
        self.split, self.place, self.most = split, place, most

    @property
    def splits(self):
        return (self.split,)

    def choose(self, history):
        return self.place

    def ends(self, history):
        return len(history) >= self.most

    def identity(self):
        return {}


def test_a_search_tries_every_scale_and_stays_at_the_one_that_is_chosen(world):
    composition = world.composition(Partition.whole())
    points = (0, 0.5, -1.0)
    found = search(composition, Chosen(world.target.val, 1), points)
    assert [row.scale for row in found.history] == list(points)
    assert (found.kept, found.scale) == (1, 0.5)
    assert composition.values.tolist() == [0.5, 0.5]
    assert torch.equal(found.coefficients.values, composition.values)


def test_a_search_measures_what_evaluation_says(world):
    composition = world.composition()
    found = search(composition, Best(world.target.val, world.control.val), (0, 1.0, 2.0))
    for scale, measured in [(row.scale, row.accuracy) for row in found.history]:
        filled(composition, scale)
        for split in (world.target.val, world.control.val):
            assert measured[split.name] == evaluate(composition, split).value
    assert found.history[0].accuracy["target val"] == evaluate(world.encoder, world.target.val).value
    assert found.kept == Best(world.target.val, world.control.val).choose(
        [row.accuracy for row in found.history]
    )


def test_a_search_ends_when_its_rule_says_so(world):
    found = search(world.composition(), Chosen(world.target.val, 0, most=2), (0, 0.1, 0.2))
    assert [row.scale for row in found.history] == [0.0, 0.1]
    assert found.scale == 0.0


def test_a_search_for_the_lowest_compares_with_the_base(world):
    rule = Lowest(world.target.val, world.control.val, floor=0.0)
    found = search(world.composition(), rule, (0, -1.0, 1.0))
    measured = [row.accuracy for row in found.history]
    assert measured[found.kept]["target val"] == min(row["target val"] for row in measured)


def test_a_search_says_how_far_it_is(world):
    seen = []
    search(world.composition(), Best(world.target.val), (0, 1), progress=lambda *said: seen.append(said))
    assert seen == [("scales", 1, 2), ("scales", 2, 2)]


@pytest.mark.parametrize("points", [(), (0.1, 0.2), (1, 0)])
def test_a_search_begins_at_the_base(world, points, refused):
    with refused("KEEP", 2, "scale 0 as its first point"):
        search(world.composition(), Best(world.target.val), points)


def test_a_search_needs_something_to_choose_by(world, refused):
    with refused("KEEP", 2, "splits"):
        search(world.composition(), Last(), (0, 1))


def test_the_usual_grid_goes_from_0_to_1_in_twentieths():
    assert POINTS[0] == 0
    assert POINTS[-1] == 1
    assert len(POINTS) == 21
    assert POINTS[7] == 0.35


# ratios


def test_relative_accuracy_is_a_mean_of_ratios():
    assert relative_accuracy({"a": 0.4, "b": 0.9}, {"a": 0.8, "b": 0.9, "c": 1.0}) == pytest.approx(0.75)
    assert relative_accuracy({"a": 0.5}, {"a": 0.25}) == 2.0


@pytest.mark.parametrize(("found", "reference"), [({"a": 0.4}, {}), ({"a": 0.4}, {"a": 0.0}), ({}, {"a": 1})])
def test_relative_accuracy_needs_references_above_zero(found, reference, refused):
    with refused("USAGE", 2, "no reference"):
        relative_accuracy(found, reference)


def test_relative_significance_is_a_share_of_what_fine_tuning_gains():
    assert relative_significance(0.7, 0.5, 0.9) == pytest.approx(0.5)
    assert relative_significance(0.5, 0.5, 0.9) == 0.0
    assert relative_significance(0.9, 0.5, 0.9) == 1.0
    assert relative_significance(0.4, 0.5, 0.9) == pytest.approx(-0.25)


def test_relative_significance_needs_a_gain(refused):
    with refused("USAGE", 2, "gains nothing"):
        relative_significance(0.5, 0.7, 0.7)


# some vectors only


@pytest.mark.parametrize("partition", ["blocks", "whole", "random:2"])
def test_only_leaves_the_coefficients_of_some_vectors(world, partition):
    composition = filled(world.composition(Partition.parse(partition)), 0.5)
    with only(composition, ["two"]):
        for (vector, *_), value in zip(composition.index.labels(), composition.values.tolist(), strict=True):
            assert value == (0.5 if vector == "two" else 0.0)
    assert set(composition.values.tolist()) == {0.5}


def test_only_gives_coefficients_back_after_an_error(world):
    composition = filled(world.composition(), 0.25)
    with pytest.raises(KeyError), only(composition, []):
        assert not composition.values.any()
        raise KeyError
    assert set(composition.values.tolist()) == {0.25}


def test_a_composition_of_one_vector_is_what_only_leaves(world):
    images = torch.randn(2, 3, 16, 16)
    both = filled(world.composition(), 0.5)
    alone = colours.World(world.encoder, world.bank.only("one"), world.target, world.control).composition()
    with only(both, ["one"]), torch.no_grad():
        torch.testing.assert_close(both(images), filled(alone, 0.5)(images))


# disentanglement


def test_vectors_that_do_not_move_anything_are_disentangled(world):
    composition = world.composition()
    splits = {"one": world.target.val, "two": world.control.val}
    found = disentanglement(world.encoder, composition, splits)
    assert found == {("one", "two"): 0.0, ("two", "one"): 0.0}


def test_disentanglement_is_the_share_of_answers_that_change(world):
    composition = world.composition()
    with torch.no_grad():
        composition.values.normal_(0, 3, generator=torch.Generator().manual_seed(0))
    before = composition.values.detach().clone()
    splits = {"one": world.target.val, "two": world.control.val}
    found = disentanglement(world.encoder, composition, splits)
    assert torch.equal(composition.values, before)
    for (first, second), share in found.items():
        with only(composition, [first]):
            alone = predict(composition, splits[first])
        with only(composition, [first, second]):
            both = predict(composition, splits[first])
        assert share == pytest.approx(int((alone != both).sum()) / len(alone))
    assert max(found.values()) > 0


def test_a_vector_that_undoes_another_changes_what_the_other_changed(world):
    state = world.encoder.state_dict()
    moved = {k: v if tiny.is_hf_vision(k) else state[k] for k, v in tiny.tuned(state, 7, 1.5).items()}
    back = {k: 2 * state[k] - v if v.is_floating_point() else v for k, v in moved.items()}
    bank = Bank.build(world.encoder, {"there": moved, "back": back}, allow_distant=True)
    composition = filled(colours.World(world.encoder, bank, world.target, world.control).composition(), 1.0)
    split = world.control.val
    found = disentanglement(world.encoder, composition, {"there": split, "back": split})
    base = predict(world.encoder, split)
    with only(composition, ["there"]):
        there = predict(composition, split)
    assert found["there", "back"] == pytest.approx(int((there != base).sum()) / len(split))
    assert found["there", "back"] > 0


def test_splits_are_named_like_vectors(world, refused):
    with refused("BANK-NAME", 2, "three", "one, two"):
        disentanglement(world.encoder, world.composition(), {"three": world.target.val})


# other data


def test_out_of_domain_answers_are_among_the_classes_that_the_other_data_have(world):
    learned = world.control.classes
    split = world.target.val
    assert set(split.classes.names) < set(learned.names)
    found = out_of_domain(world.encoder, learned, split, world.encoder)
    assert found.correct == evaluate(world.encoder, split).correct
    assert set(found.by_class) == set(split.classes.names)


def test_out_of_domain_uses_the_prompts_that_were_learned_with(world):
    learned = ClassList(world.control.classes.names, ("{}!", "x {}"))
    split = world.target.val
    asked = replace(split, classes=ClassList(split.classes.names, learned.prompts))
    composition = filled(world.composition(), 0.5)
    found = out_of_domain(composition, learned, split, world.encoder)
    assert found.correct == evaluate(composition, asked).correct


def test_classes_in_another_order_are_matched_by_name(world):
    split = world.target.val
    names = split.classes.names
    turned = Labelled("turned", ClassList(names[::-1]), split.items, tuple(1 - i for i in split.labels))
    results = [out_of_domain(world.encoder, split.classes, s, world.encoder) for s in (split, turned)]
    assert results[0].by_class == results[1].by_class


def test_new_classes_are_refused(world, refused):
    with refused("DATA-CLASS", 3, "1 classes", "green"):
        out_of_domain(world.encoder, world.target.classes, world.control.val, world.encoder)


def test_what_is_measured_has_pictures_with_labels(world, refused):
    for split in (world.target.val.take([]), world.target.val.unlabelled()):
        with refused("DATA-SPLIT", 2, "labels"):
            out_of_domain(world.encoder, world.target.classes, split, world.encoder)
        with refused("DATA-SPLIT", 2, "labels"):
            disentanglement(world.encoder, world.composition(), {"one": split, "two": world.target.val})


# summaries of coefficients


@pytest.fixture(scope="module")
def plain_bank():
    base = tiny.plain()
    return Bank.build(base, {name: tiny.tuned(base, seed) for seed, name in enumerate(("a", "b"), 1)})


def numbered(bank, partition):
    zeros = Coefficients.zeros(bank, partition)
    return replace(zeros, values=torch.arange(len(zeros)).float())


@pytest.mark.parametrize("partition", ["blocks", "random:3", "rows"])
def test_groups_hold_every_coefficient_of_their_blocks_once(plain_bank, partition):
    coefficients = numbered(plain_bank, Partition.parse(partition))
    blocks = {slot.block.name: slot.block for slot in coefficients.index.blocks}
    kinds: dict[str, list[float]] = {}
    depths: dict[str, list[float]] = {}
    for _, block, _, value in coefficients.items():
        kinds.setdefault(str(blocks[block].kind), []).append(value)
        if blocks[block].depth is not None:
            depths.setdefault(str(blocks[block].depth), []).append(value)
    for found, expected in ((by_kind(coefficients), kinds), (by_depth(coefficients), depths)):
        assert {name: sorted(values.tolist()) for name, values in found.items()} == {
            name: sorted(values) for name, values in expected.items()
        }
    assert sum(map(len, by_kind(coefficients).values())) == len(coefficients)


def test_depths_are_layers_and_nothing_else(world, plain_bank):
    assert list(by_depth(Coefficients.zeros(plain_bank))) == ["0", "1", "2"]
    coefficients = world.composition().coefficients
    found = by_depth(coefficients)
    inside = [slot for slot in coefficients.index.blocks if slot.block.depth is not None]
    assert list(found) == ["0"]
    assert len(found["0"]) == 2 * len(inside) < len(coefficients)


def test_a_coefficient_that_blocks_share_counts_for_each_of_them(plain_bank):
    coefficients = numbered(plain_bank, Partition.whole())
    blocks = len(coefficients.index.blocks)
    assert sum(map(len, by_kind(coefficients).values())) == 2 * blocks
    assert all(set(values.tolist()) == {0.0, 1.0} for values in by_kind(coefficients).values())


def test_five_numbers_are_least_quartiles_and_most():
    assert five_numbers(torch.tensor([4.0, 0.0, 2.0, 1.0, 3.0])) == [0, 1, 2, 3, 4]
    assert five_numbers(torch.tensor([0.0, 1.0])) == [0, 0.25, 0.5, 0.75, 1]
    assert five_numbers(torch.tensor([7.0])) == [7] * 5
    assert math.isclose(five_numbers(torch.tensor([0.1], dtype=torch.double))[2], 0.1)
