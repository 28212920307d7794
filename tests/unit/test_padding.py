"""Batches of texts in pieces of similar length: little padding, the same results."""

from __future__ import annotations

import os
import signal

import pytest
import sentences
import torch
from hypothesis import given
from hypothesis import strategies as st

from aniso.compose import Composition, Partition, Runtime
from aniso.data import Pieces, cat_padded, load_task
from aniso.data.padding import NOTHING, stack_padded
from aniso.errors import StoppedError
from aniso.learn import CrossEntropy, Schedule, Trainable, fit
from aniso.learn._training.forward import Forward
from aniso.models import load_model
from aniso.vectors import Bank
from aniso.weights import TensorMap

pytest.importorskip("transformers")


def rows(lengths):
    return stack_padded([torch.arange(n, dtype=torch.int32) + 100 * i for i, n in enumerate(lengths)])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_every_row_is_in_one_piece_whole_and_fills_three_quarters_of_it(lengths):
    batch = rows(lengths)
    pieces = Pieces.of(batch)
    for piece in pieces.inputs:
        filled = (piece != NOTHING).sum(1)
        assert int(filled.max()) == piece.shape[1] and int(filled.min()) >= 0.75 * piece.shape[1]
    width = batch.shape[1]
    padded = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=NOTHING) for p in pieces.inputs]
    assert torch.equal(pieces.joined(padded), batch)


def test_rows_of_similar_length_stay_one_piece_in_their_order():
    batch = cat_padded([rows([9, 10]), rows([8, 12, 11])[:, :12]])
    (only,) = Pieces.of(batch[:2]).inputs
    assert torch.equal(only, batch[:2, :10])
    assert Pieces.of(batch[:2]).order is None


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(3, 3, 8, 8), torch.zeros(4, 5), torch.full((3, 2, 7), NOTHING)],
    ids=["images", "floats", "rows of language models"],
)
def test_other_inputs_are_left_as_they_are(batch):
    pieces = Pieces.of(batch)
    assert pieces.inputs[0] is batch and pieces.order is None
    assert pieces.joined([batch]) is batch


# training


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("padding")
    sentences.save(root / "m", length=30)
    words = sentences.WORDS
    texts = [" ".join(words[(i * 5 + j) % len(words)] for j in range(1 + i * i % 23)) for i in range(48)]
    table = [f"{text} {words[i % 7]},{'ab'[i % 2]}" for i, text in enumerate(dict.fromkeys(texts))]
    (root / "t.csv").write_text("text,label\n" + "\n".join(table) + "\n")
    return root


def composition(place, **runtime):
    encoder = load_model(place / "m")
    rng = torch.Generator().manual_seed(1)
    moved = {
        k: v + 0.05 * v.std() * torch.randn(v.shape, generator=rng) for k, v in encoder.state_dict().items()
    }
    tuned = TensorMap(moved, "tuned", config=encoder.model_config)
    bank = Bank.build(encoder.weight_source(), {"a": tuned}, allow_distant=True)
    return Composition(encoder, bank, Partition.blocks(), runtime=Runtime(**runtime))


def trained(place, monkeypatch=None, workers=0):
    """The coefficients after two epochs, and all inputs of the model while it trained."""
    made = composition(place)
    inputs = []
    made.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    split = load_task(place / "t.csv").train
    schedule = Schedule(epochs=2, lr=0.05, batch_size=16, warmup_steps=0, weight_decay=0.0)
    done = fit(Trainable.coefficients(made), CrossEntropy(split), schedule, workers=workers)
    return made.values.detach().clone(), inputs, [row.loss for row in done.history]


def waste(inputs):
    return sum(int((x == NOTHING).sum()) for x in inputs) / sum(x.numel() for x in inputs)


def test_less_than_15_percent_of_training_is_padding_and_the_loss_is_the_same(place, monkeypatch):
    values, inputs, losses = trained(place)
    with monkeypatch.context() as patched:
        patched.setattr(Pieces, "of", classmethod(lambda cls, batch: cls((batch,), None)))
        plain, padded, expected = trained(place)
    assert waste(padded) > 0.3 and waste(inputs) < 0.15
    assert sum(map(len, inputs)) == sum(map(len, padded))
    assert losses[1:] == pytest.approx(expected[1:], rel=1e-4)
    assert torch.allclose(values, plain, atol=1e-3)


def test_training_in_pieces_is_reproducible_and_independent_of_workers(place):
    values, _, losses = trained(place)
    again, _, same = trained(place)
    with_workers, _, _ = trained(place, workers=1)
    assert torch.equal(values, again) and losses == same and torch.equal(values, with_workers)


def test_weights_that_are_composed_in_passing_see_a_batch_in_one_piece(place):
    batch = rows([3, 20, 21])
    assert len(Pieces.of(batch).inputs) == 2
    for runtime, passes in (({}, 2), ({"stream": True}, 1)):
        made = composition(place, **runtime)
        seen = []
        made.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(given[0]))
        forward = Forward(Trainable.coefficients(made), [], None, "fp32")
        forward._features([(batch.long() % 20).masked_fill(batch == NOTHING, NOTHING)])
        assert bool(made.plan.recomputed) == bool(runtime) and len(seen) == passes


@pytest.mark.parametrize("calls", [2, 4])
def test_fine_tuning_with_dropout_is_resumed_bit_for_bit(place, tmp_path, calls):
    split = load_task(place / "t.csv").train
    schedule = Schedule(epochs=2, lr=1e-3, batch_size=16, warmup_steps=0)
    count = 0

    def stop(*progress):
        nonlocal count
        count += 1
        if count == calls:
            os.kill(os.getpid(), signal.SIGTERM)

    def tuned(**more):
        trainable = Trainable.weights(load_model(place / "m"))
        fit(trainable, CrossEntropy(split), schedule, **more)
        return trainable.copied()

    whole = tuned()
    with pytest.raises(StoppedError):
        tuned(directory=tmp_path / "run", progress=stop)
    resumed = tuned(directory=tmp_path / "run", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
