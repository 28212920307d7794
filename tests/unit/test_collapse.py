"""Collapse is detected from the batches of a run, and answered by a lower learning rate."""

from __future__ import annotations

import json
from dataclasses import replace

import colours
import pytest
import torch
from torch.nn import functional

from aniso.errors import NumericalError, StoppedError
from aniso.learn import (
    LR_LIMIT,
    CrossEntropy,
    Entropy,
    Last,
    Schedule,
    Trainable,
    fit,
    limit_learning_rate,
    predict,
    relative_norm,
)
from aniso.learn._training import loop as loop_module
from aniso.learn._training.collapse import BatchSummary, CollapseDetector, collapse_reason
from aniso.learn.objectives import TermInputs

SHORT = Schedule(epochs=2, lr=0.2, batch_size=8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


def inputs(features, logits, labels=None):
    return TermInputs((features,), (logits,), labels)


def summary(spread, loss=None, predicted=None, labels=None):
    return BatchSummary(spread, loss, predicted or {"0": 8, "1": 8}, labels or {})


def test_spread_is_one_minus_the_mean_cosine_over_pairs():
    torch.manual_seed(0)
    features = torch.randn(6, 5)
    found = BatchSummary.of(inputs(features, torch.randn(6, 3)))
    unit = functional.normalize(features, dim=-1)
    cosines = [float(unit[i] @ unit[j]) for i in range(6) for j in range(6) if i != j]
    assert found.spread == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-6)
    assert found.loss is None and found.labels == {} and sum(found.predicted.values()) == 6


def test_loss_and_counts_of_a_labelled_batch():
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 1, 1])
    found = BatchSummary.of(inputs(torch.eye(3), logits, labels))
    assert found.loss == pytest.approx(functional.cross_entropy(logits, labels).item())
    assert found.predicted == {"0": 2, "1": 1} and found.labels == {"0": 1, "1": 2}
    assert found.spread == pytest.approx(1.0)


def test_equal_features_at_the_loss_of_chance_have_collapsed():
    start = summary(0.44, 3.0)
    collapsed = [summary(0.04, 3.6)] * 5  # ln 37 = 3.61
    assert "0.56 to 0.96" in collapse_reason(start, collapsed, 37)
    assert collapse_reason(start, [summary(0.04, 1.0)] * 5, 37) is None  # close, but told apart
    assert collapse_reason(start, [summary(0.2, 3.6)] * 5, 37) is None  # not learned, but not collapsed
    assert collapse_reason(start, collapsed[:1], 1) is None  # a single class


def test_constant_predictions_have_collapsed_unless_one_class_is_frequent():
    start, constant = summary(1.0, 1.0), {"1": 16}
    even, skewed = {"0": 8, "1": 8}, {"0": 1, "1": 15}
    last = [summary(1.0, 1.0, constant, even)] * 3
    assert "48 items" in collapse_reason(start, last, 2)
    assert collapse_reason(start, [summary(1.0, 1.0, constant, skewed)] * 3, 2) is None
    assert collapse_reason(summary(1.0, 1.0, {"1": 16}), last, 2) is None  # so was the base's prediction
    assert collapse_reason(start, [summary(1.0, 1.0, {"1": 4}, {"0": 2, "1": 2})], 2) is None  # too few items
    unlabelled = [summary(1.0, None, constant)] * 3
    assert collapse_reason(summary(1.0), unlabelled, 2) is not None
    assert collapse_reason(summary(1.0, None, {"0": 1, "1": 15}), unlabelled, 2) is None


def collapsing(monkeypatch, times, epoch=1):
    """Let the detector report a collapse at the end of an epoch of the first ``times`` attempts."""
    attempts = {"ends": 0}

    def reason(self):
        if not self._start:
            return None
        attempts["ends"] += 1
        return "colours: all items are predicted as one class" if attempts["ends"] <= times * epoch else None

    monkeypatch.setattr(CollapseDetector, "reason", reason)


def test_a_collapsed_run_equals_one_with_a_third_of_the_learning_rate(world, monkeypatch):
    wanted = world.composition()
    fit(wanted, CrossEntropy(world.target.train), replace(SHORT, lr=0.2 / 3))
    collapsing(monkeypatch, times=1)
    composition = world.composition()
    done = fit(composition, CrossEntropy(world.target.train), SHORT)
    assert done.lr == pytest.approx(0.2 / 3)
    assert [row.epoch for row in done.history] == [0, 1, 2]
    (note,) = [note for note in done.notes if "collapsed" in note]
    assert "epoch 1" in note and "0.2" in note and "0.067" in note
    assert torch.allclose(composition.values, wanted.values, rtol=1e-6, atol=1e-9)


def test_entropy_at_a_high_rate_collapses_and_is_started_again(world):
    """The real detector: minimising entropy makes all predictions equal at this rate, and not at a third."""
    good = world.composition()
    fit(good, CrossEntropy(world.target.train), replace(SHORT, epochs=4))
    steps = Schedule(
        epochs=3, lr=10.0, batch_size=16, max_grad_norm=1e6, lr_schedule="constant", warmup_steps=0,
        weight_decay=0.0, min_steps_per_epoch=4,
    )  # fmt: skip
    split = world.target.test.unlabelled()

    def classes(schedule):
        composition = world.composition()
        composition.values.data.copy_(good.values.data)
        done = fit(composition, Entropy(split), schedule)
        return done, len(set(predict(composition, world.target.test).tolist()))

    done, count = classes(steps)
    assert done.lr == pytest.approx(10 / 3) and count == 2
    assert any("predicted as one class" in note for note in done.notes)
    assert classes(replace(steps, restarts=0, epochs=2))[1] == 1


def test_restarts_end_in_an_error_and_leave_the_start(world, monkeypatch):
    collapsing(monkeypatch, times=99)
    composition = world.composition()
    with pytest.raises(NumericalError) as caught:
        fit(composition, CrossEntropy(world.target.train), replace(SHORT, restarts=2))
    assert caught.value.code == "LEARN-COLLAPSE" and "0.022" in caught.value.message
    assert not composition.values.any()


def test_without_restarts_nothing_is_watched(world, monkeypatch):
    collapsing(monkeypatch, times=99)
    done = fit(world.composition(), CrossEntropy(world.target.train), replace(SHORT, restarts=0))
    assert done.lr == 0.2 and len(done.history) == 3


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_restarted_run_resumes_bit_for_bit(world, monkeypatch, tmp_path, step):
    def first_rate_collapses(self):
        """Depends on the run's state alone, as the real one does."""
        return "colours: collapsed" if self._start and not loops[-1].restarts else None

    loops = []
    made = loop_module.Loop.__init__

    def noted(self, *arguments, **options):
        loops.append(self)
        made(self, *arguments, **options)

    monkeypatch.setattr(loop_module.Loop, "__init__", noted)
    monkeypatch.setattr(CollapseDetector, "reason", first_rate_collapses)
    whole = world.composition()
    fit(whole, CrossEntropy(world.target.train), SHORT, directory=tmp_path / "whole")
    taken = {"steps": 0}

    def stop(what, done, total):
        if what.startswith("epoch"):
            taken["steps"] += 1
            if taken["steps"] == step + loops[-1].steps:  # after the restart
                raise StoppedError("STOPPED", "stopped by the test", fix="")

    again = world.composition()
    with pytest.raises(StoppedError):
        fit(again, CrossEntropy(world.target.train), SHORT, directory=tmp_path / "run", progress=stop)
    resumed = world.composition()
    done = fit(resumed, CrossEntropy(world.target.train), SHORT, directory=tmp_path / "run", resume=True)
    assert len(done.notes) == 1
    assert torch.equal(resumed.values, whole.values)
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "run")]
    assert metrics[0] == metrics[1]


def test_the_detectors_state_survives_json(world):
    detector = CollapseDetector({0: CrossEntropy(world.target.train)})
    torch.manual_seed(0)
    for _ in range(7):
        detector.observe(
            0, range(4), inputs(torch.randn(4, 3), torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
        )
    state = json.loads(json.dumps(detector.state_dict()))
    other = CollapseDetector({0: CrossEntropy(world.target.train)})
    other.load_state_dict(state)
    assert other.state_dict() == detector.state_dict() and len(state["last"]["0"]) == 5


def test_a_target_to_be_forgotten_may_collapse(world):
    composition = world.composition()
    objective = CrossEntropy(world.control.train) - CrossEntropy(world.target.train)
    run = loop_module.Loop(Trainable.coefficients(composition), objective, SHORT, Last())
    assert list(run._collapse._terms) == [0]


def test_the_learning_rate_is_limited_by_the_vectors_length(world):
    bank, model = world.composition().bank, world.encoder
    state = model.state_dict()
    base = sum(
        float(state[part.key].double().square().sum())
        for block in model.layout.blocks
        for part in block.parts
    )
    squares = [bank[name].norm() ** 2 for name in bank]
    expected = (sum(squares) / len(squares) / base) ** 0.5
    length = relative_norm(bank, model)
    assert length == pytest.approx(expected, rel=1e-6)
    low = Schedule(epochs=1, lr=0.5 * LR_LIMIT / length)
    assert limit_learning_rate(low, bank, model) == (low, None)
    limited, note = limit_learning_rate(Schedule(epochs=1, lr=100 * LR_LIMIT / length), bank, model)
    assert limited.lr == pytest.approx(LR_LIMIT / length, rel=0.05)
    assert f"{limited.lr:g}" in note and "--lr" in note


def test_each_task_of_a_sum_of_entropies_is_watched(world):
    """One task that collapses is enough, and it is named."""
    terms = {i: Entropy(task.val.unlabelled()) for i, task in enumerate((world.target, world.control))}
    detector = CollapseDetector(terms)
    items, features = list(range(16)), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    varied = functional.one_hot(torch.arange(16) % 2, 3).float()
    for i in terms:
        detector.observe(i, items, inputs(features, varied))
    assert detector.reason() is None
    constant = functional.one_hot(torch.ones(16, dtype=torch.long), 3).float()
    for _ in range(5):
        detector.observe(0, items, inputs(features, varied))
        detector.observe(1, items, inputs(features, constant))
    assert detector.reason().startswith(f"{world.control.name} val: all of 80 items")
