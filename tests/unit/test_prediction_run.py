"""Streams of predictions: only a chunk of items is held, in order, unreadable ones counted."""

from __future__ import annotations

import pytest

from aniso.errors import InputError
from aniso.experiments.prediction import run
from aniso.experiments.prediction.run import predict_inputs
from aniso.experiments.prediction.tables import InputItem


class Stub:
    """A classifier that predicts "even" or "odd" by the number of an item, and cannot read some."""

    batch_size = 4

    def __init__(self, bad=()):
        self.bad = {*bad}
        self.sizes = []

    def predict(self, items, *, tolerant=False):
        self.sizes.append(len(items))
        for i in range(len(items)):
            number = int(items.ids[i])
            if number in self.bad:
                error = InputError("IMAGE-READ", f"{number} is damaged")
                if not tolerant:
                    raise error
                yield error
            else:
                yield (("odd" if number % 2 else "even", 1.0),)


class Sink:
    def __init__(self):
        self.items = []

    def write(self, item):
        self.items.append(item)


@pytest.mark.parametrize(("kind", "chunk"), [("images", 5), ("texts", 3)])
def test_at_most_a_chunk_of_items_is_held(monkeypatch, kind, chunk):
    monkeypatch.setitem(run._CHUNK, kind, chunk)
    sink, ahead = Sink(), []

    def numbered():
        for number in range(23):
            ahead.append(number - len(sink.items))
            yield InputItem(str(number), path=str(number), text=str(number))

    progress = []
    counts = predict_inputs(
        Stub(), numbered(), sink, kind=kind, total=23, progress=lambda *words: progress.append(words)
    )
    assert max(ahead) < chunk
    assert [item.id for item in sink.items] == [str(number) for number in range(23)]
    assert [item.prediction for item in sink.items[:3]] == ["even", "odd", "even"]
    assert (counts.items, dict(counts.counts)) == (23, {"even": 12, "odd": 11})
    assert progress[-1] == ("predictions", 23, 23)


def test_long_texts_make_small_chunks(monkeypatch):
    monkeypatch.setattr(run, "_LONGEST_CHUNK", 10)
    stub = Stub()
    items = iter([InputItem(str(i), text="x" * 6) for i in range(5)])
    predict_inputs(stub, items, Sink(), kind="texts")
    assert stub.sizes == [2, 2, 1]


def test_unreadable_images_are_counted_with_those_of_an_earlier_call(refused):
    def given():
        return iter([InputItem(str(i), path=str(i)) for i in range(6)])

    sink = Sink()
    counts = predict_inputs(Stub({1, 4}), given(), sink, kind="images", on_bad_image=3, start=(10, 1))
    assert (counts.unreadable, counts.unreadable_count, counts.items) == (["1", "4"], 3, 6)
    assert [item.error for item in sink.items] == ["", "1 is damaged", "", "", "4 is damaged", ""]
    with refused("IMAGE-READ", 3, "more than 2", "4"):
        predict_inputs(Stub({1, 4}), given(), Sink(), kind="images", on_bad_image=2, start=(10, 1))
    with refused("IMAGE-READ", 3, "1 is damaged"):
        predict_inputs(Stub({1, 4}), given(), Sink(), kind="images")


def test_classes_go_by_logits_where_probabilities_round_to_the_same_number(monkeypatch):
    import importlib

    import torch

    module = importlib.import_module("aniso.learn.evaluate")  # the package has a function of this name
    logits = torch.tensor([[0.0, 1e-9]])
    assert int(logits.softmax(-1).max(-1).indices) == 0
    monkeypatch.setattr(module, "iterate_logits", lambda *_, **__: iter([logits]))
    split = type("Split", (), {"classes": None})()
    assert module.classify(None, split).labels.tolist() == [1]
    assert module.predict(None, split).tolist() == [1]
