"""Batches: complete, seeded by picture, and the same whatever the number of workers."""

from __future__ import annotations

import pictures
import pytest
import torch

from aniso.data import Batches, load_task
from aniso.models.transforms import Pixels, Transforms

VIEWS = Transforms(Pixels(8))


@pytest.fixture
def split(tmp_path):
    pictures.folder(tmp_path / "train", {"cat": 7, "dog": 6})
    return load_task(tmp_path).split("train")


def _all(*args, **kwargs):
    return list(Batches(*args, **kwargs))


def test_every_picture_comes_once_and_with_its_label(split):
    batches = _all(split, VIEWS.eval, size=4, shuffle=True)
    places = [i for batch in batches for i in batch.indices]
    assert sorted(places) == list(range(len(split)))
    assert len(batches) == len(Batches(split, VIEWS.eval, size=4)) == -(-len(split) // 4)
    for batch in batches:
        assert batch.labels.tolist() == [split.labels[i] for i in batch.indices]
        assert batch.inputs.shape == (len(batch), 3, 8, 8)
        assert batch.inputs.dtype == torch.float32


@pytest.mark.parametrize("view", ["train", "few_shot", "strong"])
def test_workers_change_nothing(split, view):
    chosen = getattr(VIEWS, view)
    alone, helped = (
        _all(split, chosen, size=3, shuffle=True, seed=5, epoch=2, workers=workers) for workers in (0, 2)
    )
    for a, b in zip(alone, helped, strict=True):
        assert a.indices == b.indices
        assert torch.equal(a.inputs, b.inputs)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_cannot_be_read_is_named_from_any_process(tmp_path, workers, refused):
    pictures.folder(tmp_path / "test", {"cat": 3, "dog": 3})
    (tmp_path / "test" / "dog" / "001.png").write_bytes(b"")
    with refused("IMAGE-READ", 3, "001.png"):
        _all(load_task(tmp_path).test, VIEWS.eval, size=2, workers=workers)


def test_batch_size_changes_no_picture(split):
    by_place = []
    for size in (2, 5):
        batches = _all(split, VIEWS.train, size=size, shuffle=True)
        pairs = [pair for b in batches for pair in zip(b.indices, b.inputs, strict=True)]
        by_place.append(dict(pairs))
    assert all(torch.equal(by_place[0][i], by_place[1][i]) for i in range(len(split)))


def test_views_differ_by_seed_epoch_and_place(split):
    def first(**words):
        return next(iter(Batches(split, VIEWS.few_shot, VIEWS.few_shot, size=4, **words))).views

    base = first()
    assert torch.equal(base[0], first()[0])
    assert not torch.equal(base[0], base[1])  # two draws of the same view
    assert not torch.equal(base[0], first(seed=1)[0])
    assert not torch.equal(base[0], first(epoch=1)[0])


def test_the_global_generator_plays_no_part_and_is_not_touched(split):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = _all(split, VIEWS.strong, size=4, shuffle=True)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    other = _all(split, VIEWS.strong, size=4, shuffle=True)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(one, other, strict=True))


def test_orders_differ_by_epoch_and_are_repeated_by_seed(split):
    orders = [
        Batches(split, VIEWS.eval, size=4, shuffle=True, seed=s, epoch=e).order
        for s, e in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] == Batches(split, VIEWS.eval, size=9, shuffle=True).order


def test_an_order_of_ones_own_may_repeat_pictures(split):
    (batch,) = _all(split, VIEWS.strong, size=8, order=[2, 2, 5])
    assert batch.indices == (2, 2, 5)
    assert not torch.equal(batch.inputs[0], batch.inputs[1])  # another draw at every visit
    (again,) = _all(split.take([2, 2, 5]), VIEWS.strong, size=8)
    assert torch.equal(batch.inputs, again.inputs)
