"""Test-time objectives of the paper: SAR's mean over reliable images, FixMatch's balanced trusted set."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import colours
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aniso.data import Unlabelled
from aniso.errors import UsageError
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.experiments.methods.layer_norm import LayerNormTuning
from aniso.experiments.settings.test_time import TestTime
from aniso.learn import SAR, FixMatch, Last, Schedule, Trainable, fit
from aniso.learn._training.loop import Loop
from aniso.learn.features import features
from aniso.learn.objectives import TermInputs
from aniso.learn.objectives.fixmatch import UNTRUSTED, highest_of_each

SMALL = settings(deadline=None, max_examples=60, database=None, derandomize=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def images(world: colours.World) -> Unlabelled:
    """Fifteen, of three classes."""
    return world.control.split("train").unlabelled()


def inputs(logits: Tensor) -> TermInputs:
    return TermInputs((logits,), (logits,), None)


def entropy(logits: Tensor) -> Tensor:
    p = logits.double().softmax(-1)
    return -(p * p.log()).sum(-1)


def test_sars_loss_is_the_mean_over_reliable_images(images: Unlabelled) -> None:
    logits = torch.tensor([[4.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 3.0, 0.5], [0.2, 0.2, 0.1]])
    each = entropy(logits)
    reliable = each < 0.4 * math.log(3)
    assert reliable.tolist() == [True, False, True, False]
    assert SAR(images).loss(inputs(logits)).item() == pytest.approx(each[reliable].mean().item(), rel=1e-5)
    over_batch = SAR(images, mean_over="batch").loss(inputs(logits))
    assert over_batch.item() == pytest.approx(each[reliable].sum().item() / 4, rel=1e-5)


def test_sars_loss_is_zero_where_nothing_is_reliable(images: Unlabelled) -> None:
    logits = torch.zeros(5, 3, requires_grad=True)
    loss = SAR(images).loss(inputs(logits))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def gradients(world: colours.World, term: SAR, micro_batch: int | None) -> tuple[Tensor, dict]:
    """Of the coefficients in one step, and its losses."""
    composition = world.composition()
    schedule = Schedule(epochs=1, lr=0.1, batch_size=15, micro_batch=micro_batch)
    loop = Loop(Trainable.coefficients(composition), term * 1.0, schedule, Last())
    (batches,) = loop._sampler.epoch(0)
    losses = loop._gradients(batches)
    assert composition.values.grad is not None
    return composition.values.grad, losses


@pytest.mark.parametrize("micro_batch", [1, 4, 7])
def test_micro_batches_of_sar_add_up_to_the_batch(
    world: colours.World, images: Unlabelled, micro_batch: int
) -> None:
    logits = world.encoder.class_weights(images.classes).logits(features(world.encoder, images)[0])
    margin = float(entropy(logits).sort().values[7] / math.log(3)) + 1e-6  # eight of fifteen are reliable
    term = SAR(images, margin=margin)
    whole, losses = gradients(world, term, None)
    cut, cut_losses = gradients(world, term, micro_batch)
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-6)
    name = term.name
    assert cut_losses[name][0] == pytest.approx(losses[name][0], rel=1e-4)
    assert losses[name][0] == pytest.approx(float(entropy(logits).sort().values[:8].mean()), rel=1e-3)


def test_sar_moves_coefficients_by_default(world: colours.World, images: Unlabelled) -> None:
    setting = TestTime(model="m", bank="b", task="t", objective="sar")
    assert setting.schedule.optimiser == "adamw"
    composition = world.composition()
    schedule = replace(setting.schedule, batch_size=8)
    fit(composition, SAR(images, margin=1.1, floor=0.0), schedule)
    assert composition.values.detach().abs().max() > 0.005


def test_layer_norms_have_the_optimiser_of_sars_authors() -> None:
    setting = TestTime(model="m", task="t", objective="sar", method=LayerNormTuning())
    assert setting.method.resolved_schedule(setting).optimiser == "sgd"
    coefficients = TestTime(model="m", bank="b", task="t", objective="sar", method=LearnedCoefficients())
    assert coefficients.method.resolved_schedule(coefficients).optimiser == "adamw"


def greedy(scores: Tensor, each: int) -> list[int]:
    """Pairs from the highest score down, in plain Python."""
    pairs = sorted(
        ((-float(s), i, k) for i, row in enumerate(scores) for k, s in enumerate(row)), key=lambda p: p
    )
    found, room = [UNTRUSTED] * len(scores), [each] * scores.shape[1]
    for _, i, k in pairs:
        if found[i] == UNTRUSTED and room[k]:
            found[i], room[k] = k, room[k] - 1
    return found


@SMALL
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(0, 999))
def test_every_class_has_the_same_number_of_trusted_images(
    classes: int, each: int, more: int, seed: int
) -> None:
    scores = torch.rand(classes * each + more, classes, generator=torch.Generator().manual_seed(seed))
    found = highest_of_each(scores, each)
    assert found.tolist() == greedy(scores, each)
    counts = Counter(label for label in found.tolist() if label != UNTRUSTED)
    assert counts == dict.fromkeys(range(classes), each)


def test_a_class_that_is_never_predicted_is_trusted_as_often_as_others(images: Unlabelled) -> None:
    logits = torch.randn(15, 3, generator=torch.Generator().manual_seed(0))
    logits[:, 2] -= 10
    assert 2 not in logits.argmax(-1)
    found = FixMatch(images, most=3).trust(logits)
    assert [int((found == label).sum()) for label in range(3)] == [3, 3, 3]
    # nobody else wants these images more: they are the highest of the class
    third = logits.softmax(-1)[:, 2]
    free = [i for i in third.argsort(descending=True).tolist() if found[i] in (2, UNTRUSTED)]
    assert sorted(free[:3]) == (found == 2).nonzero().flatten().tolist()
    by_prediction = FixMatch(images, most=3, trusted_by="prediction").trust(logits)
    assert 2 not in by_prediction


def test_fixmatch_is_zero_where_nothing_passes(images: Unlabelled) -> None:
    strong = torch.zeros(5, 3, requires_grad=True)
    weak = torch.zeros(5, 3)
    for marks in ({}, {"trusted": torch.full((5,), UNTRUSTED)}):
        loss = FixMatch(images).loss(TermInputs((weak, strong), (weak, strong), None, marks))
        assert loss.item() == 0 and math.isfinite(loss.item())


def test_unknown_ways_are_refused(images: Unlabelled) -> None:
    with pytest.raises(UsageError, match="mean over 'all'"):
        SAR(images, mean_over="all")
    with pytest.raises(UsageError, match="by 'chance'"):
        FixMatch(images, trusted_by="chance")
