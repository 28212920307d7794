"""Coefficients and a head learned together: rates, steps by hand, states, and what an epoch is chosen by."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import colours
import pytest
import torch
from runs import At
from torch import Tensor
from torch.nn import functional

from aniso.compose import Composition
from aniso.data import Labelled
from aniso.errors import StoppedError
from aniso.learn import Best, CoefficientNorm, CrossEntropy, Last, Schedule, Trainable, evaluate, fit
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.loop import Loop
from aniso.learn.features import features
from aniso.learn.heads import TipAdapter, new_head

Refused = Callable[..., AbstractContextManager[Any]]

SCHEDULE = Schedule(epochs=2, lr=0.2, batch_size=8, warmup_steps=0)
STEPS = 4  # of SCHEDULE on the target's 16 pictures


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


def head_of(world: colours.World, shots: Labelled, *, seed: int = 0, alpha: float = 1.0) -> TipAdapter:
    """As ``aniso fit few-shot --joint`` begins: the base's features of the shots."""
    base = world.encoder.class_weights(shots.classes)
    seen = features(world.encoder, shots, view="few_shot", views=2, seed=seed)
    return TipAdapter(base, alpha=alpha).remember(seen, torch.tensor(shots.labels))


def joint(
    world: colours.World, *, start: float = 0.0, **more: Any
) -> tuple[Composition, TipAdapter, Trainable]:
    composition = world.composition()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        composition.values.copy_(start * torch.randn(composition.values.shape, generator=rng))
    head = head_of(world, world.target.split("train"), **more)
    return composition, head, Trainable.coefficients(composition).with_head(head)


def term_of(world: colours.World, view: str = "few_shot") -> CrossEntropy:
    return CrossEntropy(world.target.split("train"), view)


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# what is trained


def test_a_heads_parameters_are_trained_beside_the_coefficients(world: colours.World) -> None:
    composition, head, trained = joint(world)
    alone = Trainable.coefficients(composition)
    assert list(trained.tensors) == ["values", "head.keys", "head.alpha", "head.beta"]
    assert trained.tensors["values"] is composition.values
    assert trained.tensors["head.keys"] is head.keys
    assert trained.count == alone.count + head.count == alone.count + head.keys.numel() + 2
    assert trained.slots is alone.slots
    assert alone.head is None and not alone.rates


def test_who_it_is_includes_where_the_head_begins(world: colours.World) -> None:
    found = [
        joint(world, seed=seed, alpha=alpha)[2].identity for seed, alpha in ((0, 1), (1, 1), (0, 2), (0, 1))
    ]
    assert found[0] == found[3]
    assert found[0] != found[1] and found[0] != found[2]
    assert found[0]["head"]["kind"] == "tip"
    assert {k: v for k, v in found[0].items() if k != "head"} == Trainable.coefficients(
        world.composition()
    ).identity


@pytest.mark.parametrize("kind", ["lpp", "linear"])
def test_heads_that_have_no_rates_are_learned_afterwards(
    world: colours.World, kind: str, refused: Refused
) -> None:
    head = new_head(kind, world.encoder.class_weights(world.target.classes))
    with refused("HEAD-FEATURES", 2, f"'{kind}'", "--joint", "--head tip"):
        Trainable.coefficients(world.composition()).with_head(head)


# rates


def test_every_tensor_has_its_own_rate_and_only_coefficients_decay(world: colours.World) -> None:
    _, _, trained = joint(world)
    schedule = replace(SCHEDULE, weight_decay=0.3)
    loop = Loop(trained, term_of(world) * 1.0, schedule, Last())
    names = {id(tensor): name for name, tensor in trained.tensors.items()}
    found = {
        names[id(tensor)]: (group["full_lr"], group["weight_decay"])
        for group in loop._optimiser.param_groups
        for tensor in group["params"]
    }
    assert found == {
        "values": (0.2, 0.3),
        "head.keys": (1e-3, 0.0),
        "head.alpha": (1e-1, 0.0),
        "head.beta": (1e-1, 0.0),
    }


def test_without_a_head_there_is_one_group_as_before(world: colours.World) -> None:
    loop = Loop(Trainable.coefficients(world.composition()), term_of(world) * 1.0, SCHEDULE, Last())
    (group,) = loop._optimiser.param_groups
    assert (group["full_lr"], group["weight_decay"]) == (0.2, SCHEDULE.weight_decay)


@pytest.mark.parametrize(("shape", "warmup"), [("cosine", 0), ("constant", 0), ("cosine", 2)])
def test_the_schedules_shape_holds_for_every_rate(world: colours.World, shape: Any, warmup: int) -> None:
    _, _, trained = joint(world)
    schedule = replace(SCHEDULE, epochs=10, lr_schedule=shape, warmup_steps=warmup)
    loop = Loop(trained, term_of(world) * 1.0, schedule, Last())
    seen: list[list[float]] = []

    def progress(what: str, done: int, total: int) -> None:
        seen.append([group["lr"] for group in loop._optimiser.param_groups])

    rows = loop.run(progress, lambda: None)
    for _ in range(3):  # the start and two epochs
        next(rows)
    assert len(seen) == 4
    for step, rates in enumerate(seen):
        share = 1.0
        if step < warmup:
            share = (step + 1) / warmup
        elif shape == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (20 - warmup)))
        assert rates == pytest.approx([share * rate for rate in (0.2, 1e-3, 1e-1, 1e-1)])


# steps by hand


def loss_by_hand(
    composition: Composition, head: TipAdapter, images: Tensor, labels: Tensor, tensors: list[Tensor]
) -> Tensor:
    """Tip-Adapter's logits on a composition's features, written down once more."""
    _, keys, alpha, beta = tensors
    rows = functional.normalize(composition(images), dim=-1)
    near = torch.exp(-beta * (1 - rows @ keys.T))
    owners = torch.eye(len(head.names))[head.owners]
    logits = rows @ head.base_weight.T + alpha * near @ owners
    return -logits.log_softmax(-1)[range(len(labels)), labels].mean()


@pytest.mark.parametrize("clip", [1e6, 1e-3])
def test_a_step_is_adamw_on_both_at_once(world: colours.World, clip: float) -> None:
    schedule = Schedule(
        epochs=1, lr=0.02, batch_size=16, max_grad_norm=clip, weight_decay=0.3, warmup_steps=0
    )
    composition, head, trained = joint(world, start=0.1)
    start = {name: tensor.double() for name, tensor in trained.copied().items()}
    term = term_of(world)
    ((batch,),) = list(EpochSampler([(term.split, term.views(world.encoder))], schedule, 0).epoch(0))
    tensors = list(trained.tensors.values())
    assert batch.labels is not None
    loss = loss_by_hand(composition, head, batch.inputs, batch.labels, tensors)
    grads = [grad.double() for grad in torch.autograd.grad(loss, tensors)]
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
    done = fit(trained, term, schedule)
    assert done.history[1].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    rates = {"values": 0.02, "head.keys": 1e-3, "head.alpha": 1e-1, "head.beta": 1e-1}
    for (name, rate), grad in zip(rates.items(), grads, strict=True):
        grad = grad * min(1.0, clip / (norm + 1e-6))
        decay = 0.3 if name == "values" else 0.0
        expected = start[name] * (1 - rate * decay) - rate * grad / (grad.abs() + 1e-8)
        clear = grad.abs() > 1e-5 * grad.abs().max()  # Adam turns even rounding into a whole step
        assert float(clear.double().mean()) > 0.9
        found = trained.tensors[name].detach().double()
        torch.testing.assert_close(found[clear], expected[clear], rtol=1e-4, atol=rate * 1e-2)
        assert not torch.equal(found, start[name]), name
    assert torch.equal(composition.values, trained.tensors["values"])
    assert torch.equal(head.keys, trained.tensors["head.keys"])


@pytest.mark.parametrize("micro", [3, 5])
def test_slices_of_a_step_give_the_gradients_of_the_whole(world: colours.World, micro: int) -> None:
    found = []
    for size in (None, micro):
        _, _, trained = joint(world, start=0.1)
        schedule = replace(SCHEDULE, batch_size=16, micro_batch=size)
        term = term_of(world)
        loop = Loop(trained, term * 1.0, schedule, Last())
        (batches,) = EpochSampler([(term.split, term.views(world.encoder))], schedule, 0).epoch(0)
        loop._gradients(batches)
        found.append([tensor.grad for tensor in trained.tensors.values()])
    for whole, sliced in zip(*found, strict=True):
        assert whole is not None and sliced is not None and bool(whole.any())
        torch.testing.assert_close(sliced, whole, rtol=1e-3, atol=1e-5)


def test_terms_about_coefficients_do_not_touch_the_head(world: colours.World) -> None:
    found = []
    for objective in (term_of(world) * 1.0, term_of(world) + 5.0 * CoefficientNorm()):
        _, _, trained = joint(world, start=0.1)
        schedule, term = replace(SCHEDULE, batch_size=16), term_of(world)
        (batches,) = EpochSampler([(term.split, term.views(world.encoder))], schedule, 0).epoch(0)
        Loop(trained, objective, schedule, Last())._gradients(batches)
        found.append({name: tensor.grad for name, tensor in trained.tensors.items()})
    for name, plain in found[0].items():
        more = found[1][name]
        assert plain is not None and more is not None
        assert torch.equal(plain, more) == (name != "values"), name


# what comes of it


def test_learning_together_lowers_the_loss(world: colours.World) -> None:
    _, head, trained = joint(world)
    before = trained.copied()
    done = fit(trained, term_of(world), replace(SCHEDULE, epochs=4))
    losses = [row.loss for row in done.history[1:]]
    assert losses[-1] < 0.8 * losses[0]
    for name, tensor in trained.tensors.items():
        assert not torch.equal(tensor, before[name]), name
    assert torch.equal(head.owners, torch.tensor(world.target.split("train").labels))


def test_an_epoch_is_chosen_by_what_the_head_answers(world: colours.World) -> None:
    composition, head, trained = joint(world, alpha=-5.0)  # against what it remembers
    split = world.target.split("val")
    start = evaluate(world.encoder, split, head=head).value
    assert start != evaluate(world.encoder, split).value
    seen: list[tuple[dict[str, Tensor], float]] = []

    def epoch_done(row: dict[str, Any]) -> None:
        seen.append((trained.copied(), evaluate(composition, split, head=head).value))

    rates = replace(SCHEDULE, epochs=3, lr=0.5)
    done = fit(trained, term_of(world), rates, keep=Best(split), epoch_done=epoch_done)
    measured = [row.accuracy["target val"] for row in done.history]
    assert measured == [value for _, value in seen]
    assert measured[0] == start
    assert done.kept == max(range(4), key=lambda i: (measured[i], -i))
    assert same(trained.copied(), seen[done.kept][0])
    assert evaluate(composition, split, head=head).value == measured[done.kept]


def test_the_start_comes_back_whole_if_nothing_is_better(world: colours.World) -> None:
    task = world.target
    train = task.split("train")
    swapped = Labelled("swapped", task.classes, train.items, tuple(1 - i for i in train.labels))
    good = world.composition()
    fit(good, CrossEntropy(train), replace(SCHEDULE, epochs=6))
    head = head_of(world, train, alpha=0.01)
    trained = Trainable.coefficients(good).with_head(head)
    before = trained.copied()
    done = fit(trained, CrossEntropy(swapped), SCHEDULE, keep=Best(task.split("val")))
    assert done.history[0].accuracy["target val"] > 0.5
    assert done.kept == 0
    assert same(trained.copied(), before)


def test_a_head_answers_for_other_pictures_among_their_classes(world: colours.World) -> None:
    """The head knows green, blue and red; the target has red and blue, in another order."""
    shots, split = world.control.split("train"), world.target.split("train")
    assert set(split.classes.names) < set(shots.classes.names)
    head = head_of(world, shots)
    composition = world.composition()
    trained = Trainable.coefficients(composition).with_head(head)
    schedule = Schedule(epochs=1, lr=1e-9, batch_size=16)
    done = fit(trained, CrossEntropy(split, "eval"), schedule, keep=Best(world.target.split("val")))
    places = [shots.classes.names.index(name) for name in split.classes.names]
    with torch.no_grad():
        logits = head_of(world, shots).logits(features(world.encoder, split)[0])[:, places]
    expected = functional.cross_entropy(logits, torch.tensor(split.labels))
    assert done.history[1].loss == pytest.approx(float(expected), rel=1e-4)


def test_classes_that_the_head_does_not_know_are_refused(world: colours.World, refused: Refused) -> None:
    _, _, trained = joint(world)
    with refused("DATA-CLASS", 3, "green"):
        fit(trained, CrossEntropy(world.control.split("train")), SCHEDULE)
    with refused("DATA-CLASS", 3, "green"):
        fit(trained, term_of(world), SCHEDULE, keep=Best(world.control.split("val")))


# going on

FAST = replace(SCHEDULE, lr=0.5)


def run(
    world: colours.World, directory: Path | None, n: int = 0, **more: Any
) -> tuple[dict[str, Tensor], Any]:
    _, _, trained = joint(world, alpha=-20.0)  # a bad start, so that something better is kept
    keep = Best(world.target.split("val"))
    done = fit(trained, term_of(world), FAST, keep=keep, directory=directory, progress=At(n), **more)
    return trained.copied(), done.history


@pytest.fixture(scope="module")
def whole(world: colours.World) -> tuple[dict[str, Tensor], Any]:
    """What a run comes to that nobody interrupts."""
    found = run(world, None)
    assert not found[1][0].kept  # else nothing learned would be compared
    return found


@pytest.mark.parametrize("n", range(1, STEPS + 4))  # three measurements among the steps
def test_a_run_that_was_interrupted_anywhere_ends_the_same(
    world: colours.World, whole: tuple[dict[str, Tensor], Any], tmp_path: Path, n: int
) -> None:
    with pytest.raises(StoppedError):
        run(world, tmp_path / "run", n)
    tensors, history = run(world, tmp_path / "run", resume=True)
    assert same(tensors, whole[0])
    assert history == whole[1]


def test_a_run_does_not_go_on_with_another_head(
    world: colours.World, tmp_path: Path, refused: Refused
) -> None:
    with pytest.raises(StoppedError):
        run(world, tmp_path / "run", 3)
    _, _, other = joint(world, alpha=-20.0, seed=1)
    keep = Best(world.target.split("val"))
    for trained in (other, Trainable.coefficients(world.composition())):
        with refused("RUN-CHANGED", 3, "head"):
            fit(trained, term_of(world), FAST, keep=keep, directory=tmp_path / "run", resume=True)
