"""Temperatures: closed forms, data without an optimum, and no look at test labels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import runs
import torch
from torch.nn.functional import cross_entropy

from aniso.data import load_task
from aniso.learn import (
    Calibration,
    calibrate,
    calibration,
    classify,
    fit_temperature,
    iterate_logits,
    predict,
)
from aniso.models import load_model


@pytest.mark.parametrize(("right", "wrong", "margin"), [(3, 1, 1.0), (9, 1, 10.0), (99, 1, 0.01)])
def test_two_classes_with_one_margin_have_the_temperature_of_their_odds(right, wrong, margin):
    """softmax((m, 0) / t) is right / (right + wrong) for t = m / log(right / wrong)."""
    logits = torch.tensor([[margin, 0.0]] * (right + wrong), dtype=torch.float64)
    labels = torch.tensor([0] * right + [1] * wrong)
    assert fit_temperature(logits, labels) == pytest.approx(margin / math.log(right / wrong), rel=1e-9)


def test_the_temperature_scales_with_the_logits_and_does_not_depend_on_their_offset():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 5, generator=generator)
    labels = torch.where(torch.arange(200) % 3 == 0, torch.arange(200) % 5, logits.argmax(-1))
    found = fit_temperature(logits, labels)
    assert found is not None
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * found, rel=1e-6)
    assert fit_temperature(logits + 3, labels) == pytest.approx(found, rel=1e-4)


def test_labels_drawn_from_the_probabilities_have_a_temperature_near_one():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    assert fit_temperature(logits, labels) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("labels", [[0, 1, 0], [1, 0, 1]], ids=["all right", "all wrong"])
def test_there_is_no_temperature_where_every_item_is_right_or_wrong(labels):
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    assert fit_temperature(logits, torch.tensor(labels)) is None


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


def test_calibration_lowers_the_loss_on_validation_items(shelf):
    model, task = load_model(str(shelf.model)), load_task(shelf.data / "cars")
    found = calibrate(model, task.val)
    assert found.loss is not None and found.loss[1] < found.loss[0]
    logits, labels = torch.cat(list(iterate_logits(model, task.val))), torch.tensor(task.val.labels)
    assert found.temperature == fit_temperature(logits, labels)
    for t, loss in zip((1.0, found.temperature), found.loss, strict=True):
        assert loss == pytest.approx(float(cross_entropy(logits.double() / t, labels)), rel=1e-9)
    assert (found.items, found.split) == (len(task.val), "cars val")
    assert f"temperature {found.temperature:.4g}, fitted on 8 items of cars val" in str(found)


def test_where_all_are_right_the_result_says_why_it_is_not_calibrated(shelf):
    """Labels that are the predictions themselves."""
    model, task = load_model(str(shelf.model)), load_task(shelf.data / "cars")
    own = replace(task.val, labels=tuple(predict(model, task.val).tolist()))
    assert (
        str(calibrate(model, own)) == "not calibrated: no temperature fits cars val, where 100% are correct"
    )


def test_a_part_of_many_items_is_used(shelf, monkeypatch):
    monkeypatch.setattr(calibration, "MOST_ITEMS", 6)
    model, task = load_model(str(shelf.model)), load_task(shelf.data / "cars")
    assert calibrate(model, task.val).items == 6


def test_test_labels_are_not_used(shelf, refused):
    with refused("LEARN-TEST", 2, "cars test"):
        calibrate(load_model(str(shelf.model)), load_task(shelf.data / "cars").test)
    assert str(Calibration()) == "not calibrated"


def test_classify_gives_the_predictions_of_predict_with_their_probabilities(shelf):
    task = load_task(shelf.data / "cars")
    model = load_model(str(shelf.model))
    found = classify(model, task.test, batch_size=5)
    assert torch.equal(found.labels, predict(model, task.test, batch_size=5))
    weights = model.class_weights(task.classes)
    with torch.no_grad():
        pixels = torch.stack([model.transforms.eval(task.test.open(i), None) for i in range(len(task.test))])
        shares = weights.logits(model(model.transforms.eval.finish(pixels))).softmax(-1)
    assert torch.allclose(found.confidence, shares.max(-1).values, atol=1e-6)
