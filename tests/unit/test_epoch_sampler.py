"""The epoch sampler: an epoch goes through the longest split once, and gives every split the same share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pictures
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aniso.data import load_task, sampling
from aniso.data.batches import Batches, together
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.models.transforms import Pixels, Transforms
from aniso.schedule import Schedule

VIEWS = Transforms(Pixels(8))


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Thirteen and five pictures."""
    root = tmp_path_factory.mktemp("tasks")
    for name, cats, dogs in (("long", 7, 6), ("short", 3, 2)):
        pictures.folder(root / name / "train", {"cat": cats, "dog": dogs})
        pictures.folder(root / name / "val", {"cat": 1, "dog": 1}, first=100)
    return [load_task(root / name).train for name in ("long", "short")]


def passes(splits, *, batch, seed=0, view=VIEWS.train, **more):
    schedule = Schedule(epochs=2, lr=1.0, batch_size=batch, **more)
    return EpochSampler([(split, (view,)) for split in splits], schedule, seed)


def indices(steps):
    return [tuple(batch.indices for batch in step) for step in steps]


def visits(steps, which):
    return Counter(i for step in steps for i in step[which].indices)


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(
        a.indices == b.indices and torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)
        for left, right in pairs
        for a, b in zip(left, right, strict=True)
    )


def test_the_longest_split_is_visited_once_and_shorter_ones_cycle(splits):
    made = passes(splits, batch=6)
    steps = list(made.epoch(0))
    assert len(steps) == made.steps == 5
    assert visits(steps, 0) == dict.fromkeys(range(13), 1)
    assert visits(steps, 1) == dict.fromkeys(range(5), 3)
    assert [tuple(map(len, step)) for step in steps] == [(3, 3)] * 4 + [(1, 3)]


def test_a_single_split_is_visited_once(splits):
    steps = list(passes(splits[:1], batch=4).epoch(0))
    assert visits(steps, 0) == dict.fromkeys(range(13), 1)
    assert [len(batch) for (batch,) in steps] == [4, 4, 4, 1]


def test_every_round_over_a_short_split_has_another_order(splits):
    flat = [i for step in passes(splits, batch=6).epoch(0) for i in step[1].indices]
    rounds = [tuple(flat[i : i + 5]) for i in (0, 5, 10)]
    assert all(sorted(one) == list(range(5)) for one in rounds)
    assert len(set(rounds)) == 3


def test_pictures_that_come_again_in_an_epoch_are_seen_anew(splits):
    seen: dict[int, list[torch.Tensor]] = {}
    for _, batch in passes(splits, batch=6, view=VIEWS.few_shot).epoch(0):
        for i, image in zip(batch.indices, batch.inputs, strict=True):
            seen.setdefault(i, []).append(image)
    assert all(len(views) == 3 and not torch.equal(views[0], views[1]) for views in seen.values())


def test_labels_go_with_their_pictures(splits):
    for step in passes(splits, batch=6).epoch(0):
        for split, batch in zip(splits, step, strict=True):
            assert batch.labels.tolist() == [split.labels[i] for i in batch.indices]


def test_unlabelled_splits_have_no_labels(splits):
    made = EpochSampler(
        [(splits[0].unlabelled(), (VIEWS.eval,)), (splits[1], (VIEWS.eval,))],
        Schedule(epochs=1, lr=1.0, batch_size=8),
        0,
    )
    assert all(a.labels is None and b.labels is not None for a, b in made.epoch(0))


def test_seeds_and_epochs_decide_the_order_and_nothing_else_does(splits):
    base = list(passes(splits, batch=6).epoch(0))
    assert same(base, list(passes(splits, batch=6).epoch(0)))
    others = [
        indices(passes(splits, batch=6).epoch(1)),
        indices(passes(splits, batch=6, seed=1).epoch(0)),
        indices(passes(splits, batch=6, seed=1).epoch(1)),
    ]
    assert indices(base) not in others
    assert others[0] != others[1] != others[2] != others[0]


@pytest.mark.parametrize("start", range(6))
def test_an_epoch_goes_on_where_it_ended(splits, start):
    made = passes(splits, batch=6)
    assert same(list(made.epoch(1, start=start)), list(made.epoch(1))[start:])


def test_workers_change_nothing(splits):
    made = passes(splits, batch=6, view=VIEWS.few_shot)
    assert same(list(made.epoch(0, start=1, workers=2)), list(made.epoch(0, start=1)))


def test_small_splits_are_gone_through_several_times_to_make_an_epoch(splits):
    made = passes(splits, batch=6, min_steps_per_epoch=9)
    steps = list(made.epoch(0))
    assert len(steps) == 9
    assert all(len(batch) == 3 for step in steps for batch in step)
    assert set(visits(steps, 0).values()) == {2, 3}
    assert set(visits(steps, 1).values()) == {5, 6}
    assert passes(splits, batch=6, min_steps_per_epoch=5).steps == 5


def test_passes_of_different_lengths_do_not_go_together(splits):
    with pytest.raises(ValueError, match="shorter"):
        list(together(*(Batches(split, VIEWS.eval, size=3) for split in splits)))


def test_a_batch_smaller_than_the_number_of_splits_still_has_one_of_each(splits):
    steps = list(passes(splits, batch=1).epoch(0))
    assert len(steps) == 13
    assert all(tuple(map(len, step)) == (1, 1) for step in steps)


@dataclass
class Fake:
    """A split of so many pictures that nobody looks at."""

    size: int

    def __len__(self):
        return self.size

    @property
    def keys(self):
        return tuple(sampling.number(self.size, i) for i in range(self.size))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    batch=st.integers(1, 50),
    least=st.integers(1, 12),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_one_pass_over_the_union(sizes, batch, least, epoch):
    schedule = Schedule(epochs=4, lr=1.0, batch_size=batch, min_steps_per_epoch=least)
    made = EpochSampler([(Fake(size), ()) for size in sizes], schedule, 0)
    share = schedule.share(len(sizes))
    natural = [-(-size // share) for size in sizes]
    assert made.steps == max(least, *natural)
    for size, own in zip(sizes, natural, strict=True):
        order = made.order(Fake(size), share, epoch)
        assert -(-len(order) // share) == made.steps
        counts = Counter(order)
        assert set(counts) == set(range(size))
        if own == made.steps:
            assert set(counts.values()) == {1}
        else:
            assert len(order) == made.steps * share
            assert set(counts.values()) <= {len(order) // size, -(-len(order) // size)}
        rounds = [order[i : i + size] for i in range(0, len(order), size)]
        assert all(len(set(one)) == len(one) for one in rounds)
