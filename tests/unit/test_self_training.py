"""Learning without labels: what is trusted and when, batches, online answers, states, and layer norms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import colours
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from runs import At
from torch import Tensor, nn

from aniso.classes import ClassList
from aniso.compose import Composition, Partition
from aniso.data import Batch, Labelled, Unlabelled
from aniso.data.images import ArrayImages
from aniso.errors import StoppedError
from aniso.experiments.session import Session
from aniso.experiments.settings.test_time import TestTime
from aniso.learn import (
    SAR,
    CoefficientNorm,
    Contrastive,
    CrossEntropy,
    Entropy,
    FixMatch,
    Last,
    Schedule,
    Trainable,
    fit,
)
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.loop import Loop
from aniso.learn.features import features
from aniso.learn.finetune import tuned_weights
from aniso.learn.lora import adapter
from aniso.learn.objectives import DataTerm, TermInputs
from aniso.learn.predictions import Predictions, predict_unlabelled
from aniso.models.encoder import Encoder, Family
from aniso.models.transforms import Pixels
from aniso.vectors import Bank

Refused = Callable[..., AbstractContextManager[Any]]

SMALL = settings(deadline=None, max_examples=60, database=None, derandomize=True)
SCHEDULE = Schedule(epochs=2, lr=0.1, batch_size=8, warmup_steps=0)
DESCENT = replace(SCHEDULE, lr=0.5, weight_decay=0.0, max_grad_norm=0.5, optimiser="sgd")
NOTHING: tuple[Any, Any] = (lambda *_: None, lambda: None)
SEEING = tiny.seeing(8)
TERMS: dict[str, Callable[[Unlabelled], DataTerm]] = {
    "entropy": Entropy,
    "sar": lambda split: SAR(split, margin=1.1, floor=0.0),  # nothing is left out, nothing forgotten
    "contrastive": Contrastive,
    "fixmatch": FixMatch,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def pictures(world: colours.World) -> Unlabelled:
    """Fifteen, of three classes."""
    return world.control.split("train").unlabelled()


@pytest.fixture(scope="module")
def start(world: colours.World) -> Tensor:
    """Coefficients with which answers are of several classes: half learned, from other pictures."""
    composition = world.composition()
    fit(composition, CrossEntropy(world.control.split("val")), replace(SCHEDULE, epochs=3))
    return composition.values.detach().clone()


def started(world: colours.World, values: Tensor) -> Composition:
    composition = world.composition()
    with torch.no_grad():
        composition.values.copy_(values)
    return composition


def logits_of(world: colours.World, model: nn.Module, split: Unlabelled) -> Tensor:
    """Of all pictures as they are, by class weights from prompts."""
    return world.encoder.class_weights(split.classes).logits(features(model, split)[0])


def bits(values: Tensor) -> bytes:
    return values.detach().contiguous().numpy().tobytes()


# what is trusted


def test_what_is_trusted_is_chosen_anew_in_every_epoch_by_the_model_as_it_is_then(
    world: colours.World, pictures: Unlabelled, start: Tensor
) -> None:
    term = FixMatch(pictures, trusted_by="prediction")
    composition = started(world, start)
    loop = Loop(Trainable.coefficients(composition), term * 1.0, replace(SCHEDULE, epochs=3, lr=2.0), Last())
    values, found = [], []
    for row in loop.run(*NOTHING):
        values.append(composition.values.detach().clone())
        if row.epoch:
            found.append(loop.state().tensors["trusted.0"].clone())
            assert row.trusted == int((found[-1] >= 0).sum()) > 0
        else:
            assert row.trusted is None  # nothing was learned from yet
    for marks, before in zip(found, values, strict=False):
        expected = term.trust(logits_of(world, started(world, before), pictures))
        assert marks.tolist() == expected.tolist()
    assert len({tuple(marks.tolist()) for marks in found}) > 1


def test_answers_are_looked_at_once_an_epoch_without_gradients(
    world: colours.World, pictures: Unlabelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Composition.forward, []

    def watched(self: Composition, images: Tensor) -> Tensor:
        calls.append((len(images), torch.is_grad_enabled(), self.training))
        return forward(self, images)

    monkeypatch.setattr(Composition, "forward", watched)
    said_so: list[str] = []
    fit(world.composition(), FixMatch(pictures), SCHEDULE, progress=lambda what, *_: said_so.append(what))
    steps = [(8, False, False), (8, True, False)] * 3  # the view that is only looked at, and the strong one
    assert calls == 2 * [(15, False, False), *steps]
    answers = [i for i, what in enumerate(said_so) if what == "predictions on control train"]
    assert answers == [0, 4]


def test_the_loop_sees_trusted_classes_and_how_much_of_the_run_is_over(
    world: colours.World, pictures: Unlabelled, start: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, seen = FixMatch.loss, []
    monkeypatch.setattr(FixMatch, "loss", lambda self, one: seen.append(one) or loss(self, one))
    composition = started(world, start)
    fit(composition, FixMatch(pictures, most=2), SCHEDULE)
    assert [one.progress for one in seen] == pytest.approx([n / 6 for n in range(6)])
    for one in seen:
        assert one.labels is None and "trusted" in one.marks
        assert len(one.marks["trusted"]) == len(one.logits[0]) == len(one.logits[1]) == 8
        assert bool((one.marks["trusted"][-2:] >= 0).all())  # a quarter, at the end
        assert not one.logits[0].requires_grad and one.logits[1].requires_grad
    assert any(bool((one.marks["trusted"][:-2] < 0).any()) for one in seen)


# batches


class Blank:
    """A view that looks at nothing."""

    name = "blank"

    def __call__(self, picture: Image.Image, rng: torch.Generator) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def finish(self, pixels: Tensor) -> Tensor:
        return pixels


def grey(count: int) -> Unlabelled:
    images = ArrayImages(np.zeros((count, 1, 1, 3), np.uint8), "grey")
    return Labelled("grey", ClassList(("a", "b")), images, (0,) * count).unlabelled()


def indices(
    count: int, batch: int, trusted: Sequence[int] | None, *, epoch: int = 0, seed: int = 0, **more: Any
) -> list[tuple[int, ...]]:
    schedule = Schedule(epochs=2, lr=1.0, batch_size=batch, **more)
    made = EpochSampler([(grey(count), (Blank(),))], schedule, seed, [0.25])
    found = [one.indices for (one,) in made.epoch(epoch, reserved_items=[trusted])]
    assert len(found) == made.steps
    return found


def kept_free(batch: int) -> int:
    return batch // 4


@SMALL
@given(st.integers(2, 50), st.integers(4, 24), st.integers(1, 50), st.integers(0, 3))
def test_a_quarter_of_every_batch_is_trusted_and_every_picture_comes_once_beside_them(
    count: int, batch: int, sure: int, epoch: int
) -> None:
    trusted = sorted({(7 * i) % count for i in range(sure)})
    found = indices(count, batch, trusted, epoch=epoch)
    own = batch - kept_free(batch)
    assert len(found) == -(-count // own)
    for places in found[:-1]:
        assert len(places) == batch
        assert set(places[own:]) <= set(trusted)
    last = count - own * (len(found) - 1)
    assert len(found[-1]) - last >= kept_free(batch) and set(found[-1][last:]) <= set(trusted)
    visits = [i for places in found[:-1] for i in places[:own]] + list(found[-1][:last])
    assert sorted(visits) == list(range(count))


@SMALL
@given(st.integers(2, 60), st.integers(4, 24), st.integers(1, 50))
def test_trusted_pictures_that_fill_up_whole_batches_come_equally_often(
    count: int, batch: int, sure: int
) -> None:
    trusted = sorted({(7 * i) % count for i in range(sure)})
    own = batch - kept_free(batch)
    found = Counter(i for places in indices(count, batch, trusted)[:-1] for i in places[own:])
    often = [found[i] for i in trusted]
    assert max(often) - min(often) <= 1


@pytest.mark.parametrize(
    ("count", "batch", "sure"),
    [
        (15, 8, 9),
        (40, 16, 12),
        pytest.param(13, 16, 3),
    ],
)
def test_all_batches_of_an_epoch_are_of_one_size(count: int, batch: int, sure: int) -> None:
    """Also the last, where fewer pictures are left."""
    found = indices(count, batch, range(sure))
    assert count % (batch - kept_free(batch)) and len(found) > 1
    assert {len(places) for places in found} == {batch}


def test_trusted_pictures_come_equally_often_over_a_whole_epoch() -> None:
    found = indices(19, 8, range(7))
    often = Counter(i for n, places in enumerate(found) for i in places[6 if n < 3 else 1 :])
    assert max(often.values()) - min(often.values()) <= 1


def test_orders_of_what_is_trusted_depend_on_seed_and_epoch_alone() -> None:
    base = indices(30, 16, range(9))
    assert base == indices(30, 16, range(9))
    others = [indices(30, 16, range(9), epoch=1), indices(30, 16, range(9), seed=1)]
    quarters = [[places[12:] for places in found] for found in (base, *others)]
    assert quarters[0] != quarters[1] != quarters[2] != quarters[0]


def test_where_nothing_is_trusted_the_others_stay_as_they_are() -> None:
    found = indices(15, 8, None)
    assert [len(places) for places in found] == [6, 6, 3]
    assert [places[:6] for places in indices(15, 8, [2])[:2]] == found[:2]


def test_batches_too_small_for_a_quarter_have_nothing_trusted() -> None:
    assert [len(places) for places in indices(7, 3, [0, 1])] == [3, 3, 1]


def test_an_epoch_that_goes_on_has_the_same_batches() -> None:
    schedule = Schedule(epochs=1, lr=1.0, batch_size=8)
    made = EpochSampler([(grey(30), (Blank(),))], schedule, 0, [0.25])
    whole = [one.indices for (one,) in made.epoch(0, reserved_items=[range(5)])]
    for start in range(len(whole) + 1):
        rest = [one.indices for (one,) in made.epoch(0, start=start, reserved_items=[range(5)])]
        assert rest == whole[start:]


# views


def strong_views(
    split: Unlabelled, *, seed: int = 0, epoch: int = 0, trusted: Sequence[int] = (2, 9)
) -> list[Batch]:
    term = FixMatch(split)
    made = EpochSampler([(split, term.views(SEEING))], SCHEDULE, seed, [term.reserved_share])
    return [batch for (batch,) in made.epoch(epoch, reserved_items=[trusted])]


def by_visit(batches: Sequence[Batch], view: int) -> dict[tuple[int, int], Tensor]:
    """Pictures by their place, and how often it came before."""
    often: Counter[int] = Counter()
    out = {}
    for batch in batches:
        for place, image in zip(batch.indices, batch.views[view], strict=True):
            out[place, often[place]] = image
            often[place] += 1
    return out


def test_views_are_the_same_twice_and_others_by_seed_epoch_and_visit(pictures: Unlabelled) -> None:
    base = strong_views(pictures)
    for one, again in zip(base, strong_views(pictures), strict=True):
        assert one.indices == again.indices and one.labels is None
        assert all(torch.equal(a, b) for a, b in zip(one.views, again.views, strict=True))
    weak, strong = by_visit(base, 0), by_visit(base, 1)
    assert torch.equal(weak[2, 0], weak[2, 1]) and not torch.equal(strong[2, 0], strong[2, 1])
    for changed in ({"seed": 1}, {"epoch": 1}):
        other = strong_views(pictures, **changed)
        assert torch.equal(weak[4, 0], by_visit(other, 0)[4, 0])
        assert not torch.equal(strong[4, 0], by_visit(other, 1)[4, 0])


@pytest.mark.parametrize("name", TERMS)
def test_runs_depend_on_the_seed_and_not_on_workers_or_chance(
    world: colours.World, pictures: Unlabelled, start: Tensor, name: str
) -> None:
    found = []
    for seed, workers in ((0, 0), (0, 1), (1, 0)):
        torch.manual_seed(seed + 10 * workers)
        composition = started(world, start)
        schedule = replace(SCHEDULE, epochs=1)
        done = fit(composition, TERMS[name](pictures), schedule, seed=seed, workers=workers)
        found.append((bits(composition.values), str(done.history)))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]


# going on


WAYS: dict[str, Any] = {
    # what is minimised, the schedule, how it is called; how often progress is reported, and where to stop
    "fixmatch": (FixMatch, SCHEDULE, {}, 8, (1, 2, 4, 5, 7)),
    "sar": (
        lambda split: SAR(split, 0.5, 0.05, scaled(0.51, split)),
        replace(DESCENT, batch_size=5),
        {},
        6,
        (1, 2, 4),
    ),
    "online": (FixMatch, replace(SCHEDULE, batch_size=4), {"online": True}, 4, (1, 3, 4)),
    "online sar": (
        lambda split: SAR(split, 1.1, 0.05, scaled(0.3, split)),
        replace(DESCENT, batch_size=4),
        {"online": True},
        4,
        (2,),
    ),
}


def uncertain(world: colours.World) -> Tensor:
    """Coefficients with which SAR, as above, forgets something on the way."""
    rng = torch.Generator().manual_seed(5)
    return 0.05 * torch.randn(world.composition().values.shape, generator=rng)


def run(
    world: colours.World,
    pictures: Unlabelled,
    way: str,
    directory: Path | None,
    composition: Composition | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """What a run comes to, for comparison."""
    term, schedule, how, *_ = WAYS[way]
    model = composition or started(world, uncertain(world))
    done = fit(model, term(pictures), schedule, directory=directory, **how, **more)
    answers = None if done.predictions is None else done.predictions.tolist()
    return bits(model.values), done.history, answers, done.notes


@pytest.fixture(scope="module")
def whole(
    world: colours.World, pictures: Unlabelled, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, ...]]:
    """What runs come to that nobody interrupts."""
    out = {}
    for way, (*_, calls, _) in WAYS.items():
        progress = At(0)
        out[way] = run(world, pictures, way, tmp_path_factory.mktemp("runs") / "run", progress=progress)
        assert progress.calls == calls
    assert out["sar"][1][-1].forgotten == 2
    return out


@pytest.mark.parametrize(("way", "n"), [(way, n) for way, (*_, places) in WAYS.items() for n in places])
def test_a_run_that_was_asked_to_stop_anywhere_ends_the_same(
    world: colours.World,
    pictures: Unlabelled,
    whole: dict[str, tuple[Any, ...]],
    tmp_path: Path,
    way: str,
    n: int,
) -> None:
    with pytest.raises(StoppedError):
        run(world, pictures, way, tmp_path / "run", progress=At(n))
    assert run(world, pictures, way, tmp_path / "run", resume=True) == whole[way]


def test_directories_change_nothing(
    world: colours.World, pictures: Unlabelled, whole: dict[str, tuple[Any, ...]]
) -> None:
    assert run(world, pictures, "fixmatch", None) == whole["fixmatch"]


def test_a_run_that_goes_on_with_the_same_composition_forgets_back_to_the_first_start(
    world: colours.World, pictures: Unlabelled, whole: dict[str, tuple[Any, ...]], tmp_path: Path
) -> None:
    composition = started(world, uncertain(world))
    with pytest.raises(StoppedError):
        run(world, pictures, "sar", tmp_path / "run", composition, progress=At(2))
    assert run(world, pictures, "sar", tmp_path / "run", composition, resume=True) == whole["sar"]


def test_other_settings_of_a_loss_are_no_run_to_go_on_with(
    world: colours.World, pictures: Unlabelled, tmp_path: Path, refused: Refused
) -> None:
    one = replace(SCHEDULE, epochs=1)
    fit(world.composition(), FixMatch(pictures), one, directory=tmp_path / "run")
    for term, what in ((FixMatch(pictures, power=1.0), "power"), (Entropy(pictures), "loss")):
        with refused("RUN-CHANGED", 3, what):
            fit(world.composition(), term, one, directory=tmp_path / "run", resume=True)
    with refused("RUN-CHANGED", 3, "online"):
        fit(
            world.composition(), FixMatch(pictures), one, directory=tmp_path / "run", resume=True, online=True
        )


# online


def online_by_hand(
    world: colours.World, start: Tensor, term: DataTerm, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    """Answers and values of a loop that answers every batch before it learns from it."""
    composition = started(world, start)
    made = EpochSampler([(term.split, term.views(world.encoder))], schedule, 0)
    head = world.encoder.class_weights(term.split.classes)
    optimiser = torch.optim.AdamW([composition.values], weight_decay=schedule.weight_decay)
    answers = torch.full((len(term.split),), -1)
    for n, (batch,) in enumerate(made.epoch(0)):
        seen = tuple(composition(view) for view in batch.views)
        logits = tuple(map(head.logits, seen))
        assert bool((answers[list(batch.indices)] == -1).all())
        answers[list(batch.indices)] = logits[0].argmax(-1)
        optimiser.zero_grad()
        term.loss(TermInputs(seen, logits, None, progress=n / made.steps)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([composition.values], schedule.max_grad_norm)
        optimiser.param_groups[0]["lr"] = schedule.rate(n, made.steps)
        optimiser.step()
    return answers, composition.values.detach()


@pytest.mark.parametrize("term", [Entropy, Contrastive, lambda split: FixMatch(split, threshold=0.4)])
def test_online_every_batch_is_answered_before_anything_is_learned_from_it(
    world: colours.World, pictures: Unlabelled, start: Tensor, term: Callable[[Unlabelled], DataTerm]
) -> None:
    schedule = Schedule(epochs=1, lr=2.0, batch_size=2, warmup_steps=0)
    answers, values = online_by_hand(world, start, term(pictures), schedule)
    composition = started(world, start)
    done = fit(composition, term(pictures), schedule, online=True)
    assert done.predictions is not None
    assert done.predictions.tolist() == answers.tolist()
    torch.testing.assert_close(composition.values.detach(), values, rtol=1e-2, atol=1e-4)
    before = logits_of(world, started(world, start), pictures).argmax(-1)
    after = logits_of(world, composition, pictures).argmax(-1)
    assert before.tolist() != answers.tolist() != after.tolist()  # it matters when they are made


def test_online_the_first_batch_is_answered_by_the_model_as_it_was_given(
    world: colours.World, pictures: Unlabelled, start: Tensor
) -> None:
    for name, term in TERMS.items():
        done = fit(
            started(world, start), term(pictures), replace(DESCENT, batch_size=15, lr=50.0), online=True
        )
        assert done.predictions is not None
        before = logits_of(world, started(world, start), pictures).argmax(-1)
        assert done.predictions.tolist() == before.tolist(), name


def test_online_answers_are_not_those_of_the_worst_point_nearby(
    world: colours.World, pictures: Unlabelled, start: Tensor
) -> None:
    term = SAR(pictures, margin=1.1, radius=20.0, floor=0.0)
    done = fit(started(world, start), term, replace(DESCENT, batch_size=15), online=True)
    assert done.predictions is not None
    assert done.predictions.tolist() == logits_of(world, started(world, start), pictures).argmax(-1).tolist()


@pytest.mark.parametrize("name", TERMS)
def test_online_every_picture_is_answered_and_learned_from_once_and_none_is_trusted(
    world: colours.World, pictures: Unlabelled, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, ...]] = []
    take = Loop._take_step
    monkeypatch.setattr(
        Loop, "_take_step", lambda self, batches: steps.append(batches[0].indices) or take(self, batches)
    )
    schedule = replace(SCHEDULE, epochs=5, min_steps_per_epoch=9)
    done = fit(world.composition(), TERMS[name](pictures), schedule, online=True)
    assert [len(places) for places in steps] == [8, 7]
    assert sorted(i for places in steps for i in places) == list(range(15))
    assert done.predictions is not None and set(done.predictions.tolist()) <= {0, 1, 2}
    assert len(done.history) == 2 and done.history[1].trusted is None


def test_runs_that_are_not_online_have_no_answers(world: colours.World, pictures: Unlabelled) -> None:
    assert fit(world.composition(), Entropy(pictures), replace(SCHEDULE, epochs=1)).predictions is None


def test_online_there_is_one_stream(world: colours.World, pictures: Unlabelled, refused: Refused) -> None:
    other = world.target.split("train").unlabelled()
    with refused("OBJECTIVE", 2, "exactly one split"):
        fit(world.composition(), Entropy(pictures) + Entropy(other), SCHEDULE, online=True)


# labels


class Raising(tuple[int, ...]):
    """Labels that raise when touched."""

    def _no(self, *args: object) -> Any:
        raise AssertionError("a label was read")

    __getitem__ = __iter__ = __contains__ = count = index = __eq__ = __hash__ = _no  # type: ignore[assignment]


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_labels_that_raise_when_touched_are_never_touched(
    world: colours.World, start: Tensor, tmp_path: Path, name: str, online: bool
) -> None:
    test = world.control.split("test")
    guarded = Labelled(test.name, test.classes, test.items, Raising(test.labels), test.role)
    with pytest.raises(AssertionError, match="a label was read"):
        guarded.labels[0]
    found = []
    for labelled in (guarded, test):
        composition = started(world, start)
        place = tmp_path / str(len(found))
        term, schedule = TERMS[name](labelled.unlabelled()), replace(SCHEDULE, epochs=1)
        done = fit(composition, term, schedule, online=online, directory=place)
        found.append((bits(composition.values), str(done.history)))
    assert found[0] == found[1]
    assert found[0][0] != bits(start)


@pytest.mark.parametrize("objective", ["fixmatch", "sar", "entropy", "contrastive"])
def test_what_the_setting_learns_from_and_chooses_by_has_no_labels(
    world: colours.World, objective: Any
) -> None:
    setting = TestTime(model="any", bank="any", task="control", objective=objective)
    job = Session(setting, tasks={"control": world.control}).problem
    splits = [term.split for _, term in job.objective.data_terms]
    assert [type(split) for split in splits] == [Unlabelled]
    assert splits[0].keys == world.control.split("test").keys
    assert isinstance(job.keep, Last) and not job.keep.splits
    assert job.evaluation.tests == {"control": world.control.split("test")}  # for measuring


# slices


def test_a_contrast_within_the_batch_cannot_be_cut_into_slices(
    world: colours.World, pictures: Unlabelled, refused: Refused
) -> None:
    for objective in (Contrastive(pictures), Contrastive(pictures) + CoefficientNorm()):
        with refused("OBJECTIVE", 2, "contrast", "--micro-batch"):
            fit(world.composition(), objective, replace(SCHEDULE, micro_batch=7))
    fit(world.composition(), Contrastive(pictures), replace(SCHEDULE, epochs=1, micro_batch=8))


@pytest.mark.parametrize("name", ["entropy", "sar", "some reliable", "fixmatch"])
def test_slices_of_a_step_give_what_the_whole_gives(
    world: colours.World, pictures: Unlabelled, start: Tensor, name: str
) -> None:
    chosen = {**TERMS, "some reliable": lambda split: SAR(split, margin=0.45, radius=0.02, floor=0.0)}
    values = uncertain(world) if name == "some reliable" else start
    found = []
    for size in (None, 3):
        composition = started(world, values)
        schedule = replace(DESCENT, epochs=1, micro_batch=size)
        done = fit(composition, chosen[name](pictures), schedule)
        found.append((composition.values.detach(), done.history[1].loss))
    assert found[0][1] > 0 and not torch.equal(found[0][0], values)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-5)


def test_no_pass_has_more_pictures_than_was_asked_for(
    world: colours.World, pictures: Unlabelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, sizes = Composition.forward, []

    def watched(self: Composition, images: Tensor) -> Tensor:
        sizes.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Composition, "forward", watched)
    fit(world.composition(), FixMatch(pictures), replace(SCHEDULE, epochs=1, micro_batch=3))
    assert set(sizes) <= {1, 2, 3}


# several terms


def test_a_term_that_trusts_pictures_goes_together_with_others(
    world: colours.World, pictures: Unlabelled, start: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    take = Loop._take_step
    monkeypatch.setattr(
        Loop, "_take_step", lambda self, batches: sizes.append([*map(len, batches)]) or take(self, batches)
    )
    labelled = CrossEntropy(world.target.split("train"))
    objective = FixMatch(pictures) + 0.5 * labelled + 0.1 * CoefficientNorm()
    done = fit(started(world, start), objective, replace(SCHEDULE, epochs=1, batch_size=16))
    assert sizes == [[8, 8]] * 3
    row = done.history[1]
    terms = row.terms
    assert set(terms) == {"control train, FixMatch", "target train", "coefficients' 1-norm"}
    expected = terms["control train, FixMatch"] + 0.5 * terms["target train"]
    assert row.loss == pytest.approx(expected + 0.1 * terms["coefficients' 1-norm"])


def test_the_same_loss_on_the_same_pictures_twice_is_refused(
    world: colours.World, pictures: Unlabelled, refused: Refused
) -> None:
    with refused("OBJECTIVE", 2, "FixMatch", "twice"):
        fit(world.composition(), FixMatch(pictures) + FixMatch(pictures, power=1.0), SCHEDULE)
    fit(world.composition(), FixMatch(pictures) + Entropy(pictures), replace(SCHEDULE, epochs=1))


# compositions


@pytest.fixture(scope="module")
def low_rank(world: colours.World, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Two adapters that nobody trained, with factors that are not zero."""
    pytest.importorskip("peft")
    places = {}
    for seed in (1, 2):
        made = adapter(world.encoder, 2, seed=seed)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for factor in made.trained.tensors.values():
                factor.add_(0.05 * torch.randn(factor.shape, generator=rng))
        places[f"lora{seed}"] = tmp_path_factory.mktemp("lora") / str(seed)
        made.save(places[f"lora{seed}"])
    return Bank.build(world.encoder, places, allow_distant=True)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("kind", ["random parts", "low rank"])
def test_every_loss_learns_with_random_parts_and_low_rank_vectors(
    world: colours.World, pictures: Unlabelled, low_rank: Bank, name: str, kind: str
) -> None:
    if kind == "low rank":
        composition = Composition(world.encoder, low_rank)
    else:
        composition = world.composition(Partition.parse("random:3"))
    done = fit(composition, TERMS[name](pictures), replace(SCHEDULE, epochs=1, lr=0.02))
    assert bool(composition.values.any()) and bool(torch.isfinite(composition.values).all())
    assert done.coefficients is not None and len(done.coefficients) == composition.index.count
    assert math.isfinite(done.history[1].loss)


def test_entropy_falls_where_it_is_minimised(
    world: colours.World, pictures: Unlabelled, start: Tensor
) -> None:
    done = fit(started(world, start), Entropy(pictures), replace(SCHEDULE, epochs=3, lr=0.02))
    losses = [row.loss for row in done.history[1:]]
    assert losses[2] < losses[1] < losses[0]


# layer norms


def thin(network: nn.Module) -> Encoder:
    """An encoder with the network's names, of which only layer norms have their size."""
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    shape = tensor.shape if isinstance(module, nn.LayerNorm) else (1,) * tensor.ndim
                    made = torch.zeros(shape, dtype=tensor.dtype)
                    held[name] = made if held is module._buffers else nn.Parameter(made)  # type: ignore[assignment]
    return Encoder("thin", network, Family(lambda network, images: images), Pixels(224))


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig())  # type: ignore[no-any-return]


def open_clip() -> nn.Module:
    model = pytest.importorskip("open_clip.model")
    return model.CLIP(512, model.CLIPVisionCfg(patch_size=32), model.CLIPTextCfg(layers=1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [hugging_face, open_clip])
def test_a_vit_b_32_has_30720_numbers_in_its_norms_but_for_the_last_three_layers(
    made: Callable[[], nn.Module],
) -> None:
    with torch.device("meta"):
        network = made()
    encoder = thin(network)
    trained = Trainable.layer_norms(encoder)
    assert trained.count == 30_720 == 768 * 2 * (2 * 9 + 2)
    depths = {
        block.depth for block in encoder.layout.blocks for part in block.parts if part.key in trained.tensors
    }
    assert depths == {None, *range(9)}
    assert not [name for name in trained.tensors if name.startswith(("transformer", "text", "ln_final"))]
    assert Trainable.layer_norms(encoder, without_last=0).count == 768 * 2 * (2 * 12 + 2)


@pytest.mark.parametrize("name", TERMS)
def test_norms_are_trained_and_nothing_else_changes(
    world: colours.World, pictures: Unlabelled, name: str
) -> None:
    before = {key: value.clone() for key, value in world.encoder.state_dict().items()}
    trained = Trainable.layer_norms(world.encoder, without_last=0)
    assert trained.count == 32 * 2 * (2 * 1 + 2)  # one layer, and the norms before and after
    done = fit(trained, TERMS[name](pictures), replace(SCHEDULE, epochs=1, lr=0.01))
    assert done.coefficients is None and done.kept == 1
    moved = tuned_weights(world.encoder, trained)
    for key, value in before.items():
        assert torch.equal(world.encoder.state_dict()[key], value), key
        assert torch.equal(moved.read(key), value) == (key not in trained.tensors), key
        assert torch.equal(trained.model.state_dict()[key], moved.read(key)), key


def test_the_last_layers_norms_stay(world: colours.World) -> None:
    names = [set(Trainable.layer_norms(world.encoder, without_last=n).tensors) for n in (0, 1, 3)]
    assert names[1] == names[2] == {name for name in names[0] if ".layers." not in name}
    assert len(names[0]) == 8 and len(names[1]) == 4


def test_a_run_over_norms_goes_on_the_same(
    world: colours.World, pictures: Unlabelled, tmp_path: Path
) -> None:
    def norms(place: str, **more: Any) -> tuple[list[bytes], tuple[Any, ...]]:
        trained = Trainable.layer_norms(world.encoder)
        done = fit(trained, FixMatch(pictures), SCHEDULE, directory=tmp_path / place, **more)
        return [bits(tensor) for tensor in trained.tensors.values()], done.history

    expected = norms("whole")
    with pytest.raises(StoppedError):
        norms("run", progress=At(6))
    assert norms("run", resume=True) == expected


def test_a_model_without_norms_is_refused(refused: Refused) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.Linear(4, 4))
    encoder = Encoder("plain", network, Family(lambda network, images: network(images)), Pixels(8))
    with refused("MODEL-NAME", 2, "plain", "no norms"):
        Trainable.layer_norms(encoder)


def test_terms_about_coefficients_are_refused_for_norms(
    world: colours.World, pictures: Unlabelled, refused: Refused
) -> None:
    with refused("OBJECTIVE", 2, "1-norm"):
        fit(Trainable.layer_norms(world.encoder), Entropy(pictures) + CoefficientNorm(), SCHEDULE)


# what can be told from answers alone


def test_answers_are_those_of_the_model_with_their_probabilities(
    world: colours.World, pictures: Unlabelled, start: Tensor
) -> None:
    composition = started(world, start)
    found = predict_unlabelled(composition, pictures)
    p = logits_of(world, composition, pictures).softmax(-1)
    assert found.labels.tolist() == p.argmax(-1).tolist()
    torch.testing.assert_close(found.confidence, p.max(-1).values)
    assert sum(found.counts.values()) == 15 and list(found.counts) == list(pictures.classes.names)


def made(*answers: int, sure: float = 0.5, classes: int = 4) -> Predictions:
    names = ClassList(tuple("abcdefgh"[:classes]))
    return Predictions(torch.tensor(answers), torch.full((len(answers),), sure), names)


def test_two_sets_of_answers_are_compared_in_plain_numbers() -> None:
    before, after = made(0, 1, 2, 0, sure=0.25), made(0, 2, 2, 2, sure=0.75)
    assert after.compared_with(before) == {
        "agreement": 0.5,
        "confidence": [0.25, 0.75],
        "counts": {"a": 1, "b": 0, "c": 3, "d": 0},
    }
    assert after.largest == ("c", 0.75)


@pytest.mark.parametrize(
    ("before", "after", "warned"),
    [
        ((0, 1, 2, 3), (1, 1, 1, 1), True),
        ((1, 1, 1, 1), (1, 1, 1, 1), False),  # it had always been so
        ((1, 1, 1, 1), (2, 2, 2, 2), True),  # into another class
        ((0, 1, 2, 3), (1, 1, 0, 2), False),  # half is no collapse
        ((0, 1, 2, 3), (1, 1, 1, 2), True),
    ],
)
def test_one_class_that_swallows_the_others_is_warned_of(
    before: Sequence[int], after: Sequence[int], warned: bool
) -> None:
    notes = made(*after).doubts(made(*before))
    assert [note.startswith("warning: ") and "collapsed" in note for note in notes] == [True] * warned


def test_of_two_classes_one_may_have_most_of_the_answers() -> None:
    before = made(0, 1, 0, 1, classes=2)
    assert not made(0, 0, 0, 1, classes=2).doubts(before)
    assert made(0, 0, 0, 0, classes=2).doubts(before)


def scaled(floor: float, split: Unlabelled) -> float:
    """The floor of a thousand classes that is this one for the split's."""
    return floor * math.log(1000) / math.log(len(split.classes))
