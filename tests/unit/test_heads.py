"""Heads on toy features: closed forms, bounds that hold, files that come back, failures that are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from aniso.errors import AnisoError, InputError
from aniso.learn.heads import (
    LPP,
    Head,
    LinearProbe,
    RestrictedHead,
    SavedHead,
    TipAdapter,
    load_head,
    new_head,
    tip,
)
from aniso.learn.heads.lpp import step_sizes
from aniso.models import ClassWeights
from aniso.weights import SafetensorsFile
from aniso.weights.files import RawFile

HEADS = ("tip", "lpp", "linear")

Refused = Callable[..., AbstractContextManager[Any]]
Damage = Callable[[dict[str, Tensor], dict[str, str]], object]

WIDTH = 8
NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibex", "jay", "kite", "lynx", "mole")
OF = {"model": "abc"}
SMALL = settings(deadline=None, max_examples=60, database=None, derandomize=True)


def weights(
    classes: int = 3, width: int = WIDTH, *, by_angle: bool = True, seed: int = 1, scale: float = 20.0
) -> ClassWeights:
    """Of a CLIP, rows as long as ``scale``; or a linear layer with biases."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(classes, width, generator=rng)
    if by_angle:
        return ClassWeights(NAMES[:classes], scale * functional.normalize(drawn, dim=-1))
    return ClassWeights(NAMES[:classes], drawn, torch.randn(classes, generator=rng), by_angle=False)


def shots(
    counts: tuple[int, ...] = (5, 3, 4),
    views: int = 4,
    width: int = WIDTH,
    seed: int = 2,
    spread: float = 0.7,
) -> tuple[Tensor, Tensor]:
    """Features of any length around a centre for each class, so many pictures of each; and labels."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(counts), width, generator=rng)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=rng)]
    drawn = centres[labels] + spread * torch.randn(views, len(labels), width, generator=rng)
    return drawn * (0.5 + torch.rand(views, len(labels), 1, generator=rng)), labels


def unit(features: Tensor) -> Any:
    """Normalised, as double precision numbers of numpy's."""
    rows = features.double().numpy()
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def tensors(head: Head) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in head.tensors().items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def new(kind: str, steps: int = 20, base: ClassWeights | None = None) -> Head:
    head = new_head(kind, base or weights())
    head.steps = steps
    return head


@cache
def learned(kind: str, *, by_angle: bool = True) -> Head:
    """To be asked and saved, not to be changed."""
    head = new(kind, base=weights(by_angle=by_angle))
    head.fit(*shots())
    return head


# before anything is learned


@pytest.mark.parametrize(
    ("kind", "by_angle"), [("tip", True), ("tip", False), ("lpp", True), ("linear", True), ("linear", False)]
)
def test_until_it_learns_a_head_answers_as_the_class_weights(kind: str, by_angle: bool) -> None:
    base = weights(5, by_angle=by_angle)
    features = shots((4, 4, 4, 4, 4))[0]
    found, expected = new_head(kind, base).logits(features), base.logits(features)
    if kind == "tip":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    assert new_head(kind, base).names == base.names


def test_a_head_keeps_a_copy_of_the_class_weights() -> None:
    base = weights()
    before = base.weight.clone()
    for kind in HEADS:
        new(kind, 3, base).fit(*shots())
    assert torch.equal(base.weight, before)


def test_a_kind_that_does_not_exist_is_refused_with_those_that_do(refused: Refused) -> None:
    with refused("USAGE", 2, "'tipp'", "linear, lpp, tip", "--head tip"):
        new_head("tipp", weights())


# Tip-Adapter


def test_tip_with_alpha_zero_is_zero_shot() -> None:
    features, labels = shots()
    head = TipAdapter(weights(), alpha=0.0).remember(features, labels)
    assert len(head.keys) == len(labels)
    assert torch.equal(head.logits(features), weights().logits(features))


@pytest.mark.parametrize("by_angle", [True, False])
def test_tips_logits_are_those_of_the_formula(by_angle: bool) -> None:
    base = weights(by_angle=by_angle)
    features, labels = shots()
    asked = shots((2, 2, 2), views=1, seed=9)[0][0]
    head = TipAdapter(base).remember(features, labels)
    with torch.no_grad():
        head.keys.mul_(1.3).add_(0.1)  # learned keys have any length
        head.alpha.fill_(2.5)
        head.beta.fill_(3.25)
    text = base.weight.double().numpy()
    before = unit(asked) @ text.T
    if base.bias is not None:
        before = asked.double().numpy() @ text.T + base.bias.double().numpy()
    near = unit(asked) @ head.keys.detach().double().numpy().T
    expected = before + 2.5 * np.exp(-3.25 * (1 - near)) @ np.eye(3)[labels.numpy()]
    np.testing.assert_allclose(head.logits(asked).detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_tips_keys_are_the_normalised_means_of_normalised_views() -> None:
    features, labels = shots()
    head = TipAdapter(weights(), alpha=0.5, beta=4.0).remember(features, labels)
    mean = unit(features).mean(0)
    expected = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    np.testing.assert_allclose(head.keys.detach().numpy(), expected, atol=1e-6)
    assert torch.equal(head.owners, labels)
    assert (float(head.alpha), float(head.beta)) == (0.5, 4.0)


def test_tips_gradient_is_the_same_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = shots((7, 5, 6))
    found = []
    for rows in (4096, 5):
        monkeypatch.setattr(tip, "_ROWS", rows)
        head = TipAdapter(weights()).remember(features, labels)
        loss = head._gradients(features[0], labels)
        found.append((loss, head.keys.grad, head.alpha.grad, head.beta.grad))
    whole, sliced = found
    assert whole[0] == pytest.approx(sliced[0], rel=1e-5)
    for one, other in zip(whole[1:], sliced[1:], strict=True):
        assert one is not None and other is not None and bool(one.any())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_tip_learns_every_one_of_its_parameters() -> None:
    features, labels = shots(spread=1.5)
    before = TipAdapter(weights()).remember(features, labels)
    head = TipAdapter(weights(), steps=40)
    losses = head.fit(features, labels).losses
    start = functional.cross_entropy(before.logits(features[0]), labels).item()
    assert losses[0] == pytest.approx(start, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    for name in ("keys", "alpha", "beta"):
        assert not torch.equal(getattr(head, name), getattr(before, name)), name


def test_tips_first_step_moves_by_its_rates() -> None:
    """Adam's first step is the rate, whatever the gradient's size, where that is far above its epsilon."""
    features, labels = shots()
    before = TipAdapter(weights()).remember(features, labels)
    before._gradients(features[0], labels)
    head = TipAdapter(weights(), steps=1, decay=0.0)
    head.fit(features, labels)
    for name, rate in (("keys", 1e-3), ("alpha", 1e-1), ("beta", 1e-1)):
        start = getattr(before, name)
        step = rate * start.grad / (start.grad.abs() + 1e-4)
        torch.testing.assert_close(getattr(head, name), start - step, rtol=1e-4, atol=rate * 1e-3)


def test_views_take_turns_in_being_learned_from() -> None:
    features, labels = shots(views=3, spread=1.5)
    head = TipAdapter(weights(), steps=7)
    expected: list[float] = []

    def progress(what: str, step: int, steps: int) -> None:
        """After a step: what the next one will find."""
        with torch.no_grad():
            expected.append(functional.cross_entropy(head.logits(features[step % 3]), labels).item())

    losses = head.fit(features, labels, progress=progress).losses
    assert losses[1:] == pytest.approx(expected[:-1], rel=1e-5)
    assert len({round(loss, 3) for loss in losses[:3]}) == 3


# LP++


@pytest.mark.parametrize(("count", "width"), [(5, 9), (9, 5), (6, 6)])
def test_step_sizes_come_from_the_largest_eigenvalue_and_the_largest_sum(count: int, width: int) -> None:
    rng = torch.Generator().manual_seed(count)
    features = functional.normalize(torch.randn(count, width, generator=rng), dim=-1)
    cosines = features @ weights(3, width).weight.T / 20
    step, text_step = step_sizes(features, cosines)
    rows = features.double().numpy()
    assert step == pytest.approx(4 * count / np.linalg.eigvalsh(rows.T @ rows).max(), rel=1e-9)
    squares = [sum(float(c) ** 2 for c in cosines[:, k]) for k in range(3)]
    assert text_step == pytest.approx(count / (4 * max(squares)), rel=1e-6)


class LPPByHand:
    """LP++ once more, in double precision, with gradients by autograd."""

    def __init__(self, base: ClassWeights, features: Tensor, labels: Tensor, text: float = 250.0) -> None:
        directions = torch.from_numpy(unit(base.weight))
        views = torch.from_numpy(unit(features))
        self.rows, self.wanted = views.flatten(0, 1), labels.repeat(len(views))
        self.cosines = self.rows @ directions.T
        classes = range(len(base.names))
        self.prototypes = torch.stack([views.mean(0)[labels == k].sum(0) for k in classes])
        own = [self.cosines[self.wanted == k, k].mean() for k in classes]
        self.alpha = torch.full((len(own),), text * float(torch.stack(own).mean()), dtype=torch.double)
        self.sizes = step_sizes(self.rows, self.cosines)
        self.losses: list[float] = []

    def loss(self) -> Tensor:
        return functional.cross_entropy(
            self.rows @ self.prototypes.T + self.alpha * self.cosines, self.wanted
        )

    def _descend(self, name: str, size: float) -> None:
        before: Tensor = getattr(self, name).requires_grad_()
        (grad,) = torch.autograd.grad(self.loss(), before)
        setattr(self, name, (before - size * grad).detach())

    def run(self, steps: int, text_every: int) -> LPPByHand:
        for number in range(1, steps + 1):
            self.losses.append(float(self.loss().detach()))
            self._descend("prototypes", self.sizes[0])
            if number % text_every == 0:
                self._descend("alpha", self.sizes[1])
        return self


def test_lpp_begins_with_sums_of_mean_views_and_one_multiplier_for_all() -> None:
    features, labels = shots((1, 4, 7))
    by_hand = LPPByHand(weights(), features, labels)
    head = LPP(weights(), steps=1)
    (first,) = head.fit(features, labels).losses
    assert first == pytest.approx(float(by_hand.loss()), rel=1e-5)
    start = by_hand.alpha.float()
    torch.testing.assert_close(head.alpha.detach(), start, rtol=1e-5, atol=1e-5)  # no step of its own yet
    means = torch.tensor([float(by_hand.cosines[by_hand.wanted == k, k].mean()) for k in range(3)])
    assert float(head.alpha[0].detach()) == pytest.approx(250 * float(means.mean()), rel=1e-5)
    pooled = by_hand.cosines.gather(1, by_hand.wanted[:, None]).mean()
    assert abs(float(pooled) / float(means.mean()) - 1) > 0.01  # else pictures and classes weigh the same
    by_hand._descend("prototypes", by_hand.sizes[0])
    torch.testing.assert_close(head.prototypes.detach().double(), by_hand.prototypes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text_every", [1, 3])
def test_lpps_steps_are_those_of_gradient_descent(text_every: int) -> None:
    features, labels = shots((2, 5, 3), spread=1.5)
    head = LPP(weights(), steps=7, text=20.0, text_every=text_every, momentum=0.0, bias=False)
    losses = head.fit(features, labels).losses
    by_hand = LPPByHand(weights(), features, labels, text=20.0).run(7, text_every)
    np.testing.assert_allclose(losses, by_hand.losses, rtol=1e-4)
    torch.testing.assert_close(head.prototypes.detach().double(), by_hand.prototypes, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(head.alpha.detach().double(), by_hand.alpha, rtol=1e-3, atol=1e-3)


@SMALL
@given(
    counts=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    views=st.integers(1, 4),
    width=st.integers(2, 12),
    seed=st.integers(0, 2**32),
    spread=st.floats(0, 3),
    text=st.sampled_from([0.0, 1.0, 20.0, 250.0]),
    text_every=st.integers(1, 10),
)
def test_lpps_loss_never_rises(
    counts: list[int], views: int, width: int, seed: int, spread: float, text: float, text_every: int
) -> None:
    features, labels = shots(tuple(counts), views, width, seed, spread)
    base = weights(len(counts), width, seed=seed)
    head = LPP(base, steps=40, text=text, text_every=text_every, momentum=0.0, bias=False)
    losses = head.fit(features, labels).losses
    rounding = [2e-6 * (1 + loss) for loss in losses]
    assert all(b <= a + r for a, b, r in zip(losses, losses[1:], rounding, strict=False)), losses
    assert losses[-1] <= losses[0]


def test_lpp_needs_text(refused: Refused) -> None:
    with refused("HEAD-FEATURES", 2, "no text", "--head linear"):
        new_head("lpp", weights(by_angle=False))


def test_lpp_cannot_learn_from_nothing(refused: Refused) -> None:
    features, labels = shots()
    with refused("LEARN-NONFINITE", 6, "nothing to learn from"):
        new_head("lpp", weights()).fit(torch.zeros_like(features), labels)


# the linear probe


SEEDS = (2, 3, 4, 10, 12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_linear_probe_reaches_the_optimum(seed: int) -> None:
    features, labels = shots((6, 3, 5, 4), seed=seed, spread=1.5)
    head = LinearProbe(weights(4), steps=100)
    losses = head.fit(features, labels).losses
    rows = torch.from_numpy(unit(features)).flatten(0, 1)
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    loss = functional.cross_entropy(rows @ weight.T + bias, labels.repeat(4)) + 5e-4 * weight.square().sum()
    for grad in torch.autograd.grad(loss, [weight, bias]):
        assert float(grad.norm()) < 1e-3
    assert losses[-1] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert losses[0] == pytest.approx(np.log(4), rel=1e-5)  # from zero on
    assert list(losses) == sorted(losses, reverse=True)


@pytest.mark.parametrize("decay", [1e-2, 1e-3, 1e-4])
def test_the_linear_probe_is_scikit_learns_logistic_regression(decay: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = shots((6, 3, 5, 4), spread=1.5)
    head = LinearProbe(weights(4), steps=100, decay=decay)
    loss = head.fit(features, labels).losses[-1]
    rows, wanted = unit(features).reshape(-1, WIDTH), labels.repeat(4).numpy()
    other = linear_model.LogisticRegression(C=1 / (len(rows) * decay), tol=1e-10, max_iter=5000)
    expected = other.fit(rows, wanted).decision_function(rows)
    found = head.logits(features).detach().double().flatten(0, 1).numpy()
    centred = [x - x.mean(-1, keepdims=True) for x in (found, expected)]  # softmax does not see a constant
    np.testing.assert_allclose(centred[0], centred[1], atol=1e-2)
    right = torch.from_numpy(expected).log_softmax(-1)[range(len(wanted)), wanted]
    assert loss == pytest.approx(-float(right.mean()) + decay / 2 * np.square(other.coef_).sum(), rel=1e-4)


@pytest.mark.parametrize("by_angle", [True, False])
def test_the_linear_probe_sees_directions_alone_once_it_has_learned(by_angle: bool) -> None:
    head = learned("linear", by_angle=by_angle)
    features = shots(seed=5)[0]
    torch.testing.assert_close(head.logits(7 * features), head.logits(features), rtol=1e-4, atol=1e-4)


# all of them


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_learns_what_it_is_shown(kind: str) -> None:
    features, labels = shots(spread=0.5)
    head = new(kind, 60, weights(scale=2.0))
    losses = head.fit(features, labels).losses
    right = [(c.logits(features).argmax(-1) == labels).float().mean() for c in (head.base, head)]
    assert right[0] < 0.7 < 0.9 < right[1]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_features_give_the_same_bits_and_chance_is_left_alone(kind: str) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        head = new(kind)
        found.append((head.fit(*shots()), tensors(head)))
        assert torch.equal(before, torch.get_rng_state())
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", HEADS)
def test_learning_again_begins_anew(kind: str) -> None:
    twice, once = new(kind), new(kind)
    twice.fit(*shots(seed=7))
    assert twice.fit(*shots()) == once.fit(*shots())
    assert same(tensors(twice), tensors(once))


@pytest.mark.parametrize("kind", HEADS)
def test_the_length_of_features_says_nothing(kind: str) -> None:
    features, labels = shots()
    found = []
    for scale in (1.0, 64.0):  # a power of two: not a bit of a mantissa changes
        head = new(kind)
        head.fit(scale * features, labels)
        found.append(head.logits(features))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_one_view_may_come_without_a_dimension_for_views(kind: str) -> None:
    features, labels = shots(views=1)
    found = [new(kind), new(kind)]
    assert found[0].fit(features, labels) == found[1].fit(features[0], labels)
    assert same(tensors(found[0]), tensors(found[1]))


@pytest.mark.parametrize("kind", HEADS)
def test_labels_may_be_a_list(kind: str) -> None:
    features, labels = shots()
    found = [new(kind, 5), new(kind, 5)]
    assert found[0].fit(features, labels.tolist()) == found[1].fit(features, labels)
    assert same(tensors(found[0]), tensors(found[1]))


@pytest.mark.parametrize("kind", HEADS)
def test_learning_does_not_change_what_it_was_given(kind: str) -> None:
    features, labels = shots()
    kept = features.clone(), labels.clone()
    new(kind).fit(features, labels, held_out=(features[0], labels))
    assert torch.equal(features, kept[0]) and torch.equal(labels, kept[1])


@pytest.mark.parametrize("kind", HEADS)
def test_progress_is_told_step_by_step(kind: str) -> None:
    seen: list[tuple[str, int, int]] = []
    new(kind, 3).fit(*shots(), progress=lambda *said: seen.append(said))
    assert seen == [(f"head: {kind}", n, 3) for n in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["tip", "linear"])
def test_a_model_without_text_can_have_a_head(kind: str) -> None:
    features, labels = shots(spread=0.5)
    base = weights(by_angle=False)
    head = new(kind, 60, base)
    assert torch.equal(head.logits(features), base.logits(features))
    losses = head.fit(features, labels).losses
    assert losses[-1] < losses[0]
    right = [(c.logits(features).argmax(-1) == labels).float().mean() for c in (base, head)]
    assert right[1] > right[0]


def test_tip_learns_with_the_logits_that_it_will_answer_with() -> None:
    features, labels = shots()
    base = weights(by_angle=False)
    head = TipAdapter(base, alpha=0.0, steps=1)  # zero-shot before the first step
    (first,) = head.fit(30 * features, labels).losses
    expected = functional.cross_entropy(base.logits(30 * features[0]), labels).item()
    assert first == pytest.approx(expected, rel=1e-4)


# the step that is kept


@pytest.mark.parametrize("kind", HEADS)
def test_the_last_step_is_kept_if_there_is_nothing_to_choose_by(kind: str) -> None:
    done = new(kind, 13).fit(*shots())
    assert (done.kept, len(done.losses)) == (13, 13)


@pytest.mark.parametrize("kind", HEADS)
def test_zero_shot_is_kept_if_nothing_is_better(kind: str) -> None:
    base, head = weights(), new(kind, 25)
    fresh = tensors(head)
    features, labels = shots()
    held_out = shots((20, 20, 20), views=1, seed=8)[0][0]
    perfect = base.logits(held_out).argmax(-1)
    done = head.fit(features, labels, held_out=(held_out, perfect))
    assert done.kept == 0
    assert len(done.losses) == 25  # and all of them were worse, or no better
    assert same(tensors(head), fresh)
    torch.testing.assert_close(head.logits(held_out), base.logits(held_out), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("seed", [2, 4, 5])
def test_the_step_that_is_best_on_held_out_features_is_kept(kind: str, seed: int) -> None:
    features, labels = shots((2, 1, 2), seed=seed, spread=1.2)
    held_out, wanted = shots((30, 30, 30), views=1, seed=seed, spread=1.2)
    head = new(kind, 37, weights(scale=1.0))

    def right() -> int:
        return int((head.logits(held_out[0]).argmax(-1) == wanted).sum())

    counts, states = {0: right()}, {0: tensors(head)}

    def look(what: str, step: int, steps: int) -> None:
        if step % 10 == 0 or step == steps:
            counts[step], states[step] = right(), tensors(head)

    done = head.fit(features, labels, held_out=(held_out[0], wanted), progress=look)
    assert list(counts) == [0, 10, 20, 30, 37]
    assert done.kept == max(counts, key=lambda step: (counts[step], -step)) > 0
    assert same(tensors(head), states[done.kept])
    assert right() == counts[done.kept]


# what is refused


@pytest.mark.parametrize("kind", HEADS)
def test_classes_are_those_of_the_class_weights_whatever_labels_occur(kind: str, refused: Refused) -> None:
    features, labels = shots()
    head = new_head(kind, weights(5))
    before = tensors(head)
    with refused("HEAD-CLASS", 3, "2 of 5 classes", "dog", "elk", "without --head") as refusal:
        head.fit(features, labels)
    assert refusal.error.facts["found"] == ["dog", "elk"]
    assert same(tensors(head), before)
    with refused("HEAD-CLASS", 3, "1 of 3 classes", "ant"):
        new_head(kind, weights()).fit(features[:, labels > 0], labels[labels > 0])


def test_the_first_of_many_absent_classes_are_listed_and_the_rest_counted(refused: Refused) -> None:
    features, labels = shots((3,))
    with refused("HEAD-CLASS", 3, "12 of 13", "2 more classes", "bee") as refusal:
        LPP(weights(13)).fit(features, labels)
    assert refusal.error.facts["found"] == list(NAMES[1:11])


@pytest.mark.parametrize("kind", HEADS)
def test_a_single_class_is_nothing_to_tell_apart(kind: str, refused: Refused) -> None:
    with refused("HEAD-CLASS", 3, "'ant'", "only class"):
        new_head(kind, weights(1)).fit(*shots((4,)))


@pytest.mark.parametrize("odd", [-1, 3, 1000])
def test_a_label_of_no_class_is_refused(odd: int, refused: Refused) -> None:
    features, labels = shots()
    labels[4] = odd
    with refused("HEAD-CLASS", 2, f"{odd} is not a label of 3 classes", "0 to 2"):
        TipAdapter(weights()).fit(features, labels)


def test_labels_are_whole_numbers(refused: Refused) -> None:
    features, labels = shots()
    with refused("HEAD-CLASS", 2, "torch.float32"):
        LPP(weights()).fit(features, labels.float())


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_features_that_are_not_finite_are_an_error_that_names_the_picture(
    kind: str, value: float, refused: Refused
) -> None:
    features, labels = shots()
    features[2, 6, 3] = features[1, 8, 0] = value
    name = NAMES[int(labels[6])]
    with refused("LEARN-NONFINITE", 6, "2 images", f"image 6, '{name}'"):
        new_head(kind, weights()).fit(features, labels)


@pytest.mark.parametrize(
    "change",
    [
        lambda f, y: (f[..., :-1], y),
        lambda f, y: (f[:, :-1], y),
        lambda f, y: (f, y[:-1]),
        lambda f, y: (f[0, 0], y),
        lambda f, y: (f[None], y),
        lambda f, y: (f.transpose(0, 1), y),
    ],
)
@pytest.mark.parametrize("kind", HEADS)
def test_what_are_no_features_with_labels_is_refused(
    kind: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], refused: Refused
) -> None:
    with refused("HEAD-FEATURES", 2, "images x 8"):
        new_head(kind, weights()).fit(*change(*shots()))


def test_a_loss_that_is_not_finite_is_an_error(refused: Refused) -> None:
    with refused("LEARN-NONFINITE", 6, "loss of the head", "step 1"):
        TipAdapter(weights(), alpha=3e38, beta=0.0).fit(*shots())


@pytest.mark.parametrize("kind", HEADS)
def test_labels_may_be_whole_numbers_of_another_length(kind: str) -> None:
    features, labels = shots()
    short, usual = new(kind, 3), new(kind, 3)
    assert short.fit(features, labels.int()) == usual.fit(features, labels)
    assert same(tensors(short), tensors(usual))


@pytest.mark.parametrize("change", [lambda f, y: (f, y[:, None]), lambda f, y: (f[:0], y)])
@pytest.mark.parametrize("kind", HEADS)
def test_labels_in_rows_and_no_views_at_all_are_refused(
    kind: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], refused: Refused
) -> None:
    with refused("HEAD-FEATURES", 2):
        new(kind, 3).fit(*change(*shots()))


@pytest.mark.parametrize("kind", HEADS)
def test_held_out_features_that_are_not_finite_are_an_error(kind: str, refused: Refused) -> None:
    features, labels = shots()
    with refused("LEARN-NONFINITE", 6):
        new(kind, 3).fit(features, labels, held_out=(features[0] * float("nan"), labels))


def test_a_whole_number_is_a_number_for_tip() -> None:
    assert float(TipAdapter(weights(), alpha=1, beta=5).beta) == 5.0


# files


@pytest.mark.parametrize(
    ("kind", "by_angle"), [("tip", True), ("tip", False), ("lpp", True), ("linear", True), ("linear", False)]
)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_head_comes_back_from_its_file_bit_for_bit(
    kind: str, by_angle: bool, fresh: bool, tmp_path: Path
) -> None:
    base = weights(by_angle=by_angle)
    base = ClassWeights(("ant", "a ümlaut/\n", ""), base.weight, base.bias, by_angle)
    head = new(kind, base=base)
    if not fresh:
        head.fit(*shots())
    of = {"model": "abc", "bank": "def"}
    written = head.save(tmp_path / "head", of)
    found = load_head(tmp_path / "head")
    assert found.features == of
    assert type(found.head) is type(head)
    assert (found.head.names, found.head.by_angle) == (base.names, by_angle)
    assert found.head.settings() == head.settings()
    assert same(tensors(found.head), tensors(head))
    features = shots(seed=4)[0]
    assert torch.equal(found.head.logits(features), head.logits(features))
    assert found.head.save(tmp_path / "again", of) == written


@pytest.mark.parametrize(
    "head",
    [
        TipAdapter(weights(), steps=7, alpha=2.0, beta=1.5),
        LPP(weights(), steps=7, text=100.0, text_every=3),
        LinearProbe(weights(), steps=7, decay=0.5),
    ],
    ids=HEADS,
)
def test_a_head_from_a_file_learns_as_it_would_have(head: Head, tmp_path: Path) -> None:
    head.save(tmp_path / "head", OF)
    found = load_head(tmp_path / "head").head
    assert found.fit(*shots()) == head.fit(*shots())
    assert same(tensors(found), tensors(head))


def test_a_heads_bytes_are_those_of_its_file(tmp_path: Path) -> None:
    head = learned("tip")
    head.save(tmp_path / "head", OF)
    assert head.to_bytes(OF) == (tmp_path / "head").read_bytes()


def test_a_file_is_not_overwritten_unasked(tmp_path: Path, refused: Refused) -> None:
    learned("tip").save(tmp_path / "head", OF)
    before = (tmp_path / "head").read_bytes()
    with refused("OUT-EXISTS", 2):
        learned("lpp").save(tmp_path / "head", OF)
    assert (tmp_path / "head").read_bytes() == before
    learned("lpp").save(tmp_path / "head", OF, overwrite=True)
    assert load_head(tmp_path / "head").head.kind == "lpp"


def changed(path: Path, damage: Damage) -> Path:
    """A copy of a head's file with something else in it."""
    found, meta = load_file(path), dict(SafetensorsFile(RawFile(path)).metadata)
    del meta["checksum"]  # as in files that something else wrote: damage alone is told by it
    damage(found, meta)
    other = path.with_name("damaged")
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, other, meta)
    return other


def index(**other: object) -> Damage:
    def damage(found: dict[str, Tensor], meta: dict[str, str]) -> None:
        said = {**json.loads(meta["index"]), **other}
        meta["index"] = json.dumps({key: value for key, value in said.items() if value is not None})

    return damage


def test_the_machinery_of_damage_does_none_itself(tmp_path: Path) -> None:
    learned("tip").save(tmp_path / "head", OF)
    assert load_head(changed(tmp_path / "head", index())).features == OF


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda t, m: m.pop("format"),
        lambda t, m: m.update(format="aniso coefficients"),
        lambda t, m: m.update(schema="2"),
        lambda t, m: m.pop("schema"),
        lambda t, m: m.pop("index"),
        lambda t, m: m.update(index="{"),
        lambda t, m: m.update(index="[" * 100_000),
        lambda t, m: m.update(index=m["index"].replace('"ant"', '"\\ud800"')),
        lambda t, m: t["base_weight"][1, 2].fill_(float("nan")),
        lambda t, m: t["base_weight"][1, 2].fill_(float("inf")),
        lambda t, m: t.pop("base_weight"),
        lambda t, m: t.pop(sorted(t)[0]),
        lambda t, m: t.update(other=torch.zeros(2)),
        lambda t, m: t.update(base_weight=t["base_weight"][:2]),
        lambda t, m: t.update(base_weight=t["base_weight"][0]),
        index(classes=["ant", "bee"]),
        index(classes=["ant", "bee", "cat", "dog"]),
        index(classes=["ant", "bee", "bee"]),
        index(classes=["ant", "bee", 3]),
        index(classes=None),
        index(kind="forest"),
        index(kind=None),
        index(by_angle="yes"),
        index(settings={"steps": 3, "zoo": 1}),
        index(settings={"base": 1}),
        index(settings={"steps": "many"}),
        index(settings={"steps": True}),
        index(features={"model": 3}),
        index(more=1),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    kind: str, damage: Damage, tmp_path: Path, refused: Refused
) -> None:
    learned(kind).save(tmp_path / "head", OF)
    with refused("HEAD-FILE", 3, str(tmp_path / "damaged")):
        load_head(changed(tmp_path / "head", damage))


@pytest.mark.parametrize(
    ("kind", "name"), [("tip", "keys"), ("tip", "beta"), ("lpp", "prototypes"), ("linear", "bias")]
)
def test_a_tensor_that_is_missing_misshapen_or_not_finite_is_refused(
    kind: str, name: str, tmp_path: Path, refused: Refused
) -> None:
    learned(kind).save(tmp_path / "head", OF)
    misshapen: Damage = lambda t, m: t.update({name: torch.zeros(2, 2, 2)})  # noqa: E731
    damages: list[Damage] = [
        lambda t, m: t.pop(name),
        lambda t, m: t.update({name: torch.full_like(t[name], float("nan"))}),
        *([] if name == "keys" else [misshapen]),
    ]
    for damage in damages:
        with refused("HEAD-FILE", 3):
            load_head(changed(tmp_path / "head", damage))


@pytest.mark.parametrize(
    "damage",
    [
        lambda t, m: t["owners"].fill_(3),
        lambda t, m: t["owners"].fill_(-1),
        lambda t, m: t.update(owners=t["owners"][:3]),
        lambda t, m: t.update(owners=t["owners"].float()),
        lambda t, m: t.update(keys=t["keys"][:, :5]),
        lambda t, m: t.update(base_weight=t["base_weight"][:, :5]),
        lambda t, m: t.update(keys=torch.zeros(2, 2, 2)),
    ],
)
def test_tips_keys_and_their_owners_fit_each_other_and_the_classes(
    damage: Damage, tmp_path: Path, refused: Refused
) -> None:
    learned("tip").save(tmp_path / "head", OF)
    with refused("HEAD-FILE", 3):
        load_head(changed(tmp_path / "head", damage))


@pytest.mark.parametrize("kind", HEADS)
def test_a_file_cut_short_or_with_a_changed_byte_never_ends_in_another_error(
    kind: str, tmp_path: Path
) -> None:
    learned(kind).save(tmp_path / "head", OF)
    whole = (tmp_path / "head").read_bytes()
    path = tmp_path / "damaged"
    for length in {*range(0, len(whole), 37), *range(9), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(AnisoError):
            load_head(path)
    refusals = 0
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            load_head(path)
        except AnisoError:
            refusals += 1
    assert refusals > 10  # what is no part of the header may well be another number


@pytest.mark.parametrize("what", ["nothing", "directory", "other tensors"])
def test_what_is_no_file_of_a_head_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "head"
    if what == "directory":
        path.mkdir()
    elif what == "other tensors":
        save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(AnisoError) as caught:
        load_head(path)
    assert caught.value.code in ("FILE-MISSING", "FILE-KIND", "HEAD-FILE")
    assert caught.value.exit_code == 3


# whose features


COMPOSED = {"model": "m", "bank": "b", "partition": "p", "coefficients": "c", "linearised": "False"}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model", "another model"),
        ("bank", "another bank"),
        ("partition", "another composition"),
        ("coefficients", "another composition"),
        ("linearised", "another composition"),
    ],
)
def test_features_of_something_else_are_refused_and_said_of_what(
    key: str, said: str, refused: Refused
) -> None:
    saved = SavedHead(learned("tip"), COMPOSED)
    saved.require_features(COMPOSED, "file")
    with refused("HEAD-FEATURES", 3, said, "'file'", COMPOSED[key], "other") as refusal:
        saved.require_features({**COMPOSED, key: "other"}, "file")
    assert (refusal.error.facts["expected"], refusal.error.facts["found"]) == (COMPOSED[key], "other")


def test_a_composition_and_its_base_are_not_the_same(refused: Refused) -> None:
    base = {"model": "m"}
    with refused("HEAD-FEATURES", 3, "another bank") as refusal:
        SavedHead(learned("tip"), COMPOSED).require_features(base, "file")
    assert refusal.error.facts["found"] == "none"
    with refused("HEAD-FEATURES", 3, "another bank") as refusal:
        SavedHead(learned("tip"), base).require_features(COMPOSED, "file")
    assert refusal.error.facts["expected"] == "none"
    tuned = {"model": "m", "weights": "w"}
    with refused("HEAD-FEATURES", 3, "another model"):
        SavedHead(learned("tip"), tuned).require_features(base, "file")


def test_a_key_that_nobody_knows_is_no_bug(refused: Refused) -> None:
    with refused("HEAD-FEATURES", 3):
        SavedHead(learned("tip"), {**COMPOSED, "adapter": "x"}).require_features(COMPOSED, "file")


# some of the classes


@pytest.mark.parametrize("kind", HEADS)
def test_among_restricts_and_reorders_by_name(kind: str) -> None:
    head = learned(kind)
    features = shots(seed=4)[0]
    among = RestrictedHead(head, ("cat", "ant"))
    assert torch.equal(among.logits(features), head.logits(features)[..., [2, 0]])
    assert among.names == ("cat", "ant")


def test_among_takes_class_weights_as_well_and_hands_their_notes_on() -> None:
    base = ClassWeights(("ant", "bee"), torch.eye(2), notes=("cut",))
    among = RestrictedHead(base, ("bee",))
    assert among.notes == ("cut",)
    assert among.logits(torch.tensor([[3.0, 4.0]])).tolist() == [[pytest.approx(0.8)]]


def test_among_refuses_classes_that_nothing_was_learned_for(refused: Refused) -> None:
    with refused("DATA-CLASS", 3, "2 classes", "yak, zebu", "ant, bee, cat"):
        RestrictedHead(learned("tip"), ("ant", "yak", "zebu"))


@SMALL
@given(st.integers(0, 2**16), st.integers(2, 5), st.integers(1, 4))
def test_tip_adapters_own_gradients_are_those_of_its_loss(seed: int, classes: int, shots: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    names = tuple(map(str, range(classes)))
    head = TipAdapter(ClassWeights(names, 3 * torch.randn(classes, 6, generator=rng)))
    labels = torch.arange(classes).repeat(shots)
    views = torch.randn(2, len(labels), 6, generator=rng)
    head.remember(views, labels)
    with torch.no_grad():
        head.keys.add_(0.1 * torch.randn(head.keys.shape, generator=rng))
        head.alpha.fill_(1.7)
        head.beta.fill_(2.3)
    loss = functional.cross_entropy(head.logits(views[0]), labels)
    expected = torch.autograd.grad(loss, [head.keys, head.alpha, head.beta])
    assert head._gradients(views[0], labels) == pytest.approx(float(loss), rel=1e-5)
    for parameter, gradient in zip((head.keys, head.alpha, head.beta), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_setting_beyond_all_floats_is_refused(tmp_path: Path) -> None:
    """An integer of JSON may have hundreds of digits."""
    learned("tip").save(tmp_path / "head", OF)
    path = changed(tmp_path / "head", index(settings={"steps": 3, "alpha": 1.0, "beta": 10**400}))
    with pytest.raises(InputError) as caught:
        load_head(path)
    assert caught.value.code == "HEAD-FILE"
