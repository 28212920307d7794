"""Partitions and divisions: which elements a coefficient scales, against an index of every element."""

from __future__ import annotations

import hashlib
import itertools
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from aniso.compose import CoefficientIndex, Partition
from aniso.compose._engine import block_partition
from aniso.compose._engine.block_partition import (
    ColumnParts,
    RandomParts,
    RowParts,
    WholeBlock,
)
from aniso.compose.partition import FAMILIES
from aniso.compose.partition_rule import PartitionRule
from aniso.registry import PARTITIONS
from aniso.vectors import Block, Kind

PROPERTY = settings(deadline=None, max_examples=150)
NAME = "visual.transformer.resblocks.3.mlp.c_fc.weight"


def block(*shape, name="w", kind=Kind.OTHER):
    return Block(name, shape, kind)


def random_parts(block, parts, seed):
    return Partition.random(parts, seed).for_block(block)


# partitions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("whole", Partition.whole()),
        ("blocks", Partition.blocks()),
        ("rows", Partition.rows()),
        ("columns", Partition.columns()),
        ("random:8", Partition.random(8, 5)),
        ("blocks@weight", Partition.kinds("weight")),
        ("components:8", Partition.components(8)),
        ("rows@mlp,norm", Partition.rows().over("mlp", "norm")),
        ("random:3@attention", Partition.random(3, 5).over("attention")),
    ],
)
def test_what_is_typed_is_what_is_constructed(text, expected):
    """Only a random partition has a seed: others must compare equal whatever the seed of a run is."""
    assert Partition.parse(text, seed=5) == expected
    assert hash(Partition.parse(text, seed=5)) == hash(expected)


def test_a_partition_says_itself_in_words():
    assert str(Partition.blocks()) == "one coefficient per vector and block"
    assert str(Partition.whole()) == "one coefficient per vector"
    said = str(Partition.random(4, 7).over("mlp", "bias"))
    for text in ("4 coefficients", "seed 7", "mlp and bias blocks only"):
        assert text in said


def test_a_partition_is_its_fields():
    made = Partition.random(4, 7).over("mlp")
    assert Partition(**made.as_dict()) == made
    assert made.over() == Partition.random(4, 7)
    assert [Partition.parse(t).is_shared for t in ("whole", "blocks", "rows")] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "random", "random:", "random:-1", "random:1.5", "random:2:3", "rows:3", "Blocks",
     " blocks", "blocks@nonsense", "blocks@weight@norm", "blocks@weight, norm"],
)  # fmt: skip
def test_what_is_no_partition_is_refused_with_the_choices(text, refused):
    with refused("PARTITION", 2, "expected", "fix"):
        Partition.parse(text)


@pytest.mark.parametrize("parts", ["²", "9" * 5000, "٣"])
def test_digits_that_are_no_plain_number_are_refused(parts, refused):
    """Python calls these digits, too, and then cannot or should not read them as a number."""
    with refused("PARTITION", 2, "expected"):
        Partition.parse(f"random:{parts}")


@pytest.mark.parametrize("text", ["blocks:", "blocks@", "blocks@,"])
def test_a_mark_with_nothing_behind_it_is_refused(text, refused):
    """A family that a script left empty must not turn into all blocks."""
    with refused("PARTITION", 2):
        Partition.parse(text)


@pytest.mark.parametrize("parts", [0, -1])
def test_d15_a_block_in_no_parts_is_a_usage_error(parts, refused):
    with refused("PARTITION", 2, f"{parts} parts", "1 or more"):
        Partition.random(parts, 0)


def test_d15_no_parts_on_the_command_line(refused):
    with refused("PARTITION", 2, "0 parts"):
        Partition.parse("random:0")


def test_unknown_families_and_rules_are_refused(refused):
    with refused("PARTITION", 2, "'head'", *FAMILIES):
        Partition.blocks().over("weight", "head")
    with refused("PARTITION", 2, "no family"):
        Partition.kinds()
    with refused("PARTITION", 2, "'halves'"):
        Partition("halves")


def test_a_partition_of_another_package_is_parsed_described_and_used(monkeypatch, refused):
    class Halves(PartitionRule):
        """Two halves."""

        takes_parts = True

        def for_block(self, block):
            return ColumnParts(1, block.numel)

        def describe(self):
            return f"{self.parts} halves"

    monkeypatch.setattr(PARTITIONS, "_classes", {**PARTITIONS._classes, "halves": Halves})
    made = Partition.parse("halves:2@weight", seed=3)
    assert made == Partition("halves", ("weight",), 2)
    assert str(made) == "2 halves, weight blocks only"
    assert made.for_block(block(4)) == ColumnParts(1, 4)
    with refused("PARTITION", 2, "halves:K"):
        Partition.parse("halves")


def test_partitions_have_a_summary_each():
    assert set(PARTITIONS.names) == {"whole", "blocks", "rows", "columns", "random", "components"}
    assert all("coefficient" in PARTITIONS.summary(name) for name in PARTITIONS.names)


def test_the_order_of_families_says_nothing():
    """Coefficients learned for norms and biases fit a composition of biases and norms."""
    assert Partition.blocks().over("norm", "bias") == Partition.blocks().over("bias", "norm", "bias")


def test_families_cover_blocks_by_kind():
    blocks = {
        "attention": block(6, 2, kind=Kind.ATTENTION),
        "mlp": block(6, 2, kind=Kind.MLP),
        "conv": block(6, 3, 2, 2, kind=Kind.CONV),
        "projection": block(6, 2, kind=Kind.PROJECTION),
        "embedding": block(6, 2, kind=Kind.EMBEDDING),
        "norm": block(6, kind=Kind.NORM),
        "bias": block(6, kind=Kind.BIAS),
    }
    for family in blocks:
        assert [n for n, b in blocks.items() if Partition.kinds(family).covers(b)] == [family]
    weights = ["attention", "mlp", "conv", "projection"]
    assert [n for n, b in blocks.items() if Partition.kinds("weight").covers(b)] == weights
    assert all(Partition.blocks().covers(b) for b in blocks.values())


def test_a_weight_has_rows_and_columns():
    """A scale that some model calls weight is none."""
    assert Partition.kinds("weight").covers(block(4, 4))
    assert not Partition.kinds("weight").covers(block(4))
    assert not Partition.kinds("weight").covers(block())


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((3, 4), RowParts(3, 4), ColumnParts(3, 4)),
        ((5, 3, 2, 2), RowParts(5, 12), ColumnParts(5, 12)),
        ((7,), ColumnParts(1, 7), WholeBlock(7)),
        ((7, 1), ColumnParts(1, 7), WholeBlock(7)),
        ((1, 7), WholeBlock(7), ColumnParts(1, 7)),
        ((1,), WholeBlock(1), WholeBlock(1)),
        ((), WholeBlock(1), WholeBlock(1)),
        ((0,), WholeBlock(0), WholeBlock(0)),
        ((0, 5), WholeBlock(0), WholeBlock(0)),
    ],
)
def test_rows_and_columns_of_every_shape(shape, rows, columns):
    assert Partition.rows().for_block(block(*shape)) == rows
    assert Partition.columns().for_block(block(*shape)) == columns
    for text in ("whole", "blocks", "random:1"):
        assert Partition.parse(text).for_block(block(*shape)) == WholeBlock(block(*shape).numel)


def test_the_first_and_the_last_part_are_described():
    assert WholeBlock(4).describe(0) == "the whole block"
    assert RowParts(3, 4).describe(2) == "row 2"
    assert ColumnParts(3, 4).describe(3) == "column 3"
    assert "part 0 of 3: 4 elements" in RandomParts(10, 3, 0).describe(0)
    assert "part 2 of 3: 3 elements" in RandomParts(10, 3, 0).describe(2)


# arithmetic, with an index of every element as the oracle

KEYS = st.integers(0, 2**64 - 1).map(lambda k: k & ~3)
DIVISIONS = st.one_of(
    st.builds(WholeBlock, st.integers(0, 40)),
    st.builds(RowParts, st.integers(1, 9), st.integers(1, 9)),
    st.builds(ColumnParts, st.integers(1, 9), st.integers(1, 9)),
    st.builds(RandomParts, st.integers(2, 150), st.integers(2, 40), KEYS),
)


def numbers(seed, *shape):
    """Small whole numbers: their sums are exact in float64, in any order."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=g).double()


def cuts_of(div, data):
    """Tiles that begin and end wherever they may."""
    units = div.numel // div.alignment
    inner = data.draw(st.sets(st.integers(1, units - 1), max_size=5)) if units > 1 else set()
    edges = [0, *(div.alignment * u for u in sorted(inner)), div.numel]
    return list(itertools.pairwise(edges))


@PROPERTY
@given(
    div=DIVISIONS, vectors=st.integers(1, 4), run=st.integers(1, 50), seed=st.integers(0, 999), data=st.data()
)
def test_tiles_are_added_and_collected_as_the_index_says(div, vectors, run, seed, data):
    """Some of a block's tiles, in any cut: sums of coefficient * tile, and sums over each part."""
    seed = data.draw(st.integers(0, 999))
    with mock.patch.object(block_partition, "_RUN", run):  # many runs in a small block
        part = div.part_of()
        assert part.shape == (div.numel,)
        own, deltas = numbers(seed, vectors, div.count), numbers(seed + 1, vectors, div.numel)
        out, gradient = numbers(seed + 2, div.numel), numbers(seed + 3, div.numel)
        expected, used = out.clone(), torch.zeros(div.numel).double()
        spread, total = div.expand(own), div.accumulator(deltas)
        for start, stop in cuts_of(div, data):
            if data.draw(st.booleans()):
                continue  # a tile that comes from another stack
            span = slice(start, stop)
            tile = deltas[:, span].contiguous() if data.draw(st.booleans()) else deltas[:, span]
            div.add(out[span], tile, spread, start)
            div.accumulate(total, tile, gradient[span], start)
            expected[span] += (own[:, part] * deltas).sum(0)[span]
            used[span] = 1
        sums = torch.zeros(vectors, div.count).double().index_add_(1, part, deltas * gradient * used)
    assert torch.equal(out, expected)
    assert torch.equal(div.sum_by_part(total), sums)


@pytest.mark.parametrize("parts", [2, 7, 1000, 16384, 20000])
def test_runs_of_their_real_length_are_added_and_collected_too(parts):
    div = RandomParts(50_001, parts, 4 * parts)
    part = div.part_of()
    own, deltas, gradient = numbers(1, 2, parts), numbers(2, 2, div.numel), numbers(3, div.numel)
    out, total, spread = torch.zeros(div.numel).double(), div.accumulator(deltas), div.expand(own)
    for start, stop in ((0, 10), (10, 33_000), (33_000, 50_001)):
        div.add(out[start:stop], deltas[:, start:stop], spread, start)
        div.accumulate(total, deltas[:, start:stop], gradient[start:stop], start)
    assert torch.equal(out, (own[:, part] * deltas).sum(0))
    sums = torch.zeros(2, parts).double().index_add_(1, part, deltas * gradient)
    assert torch.equal(div.sum_by_part(total), sums)


@pytest.mark.parametrize("threads", [1, 2])
def test_long_blocks_are_gone_through_by_several_threads_as_by_one(threads):
    g = torch.Generator().manual_seed(0)
    tile = torch.randn(3, block_partition._LONG + 5, generator=g, dtype=torch.float64)
    out, gradient = torch.randn(2, tile.shape[1], generator=g, dtype=torch.float64)
    coefficients = torch.randn(3, 1, generator=g, dtype=torch.float64)
    expected = out + coefficients[:, 0] @ tile, (tile @ gradient).unsqueeze(1)
    div = WholeBlock(tile.shape[1])
    total = div.accumulator(tile)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert block_partition.one_vector_at_a_time(out) == (threads > 1)
        div.add(out, tile, coefficients, 0)
        div.accumulate(total, tile, gradient, 0)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close((out, total), expected)


@pytest.mark.parametrize("text", ["whole", "rows", "columns", "random:3"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (3, 0), (2, 0, 3)])
def test_blocks_of_one_element_and_of_none_have_one_coefficient(text, shape):
    div = Partition.parse(text).for_block(block(*shape))
    numel = block(*shape).numel
    assert (div.count, div.numel, len(div.part_of())) == (1, numel, numel)
    out, tile = torch.full((numel,), 2.0), torch.full((2, numel), 3.0)
    div.add(out, tile, div.expand(torch.tensor([[1.0], [10.0]])), 0)
    assert out.tolist() == [35.0] * numel
    total = div.accumulator(tile)
    div.accumulate(total, tile, torch.full((numel,), 5.0), 0)
    assert div.sum_by_part(total).tolist() == [[15.0 * numel]] * 2


@PROPERTY
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), more=st.integers(1, 3))
def test_the_index_of_rows_and_columns_is_that_of_the_matrix(rows, columns, more):
    shape = (rows, columns, more)
    row = torch.arange(rows).view(-1, 1, 1).expand(shape).reshape(-1)
    column = torch.arange(columns * more).view(1, columns, more).expand(shape).reshape(-1)
    assert torch.equal(Partition.rows().for_block(block(*shape)).part_of(), row)
    assert torch.equal(Partition.columns().for_block(block(*shape)).part_of(), column)


# divisions at random


@PROPERTY
@given(numel=st.integers(2, 400), parts=st.integers(2, 450), run=st.integers(1, 64), key=KEYS)
def test_parts_cover_the_block_and_differ_by_one_element_at_most(numel, parts, run, key):
    with mock.patch.object(block_partition, "_RUN", run):
        div = RandomParts(numel, parts, key)
        sizes = torch.bincount(div.part_of(), minlength=div.count).tolist()
        said = [f"{size} elements" in div.describe(part) for part, size in enumerate(sizes)]
    assert len(sizes) == div.count == min(parts, numel)
    assert sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 1
    assert all(said)


def fingerprint(div):
    assert div.part_of().dtype == torch.int64
    return hashlib.sha256(div.part_of().numpy().astype("<i8").tobytes()).hexdigest()


GOLDEN = "b0577f817a2dc2f9e45943415ee52422e4f1050e71a8daf9993907efe0f8f5ad"


def test_a_division_is_made_again_from_seed_name_and_number_of_parts():
    """Coefficients are saved without their division: if this hash changes, files that exist become wrong."""
    assert fingerprint(random_parts(block(300, 200, name=NAME), 7, 42)) == GOLDEN


def test_the_shape_of_a_block_plays_no_part_in_its_division():
    """Name, seed, number of parts and number of elements say it all."""
    assert fingerprint(random_parts(block(60_000, name=NAME), 7, 42)) == GOLDEN


def mixed(key, i):
    """SplitMix64 with Python's integers, as it was published."""
    mask = 2**64 - 1
    x = (key + i * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_a_division_at_random_is_what_its_description_says():
    """Computed without numpy: runs are windows of one shuffled sequence, the rest is shuffled by itself."""
    numel, parts, seed = 40_000, 11, 3
    digest = hashlib.sha256(f"{seed}\0{NAME}\0{parts}".encode()).digest()
    key = int.from_bytes(digest[:8], "big") & ~3
    length = -(-(1 << 14) // parts) * parts

    def shuffled(key, size):
        return sorted(range(size), key=lambda i: mixed(key, i + 1))

    sequence, expected = shuffled(key, length), []
    for run in range(numel // length):
        shift = mixed(key ^ 2, run + 1) % length
        expected += [sequence[(shift + s) % length] % parts for s in range(length)]
    expected += [s % parts for s in shuffled(key ^ 1, numel % length)]
    assert random_parts(block(numel, name=NAME), parts, seed).part_of().tolist() == expected


def agreement(a, b):
    return float((a.part_of() == b.part_of()).double().mean())


def test_another_seed_or_name_is_another_division():
    """Two divisions agree no more often than by chance."""
    div = random_parts(block(20_000, name="a"), 10, 1)
    assert div == random_parts(block(20_000, name="a"), 10, 1)
    for other in (random_parts(block(20_000, name="a"), 10, 2), random_parts(block(20_000, name="b"), 10, 1)):
        assert agreement(div, other) == pytest.approx(0.1, abs=5 * (0.09 / 20_000) ** 0.5)
    assert agreement(div, random_parts(block(20_000, name="a"), 11, 1)) < 0.2
    assert agreement(random_parts(block(500), 10, -1), random_parts(block(500), 10, 1)) < 0.3


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 17), (5, 4), (63, 0)])
def test_elements_of_different_runs_share_a_part_as_often_as_by_chance(first, second):
    parts, runs = 8, 4000
    with mock.patch.object(block_partition, "_RUN", 64):
        part = RandomParts(64 * runs, parts, 1 << 40).part_of().view(runs, 64)
    shared = float((part[1:, first] == part[:-1, second]).double().mean())
    spread = (1 / parts * (1 - 1 / parts) / runs) ** 0.5
    assert shared == pytest.approx(1 / parts, abs=4 * spread)


def test_each_place_in_a_run_falls_to_every_part():
    parts, runs = 8, 4000
    with mock.patch.object(block_partition, "_RUN", 64):
        part = RandomParts(64 * runs, parts, 1 << 41).part_of().view(runs, 64)
    counts = torch.stack([torch.bincount(part[:, place], minlength=parts) for place in (0, 1, 31)]).double()
    expected = runs / parts
    assert float(((counts - expected) ** 2 / expected).sum(1).max()) < 30  # chi squared, 7 degrees of freedom


def test_d15_more_parts_than_elements_are_capped_and_said():
    cells = [(block(4, 4, name="w"), ("a", "b")), (block(3, name="b"), ("a",)), (block(name="gate"), ("a",))]
    slots = CoefficientIndex.from_cells(Partition.random(5, 0), ("a", "b"), cells)
    assert [slot.partition.count for slot in slots.blocks] == [5, 3, 1]
    assert [slot.block.name for slot in slots.capped] == ["b", "gate"]
    assert slots.count == 2 * 5 + 3 + 1
    assert sorted(slots.by_block["b"].partition.part_of().tolist()) == [0, 1, 2]
    assert CoefficientIndex.from_cells(Partition.rows(), ("a", "b"), cells).capped == ()
    assert CoefficientIndex.from_cells(Partition.random(1, 0), ("a", "b"), cells).capped == ()
