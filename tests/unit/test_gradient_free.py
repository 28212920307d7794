"""Learning from losses alone: what is tried, counted, kept and left alone, against a closed form."""

from __future__ import annotations

import builtins
import gc
import math
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from aniso.classes import ClassList
from aniso.compose import Composition, Partition
from aniso.data import Labelled
from aniso.data.batches import Batches
from aniso.data.images import ArrayImages
from aniso.learn import Best, CoefficientNorm, CrossEntropy, Entropy, FixMatch, Last, gradient_free
from aniso.learn._training import validation as gauge
from aniso.learn.gradient_free import evolve, objective_loss
from aniso.learn.keep import Lowest
from aniso.learn.objectives import DataTerm, Objective, TermInputs
from aniso.learn.tracking import Tracker
from aniso.learn.unwrap import encoder_of
from aniso.models.encoder import Encoder, Family
from aniso.models.transforms import Pixels
from aniso.records import EpochRow
from aniso.vectors import Bank

pytest.importorskip("nevergrad")

Refused = Callable[..., AbstractContextManager[Any]]

SIDE, WIDTH = 4, 3
CLASSES = ("red", "green", "blue")
GOAL = (0.3, -0.2, 0.5)
WHOLE, BLOCKS = Partition.whole(), Partition.blocks()


class Line(nn.Module):
    """Features are linear in the weights, and so in coefficients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3 * SIDE * SIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


def pictures(name: str = "made", count: int = 6, role: str = "train", seed: int = 3) -> Labelled:
    drawn = np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3)).astype(np.uint8)
    labels = tuple(i % 3 for i in range(count))
    return Labelled(name, ClassList(CLASSES), ArrayImages(drawn, name), labels, role=role)


@dataclass(frozen=True)
class Distance(DataTerm):
    """From features to a point: convex, with a minimum that least squares find."""

    split: Labelled
    spoilt: bool = False

    @property
    def name(self) -> str:
        return "distance"

    def identity(self) -> dict[str, Any]:
        return {"loss": "distance"}

    def views(self, model: nn.Module) -> tuple[Any, ...]:
        return (encoder_of(model).transforms.eval,)

    def loss(self, seen: TermInputs) -> Tensor:
        found = (seen.features[0] - torch.tensor(GOAL)).square().sum(-1).mean()
        return found * math.nan if self.spoilt else found


SPLIT = pictures()
TERM = Distance(SPLIT)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    g = torch.Generator().manual_seed(7)
    head = torch.randn(len(CLASSES), WIDTH, generator=g)
    family = Family(lambda network, x: network(x), own_head=lambda _: (head, None), own_classes=CLASSES)
    return Encoder("line", Line(), family, Pixels(SIDE))


@pytest.fixture(scope="module")
def bank(encoder: Encoder) -> Bank:
    base = encoder.state_dict()
    return Bank.build(
        encoder, {name: tiny.tuned(base, i, 4.0) for i, name in enumerate("ab", 1)}, allow_distant=True
    )


@pytest.fixture
def made(encoder: Encoder, bank: Bank) -> Callable[..., Composition]:
    return lambda partition=WHOLE: Composition(encoder, bank, partition)


def least_squares(composition: Composition) -> tuple[Tensor, float]:
    """The coefficients that are best, and their loss."""
    (batch,) = Batches(SPLIT, composition.model.transforms.eval, size=len(SPLIT))

    def at(values: Tensor) -> Tensor:
        with torch.no_grad():
            composition.values.copy_(values)
            return composition(batch.inputs).double().reshape(-1)

    count = composition.values.numel()
    zero = at(torch.zeros(count))
    columns = torch.stack([at(row) - zero for row in torch.eye(count)], 1)
    goal = torch.tensor(GOAL, dtype=torch.float64).repeat(len(SPLIT))
    solved = torch.linalg.lstsq(columns, (goal - zero)[:, None]).solution[:, 0]
    left = float((zero + columns @ solved - goal).square().sum() / len(SPLIT))
    at(torch.zeros(count))
    return solved, left


class Watched:
    """Every try: its values and its loss, and what held while it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries: list[tuple[tuple[float, ...], float]] = []
        self.grad: set[bool] = set()
        self.threads: set[str] = set()

        def counted(composition: Composition, objective: Objective, seed: int = 0) -> float:
            found = objective_loss(composition, objective, seed)
            self.tries.append((tuple(composition.values.tolist()), found))
            self.threads.add(threading.current_thread().name)
            return found

        really = Distance.loss

        def loss(term: Distance, seen: TermInputs) -> Tensor:
            self.grad.add(torch.is_grad_enabled() or any(f.requires_grad for f in seen.features))
            return really(term, seen)

        monkeypatch.setattr(gradient_free, "objective_loss", counted)
        monkeypatch.setattr(Distance, "loss", loss)

    @property
    def losses(self) -> list[float]:
        return [loss for _, loss in self.tries]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture(autouse=True, scope="module")
def _threads_end() -> Iterator[None]:
    yield
    gc.collect()  # what optimisers left behind must not wait when the tests are over


# a closed form


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("partition", [WHOLE, BLOCKS], ids=str)
def test_a_known_minimum_is_found(
    made: Callable[..., Composition], partition: Partition, parallel: int
) -> None:
    composition = made(partition)
    best, left = least_squares(composition)
    assert float(best.abs().max()) < 1.5 and composition.values.numel() == (2 if partition is WHOLE else 4)
    start = objective_loss(composition, TERM * 1.0)
    done = evolve(composition, TERM, evaluations=300, parallel=parallel)
    found = objective_loss(composition, TERM * 1.0)
    assert left <= found + 1e-6 and found - left < 1e-3 * (start - left)
    torch.testing.assert_close(composition.values.detach().double(), best, atol=0.05, rtol=0)
    assert done.history[-1].loss == pytest.approx(found, abs=1e-6)
    assert done.coefficients is not None and torch.equal(done.coefficients.values, composition.values)


@pytest.mark.parametrize(
    ("evaluations", "parallel"),
    [
        *((1, 1), (1, 2), (2, 1), (2, 3), (5, 2), (30, 1)),
        *((30, 2), (100, 3), (200, 1)),
    ],
)
def test_any_number_of_tries_can_be_made(
    made: Callable[..., Composition], watched: Watched, evaluations: int, parallel: int
) -> None:
    evolve(made(), TERM, evaluations=evaluations, parallel=parallel)
    assert len(watched.tries) == evaluations


# what is tried


@pytest.mark.parametrize("evaluations", [1, 2, 5, 7])
@pytest.mark.parametrize("parallel", [1, 2])
def test_the_base_is_tried_first_and_tries_are_counted_honestly(
    made: Callable[..., Composition], watched: Watched, evaluations: int, parallel: int
) -> None:
    composition, said = made(), []
    done = evolve(
        composition,
        TERM,
        evaluations=evaluations,
        parallel=parallel,
        progress=lambda *words: said.append(words),
    )
    assert len(watched.tries) == evaluations == done.history[-1].evaluations
    assert (0.0, 0.0) in [values for values, _ in watched.tries[:parallel]]
    counts = [min(parallel * (i + 1), evaluations) for i in range(-(-evaluations // parallel))]
    assert said == [("evaluations", count, evaluations) for count in counts]  # the last round is cut
    # the best of all is kept, so it is never worse than the base
    values, loss = min(watched.tries, key=lambda one: one[1])
    assert done.history[-1].loss == loss <= objective_loss(made(), TERM * 1.0)
    assert tuple(composition.values.tolist()) == values


def test_if_nothing_is_better_than_the_base_it_stays(made: Callable[..., Composition]) -> None:
    composition = made()
    done = evolve(composition, 0.0 * TERM + CoefficientNorm(), evaluations=12)
    assert not composition.values.any() and done.history[-1].loss == 0


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize(
    "bound",
    [1.5, 0.05],
)
def test_bounds_are_kept_to_without_a_word(
    made: Callable[..., Composition], watched: Watched, parallel: int, bound: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        evolve(made(), -1.0 * TERM, evaluations=8, bound=bound, parallel=parallel)
    sizes = [abs(value) for values, _ in watched.tries for value in values]
    assert max(sizes) <= bound * (1 + 1e-6) and any(sizes)


def test_tries_at_once_have_the_losses_that_they_have_alone(
    made: Callable[..., Composition], watched: Watched
) -> None:
    before = torch.get_num_threads()
    objective = CrossEntropy(SPLIT, "few_shot") + 0.1 * CoefficientNorm()
    evolve(made(), objective, evaluations=9, parallel=3, seed=4)
    assert len(watched.threads) > 1 and threading.main_thread().name not in watched.threads
    assert torch.get_num_threads() == before
    composition = made()
    for values, loss in list(watched.tries):
        with torch.no_grad():
            composition.values.copy_(torch.tensor(values))
        assert objective_loss(composition, objective, 4) == pytest.approx(loss, rel=1e-6)


def test_all_terms_count_with_their_weights(made: Callable[..., Composition]) -> None:
    composition = made()
    with torch.no_grad():
        composition.values.copy_(torch.tensor([0.5, -0.25]))
    parts = [TERM, CrossEntropy(SPLIT, "eval"), CoefficientNorm()]
    alone = [objective_loss(composition, (TERM * 0.0) + part) for part in parts]
    whole = objective_loss(composition, 2.0 * parts[0] - 0.5 * parts[1] + 3.0 * parts[2])
    assert whole == pytest.approx(2 * alone[0] - 0.5 * alone[1] + 3 * alone[2], rel=1e-6)


def test_a_loss_over_several_batches_is_that_of_all_pictures(
    made: Callable[..., Composition], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = objective_loss(made(), TERM * 1.0)
    monkeypatch.setattr(gradient_free, "_AT_ONCE", 4)  # a last batch of two
    assert objective_loss(made(), TERM * 1.0) == pytest.approx(expected, rel=1e-6)


def test_terms_without_labels_can_be_minimised_too(made: Callable[..., Composition]) -> None:
    done = evolve(made(), Entropy(SPLIT.unlabelled()), evaluations=10)
    assert done.history[-1].loss <= done.history[1].loss


# chance


def test_the_same_seed_gives_the_same_and_another_does_not(
    made: Callable[..., Composition], watched: Watched
) -> None:
    found = []
    for seed, disturbed in ((0, 1), (0, 2), (1, 1), (2**32 + 7, 1)):
        np.random.seed(disturbed)
        random.seed(disturbed)
        torch.manual_seed(disturbed)
        watched.tries.clear()
        evolve(made(), TERM, evaluations=12, parallel=2, seed=seed)
        found.append(sorted(watched.tries))
    assert found[0] == found[1] and found[0] != found[2] and found[3] not in found[:3]


def test_views_are_drawn_by_the_seed_and_are_the_same_for_every_try(made: Callable[..., Composition]) -> None:
    term = CrossEntropy(pictures(count=9), "few_shot") * 1.0
    one, same, other = (objective_loss(made(), term, seed) for seed in (0, 0, 1))
    assert one == same != other


@pytest.mark.parametrize("parallel", [1, 2])
def test_nothing_is_drawn_from_generators_that_are_others(
    made: Callable[..., Composition], parallel: int
) -> None:
    np.random.seed(5)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()
    evolve(made(), CrossEntropy(SPLIT, "few_shot"), evaluations=8, parallel=parallel)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    after: Any = np.random.get_state()
    assert np.array_equal(after[1], before[2][1]) and after[2] == before[2][2]


# gradients and memory


@pytest.mark.parametrize("parallel", [1, 2])
def test_no_graph_is_built(made: Callable[..., Composition], watched: Watched, parallel: int) -> None:
    composition, saved = made(BLOCKS), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        evolve(composition, TERM, evaluations=6, parallel=parallel, keep=Best(pictures("val", role="val")))
    assert watched.grad == {False} and not saved
    assert composition.values.grad is None and composition.values.requires_grad
    assert all(p.grad is None for p in composition.parameters())
    assert torch.is_grad_enabled()


def test_no_thread_is_left_behind_when_it_ends_early(
    made: Callable[..., Composition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for ever keeps Python from ending, if anything still holds the error."""
    before, calls = set(threading.enumerate()), []

    def third_fails(composition: Composition, objective: Objective, seed: int = 0) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the disk has gone")
        return objective_loss(composition, objective, seed)

    monkeypatch.setattr(gradient_free, "objective_loss", third_fails)
    with pytest.raises(OSError, match="gone") as held:
        evolve(made(BLOCKS), TERM, evaluations=50)
    left = set(threading.enumerate()) - before
    del held
    assert not left


# what is kept


def test_the_last_look_is_kept_unless_said_otherwise(made: Callable[..., Composition]) -> None:
    rows: list[EpochRow] = []
    done = evolve(made(), TERM, evaluations=40, look_done=rows.append)
    assert done.kept == len(done.history) - 1 == gradient_free.LOOKS == len(rows) - 1
    assert [row.evaluations for row in done.history] == [0, *range(4, 41, 4)]
    assert done.history[0].loss is None and all(row.accuracy == {} for row in done.history)
    losses = [row.loss for row in done.history[1:]]
    assert losses == sorted(losses, reverse=True)
    assert [row.epoch for row in rows] == list(range(11)) and all(row.kept for row in rows)
    assert [row.kept for row in done.history] == [False] * 10 + [True]


def test_looks_are_as_many_as_tries_if_those_are_few(made: Callable[..., Composition]) -> None:
    for evaluations, parallel, looks in ((3, 1, 3), (3, 2, 2), (25, 1, 10), (8, 3, 3)):
        done = evolve(made(), TERM, evaluations=evaluations, parallel=parallel)
        assert len(done.history) == 1 + looks and done.history[-1].evaluations == evaluations


def test_looks_can_be_sent_to_a_tracker(
    made: Callable[..., Composition], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[list[str], int]] = []
    fake = SimpleNamespace(
        init=lambda **how: None,
        log=lambda numbers, step: sent.append(([*numbers], step)),
        finish=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    evolve(made(), TERM, evaluations=2, look_done=Tracker("trackio"))
    assert sent == [([], 0), (["loss"], 1), (["loss"], 2)]


def accuracies(monkeypatch: pytest.MonkeyPatch, values: list[float], asked: list[Any]) -> None:
    """What is measured, one look after another."""
    progress = iter(values)

    class Found:
        def __init__(self, value: float) -> None:
            self.value = value

    def evaluate(composition: Composition, split: Labelled, **how: Any) -> Found:
        asked.append((split.name, composition.values.detach().clone()))
        return Found(next(progress))

    monkeypatch.setattr(gauge, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.9, 0.1, 0.2, 0.3], 0),
        ([0.5, 0.5, 0.5, 0.5], 0),
        ([0.1, 0.9, 0.2, 0.9], 1),
        ([0.1, 0.2, 0.3, 0.4], 3),
    ],
    ids=["the start", "the first of equals", "one on the way", "the last"],
)
def test_the_best_look_is_kept_the_start_included(
    made: Callable[..., Composition], monkeypatch: pytest.MonkeyPatch, values: list[float], kept: int
) -> None:
    asked: list[Any] = []
    accuracies(monkeypatch, [*values, *[0.0] * 20], asked)
    composition = made()
    val = pictures("val", role="val")
    done = evolve(composition, TERM, evaluations=30, keep=Best(val))
    looked = [row.accuracy["val"] for row in done.history]
    chosen = max(range(len(looked)), key=lambda i: (looked[i], -i))
    assert done.kept == chosen and looked[0] == values[0]
    assert [row.kept for row in done.history] == [i == chosen for i in range(len(looked))]
    assert looked[chosen] == max(values) == values[kept]
    # measured once for each that differs from the one before, and never on anything else
    assert {name for name, _ in asked} == {"val"}
    measured = {value: each for value, (_, each) in zip(values, asked, strict=False)}
    if values.count(values[kept]) == 1:
        assert torch.equal(composition.values, measured[values[kept]])
    if kept == 0:
        assert not composition.values.any()


def test_it_ends_once_the_rule_says_so(
    made: Callable[..., Composition], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    accuracies(monkeypatch, [0.5, 0.9, 0.1, 0.2] + [0.0] * 40, asked)  # target, control; at the start, then
    composition = made()
    keep = Lowest(pictures("target", role="val"), pictures("control", role="val", seed=8))
    done = evolve(composition, -1.0 * TERM, evaluations=100, keep=keep)
    assert done.kept == 0 and not composition.values.any()
    assert done.history[-1].accuracy["control"] == 0.2
    assert len(watched.tries) == done.history[-1].evaluations < 100


def test_nothing_is_learned_from_or_chosen_by_a_test_split(
    made: Callable[..., Composition], refused: Refused
) -> None:
    test = pictures("test", role="test")
    with refused("LEARN-TEST", 2):
        evolve(made(), CrossEntropy(test), evaluations=2)
    with refused("LEARN-TEST", 2):
        evolve(made(), TERM, evaluations=2, keep=Best(test))


def test_the_model_is_as_it_was(made: Callable[..., Composition], encoder: Encoder) -> None:
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    evolve(made(), TERM, evaluations=5, parallel=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())


# what is refused


@pytest.mark.parametrize(
    "how",
    [
        {"evaluations": 0},
        {"parallel": 0},
        {"bound": 0.0},
        {"bound": -1.0},
        {"bound": math.inf},
        {"bound": math.nan},
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(
    made: Callable[..., Composition], watched: Watched, how: dict[str, Any], refused: Refused
) -> None:
    with refused("OBJECTIVE", 2, str(next(iter(how.values())))):
        evolve(made(), TERM, **how)
    assert not watched.tries


def test_what_has_no_fixed_loss_is_refused(
    made: Callable[..., Composition], watched: Watched, refused: Refused
) -> None:
    with refused("OBJECTIVE", 2, "fixed targets", "made"):
        evolve(made(), TERM + FixMatch(SPLIT.unlabelled()), evaluations=2)
    with refused("OBJECTIVE", 2, "CrossEntropy(split)"):
        evolve(made(), CoefficientNorm(), evaluations=2)
    assert not watched.tries


def test_without_nevergrad_it_is_said_what_to_install(
    made: Callable[..., Composition], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    really = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "nevergrad":
            raise ImportError(name)
        return really(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with refused("MODEL-LIBRARY", 2, "pip install 'aniso[evolve]'"):
        evolve(made(), TERM, evaluations=2)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_loss_that_is_no_number_is_said(
    made: Callable[..., Composition], refused: Refused, parallel: int
) -> None:
    threads = torch.get_num_threads()
    with refused("LEARN-NONFINITE", 6, "nan"):
        evolve(made(), Distance(SPLIT, spoilt=True), evaluations=4, parallel=parallel)
    assert torch.get_num_threads() == threads


def test_keeping_the_last_is_what_is_done_anyway(made: Callable[..., Composition]) -> None:
    one, two = made(), made()
    evolve(one, TERM, evaluations=6, keep=Last())
    evolve(two, TERM, evaluations=6)
    assert torch.equal(one.values, two.values)
