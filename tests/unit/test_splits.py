"""Splits: disjoint, drawn by seed and name alone, and unlabelled by type."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from aniso.classes import ClassList
from aniso.data import Labelled, Unlabelled, sampling
from aniso.data.images import Images
from aniso.data.splits import joined


class Named(Images):
    """Pictures that are all alike, by name."""

    def __init__(self, ids):
        self._ids = tuple(ids)

    @property
    def ids(self):
        return self._ids

    def content(self, index):
        return self._ids[index].encode()

    def open(self, index):
        return Image.new("RGB", (4, 4), (index % 256, 0, 0))


def split(labels, prefix="p", classes=None):
    names = classes or [f"class {i}" for i in range(max(labels, default=0) + 1)]
    ids = [f"{prefix}{i}" for i in range(len(labels))]
    return Labelled("made", ClassList(tuple(names)), Named(ids), tuple(labels))


LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60)


# shots and fractions


@given(LABELS, st.integers(1, 6), st.integers(0, 3))
def test_shots_are_k_of_every_class_or_all_it_has(labels, k, seed):
    made = split(labels)
    shots = made.shots(k, seed, allow_fewer=True)
    for label, count in Counter(labels).items():
        assert Counter(shots.labels)[label] == min(k, count)
    assert set(shots.ids) <= set(made.ids)
    assert [made.labels[made.ids.index(name)] for name in shots.ids] == list(shots.labels)


@given(LABELS, st.integers(0, 3))
def test_fewer_shots_are_part_of_more(labels, seed):
    made = split(labels)
    sets = [set(made.shots(k, seed, allow_fewer=True).ids) for k in (1, 2, 4)]
    assert sets[0] <= sets[1] <= sets[2]


@given(LABELS, st.permutations(range(60)), st.integers(0, 3))
def test_draws_do_not_depend_on_the_order_on_disk(labels, order, seed):
    made = split(labels)
    shuffled = made.take(i for i in order if i < len(labels))
    assert set(made.shots(2, seed, allow_fewer=True).ids) == set(
        shuffled.shots(2, seed, allow_fewer=True).ids
    )
    if len(labels) > 3:
        assert set(made.fraction(0.5, seed).ids) == set(shuffled.fraction(0.5, seed).ids)
        a, b = made.carve("val", seed, share=0.3), shuffled.carve("val", seed, share=0.3)
        assert set(a[0].ids) == set(b[0].ids)


def test_seeds_seed():
    made = split([i % 4 for i in range(80)])
    drawn = {seed: frozenset(made.shots(3, seed).ids) for seed in range(6)}
    assert len(set(drawn.values())) == 6
    assert drawn[2] == frozenset(made.shots(3, 2).ids)
    assert set(made.fraction(0.25, 0).ids) != set(made.fraction(0.25, 1).ids)


def test_every_picture_is_drawn_about_as_often():
    made = split([i % 2 for i in range(40)])
    drawn = Counter(name for seed in range(400) for name in made.shots(5, seed).ids)
    assert set(drawn) == set(made.ids)
    assert min(drawn.values()) > 60 and max(drawn.values()) < 150  # 100 expected, sd 8.7


def test_too_few_pictures_are_listed_by_class(refused):
    made = split([0, 0, 0, 1], classes=["many", "few", "none"])
    with refused("DATA-SHOTS", 3, "few: 1", "none: 0", "--allow-fewer-shots"):
        made.shots(2)
    assert len(made.shots(2, allow_fewer=True)) == 3


@pytest.mark.parametrize("k", [0, -1])
def test_no_shots_are_refused(k, refused):
    with refused("DATA-SHOTS", 2):
        split([0, 1]).shots(k)


@given(LABELS, st.floats(0.01, 1), st.integers(0, 3))
def test_fractions_keep_the_classes_shares(labels, share, seed):
    made = split(labels)
    count = round(share * len(labels))
    if not count:
        return
    part = made.fraction(share, seed)
    assert len(part) == count
    for label, whole in Counter(labels).items():
        assert abs(Counter(part.labels)[label] - count * whole / len(labels)) < 2
    assert set(part.ids) <= set(made.fraction(min(1, 2 * share), seed).ids)


def test_fractions_of_nothing_are_refused(refused):
    with refused("DATA-SHOTS", 3, "less than one of its images"):
        split([0, 1, 0]).fraction(0.1)
    for share in (0, -1, 1.5):
        with refused("DATA-SHOTS", 2):
            split([0, 1]).fraction(share)


@given(LABELS, st.floats(0, 1), st.one_of(st.none(), st.integers(1, 20)), st.integers(0, 2))
def test_what_is_carved_and_what_is_left_are_disjoint_and_everything(labels, share, most, seed):
    made = split(labels)
    cut, rest = made.carve("val", seed, share=share, most=most)
    assert set(cut.ids).isdisjoint(rest.ids)
    assert set(cut.ids) | set(rest.ids) == set(made.ids)
    wanted = round(share * len(labels))
    assert len(cut) == (wanted if most is None else min(wanted, most))


def test_per_class_rules_count():
    cut, rest = split([i % 3 for i in range(30)]).carve("test", 0, per_class=4)
    assert set(Counter(cut.labels).values()) == {4}
    assert set(Counter(rest.labels).values()) == {6}


def test_parts_join_in_order():
    both = joined("both", [split([0, 1], "a"), split([1, 0], "b", ["class 0", "class 1"])])
    assert list(both.ids) == ["a0", "a1", "b0", "b1"]
    assert both.labels == (0, 1, 1, 0)
    assert both.items.content(2) == b"b0"


def test_manifests_change_with_pictures_and_labels_but_not_with_order():
    made = split([0, 1, 1])
    assert made.manifest == made.take([2, 0, 1]).manifest
    assert made.manifest != made.take([0, 1]).manifest
    assert made.manifest != Labelled("made", made.classes, made.items, (1, 1, 1)).manifest
    assert made.unlabelled().manifest != made.take([0, 1]).unlabelled().manifest


# unlabelled


class Raising(tuple):
    """Labels that raise when touched."""

    def _no(self, *args):
        raise AssertionError("a label was read")

    __getitem__ = __iter__ = __contains__ = count = index = _no


def test_an_unlabelled_split_has_no_field_that_could_hold_labels():
    assert {f.name for f in fields(Unlabelled)} == {"name", "classes", "items"}
    assert not hasattr(Unlabelled, "labels")
    assert not hasattr(Unlabelled, "shots")


def test_unlabelled_splits_work_where_labels_would_raise():
    from aniso.data import Batches
    from aniso.models.transforms import Pixels, Transforms

    made = split([0, 1, 0, 1])
    guarded = Labelled("made", made.classes, made.items, Raising(made.labels))
    with pytest.raises(AssertionError, match="a label was read"):
        guarded.labels[0]
    views = Transforms(Pixels(8))
    batches = list(Batches(guarded.unlabelled(), views.eval, views.strong, size=3, shuffle=True))
    assert [len(batch) for batch in batches] == [3, 1]
    assert all(batch.labels is None for batch in batches)


def _reachable(root):
    """Everything that can be got at from an object, other than code and modules."""
    seen, todo = set(), [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type) or type(value).__name__ in ("module", "function"):
            continue
        seen.add(id(value))
        yield value
        todo += gc.get_referents(value)


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_labels_cannot_be_reached_from_an_unlabelled_split_of_any_reader(kind, tmp_path):
    import pictures

    from aniso.data import load_task

    if kind == "folder":
        pictures.folder(tmp_path / "test", {"cat": 3, "dog": 3})
    else:
        pictures.card(pictures.parquet(tmp_path, "test", [0, 0, 0, 1, 1, 1]), ["cat", "dog"])
    labelled = load_task(tmp_path).test
    labels = [0, 0, 0, 1, 1, 1]
    assert list(labelled.labels) == labels
    assert any(
        isinstance(v, tuple) and list(v) == labels for v in _reachable(labelled)
    )  # the search can find them
    unlabelled = labelled.unlabelled()
    unlabelled.open(0)
    del labelled
    for value in _reachable(unlabelled):
        assert not (isinstance(value, tuple | list) and list(value) == labels)
    seen = [*unlabelled.items.ids, *(unlabelled.items.describe(i) for i in range(6)), repr(unlabelled)]
    assert not any(name in text for name in ("cat", "dog") for text in seen)
    assert unlabelled.keys == load_task(tmp_path).test.keys  # the same views and orders


# draws


def test_numbers_are_the_same_everywhere():
    assert (
        sampling.number("seed", 3, "some/picture.png") == 12337900843141365602
    )  # saved results depend on it
    assert sampling.number(1, 2) != sampling.number(12)
    assert sampling.number("a", "b") != sampling.number("ab")


def test_orders_are_permutations_that_change_with_the_words():
    ids = [f"p{i}" for i in range(50)]
    a, b = sampling.shuffled(ids, "order", 0, 0), sampling.shuffled(ids, "order", 0, 1)
    assert sorted(a) == sorted(b) == list(range(50))
    assert a != b
