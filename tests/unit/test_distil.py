"""Distillation from own vectors: closed forms, targets computed once, and no label that is ever read."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import colours
import numpy as np
import pytest
import runs
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.classes import ClassList
from aniso.compose import Composition, Partition
from aniso.data import Batches, Labelled, Unlabelled
from aniso.data.images import ArrayImages
from aniso.errors import StoppedError
from aniso.learn import (
    Agreement,
    Distil,
    FeatureCache,
    Objective,
    Schedule,
    Teacher,
    evolve,
    fit,
    search,
)
from aniso.learn import features as compute_features
from aniso.learn.gradient_free import objective_loss
from aniso.learn.objectives import TermInputs
from aniso.learn.objectives.distil import MATCHES, kept_items
from aniso.models.encoder import Encoder, Family
from aniso.models.transforms import Pixels
from aniso.vectors import Bank

Refused = Callable[..., AbstractContextManager[Any]]

SIDE, WIDTH, CLASSES = 2, 5, ("red", "green", "blue")
WHOLE = Partition.whole()
NO_CACHE = FeatureCache(None)


class Line(nn.Module):
    """Linear in its weights, so that features are linear in the coefficients."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.fc = nn.Linear(SIDE * SIDE * 3, WIDTH, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.randn(self.fc.weight.shape, generator=g))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


def labelled(name: str = "made", count: int = 12, seed: int = 3) -> Labelled:
    drawn = np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3)).astype(np.uint8)
    return Labelled(
        name, ClassList(CLASSES), ArrayImages(drawn, name), tuple(i % 3 for i in range(count)), role="val"
    )


@dataclass(frozen=True)
class Linear:
    encoder: Encoder
    bank: Bank

    def composition(self, values: tuple[float, ...] = (0.0, 0.0)) -> Composition:
        made = Composition(self.encoder, self.bank, WHOLE)
        with torch.no_grad():
            made.values.copy_(torch.tensor(values))
        return made

    def teacher(self, vector: str, cache: FeatureCache = NO_CACHE) -> Teacher:
        return Teacher.of(self.encoder, self.bank, vector, cache=cache)

    def features(self, split: Unlabelled, *values: float) -> Tensor:
        (batch,) = Batches(split, self.encoder.transforms.eval, size=len(split))
        with torch.no_grad():
            found: Tensor = self.composition(values)(batch.inputs)
        return found


@pytest.fixture(scope="module")
def linear() -> Linear:
    head = torch.randn(len(CLASSES), WIDTH, generator=torch.Generator().manual_seed(7))
    family = Family(lambda network, x: network(x), own_head=lambda _: (head, None), own_classes=CLASSES)
    encoder = Encoder("line", Line(), family, Pixels(SIDE))
    base = encoder.state_dict()
    tuned = {name: tiny.tuned(base, i, 1.0) for i, name in enumerate("ab", 1)}
    return Linear(encoder, Bank.build(encoder, tuned, allow_distant=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


SPLIT = labelled().unlabelled()


def inputs(features: Tensor, logits: Tensor, target: Tensor) -> TermInputs:
    return TermInputs((features,), (logits,), None, {"teacher": target})


# closed forms


def test_the_targets_are_a_forward_pass_with_the_vector_at_one(linear: Linear) -> None:
    for vector, values in (("a", (1.0, 0.0)), ("b", (0.0, 1.0))):
        found = linear.teacher(vector).features(SPLIT)
        torch.testing.assert_close(found, linear.features(SPLIT, *values), rtol=1e-6, atol=1e-6)


def test_the_targets_of_a_clip_are_those_of_the_composition(world: colours.World) -> None:
    split = world.target.val.unlabelled()
    whole = world.composition(Partition.whole())
    with torch.no_grad():
        whole.values.copy_(torch.tensor([0.0, 1.0]))
    expected = compute_features(whole, split)[0]
    found = Teacher.of(world.encoder, world.bank, "two", cache=NO_CACHE).features(split)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("match", MATCHES)
def test_the_loss_is_least_where_the_student_is_the_teacher(linear: Linear, match: str) -> None:
    term = Distil(SPLIT, linear.teacher("b"), match) * 1.0
    at_teacher = objective_loss(linear.composition((0.0, 1.0)), term)
    at_base = objective_loss(linear.composition(), term)
    if match == "labels":  # of which the loss is the cross-entropy that the teacher itself has
        assert at_teacher < at_base
    else:
        assert at_teacher == pytest.approx(0, abs=1e-6) and at_base > 1e-3


def test_the_loss_on_features_is_a_parabola_in_the_coefficients(linear: Linear) -> None:
    zero, own = (linear.features(SPLIT, *values).double() for values in ((0.0, 0.0), (1.0, 0.0)))
    term = Distil(SPLIT, linear.teacher("a"), "features") * 1.0
    for scale in (0.0, 0.25, 1.0, 2.0):
        expected = float(((1 - scale) * (own - zero)).square().mean())
        found = objective_loss(linear.composition((scale, 0.0)), term)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("match", ["kl", "features", "cosine"])
def test_the_coefficients_of_the_teacher_are_found(linear: Linear, match: str) -> None:
    composition = linear.composition()
    schedule = Schedule(
        epochs=250, lr=0.1, batch_size=12, lr_schedule="cosine", weight_decay=0.0, warmup_steps=0
    )
    done = fit(composition, Distil(SPLIT, linear.teacher("b"), match), schedule)
    assert done.history[-1].loss == pytest.approx(0, abs=1e-3)
    if match != "cosine":  # which does not see the length of features
        torch.testing.assert_close(composition.values.detach(), torch.tensor([0.0, 1.0]), rtol=0, atol=0.05)


def test_two_teachers_give_the_least_squares_between_them(linear: Linear) -> None:
    """Features are linear in the coefficients, so the minimum of both errors solves normal equations."""
    one, two = labelled("one", 9, 5).unlabelled(), labelled("two", 9, 6).unlabelled()
    rows, goals = [], []
    for split, own in ((one, (1.0, 0.0)), (two, (0.0, 1.0))):
        zero = linear.features(split, 0.0, 0.0).double()
        columns = [linear.features(split, *e).double() - zero for e in ((1.0, 0.0), (0.0, 1.0))]
        rows.append(torch.stack([column.flatten() for column in columns], 1))
        goals.append((linear.features(split, *own).double() - zero).flatten())
    expected = torch.linalg.lstsq(torch.cat(rows), torch.cat(goals)[:, None]).solution[:, 0]
    terms = [Distil(split, linear.teacher(v), "features") for split, v in ((one, "a"), (two, "b"))]
    composition = linear.composition()
    schedule = Schedule(
        epochs=100, lr=0.1, batch_size=18, weight_decay=0.0, warmup_steps=0, lr_schedule="cosine"
    )
    fit(composition, sum(terms, start=Objective(())), schedule)
    torch.testing.assert_close(composition.values.detach().double(), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_kl_is_the_sum_of_p_log_p_over_q_times_the_squared_temperature(temperature: float) -> None:
    g = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(4, 3, generator=g, dtype=torch.double) for _ in range(2))
    p, q = ((z / temperature).exp() for z in (teacher, student))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    expected = temperature**2 * (p * (p / q).log()).sum(-1).mean()
    term = Distil(SPLIT, a_teacher(), "kl", temperature=temperature)
    torch.testing.assert_close(term.loss(inputs(student, student, teacher)), expected)


def a_teacher() -> Teacher:
    return Teacher("never asked", lambda: pytest.fail("composed"), NO_CACHE)  # type: ignore[arg-type]


def test_cosine_ignores_the_length_of_features() -> None:
    g = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(4, 3, generator=g, dtype=torch.double) for _ in range(2))
    term = Distil(SPLIT, a_teacher(), "cosine")
    expected = 1 - (functional.normalize(student) * functional.normalize(teacher)).sum(-1).mean()
    torch.testing.assert_close(term.loss(inputs(student, student, teacher)), expected)
    torch.testing.assert_close(term.loss(inputs(7 * student, student, teacher)), expected)


def test_labels_count_where_both_agree_or_the_teacher_is_as_confident() -> None:
    student = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 4.0], [2.0, 0.0]])
    teacher = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    # agrees; disagrees and more confident; disagrees and less confident; disagrees and equally confident
    assert kept_items(student, teacher).tolist() == [True, True, False, True]
    confidence = float(torch.tensor([2.0, 0.0]).softmax(-1)[0])
    assert kept_items(student, teacher, confidence).tolist() == [False, True, False, True]
    losses = functional.cross_entropy(student, torch.tensor([0, 0, 0, 1]), reduction="none")
    term = Distil(SPLIT, a_teacher(), "labels")
    expected = losses[[0, 1, 3]].sum() / 4
    torch.testing.assert_close(term.loss(inputs(student, student, teacher)), expected)


def test_a_batch_without_a_kept_item_has_a_loss_of_zero() -> None:
    student, teacher = torch.tensor([[0.0, 9.0]], requires_grad=True), torch.tensor([[1.0, 0.0]])
    term = Distil(SPLIT, a_teacher(), "labels")
    loss = term.loss(inputs(student, student, teacher))
    loss.backward()
    assert term.selective and float(loss) == 0.0
    assert student.grad is not None and not bool(student.grad.any())
    assert not Distil(SPLIT, a_teacher(), "kl").selective


# targets are computed once, one vector at a time


def test_targets_are_computed_once_and_then_read_from_the_cache(
    linear: Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    really = Line.forward
    monkeypatch.setattr(Line, "forward", lambda self, x: passes.append(len(x)) or really(self, x))
    cache = FeatureCache(tmp_path)
    first = linear.teacher("a", cache).features(SPLIT)
    assert sum(passes) == len(SPLIT)
    assert torch.equal(linear.teacher("a", cache).features(SPLIT), first)
    assert sum(passes) == len(SPLIT)
    assert not torch.equal(linear.teacher("b", cache).features(SPLIT), first)
    other = labelled("other", seed=9).unlabelled()
    assert not torch.equal(linear.teacher("a", cache).features(other), first)
    assert sum(passes) == 3 * len(SPLIT)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_another_vector_of_the_same_name_is_another_teacher(linear: Linear, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    tuned = {"a": tiny.tuned(linear.encoder.state_dict(), 5, 1.0)}
    changed = Linear(linear.encoder, Bank.build(linear.encoder, tuned, allow_distant=True))
    before, after = (one.teacher("a", cache) for one in (linear, changed))
    assert before.identity() != after.identity()
    assert not torch.equal(before.features(SPLIT), after.features(SPLIT))


def test_a_teacher_composes_its_own_vector_alone(linear: Linear) -> None:
    assert linear.teacher("b").compose().bank.names == ("b",)


def test_progress_names_the_teacher(linear: Linear) -> None:
    told: list[tuple[str, int, int]] = []
    terms = Distil(SPLIT, linear.teacher("a")) + Distil(replace(SPLIT, name="second"), linear.teacher("b"))
    quick = Schedule(epochs=1, lr=0.01, batch_size=12)
    fit(linear.composition(), terms, quick, progress=lambda *given: told.append(given))
    assert ("teacher a, features of made", 12, 12) in told
    assert ("teacher b, features of second", 12, 12) in told


# labels


def poisoned(split: Labelled) -> Labelled:
    """The same items with labels that any use would stumble over."""
    return replace(split, labels=tuple(math.nan for _ in split.labels))  # type: ignore[misc]


@pytest.mark.parametrize("match", MATCHES)
def test_labels_change_nothing(world: colours.World, match: str) -> None:
    quick = Schedule(epochs=2, lr=0.05, batch_size=8)
    learned = []
    for split in (world.target.val, poisoned(world.target.val)):
        part, rest = split.unlabelled().carve("held out", share=0.4)
        teacher = Teacher.of(world.encoder, world.bank, "one", cache=NO_CACHE)
        composition = world.composition()
        keep = Agreement((replace(part, name="held out"), teacher))
        chosen = fit(composition, Distil(rest, teacher, match), quick, keep=keep)
        last = fit(composition, Distil(rest, teacher, match), quick)
        learned.append((chosen.history, last.history, composition.values.detach().clone()))
    assert learned[0][:2] == learned[1][:2]
    assert torch.equal(learned[0][2], learned[1][2]) and bool(learned[0][2].any())


def test_a_split_with_labels_is_refused(linear: Linear, refused: Refused) -> None:
    with refused("OBJECTIVE", 2, "without labels"):
        Distil(labelled(), linear.teacher("a"))  # type: ignore[arg-type]
    with refused("KEEP", 2, "without labels"):
        Agreement((labelled(), linear.teacher("a")))  # type: ignore[arg-type]


# resuming


@pytest.mark.parametrize("match", ["kl", "features", "labels"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_run_is_resumed_exactly(world: colours.World, tmp_path: Path, match: str, steps: int) -> None:
    """Also within an epoch, and with the cache gone: the targets are computed again, to the same bits."""
    schedule = Schedule(epochs=2, lr=0.05, batch_size=4, micro_batch=3)
    part, rest = world.target.val.unlabelled().carve("held out", share=0.4, what="held out")

    def run(directory: str, cache: FeatureCache, **options: Any) -> Any:
        teacher = Teacher.of(world.encoder, world.bank, "two", cache=cache)
        composition = world.composition()
        keep = Agreement((part, teacher)) if match == "kl" else None
        place = tmp_path / directory
        done = fit(composition, Distil(rest, teacher, match), schedule, keep=keep, directory=place, **options)
        return composition.values.detach(), done.history

    expected = run("whole", FeatureCache(tmp_path / "cache"))
    with pytest.raises(StoppedError):
        run("cut", FeatureCache(tmp_path / "cache"), progress=runs.StopAfterSteps(steps))
    found = run("cut", NO_CACHE, resume=True)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert match == "kl" or bool(found[0].any())  # agreement may keep the start


def test_a_run_is_not_resumed_with_another_teacher(linear: Linear, tmp_path: Path, refused: Refused) -> None:
    quick = Schedule(epochs=1, lr=0.05, batch_size=12)
    fit(linear.composition(), Distil(SPLIT, linear.teacher("a")), quick, directory=tmp_path / "run")
    with refused("RUN-CHANGED", 3, "teacher.vector: a -> b"):
        fit(
            linear.composition(),
            Distil(SPLIT, linear.teacher("b")),
            quick,
            directory=tmp_path / "run",
            resume=True,
        )


# choosing by teachers


def test_agreement_is_the_share_of_equal_predictions(linear: Linear) -> None:
    head = linear.encoder.class_weights(SPLIT.classes)
    taught = head.logits(linear.features(SPLIT, 1.0, 0.0)).argmax(-1)
    keep = Agreement((SPLIT, linear.teacher("a")))
    points = (0.0, 0.5, 1.0, 1.5)
    found = search(linear.composition(), keep, points)
    for row, scale in zip(found.history, points, strict=True):
        own = head.logits(linear.features(SPLIT, scale, scale)).argmax(-1)
        assert row.agreement == {"made": pytest.approx(float((own == taught).float().mean()))}
        assert row.accuracy == {}


def test_the_scale_of_a_single_vector_is_one(linear: Linear) -> None:
    only = Composition(linear.encoder, linear.bank.only("a"), WHOLE)
    found = search(only, Agreement((SPLIT, linear.teacher("a"))), (0.0, 0.2, 1.0))
    assert found.scale == 1.0 and found.history[-1].agreement == {"made": 1.0}


def test_the_epoch_that_agrees_most_is_kept_and_the_first_of_equals() -> None:
    second = replace(SPLIT, name="second")
    keep = Agreement((SPLIT, a_teacher()), (second, a_teacher()))
    rows = [{"made": 0.5, "second": 0.5}, {"made": 0.9, "second": 0.3}, {"made": 0.3, "second": 0.9}]
    assert keep.choose(rows) == 1 and keep.choose(rows[:1]) == 0
    assert keep.splits == (SPLIT, second) and set(keep.teachers) == {"made", "second"}


def test_gradient_free_learning_matches_teachers(linear: Linear) -> None:
    pytest.importorskip("nevergrad")
    composition = linear.composition()
    term = Distil(SPLIT, linear.teacher("b"), "features")
    before = objective_loss(composition, term * 1.0)
    evolve(composition, term, evaluations=60, bound=2.0)
    assert objective_loss(composition, term * 1.0) < 0.2 * before


# faults


def test_a_vector_that_the_bank_does_not_have_is_named(linear: Linear, refused: Refused) -> None:
    with refused("BANK-NAME", 2, "'c'"):
        Teacher.of(linear.encoder, linear.bank, "c")


@pytest.mark.parametrize(
    "options",
    [{"match": "logits"}, {"temperature": 0.0}, {"temperature": math.inf}, {"confidence": 1.5}],
)
def test_options_that_mean_nothing_are_refused(options: Any, refused: Refused) -> None:
    with refused("OBJECTIVE", 2, "kl, features, cosine, labels"):
        Distil(SPLIT, a_teacher(), **options)


def test_a_teacher_is_needed(refused: Refused) -> None:
    with refused("OBJECTIVE", 2, "Teacher.of"):
        Distil(SPLIT, None)  # type: ignore[arg-type]


def test_agreement_needs_splits_with_different_names(refused: Refused) -> None:
    for pairs in ((), ((SPLIT, a_teacher()), (SPLIT, a_teacher()))):
        with refused("KEEP", 2, "each once"):
            Agreement(*pairs)
