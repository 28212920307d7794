"""Losses without labels, against closed forms in double precision; what is trusted, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aniso.classes import ClassList
from aniso.data import Labelled, Unlabelled
from aniso.data.images import ArrayImages
from aniso.learn import SAR, CoefficientNorm, Contrastive, CrossEntropy, Entropy, FixMatch, Objective
from aniso.learn.objectives import DataTerm, TermInputs
from aniso.learn.objectives.entropy import prediction_entropy as entropy
from aniso.learn.objectives.fixmatch import UNTRUSTED, flattened

Refused = Callable[..., AbstractContextManager[Any]]

SMALL = settings(deadline=None, max_examples=60, database=None, derandomize=True)
KINDS = (Entropy, SAR, Contrastive, FixMatch)


def labelled(count: int = 12, classes: int = 3) -> Labelled:
    images = ArrayImages(np.zeros((count, 4, 4, 3), np.uint8), "grey")
    names = ClassList(tuple(f"class {i}" for i in range(classes)))
    return Labelled("made", names, images, tuple(i % classes for i in range(count)))


def split(count: int = 12, classes: int = 3) -> Unlabelled:
    return labelled(count, classes).unlabelled()


def drawn(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def seen(*logits: Tensor, **more: Any) -> TermInputs:
    marks = {name: more.pop(name) for name in ("trusted", "reliable") if name in more}
    marks = {name: values for name, values in marks.items() if values is not None}
    return TermInputs(more.pop("features", logits), logits, None, marks, **more)


def probabilities(logits: Tensor) -> Any:
    """Numpy's, in double precision."""
    rows = np.exp(logits.detach().numpy() - logits.detach().numpy().max(-1, keepdims=True))
    return rows / rows.sum(-1, keepdims=True)


def entropies(logits: Tensor) -> Any:
    p = probabilities(logits)
    return -(p * np.log(p)).sum(-1)


def with_certainty(*chances: float, classes: int = 3) -> Tensor:
    """Logits whose first class has these probabilities, one row each; the others share the rest."""
    rows = [[c, *[(1 - c) / (classes - 1)] * (classes - 1)] for c in chances]
    return torch.tensor(rows, dtype=torch.double).log()


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, of, allow_unused=True)[0]
    assert found is not None
    return found


LOGITS = (
    st.integers(2, 6)
    .flatmap(
        lambda classes: st.lists(
            st.lists(st.floats(-30, 30), min_size=classes, max_size=classes), min_size=1, max_size=8
        )
    )
    .map(lambda rows: torch.tensor(rows, dtype=torch.double))
)


# entropy


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
def test_the_entropy_of_answers_that_are_all_alike_is_the_logarithm_of_their_number(classes: int) -> None:
    found = Entropy(split(classes=classes)).loss(seen(torch.full((4, classes), 7.0, dtype=torch.double)))
    assert float(found) == pytest.approx(math.log(classes), rel=1e-12)


def test_the_entropy_of_one_certain_answer_is_zero_and_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 1e5]], dtype=torch.double, requires_grad=True)
    loss = Entropy(split()).loss(seen(logits))
    assert float(loss) == 0.0
    assert torch.equal(gradient(loss, logits), torch.zeros_like(logits))


@SMALL
@given(LOGITS, st.floats(-50, 50))
def test_entropy_is_minus_the_sum_of_p_log_p_whatever_is_added_to_all_logits(
    logits: Tensor, shift: float
) -> None:
    np.testing.assert_allclose(entropy(logits), entropies(logits), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(entropy(logits + shift), entropy(logits), rtol=1e-7, atol=1e-9)
    assert bool((entropy(logits) >= 0).all())
    assert bool((entropy(logits) <= math.log(logits.shape[1]) + 1e-12).all())


def test_the_entropy_loss_is_a_mean_with_the_gradient_of_the_closed_form() -> None:
    logits = drawn(5, 3).requires_grad_()
    loss = Entropy(split()).loss(seen(logits))
    assert float(loss) == pytest.approx(entropies(logits).mean(), rel=1e-12)
    p, own = probabilities(logits), entropies(logits)[:, None]
    np.testing.assert_allclose(gradient(loss, logits), -p * (np.log(p) + own) / 5, rtol=1e-9, atol=1e-15)


# sar


def test_answers_count_below_a_share_of_the_largest_entropy_there_is() -> None:
    for classes, margin in ((3, 0.4), (7, 0.4), (3, 0.8)):
        term = SAR(split(classes=classes), margin=margin)
        logits = drawn(200, classes, scale=2.0)
        expected = entropies(logits) < margin * math.log(classes)
        assert 10 < expected.sum() < 190
        assert term.reliable(seen(logits)).tolist() == expected.tolist()
    assert SAR(split()).margin == 0.4


def test_an_answer_at_the_margin_itself_does_not_count() -> None:
    even = torch.zeros(1, 4, dtype=torch.double)
    limit = float(entropy(even)) / math.log(4)
    assert limit == pytest.approx(1.0)
    above = math.nextafter(limit, 2)
    found = [bool(SAR(split(classes=4), margin=m).reliable(seen(even))) for m in (limit, above)]
    assert found == [False, True]


def test_sar_is_the_mean_entropy_of_reliable_predictions() -> None:
    logits = drawn(40, 3, scale=2.0).requires_grad_()
    own = entropies(logits)
    counts = own < 0.4 * math.log(3)
    assert 0 < counts.sum() < 40
    loss = SAR(split()).loss(seen(logits))
    assert float(loss) == pytest.approx((own * counts).sum() / counts.sum(), rel=1e-12)
    p = probabilities(logits)
    expected = -p * (np.log(p) + own[:, None]) * counts[:, None] / counts.sum()
    np.testing.assert_allclose(gradient(loss, logits), expected, rtol=1e-9, atol=1e-15)


def test_at_the_worst_point_an_answer_counts_that_counted_before_and_still_does() -> None:
    logits = with_certainty(0.99, 0.98, 0.4, 0.97)
    before = torch.tensor([True, False, True, True])
    own = entropies(logits)
    loss = SAR(split()).loss(seen(logits, reliable=before))
    assert float(loss) == pytest.approx((own[0] + own[3]) / 2, rel=1e-12)


@pytest.mark.parametrize("before", [None, torch.zeros(3, dtype=torch.bool)])
def test_nothing_reliable_is_a_loss_of_zero_with_a_gradient_of_zeros(before: Tensor | None) -> None:
    sure = before is not None
    logits = with_certainty(*[0.99 if sure else 0.34] * 3).requires_grad_()
    loss = SAR(split()).loss(seen(logits, reliable=before))
    assert float(loss) == 0.0
    assert torch.equal(gradient(loss, logits), torch.zeros_like(logits))


# contrast


def nt_xent(one: Tensor, other: Tensor, temperature: float) -> float:
    """As it is written down: for each of 2N rows, its partner against all rows but itself."""
    rows = [*one.detach().numpy(), *other.detach().numpy()]
    count, total = len(one), 0.0
    for i, row in enumerate(rows):
        near = []
        for j, column in enumerate(rows):
            cosine = row @ column / (np.linalg.norm(row) * np.linalg.norm(column))
            near.append(math.exp(cosine / temperature) if i != j else 0.0)
        total -= math.log(near[(i + count) % (2 * count)] / sum(near))
    return total / (2 * count)


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("count", [2, 5])
def test_contrast_is_nt_xent_over_both_directions(count: int, temperature: float) -> None:
    one, other = drawn(count, 6), drawn(count, 6, seed=1)
    term = Contrastive(split(), temperature=temperature)
    found = float(term.loss(seen(one, other)))
    assert found == pytest.approx(nt_xent(one, other, temperature), rel=1e-10)
    assert float(term.loss(seen(other, one))) == pytest.approx(found, rel=1e-12)
    assert Contrastive(split()).temperature == 0.2


def test_contrast_does_not_depend_on_the_length_of_features_or_the_order_of_pictures() -> None:
    one, other, term = drawn(6, 5), drawn(6, 5, seed=1), Contrastive(split())
    base = float(term.loss(seen(one, other)))
    lengths = torch.linspace(0.01, 100, 6, dtype=torch.double)[:, None]
    assert float(term.loss(seen(lengths * one, lengths.flip(0) * other))) == pytest.approx(base, rel=1e-9)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(2))
    assert float(term.loss(seen(one[order], other[order]))) == pytest.approx(base, rel=1e-9)
    assert float(term.loss(seen(one, other[order]))) != pytest.approx(base, rel=1e-3)


def test_contrast_teaches_through_both_views_and_never_along_a_feature_itself() -> None:
    one, other = drawn(4, 5).requires_grad_(), drawn(4, 5, seed=1).requires_grad_()
    loss = Contrastive(split()).loss(seen(one, other))
    for view in (one, other):
        found = torch.autograd.grad(loss, view, retain_graph=True)[0]
        assert bool((found.norm(dim=-1) > 1e-3).all())
        torch.testing.assert_close(
            (found * view).sum(-1), torch.zeros(4, dtype=torch.double), rtol=0, atol=1e-9
        )


def test_contrast_is_about_features_unless_logits_are_asked_for() -> None:
    logits, features = (drawn(4, 3), drawn(4, 3, seed=1)), (drawn(4, 6, seed=2), drawn(4, 6, seed=3))
    both = TermInputs(features, logits, None)
    assert float(Contrastive(split()).loss(both)) == pytest.approx(nt_xent(*features, 0.2), rel=1e-10)
    on_logits = Contrastive(split(), on="logits")
    assert float(on_logits.loss(both)) == pytest.approx(nt_xent(*logits, 0.2), rel=1e-10)


def test_a_picture_that_is_alone_has_nothing_to_be_told_from() -> None:
    one, other = drawn(1, 5).requires_grad_(), drawn(1, 5, seed=1)
    loss = Contrastive(split()).loss(seen(one, other))
    assert float(loss) == 0.0
    assert torch.equal(gradient(loss, one), torch.zeros_like(one))


def test_views_that_agree_are_better_than_views_that_do_not() -> None:
    term, features = Contrastive(split()), drawn(6, 16)
    assert float(term.loss(seen(features, features))) < float(term.loss(seen(features, features.flip(0))))


# fixmatch


@SMALL
@given(LOGITS, st.sampled_from([0.25, 0.5, 1.0, 2.0]))
def test_answers_are_flattened_by_a_power_of_their_probabilities(logits: Tensor, power: float) -> None:
    expected = probabilities(logits) ** power
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(flattened(logits, power), expected, rtol=1e-9, atol=1e-15)


def test_the_square_root_flattens_and_a_factor_would_not() -> None:
    logits = with_certainty(0.9)
    root = math.sqrt(0.9) / (math.sqrt(0.9) + 2 * math.sqrt(0.05))
    assert FixMatch(split()).power == 0.5
    assert float(flattened(logits, 0.5).max()) == pytest.approx(root, rel=1e-12)
    assert root < 0.7


def certainty(flat: float, classes: int = 3) -> float:
    """The probability that the square root of flattens to ``flat``, if the others share the rest."""
    ratio = (1 - flat) / ((classes - 1) * flat)
    return 1 / (1 + (classes - 1) * ratio**2)


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("threshold", [0.9, 0.6])
def test_the_threshold_rises_to_one_in_a_straight_line(threshold: float, progress: float) -> None:
    limit = threshold + (1 - threshold) * progress
    weak = with_certainty(certainty(limit - 1e-6), certainty(limit + 1e-6))
    np.testing.assert_allclose(flattened(weak, 0.5)[:, 0], [limit - 1e-6, limit + 1e-6], rtol=1e-12)
    term = FixMatch(split(), threshold=threshold)
    found = [float(term.loss(seen(weak[[i]], drawn(1, 3), progress=progress))) for i in (0, 1)]
    assert found[0] == 0.0 < found[1]


def test_at_the_end_not_even_certainty_is_enough() -> None:
    weak = torch.tensor([[1e4, 0.0, 0.0]], dtype=torch.double)
    term = FixMatch(split())
    assert float(term.loss(seen(weak, drawn(1, 3), progress=1.0))) == 0.0
    assert float(term.loss(seen(weak, drawn(1, 3), progress=0.999))) > 0


def fixmatch(weak: Tensor, strong: Tensor, limit: float, trusted: list[int] | None = None) -> float:
    """Picture by picture."""
    total = 0.0
    for i, (p, log_q) in enumerate(zip(probabilities(weak), np.log(probabilities(strong)), strict=True)):
        flat = np.sqrt(p) / np.sqrt(p).sum()
        if trusted is not None and trusted[i] >= 0:
            total -= log_q[trusted[i]]
        elif flat.max() > limit:
            total -= (flat * log_q).sum()
    return total / len(weak)


@SMALL
@given(st.data())
def test_fixmatch_is_its_closed_form(data: st.DataObject) -> None:
    weak = data.draw(LOGITS)
    count, classes = weak.shape
    strong = drawn(count, classes, seed=data.draw(st.integers(0, 99)))
    progress = data.draw(st.floats(0, 1))
    marks = data.draw(
        st.none() | st.lists(st.integers(-1, classes - 1), min_size=count, max_size=count), "trusted"
    )
    trusted = None if marks is None else torch.tensor(marks)
    found = FixMatch(split(classes=classes)).loss(seen(weak, strong, trusted=trusted, progress=progress))
    limit = 0.9 + 0.1 * progress
    flat = flattened(weak, 0.5).max(-1).values
    if bool(((flat - limit).abs() > 1e-9).all()):
        assert float(found) == pytest.approx(fixmatch(weak, strong, limit, marks), rel=1e-9, abs=1e-12)
    assert float(found) >= 0


def test_pseudo_labels_are_soft_and_no_gradient_goes_through_them() -> None:
    weak = with_certainty(0.999, 0.998, 0.4).requires_grad_()
    strong = drawn(3, 3).requires_grad_()
    loss = FixMatch(split()).loss(seen(weak, strong))
    assert torch.autograd.grad(loss, weak, allow_unused=True, retain_graph=True) == (None,)
    flat = np.sqrt(probabilities(weak))
    flat /= flat.sum(-1, keepdims=True)
    expected = (probabilities(strong) - flat) / 3 * np.array([[1], [1], [0]])
    np.testing.assert_allclose(gradient(loss, strong), expected, rtol=1e-9, atol=1e-15)


def test_what_is_trusted_is_taught_by_cross_entropy_whatever_the_weak_view_says() -> None:
    strong = drawn(4, 3).requires_grad_()
    trusted = torch.tensor([2, 0, 1, 1])
    log_q = np.log(probabilities(strong))
    expected = -log_q[range(4), trusted].mean()
    for weak in (with_certainty(0.99999, 0.4, 0.9999, 0.34), with_certainty(0.34, 0.34, 0.34, 0.34)):
        loss = FixMatch(split()).loss(seen(weak, strong, trusted=trusted, progress=1.0))
        assert float(loss) == pytest.approx(expected, rel=1e-12)
    one_hot = np.eye(3)[trusted]
    np.testing.assert_allclose(gradient(loss, strong), (probabilities(strong) - one_hot) / 4, rtol=1e-9)


@pytest.mark.parametrize("trusted", [None, torch.full((3,), UNTRUSTED)])
def test_nothing_that_passes_is_a_loss_of_zero_with_a_gradient_of_zeros(trusted: Tensor | None) -> None:
    strong = (1e4 * drawn(3, 3)).requires_grad_()
    loss = FixMatch(split()).loss(seen(with_certainty(0.34, 0.5, 0.9), strong, trusted=trusted))
    assert float(loss) == 0.0
    assert torch.equal(gradient(loss, strong), torch.zeros_like(strong))


# what is trusted


def trusted_by_hand(logits: Tensor, each: int) -> list[int]:
    p = probabilities(logits)
    answers, scores = p.argmax(-1), p.max(-1)
    out = [UNTRUSTED] * len(logits)
    for label in range(logits.shape[1]):
        own = [i for i in range(len(logits)) if answers[i] == label]
        for i in sorted(own, key=lambda i: -scores[i])[:each]:  # Python's sort is stable
            out[i] = label
    return out


@SMALL
@given(
    st.integers(2, 40), st.integers(2, 6), st.integers(1, 12), st.integers(0, 99), st.sampled_from([0.1, 3.0])
)
def test_of_every_class_its_surest_pictures_are_trusted(
    count: int, classes: int, most: int, seed: int, scale: float
) -> None:
    logits = drawn(count, classes, seed=seed, scale=scale).round(decimals=1)  # with ties
    found = FixMatch(split(count, classes), most=most, trusted_by="prediction").trust(logits)
    each = max(1, min(count // classes, most))
    assert found.tolist() == trusted_by_hand(logits, each)
    scores, answers = logits.softmax(-1).max(-1)
    for label in range(classes):
        chosen, own = found == label, answers == label
        assert bool((chosen <= own).all())
        assert int(chosen.sum()) == min(each, int(own.sum()))
        left_out = own & ~chosen
        if bool(left_out.any()):
            assert float(scores[chosen].min()) >= float(scores[left_out].max())


@pytest.mark.parametrize(
    ("count", "classes", "most", "each"),
    [(1000, 2, None, 100), (100, 2, None, 50), (101, 3, None, 33), (30, 3, 4, 4), (2, 3, None, 1)],
)
def test_a_class_has_at_most_its_share_of_pictures_trusted_and_never_more_than_said(
    count: int, classes: int, most: int | None, each: int
) -> None:
    term = FixMatch(
        split(count, classes), trusted_by="prediction", **({} if most is None else {"most": most})
    )
    logits = torch.zeros(count, classes)
    logits[:, 1] = 1.0  # all are alike, and of one class
    expected = [1] * each + [UNTRUSTED] * (count - each)
    assert term.trust(logits).tolist() == expected


def test_classes_that_nobody_answers_have_nothing_trusted() -> None:
    logits = with_certainty(0.9, 0.5, 0.8, 0.7, 0.6, 0.95)
    found = FixMatch(split(6), trusted_by="prediction").trust(logits)
    assert found.tolist() == [0, UNTRUSTED, UNTRUSTED, UNTRUSTED, UNTRUSTED, 0]


# views


def test_every_term_sees_pictures_as_its_method_says() -> None:
    encoder = tiny.seeing(8)
    views = encoder.transforms
    assert Entropy(split()).views(encoder) == SAR(split()).views(encoder) == (views.eval,)
    for kind in (Contrastive, FixMatch):
        assert kind(split()).views(encoder) == (views.eval, views.few_shot)
        for strong in ("few_shot", "strong", "train"):
            assert kind(split(), strong=strong).views(encoder) == (views.eval, getattr(views, strong))


# what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_labelled_pictures_and_what_is_none_are_refused(
    kind: Callable[..., DataTerm], refused: Refused
) -> None:
    for given_split in (labelled(), None, "made", split(1), split(0)):
        with refused("OBJECTIVE", 2, "without labels", "unlabelled()"):
            kind(given_split)
    kind(split(2))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((SAR, "margin", value) for value in (0, -0.1, math.nan, math.inf)),
        *((SAR, "radius", value) for value in (-0.1, math.nan, math.inf)),
        *((Contrastive, "temperature", value) for value in (0, -1.0, math.nan)),
        *((Contrastive, "on", value) for value in ("", "images", None)),
        *((FixMatch, "power", value) for value in (0, -0.5, math.nan)),
        *((FixMatch, "threshold", value) for value in (-0.1, 1.1, math.nan)),
        *((FixMatch, "most", value) for value in (0, -3)),
        *(
            (kind, "strong", value)
            for kind in (Contrastive, FixMatch)
            for value in ("eval", "", "weak", None)
        ),
        # a run that begins anew at every step, learns nothing, has losses of NaN, or breaks off
        *(
            pytest.param(kind, name, value)
            for kind, name, value in (
                (SAR, "floor", math.nan),
                (Contrastive, "temperature", math.inf),
                (FixMatch, "power", math.inf),
                (FixMatch, "most", 2.5),
            )
        ),
    ],
)
def test_parameters_that_make_no_sense_are_refused(
    kind: Callable[..., DataTerm], name: str, value: Any, refused: Refused
) -> None:
    with refused("OBJECTIVE", 2, str(value)):
        kind(split(), **{name: value})


# sums


def test_terms_without_labels_add_and_weigh_like_others() -> None:
    own, norm, supervised = FixMatch(split()), CoefficientNorm(), CrossEntropy(labelled())
    whole = 2 * own + 0.5 * norm - supervised
    assert isinstance(whole, Objective)
    assert whole.data_terms == ((2.0, own), (-1.0, supervised))
    assert whole.value_terms == ((0.5, norm),)
    assert str(whole) == "+2 made, FixMatch +0.5 coefficients' 1-norm -1 made"
    assert sum([Entropy(split()), SAR(split())]).parts[1][0] == 1.0


def test_names_tell_the_losses_on_one_split_apart() -> None:
    own = split()
    assert len({kind(own).name for kind in KINDS} | {CrossEntropy(labelled()).name}) == len(KINDS) + 1


def test_identity_is_plain_data_and_changes_with_whatever_the_loss_depends_on() -> None:
    own = split()
    changes: dict[type[DataTerm], dict[str, Any]] = {
        Entropy: {},
        SAR: {"margin": 0.3, "radius": 0.1, "floor": 0.1},
        Contrastive: {"temperature": 0.1, "strong": "strong", "on": "logits"},
        FixMatch: {"power": 1.0, "threshold": 0.8, "most": 7, "strong": "strong"},
    }
    prompted = replace(own, classes=ClassList(own.classes.names, ("{}!",)))
    found = []
    for kind, changed in changes.items():
        terms = [kind(own), kind(split(11)), kind(prompted)]  # type: ignore[call-arg]
        terms += [kind(own, **{name: value}) for name, value in changed.items()]  # type: ignore[call-arg]
        found += [json.dumps(term.identity(), sort_keys=True) for term in terms]
        assert kind(own).identity() == kind(split()).identity()  # type: ignore[call-arg]
    assert len(set(found)) == len(found) == 3 * len(KINDS) + 3 + 3 + 4
