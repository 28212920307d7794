"""Sharpness: up to the worst point and back to the bit, steps by hand, beginning anew after a collapse."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import colours
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aniso.compose import Composition
from aniso.data import Unlabelled
from aniso.errors import ResourceError
from aniso.learn import SAR, Contrastive, Entropy, Last, Schedule, Trainable, fit
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.loop import Loop
from aniso.learn.fit import _doubts
from aniso.learn.objectives import Losses, RunContext, TermInputs
from aniso.learn.objectives.sar import Perturbation, SharpnessAware
from aniso.records import EpochRow

Refused = Callable[..., AbstractContextManager[Any]]

SMALL = settings(deadline=None, max_examples=80, database=None, derandomize=True)
DESCENT = Schedule(
    epochs=2, lr=0.5, batch_size=5, weight_decay=0.0, warmup_steps=0, max_grad_norm=0.5, optimiser="sgd"
)
NOTHING: tuple[Any, Any] = (lambda *_: None, lambda: None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def pictures(world: colours.World) -> Unlabelled:
    """Fifteen, of three classes: three steps an epoch."""
    return world.control.split("train").unlabelled()


def tensors(*values: list[float], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor(value, dtype=dtype, requires_grad=True) for value in values]


def bits(values: Tensor) -> bytes:
    return values.detach().contiguous().numpy().tobytes()


# the way up and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_worst_point_lies_along_the_gradient_of_all_tensors_together(dtype: torch.dtype) -> None:
    own = tensors([1.0, 2.0], [-3.0], dtype=dtype)
    own[0].grad, own[1].grad = torch.tensor([2.0, 3.0], dtype=dtype), torch.tensor([-6.0], dtype=dtype)
    Perturbation(own, 0.7).climb()  # the gradient's norm is 7
    torch.testing.assert_close(own[0].detach(), torch.tensor([1.2, 2.3], dtype=dtype))
    torch.testing.assert_close(own[1].detach(), torch.tensor([-3.6], dtype=dtype))


@SMALL
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=6),
    st.floats(0, 10),
    st.integers(0, 99),
)
def test_the_way_back_ends_at_the_very_bits(values: list[float], radius: float, seed: int) -> None:
    own = tensors([*values, -0.0, 1e-42, 0.1])
    own[0].grad = torch.randn(len(values) + 3, generator=torch.Generator().manual_seed(seed))
    before = bits(own[0])
    sharpness = Perturbation(own, radius)
    sharpness.climb()
    moved = own[0].detach()[-1]
    assert bool(moved != torch.tensor(0.1)) or radius < 1e-6
    sharpness.undo()
    assert bits(own[0]) == before


@pytest.mark.parametrize("gradient", [None, torch.zeros(2)])
def test_where_there_is_no_gradient_nothing_moves(gradient: Tensor | None) -> None:
    own = tensors([0.1, -0.2])
    own[0].grad = gradient
    sharpness = Perturbation(own, 0.5)
    sharpness.climb()
    assert own[0].tolist() == torch.tensor([0.1, -0.2]).tolist()
    sharpness.undo()
    assert own[0].tolist() == torch.tensor([0.1, -0.2]).tolist()


def test_tensors_without_a_gradient_stay_where_others_move() -> None:
    own = tensors([1.0], [1.0])
    own[1].grad = torch.tensor([-4.0])
    Perturbation(own, 0.25).climb()
    assert [t.item() for t in own] == [1.0, 0.75]


def test_on_a_quadratic_descent_follows_the_closed_form() -> None:
    """The loss is w A w / 2, so that its gradient at the worst point is A (w + r A w / |A w|)."""
    a = torch.tensor([[3.0, 1.0], [1.0, 0.5]], dtype=torch.double)
    w = torch.tensor([0.4, -0.9], dtype=torch.double, requires_grad=True)
    by_hand = w.detach().clone()
    sharpness = Perturbation([w], 0.3)
    for _ in range(5):
        for way in (sharpness.climb, sharpness.undo):
            w.grad = None
            (w @ a @ w / 2).backward()  # type: ignore[no-untyped-call]
            way()
        assert w.grad is not None
        with torch.no_grad():
            w -= 0.1 * w.grad
        ascent = a @ by_hand
        by_hand = by_hand - 0.1 * a @ (by_hand + 0.3 * ascent / ascent.norm())
        torch.testing.assert_close(w.detach(), by_hand, rtol=1e-12, atol=0)


# which pictures count


def seen(logits: Tensor, reliable: Tensor | None = None) -> TermInputs:
    return TermInputs((logits,), (logits,), None, {} if reliable is None else {"reliable": reliable})


def with_certainty(*chances: float) -> Tensor:
    """Logits of two classes, the first of which has these probabilities."""
    return torch.tensor([[c, 1 - c] for c in chances], dtype=torch.double).log()


def entropy_of(chance: float) -> float:
    return -sum(p * math.log(p) for p in (chance, 1 - chance))


def companion(term: SAR) -> SharpnessAware:
    """The companion of one term, in a run in which nothing is trained."""
    optimiser = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=0.1)
    return SharpnessAware({0: term}, RunContext(torch.nn.Identity(), {}, optimiser, [None]))


def floor_of(value: float, split: Unlabelled) -> float:
    """The floor of a thousand classes that is this one for the split's."""
    return value * math.log(1000) / math.log(len(split.classes))


def two_passes(sharpness: SharpnessAware, first: Tensor, second: Tensor, *places: int) -> bool:
    """A step on some images, by the logits of its passes; True if it ended in a reset."""
    passes, before = iter([first, second]), sharpness.resets

    def backward() -> Losses:
        sharpness.observe(0, places, seen(next(passes), sharpness.marks(0, places).get("reliable")))
        return {}

    sharpness.around_step(backward)
    sharpness.after_step()
    return sharpness.resets > before


@pytest.fixture(scope="module")
def four(world: colours.World) -> Unlabelled:
    return world.target.split("train").take(range(4)).unlabelled()


def test_images_reliable_in_the_first_pass_are_marked_in_the_second_only(four: Unlabelled) -> None:
    sharpness = companion(SAR(four, margin=0.5))
    calls = 0

    def backward() -> Losses:
        nonlocal calls
        calls += 1
        if calls == 1:
            sharpness.observe(0, [3, 1], seen(with_certainty(0.99, 0.6)))
            sharpness.observe(0, [0], seen(with_certainty(0.98)))
            assert sharpness.marks(0, [0, 1]) == {}
        else:
            assert sharpness.marks(0, [0, 1, 2, 3])["reliable"].tolist() == [True, False, False, True]
            assert sharpness.marks(1, [0]) == {}  # another term
        return {"loss": (float(calls), 1)}

    assert sharpness.around_step(backward) == {"loss": (1.0, 1)}  # the losses of the first pass
    sharpness.after_step()
    assert calls == 2 and sharpness.marks(0, [0]) == {}


def test_terms_of_other_kinds_have_nothing_that_is_reliable(four: Unlabelled) -> None:
    sharpness = companion(SAR(four, floor=9.0))

    def backward() -> Losses:
        assert sharpness.marks(1, [0]) == {}
        sharpness.observe(1, [0], seen(with_certainty(0.99)))
        return {}

    sharpness.around_step(backward)
    sharpness.after_step()
    assert sharpness.resets == 0 and sharpness.average is None
    optimiser = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=0.1)
    assert Entropy.companion({0: Entropy(four)}, RunContext(torch.nn.Identity(), {}, optimiser, [])) is None


def test_the_entropy_that_is_watched_is_of_what_is_reliable_in_both_passes(four: Unlabelled) -> None:
    term = SAR(four, margin=0.5, floor=0.0)
    sharpness = companion(term)
    two_passes(sharpness, with_certainty(0.99, 0.98, 0.6), with_certainty(0.95, 0.93, 0.99), 2, 0, 1)
    assert sharpness.average == pytest.approx((entropy_of(0.95) + entropy_of(0.93)) / 2)
    again = companion(term)
    two_passes(again, with_certainty(0.99, 0.98, 0.6), with_certainty(0.95, 0.6, 0.99), 2, 0, 1)
    assert again.average == pytest.approx(entropy_of(0.95))
    two_passes(again, with_certainty(0.99), with_certainty(0.6), 0)
    assert again.average == pytest.approx(entropy_of(0.95))  # nothing was left to watch


# collapse


def test_a_moving_average_below_the_floor_is_a_collapse_and_begins_anew(four: Unlabelled) -> None:
    sharpness = companion(SAR(four, margin=1.1, floor=floor_of(0.2, four)))
    first, low = entropy_of(0.7), entropy_of(0.999)
    found, averages = [], []
    for chance in (0.7, *[0.999] * 13, 0.9, 0.7):
        logits = with_certainty(chance)
        found.append(two_passes(sharpness, logits, logits, 0))
        averages.append(sharpness.average)
    expected = [first * 0.9**n + low * (1 - 0.9**n) for n in range(12)]
    assert expected[10] > 0.2 > expected[11]
    assert found == [False] * 11 + [True] * 3 + [False] * 2
    assert averages[:11] == pytest.approx(expected[:11])
    assert averages[11:14] == [None] * 3  # after each, the next value counts in full
    assert averages[14:] == pytest.approx([entropy_of(0.9), 0.9 * entropy_of(0.9) + 0.1 * first])


@SMALL
@given(st.lists(st.floats(0.51, 0.9999), max_size=30), st.floats(0, 0.7), st.floats(0.2, 1.1))
def test_averages_are_nine_tenths_of_what_was_and_a_tenth_of_what_is(
    four: Unlabelled, chances: list[float], floor: float, margin: float
) -> None:
    sharpness = companion(SAR(four, margin=margin, floor=floor_of(floor, four)))
    average: float | None = None
    for chance in chances:
        value, logits = entropy_of(chance), with_certainty(chance)
        collapsed = two_passes(sharpness, logits, logits, 1)
        if value < margin * math.log(2):  # else it does not count, and nothing changes
            average = value if average is None else 0.9 * average + 0.1 * value
        fell = average is not None and average < floor
        if average is not None and abs(average - floor) < 1e-9:
            return  # rounding decides
        assert collapsed == fell
        average = None if fell else average
        assert sharpness.average == (None if average is None else pytest.approx(average))


# in the loop


def entropies(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return -(p * p.log()).sum(-1)


def away_from_zero(world: colours.World, size: float = 0.05) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    return size * torch.randn(world.composition().values.shape, generator=rng)


def started(world: colours.World, start: Tensor | None = None) -> Composition:
    composition = world.composition()
    with torch.no_grad():
        composition.values.copy_(away_from_zero(world) if start is None else start)
    return composition


class ByHand:
    """SAR with gradient descent, written down once more, on values of its own."""

    def __init__(self, world: colours.World, term: SAR, schedule: Schedule) -> None:
        self.world, self.term, self.schedule = world, term, schedule
        self.composition = started(world)
        self.start = away_from_zero(world)
        self.forgotten = self.counted = 0
        self.average: float | None = None
        self.momentum: Tensor | None = None

    def gradient(self, images: Tensor, values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Of the loss at some values, and which pictures are reliable there."""
        with torch.no_grad():
            self.composition.values.copy_(values)
        head = self.world.encoder.class_weights(self.term.split.classes)
        own = entropies(head.logits(self.composition(images)))
        limit = self.term.margin * math.log(len(self.term.split.classes))
        counts = (own < limit) & before
        self.entropies = own.detach()
        (found,) = torch.autograd.grad(
            (own * counts).sum() / max(1, int(counts.sum())), self.composition.values
        )
        return found, counts

    def step(self, images: Tensor, values: Tensor, rate: float) -> Tensor:
        up, before = self.gradient(images, values, torch.ones(len(images), dtype=torch.bool))
        norm = float(up.norm())
        worst = values + self.term.radius * up / norm if norm > 0 else values
        slope, both = self.gradient(images, worst, before)
        slope = slope * min(1.0, self.schedule.max_grad_norm / (float(slope.norm()) + 1e-6))
        self.momentum = slope if self.momentum is None else 0.9 * self.momentum + slope
        self.counted += int(before.sum())
        values = values - rate * self.momentum
        if not bool(both.any()):
            return values
        watched = float(self.entropies[both].mean())
        self.average = watched if self.average is None else 0.9 * self.average + 0.1 * watched
        if self.average < self.term.collapse:
            self.average, self.momentum, self.forgotten = None, None, self.forgotten + 1
            values = self.start
        return values

    def run(self) -> Tensor:
        encoder, schedule = self.world.encoder, self.schedule
        made = EpochSampler([(self.term.split, self.term.views(encoder))], schedule, 0)
        values, number = self.start, 0
        for epoch in range(schedule.epochs):
            for (batch,) in made.epoch(epoch):
                rate = schedule.rate(number, schedule.epochs * made.steps)
                values, number = self.step(batch.inputs, values, rate), number + 1
        return values


@pytest.mark.parametrize(
    ("margin", "radius", "floor", "forgotten"),
    [(0.5, 0.05, 0.0, 0), (0.5, 0.0, 0.0, 0), (0.5, 0.3, 0.0, 0), (0.45, 0.02, 0.0, 0), (0.5, 0.05, 0.51, 2)],
)
def test_a_run_takes_the_gradient_where_the_loss_is_worst(
    world: colours.World, pictures: Unlabelled, margin: float, radius: float, floor: float, forgotten: int
) -> None:
    term = SAR(pictures, margin, radius, floor * math.log(1000) / math.log(len(pictures.classes)))
    assert term.collapse == pytest.approx(floor)
    by_hand = ByHand(world, term, DESCENT)
    expected = by_hand.run()
    assert 0 < by_hand.counted < DESCENT.epochs * len(pictures)  # some pictures count, some do not
    assert float((expected - by_hand.start).norm()) > 0.05
    composition = started(world)
    done = fit(composition, term, DESCENT)
    torch.testing.assert_close(composition.values.detach(), expected, rtol=2e-3, atol=2e-5)
    assert done.history[-1].forgotten == by_hand.forgotten == forgotten


def test_the_radius_matters(world: colours.World, pictures: Unlabelled) -> None:
    found = []
    for radius in (0.0, 0.5):
        composition = started(world)
        fit(composition, SAR(pictures, margin=0.5, radius=radius, floor=0.0), DESCENT)
        found.append(composition.values.detach().clone())
    assert float((found[0] - found[1]).norm()) > 0.01 * float(found[0].norm())


def test_the_loss_that_is_told_is_the_one_where_the_model_is(
    world: colours.World, pictures: Unlabelled
) -> None:
    still = replace(DESCENT, epochs=1, lr=1e-12)
    rows = [
        fit(started(world), SAR(pictures, margin=0.5, radius=radius, floor=0.0), still).history[1]
        for radius in (0.0, 2.0)
    ]
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-6)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_where_nothing_is_reliable_nothing_happens(
    world: colours.World, pictures: Unlabelled, optimiser: Any
) -> None:
    composition = started(world)
    schedule = replace(DESCENT, optimiser=optimiser)
    done = fit(composition, SAR(pictures, margin=1e-9, radius=0.5, floor=9.0), schedule)
    assert bits(composition.values) == bits(away_from_zero(world))
    assert [row.loss for row in done.history] == [None, 0.0, 0.0]
    assert [row.forgotten for row in done.history] == [0, 0, 0]
    assert done.notes == ()


def test_forgetting_puts_back_the_start_and_clears_the_momentum(
    world: colours.World, pictures: Unlabelled
) -> None:
    """A floor above all entropies: every step is a collapse."""
    composition = started(world)
    term = SAR(pictures, margin=1.1, radius=0.05, floor=9.0)
    loop = Loop(Trainable.coefficients(composition), term * 1.0, DESCENT, Last())
    for row in loop.run(*NOTHING):
        assert bits(composition.values) == bits(away_from_zero(world))
        assert row.forgotten == 3 * row.epoch
        assert not [name for name in loop.state().tensors if name.startswith("moment.")]
    assert loop.history[-1].forgotten == 6


def test_momentum_is_there_as_long_as_nothing_is_forgotten(
    world: colours.World, pictures: Unlabelled
) -> None:
    composition = started(world)
    loop = Loop(
        Trainable.coefficients(composition), SAR(pictures, margin=0.5, floor=0.0) * 1.0, DESCENT, Last()
    )
    list(loop.run(*NOTHING))
    assert bool(loop.state().tensors["moment.momentum_buffer.values"].any())


def test_how_often_was_forgotten_is_in_the_history_and_in_the_notes(
    world: colours.World, pictures: Unlabelled
) -> None:
    done = fit(started(world), SAR(pictures, margin=1.1, floor=9.0), DESCENT)
    assert [row.forgotten for row in done.history] == [0, 3, 6]
    assert [
        note
        for note in done.notes
        if "collapsed 6 times" in note and "began again from the start values" in note
    ]
    none = fit(started(world), SAR(pictures, margin=1.1, floor=0.0), DESCENT)
    assert [row.forgotten for row in none.history] == [0, 0, 0]
    assert not [note for note in none.notes if "collapsed" in note]


def test_runs_without_sar_do_not_speak_of_forgetting(world: colours.World, pictures: Unlabelled) -> None:
    done = fit(world.composition(), Contrastive(pictures), replace(DESCENT, epochs=1))
    assert all(row.forgotten is None for row in done.history)
    assert _doubts([EpochRow(loss=1.0, forgotten=0)]) == []


def test_terms_that_do_not_agree_on_the_radius_are_refused(world: colours.World, refused: Refused) -> None:
    splits = [task.split("train").unlabelled() for task in (world.target, world.control)]
    for changes in ({"radius": 0.1}, {"floor": 0.1}):
        with refused("OBJECTIVE", 2, "radius or floor"):
            fit(world.composition(), SAR(splits[0]) + SAR(splits[1], **changes), DESCENT)
    fit(world.composition(), SAR(splits[0]) + SAR(splits[1], margin=0.3), replace(DESCENT, epochs=1))


# what goes wrong


def test_a_step_that_fails_at_the_worst_point_does_not_leave_it_behind(
    world: colours.World, pictures: Unlabelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Composition.forward, []

    def full(self: Composition, images: Tensor) -> Tensor:
        calls.append(len(images))
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(self, images)

    monkeypatch.setattr(Composition, "forward", full)
    composition = started(world)
    with pytest.raises(ResourceError):
        fit(composition, SAR(pictures, margin=1.1, floor=0.0), DESCENT)
    assert bits(composition.values) == bits(away_from_zero(world))


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_gradient_that_overflowed_in_half_precision_moves_nothing(bad: float) -> None:
    """A scaler leaves such a step out, if it gets so far."""
    own = tensors([0.1, -0.2])
    own[0].grad = torch.tensor([bad, 1.0])
    Perturbation(own, 0.05).climb()
    assert own[0].tolist() == torch.tensor([0.1, -0.2]).tolist()
