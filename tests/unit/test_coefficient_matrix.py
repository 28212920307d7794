"""Coefficients in records: exact to float16, small, and refused if sizes do not match."""

from __future__ import annotations

import base64
import json
import math
import struct
import tracemalloc
import zlib

import pytest
import torch
from pydantic import ValidationError

from aniso import Bank, Partition
from aniso.coefficient_matrix import LARGEST, BlockLabel, CoefficientMatrix
from aniso.compose import Coefficients
from aniso.experiments.record import coefficient_matrix
from aniso.records import Summary

BLOCKS = [BlockLabel("conv", "conv weight"), BlockLabel("layers.0.ln.weight", "norm", 0)]
VALUES = [[0.5, -0.25], [math.nan, 1e-3]]


def matrix(values=VALUES, blocks=BLOCKS, vectors=("a", "b"), note=""):
    return CoefficientMatrix.of(vectors, blocks, values, note)


def reread(made):
    return CoefficientMatrix.model_validate_json(made.model_dump_json())


def test_values_and_labels_survive_a_round_trip():
    back = reread(matrix(note="means"))
    assert back.blocks == tuple(BLOCKS) and back.vectors == ("a", "b") and back.note == "means"
    assert back.rows[0] == (0.5, -0.25) and math.isnan(back.rows[1][0])
    assert back.rows[1][1] == pytest.approx(1e-3, rel=1 / 2048)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_the_error_is_a_4096th_of_the_largest_value_at_any_size(size):
    values = (torch.randn(7, 30, generator=torch.Generator().manual_seed(0)) * size).tolist()
    blocks = [BlockLabel(f"b{i}", "weight", i) for i in range(30)]
    back = reread(matrix(values, blocks, [f"v{i}" for i in range(7)]))
    largest = max(abs(x) for row in values for x in row)
    wrong = max(abs(x - y) for a, b in zip(values, back.rows, strict=True) for x, y in zip(a, b, strict=True))
    assert wrong <= largest / 4096 * 1.01


def test_zeros_have_a_scale():
    assert reread(matrix([[0.0, 0.0]], vectors=["a"])).rows == ((0.0, 0.0),)


def test_a_large_clip_stays_small_and_what_does_not_is_left_out():
    def made(vectors, blocks):
        values = torch.randn(vectors, blocks, generator=torch.Generator().manual_seed(0)).tolist()
        labels = [BlockLabel(f"visual.transformer.resblocks.{i}.x", "bias", i) for i in range(blocks)]
        return matrix(values, labels, [f"v{i}" for i in range(vectors)])

    assert len(made(22, 296).data) < 25_000  # ViT-L/14 with all vectors of the paper
    assert len(made(100, 700).data) <= LARGEST
    assert made(200, 700) is None


def damaged(**changes):
    return json.dumps(json.loads(matrix().model_dump_json()) | changes)


def packed(content):
    return base64.b64encode(zlib.compress(content)).decode()


LABELS = b'[["a","x",null],["b","x",0]]'
FOUR = struct.pack("<4e", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"vectors": []}, "at least 1"),
        ({"vectors": ["a", "a"]}, "twice"),
        ({"vectors": ["a", "b", "c"]}, "decoded"),
        ({"block_count": 0}, "greater than or equal"),
        ({"block_count": 1 << 20}, "less than or equal"),
        ({"block_count": 1}, "decoded"),
        ({"scale": 0.0}, "greater than 0"),
        ({"scale": -1.0}, "greater than 0"),
        ({"data": "!"}, "decoded"),
        ({"data": "AAAA"}, "decoded"),
        ({"data": "ä"}, "ASCII"),
        ({"data": "A" * (LARGEST + 1)}, "at most"),
        ({"data": packed(FOUR[:6])}, "do not match"),
        ({"data": packed(FOUR + b"[")}, "decoded"),
        ({"data": packed(FOUR + b'[["a","x",null]]')}, "1 blocks are named"),
        ({"data": packed(FOUR + LABELS.replace(b'"b"', b'"a"'))}, "twice"),
        ({"data": packed(FOUR + LABELS.replace(b"0]", b"-1]"))}, "decoded"),
        ({"data": packed(struct.pack("<4e", math.inf, 2, 3, 4) + LABELS)}, "infinite"),
        ({"data": packed(FOUR + LABELS)[:-8]}, "do not match|decoded"),
    ],
)
def test_a_matrix_that_does_not_add_up_is_refused(changes, mention):
    with pytest.raises(ValidationError, match=mention):
        CoefficientMatrix.model_validate_json(damaged(**changes))


def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = packed(b"\0" * (100 << 20))  # 100 MB in 130 kB
    assert len(bomb) < LARGEST
    tracemalloc.start()
    with pytest.raises(ValidationError, match="do not match"):
        CoefficientMatrix.model_validate_json(damaged(data=bomb))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20


def test_records_without_a_matrix_still_load():
    old = Summary.model_validate_json('{"kind": {"bias": [0, 0, 0, 0, 1]}, "depth": {}}')
    assert old.matrix is None and "matrix" not in old.content()


def test_coefficients_of_a_run_are_stored_with_what_a_value_stands_for():
    bank = Bank.load("mini").only("cars", "mnist")
    found = Coefficients.zeros(bank)
    stored = coefficient_matrix(found)
    assert stored.vectors == found.vectors and [b.name for b in stored.blocks] == list(found.blocks)
    assert stored.blocks[-1] == found.block_labels[-1] and stored.note == ""
    parts = Coefficients.zeros(bank, Partition.random(4, 0))
    values = torch.arange(len(parts), dtype=torch.float32)
    mean = coefficient_matrix(Coefficients(parts.index, values, parts.provenance))
    assert "means over the parts of a block, up to 4" in mean.note
    name = found.blocks[-1]
    own = values[parts.index.cell("cars", name)].mean().item()
    column = [b.name for b in mean.blocks].index(name)
    assert mean.rows[mean.vectors.index("cars")][column] == pytest.approx(own, rel=1e-3)
    assert "the same in all blocks" in coefficient_matrix(Coefficients.zeros(bank, Partition.whole())).note
