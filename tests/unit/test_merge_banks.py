"""Merges of banks: blocks of every shape, absent blocks, query, key and value, memory, provenance."""

from __future__ import annotations

import gc
import weakref

import merges
import pytest
import torch

import aniso
from aniso.merge import MergeOptions, new_merge_rule, plan_merge, unread_merge
from aniso.merge import merge as merge_vectors
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, Dense, SparseRows, TaskVector

SHAPES = {
    "layers.0.fc.weight": (12, 20),
    "layers.0.fc.bias": (12,),
    "layers.1.conv.weight": (4, 3, 2, 2),
    "layers.1.gate": (),
    "tokens.embedding.weight": (30, 6),
}
MATRIX, BIAS, CONV, GATE, EMBEDDING = SHAPES
RULES = MERGE_RULES.names
ELEMENTWISE = ("mean", "task-arithmetic", "ties", "dare")
SPECTRAL = tuple(name for name in RULES if name not in ELEMENTWISE)


def rule_of(name: str, **options):
    return new_merge_rule(name, options)


def rule_for_small(name: str):
    """A rule with options that leave it room in small matrices."""
    return rule_of(name, **({"cart": {"rank": 0.5}, "iso-cts": {"common": 0.5}}.get(name, {})))


def values(vector: TaskVector, block: str) -> torch.Tensor:
    return vector[block].dense() if block in vector else torch.zeros(vector.layout.by_name[block].shape)


@pytest.fixture(scope="module")
def bank() -> Bank:
    return merges.random_bank(SHAPES, ("cars", "dtd", "mnist"))


@pytest.mark.parametrize("name", RULES)
def test_a_merge_is_an_ordinary_vector(name, bank, tmp_path):
    vector = merge_vectors(bank, rule_of(name))
    assert vector.name == name and vector.layout.signature == bank.layout.signature
    assert vector.norms[MATRIX] == pytest.approx(vector[MATRIX].norm())
    both = Bank({**{n: bank[n] for n in bank}, name: vector}).save(tmp_path / "bank")
    assert both.names == (*bank.names, name) and both.check() == []
    stored = merge_vectors(bank, rule_of(name), to=tmp_path / "v.safetensors")
    for block in stored.blocks:
        assert torch.equal(stored[block.name].dense(), vector[block.name].dense())


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("block", [BIAS, CONV, GATE, EMBEDDING])
def test_spectral_rules_average_what_is_no_matrix(name, block, bank):
    rule = rule_of(name)
    expected = rule.scale * sum(bank[n][block].dense().double() for n in bank) / 3
    torch.testing.assert_close(values(merge_vectors(bank, rule), block), expected.float())


@pytest.mark.parametrize("name", SPECTRAL)
def test_embeddings_are_matrices_by_request(name, bank):
    rule = rule_of(name, **({"rank": 0.5} if name == "cart" else {}))
    if name == "iso-cts":
        rule = rule_of(name, common=0.4)
    plain, spectral = (merge_vectors(bank, rule, embeddings=how) for how in ("mean", "spectral"))
    assert not torch.allclose(values(plain, EMBEDDING), values(spectral, EMBEDDING))
    assert torch.equal(values(plain, MATRIX), values(spectral, MATRIX))


def test_the_scale_multiplies_every_block(bank):
    for name in RULES:
        one, two = (merge_vectors(bank, rule_of(name, scale=scale)) for scale in (1.0, -2.5))
        for block in SHAPES:
            torch.testing.assert_close(values(two, block), -2.5 * values(one, block))


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_the_bank_changes_no_bit(name, bank):
    turned = Bank({n: bank[n] for n in ("mnist", "cars", "dtd")})
    one, two = merge_vectors(bank, rule_of(name)), merge_vectors(turned, rule_of(name))
    assert all(torch.equal(values(one, block), values(two, block)) for block in SHAPES)
    assert one.provenance == two.provenance


# blocks that only some vectors have


@pytest.mark.parametrize("name", RULES)
def test_an_absent_block_counts_as_zero(name):
    """It is a stored delta of zeros; where zero has no directions, the vector takes no part."""
    shapes = {"a.weight": (8, 9), "b.weight": (8, 9)}
    full = {n: {b: merges.random_delta(s, 7 * i + j) for j, (b, s) in enumerate(shapes.items())}
            for i, n in enumerate("xyz")}  # fmt: skip
    absent = {**full, "z": {"a.weight": full["z"]["a.weight"]}}
    zero = {**full, "z": {**absent["z"], "b.weight": torch.zeros(8, 9)}}
    rule = rule_for_small(name)
    found = merge_vectors(merges.bank_of(absent, shapes), rule)
    for block in shapes:
        other = merge_vectors(merges.bank_of(zero, shapes), rule)
        torch.testing.assert_close(found[block].dense(), other[block].dense())
    taus = [full[n]["b.weight"].double().numpy() for n in "xy"]
    expected = {
        "mean": lambda: sum(taus) / 3,
        "task-arithmetic": lambda: 0.3 * sum(taus),
        "tsv": lambda: merges.tsv(taus),
        "iso-c": lambda: 1.5 * merges.iso_c(taus),
        "iso-cts": lambda: 1.5 * merges.iso_cts(taus, 0.5),
        "cart": lambda: merges.cart([*taus, 0 * taus[0]], 0.5),
        "aswudi": lambda: merges.aswudi(taus),
    }.get(name)
    if expected is not None:
        wanted = torch.as_tensor(expected()).float()
        torch.testing.assert_close(found["b.weight"].dense(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tsv", "cart", "aswudi", "swudi"])
def test_a_block_of_one_vector_alone(name):
    shapes = {"a.weight": (8, 9), "b.weight": (8, 9)}
    own = merges.random_delta((8, 9), 5)
    bank = merges.bank_of({"x": {"a.weight": own}, "y": {"b.weight": own}}, shapes)
    rule = rule_of(name, **({"rank": 0.5} if name == "cart" else {}))
    found = merge_vectors(bank, rule)["a.weight"].dense()
    expected = own
    if name == "cart":  # the mean of x and nothing
        expected = torch.from_numpy(
            merges.cart([own.double().numpy(), 0 * own.double().numpy()], 0.5)
        ).float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_blocks_that_no_vector_changes_stay_absent(bank):
    small = Bank({n: bank[n].within({MATRIX}) for n in bank})
    assert [block.name for block in merge_vectors(small, rule_of("tsv")).blocks] == [MATRIX]


def test_ties_counts_the_elements_of_blocks_that_a_vector_has():
    shapes = {"a.weight": (4, 5), "b.weight": (40, 50)}
    taus = [merges.random_delta((4, 5), i) for i in range(2)]
    bank = merges.bank_of({n: {"a.weight": tau} for n, tau in zip("xy", taus, strict=True)}, shapes)
    expected = merges.ties([tau.double().numpy().copy() for tau in taus], 0.2)
    found = merge_vectors(bank, rule_of("ties"))["a.weight"].dense()
    torch.testing.assert_close(found.view(-1), torch.from_numpy(expected).float())


def test_a_vocabulary_keeps_only_rows_that_a_vector_changes():
    shape = (100, 6)
    values = merges.random_delta((4, 6), 1)
    vectors = {
        "x": {"tokens.embedding.weight": SparseRows(shape, torch.tensor([1, 5]), values[:2])},
        "y": {"tokens.embedding.weight": SparseRows(shape, torch.tensor([5, 99]), values[2:])},
    }
    bank = merges.bank_of(vectors, {"tokens.embedding.weight": shape})
    merged = aniso.merge.tsv(bank)["tokens.embedding.weight"]
    assert isinstance(merged, SparseRows) and merged.rows.tolist() == [1, 5, 99]
    torch.testing.assert_close(merged.values[1], (values[1] + values[2]) / 2)


# query, key and value


FUSED = {"attn.in_proj_weight": (12, 10), "attn.in_proj_bias": (12,)}
SPLIT = {f"attn.{letter}_proj.weight": (4, 10) for letter in "qkv"} | {
    f"attn.{letter}_proj.bias": (4,) for letter in "qkv"
}


def _both_layouts() -> tuple[Bank, Bank]:
    whole = {n: {b: merges.random_delta(s, 9 * i + j) for j, (b, s) in enumerate(FUSED.items())}
             for i, n in enumerate("xyz")}  # fmt: skip
    parts = {
        name: {
            f"attn.{letter}_proj.{block.rpartition('_')[2]}": delta[4 * i : 4 * i + 4]
            for block, delta in deltas.items()
            for i, letter in enumerate("qkv")
        }
        for name, deltas in whole.items()
    }
    return merges.bank_of(whole, FUSED), merges.bank_of(parts, SPLIT)


@pytest.mark.parametrize("name", [name for name in RULES if name != "dare"])
@pytest.mark.parametrize("qkv", ["fused", "split"])
def test_query_key_and_value_are_one_or_three_whatever_the_bank_has(name, qkv):
    """Except for DARE, whose random elements depend on the blocks' names."""
    fused, split = _both_layouts()
    rule = rule_for_small(name)
    one, three = merge_vectors(fused, rule, qkv=qkv), merge_vectors(split, rule, qkv=qkv)
    for kind in ("weight", "bias"):
        joined = torch.cat([values(three, f"attn.{letter}_proj.{kind}") for letter in "qkv"])
        torch.testing.assert_close(values(one, f"attn.in_proj_{kind}"), joined)


@pytest.mark.parametrize("name", SPECTRAL)
def test_fused_and_split_merges_differ(name):
    fused, _ = _both_layouts()
    rule = rule_for_small(name)
    one, three = (
        merge_vectors(fused, rule, qkv=qkv)["attn.in_proj_weight"].dense() for qkv in ("fused", "split")
    )
    assert not torch.allclose(one, three)
    assert torch.equal(merge_vectors(fused, rule)["attn.in_proj_weight"].dense(), one)


# memory


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [2, 10])
def test_one_delta_is_held_at_a_time_whatever_the_number_of_vectors(name, count):
    alive = peak = 0

    def cell(shape, seed):
        def read():
            nonlocal alive, peak
            delta = Dense(merges.random_delta(shape, seed))
            alive, peak = alive + 1, max(peak, alive + 1)

            def freed():
                nonlocal alive
                alive -= 1

            weakref.finalize(delta, freed)
            return delta

        return read

    shapes = {"a.weight": (40, 60), "b.weight": (40, 60)}
    vectors = {
        f"v{i}": {block: cell(shape, 5 * i + j) for j, (block, shape) in enumerate(shapes.items())}
        for i in range(count)
    }
    bank = merges.bank_of(vectors, shapes)
    _ = [bank[n].norm() for n in bank]
    vector = unread_merge(bank, rule_of(name, **({"common": 0.5} if name == "iso-cts" else {})))
    gc.collect()
    alive = peak = 0
    assert vector["a.weight"].norm() > 0
    assert peak == 1


def test_the_plan_grows_with_the_largest_block_and_not_with_vectors():
    rule = rule_of("tsv")
    few, many = (merges.random_bank({"a.weight": (16, 32)}, [f"v{i:02d}" for i in range(n)]) for n in (2, 8))
    assert plan_merge(few, rule).memory_bytes == plan_merge(many, rule).memory_bytes > 16 * 32 * 8
    assert plan_merge(many, rule).read_bytes == 4 * plan_merge(few, rule).read_bytes
    larger = merges.random_bank({"a.weight": (16, 32), "b.weight": (32, 64)}, "xy")
    assert plan_merge(larger, rule).largest == "b.weight"


# provenance


def test_provenance_names_rule_options_and_sources(bank):
    found = merge_vectors(bank, rule_of("cart", rank=0.25), qkv="split", name="mine")
    assert found.name == "mine"
    origin = found.provenance
    assert (origin.source, origin.format) == ("cart of 3 vectors", "merge")
    for text in ("cart(", "scale=1.0", "rank=0.25", "factor=2.0", "qkv=split", "cars@", "dtd@", "mnist@"):
        assert text in origin.formula
    changed = Bank({**{n: bank[n] for n in bank}, "cars": 2.0 * bank["cars"]})
    other = [
        merge_vectors(bank, rule_of("cart", rank=0.3), qkv="split"),
        merge_vectors(bank, rule_of("cart", rank=0.25)),
        merge_vectors(bank.without("cars"), rule_of("cart", rank=0.25), qkv="split"),
        merge_vectors(changed, rule_of("cart", rank=0.25), qkv="split"),
    ]
    assert len({origin.sha256, *(vector.provenance.sha256 for vector in other)}) == 5


def test_packed_vectors_and_vectors_with_fewer_blocks_have_another_provenance(bank, tmp_path):
    large = merges.random_bank({"a.weight": (80, 90), "b.weight": (80, 90)}, "xy")
    packed = large.save(tmp_path / "packed", storage="int4")
    fewer = Bank({"x": large["x"], "y": large["y"].within({"a.weight"})})
    found = [aniso.merge.tsv(b).provenance.sha256 for b in (large, packed, fewer)]
    assert len(set(found)) == 3


def test_provenance_survives_the_file(bank, tmp_path):
    stored = aniso.merge.tsv(bank, to=tmp_path / "v.safetensors")
    assert stored.provenance == aniso.merge.tsv(bank).provenance
    again = TaskVector.load(tmp_path / "v.safetensors")
    assert again.provenance.sha256 == stored.provenance.sha256


def test_vectors_of_very_different_norms_are_noted(bank):
    large = Bank({**{n: bank[n] for n in bank}, "cars": 5.0 * bank["cars"]})
    assert any("differ by a factor" in note and "'cars'" in note for note in aniso.merge.mean(large).notes)
    assert aniso.merge.mean(bank).notes == ()


def test_a_merge_among_the_sources_is_noted(bank):
    again = Bank({**{n: bank[n] for n in bank}, "tsv": aniso.merge.tsv(bank)})
    assert any("'tsv'" in note and "--vectors" in note for note in aniso.merge.mean(again).notes)


# input that rules are not defined for


@pytest.mark.parametrize("name", RULES)
def test_one_vector(name, bank, refused):
    alone = bank.only("cars")
    if name == "iso-cts":
        with refused("MERGE-VECTORS", 2, "2 vectors or more", "--vectors"):
            merge_vectors(alone, rule_of(name))
        return
    vector = merge_vectors(alone, rule_of(name, **({"keep": 1.0} if name in ("ties", "dare") else {})))
    for block in SHAPES:
        if name != "iso-c" or block != MATRIX:
            expected = rule_of(name).scale * alone["cars"][block].dense()
            torch.testing.assert_close(values(vector, block), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", RULES)
def test_equal_vectors(name, bank, refused):
    twice = Bank({"cars": bank["cars"], "copy": bank["cars"], "dtd": bank["dtd"]})
    if name in ("tsv", "iso-cts"):
        with refused("MERGE-VECTORS", 2, "'cars' and 'copy' are equal", "leave 'copy' out"):
            merge_vectors(twice, rule_of(name))
        return
    vector = merge_vectors(twice, rule_of(name))
    assert all(bool(values(vector, block).isfinite().all()) for block in SHAPES)


@pytest.mark.parametrize("name", RULES)
def test_a_vector_of_zeros_is_refused(name, bank, refused):
    zeros = {block: torch.zeros(shape) for block, shape in SHAPES.items()}
    vectors = {"cars": {b: bank["cars"][b].dense() for b in SHAPES}, "none": zeros}
    with refused("VECTOR-ZERO", 3, "'none'", "--vectors"):
        merge_vectors(merges.bank_of(vectors, SHAPES), rule_of(name))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(name, bad, bank, refused):
    broken = bank["dtd"][MATRIX].dense()
    broken[3, 4] = bad
    vectors = {n: {b: bank[n][b].dense() for b in SHAPES} for n in bank}
    vectors["dtd"][MATRIX] = broken
    with refused("WEIGHT-NONFINITE", 3, "'dtd'", MATRIX):
        merge_vectors(merges.bank_of(vectors, SHAPES), rule_of(name))


def test_nan_that_a_stored_norm_does_not_show_is_refused(bank, refused):
    """Norms are read from a file's index; the values are looked at when they are merged."""
    broken = Dense(bank["dtd"][MATRIX].dense().fill_(float("nan")))
    cells = {MATRIX: lambda: broken}
    vector = TaskVector("bad", bank.layout, lambda: bank.base, cells, bank["dtd"].provenance, {MATRIX: 1.0})
    with refused("WEIGHT-NONFINITE", 3, "'bad' has 240 values", MATRIX):
        merge_vectors(Bank({"cars": bank["cars"], "bad": vector}), rule_of("mean"))


@pytest.mark.parametrize("name", RULES)
def test_more_vectors_than_ranks(name, refused):
    shapes = {"head.weight": (3, 20), "fc.weight": (40, 40)}
    bank = merges.random_bank(shapes, [f"v{i}" for i in range(5)])
    rule = rule_of(name)
    if name in ("tsv", "iso-cts", "cart"):
        with refused("MERGE-RANK", 2, "head.weight", "3 x 20, 5 vectors", "--small mean"):
            merge_vectors(bank, rule)
        with refused("MERGE-RANK", 2, "head.weight"):
            plan_merge(bank, rule)
        mean = rule.scale * sum(bank[n]["head.weight"].dense() for n in bank) / 5
        found = merge_vectors(bank, rule, small="mean")
        torch.testing.assert_close(found["head.weight"].dense(), mean)
        assert not torch.allclose(found["fc.weight"].dense(), mean.mean())
        return
    assert bool(merge_vectors(bank, rule)["head.weight"].dense().isfinite().all())


def test_iso_cts_is_never_iso_c_under_another_name(refused):
    """For more than 2 (q - k) vectors the published rounding leaves no directions to single vectors."""
    bank = merges.random_bank({"fc.weight": (10, 10)}, [f"v{i}" for i in range(5)])
    with refused("MERGE-RANK", 2, "iso-cts"):
        aniso.merge.iso_cts(bank)
    assert aniso.merge.iso_cts(bank, common=0.5).norm() > 0


@pytest.mark.parametrize("name", ["mean", "task-arithmetic", "ties", "iso-c", "aswudi"])
def test_vectors_that_cancel_are_refused(name, bank, refused):
    opposite = Bank({"cars": bank["cars"], "minus": -1.0 * bank["cars"]})
    with refused("VECTOR-ZERO", 3, name, "cancel"):
        merge_vectors(opposite, rule_of(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mean", {"scale": 0.0}),
        ("mean", {"scale": float("nan")}),
        ("ties", {"keep": 0.0}),
        ("ties", {"keep": 1.5}),
        ("ties", {"form": "peft"}),
        ("dare", {"keep": -1.0}),
        ("dare", {"form": "x"}),
        ("iso-cts", {"common": 1.0}),
        ("cart", {"rank": 0.0}),
        ("cart", {"factor": float("inf")}),
        ("swudi", {"time": 0.0}),
        ("swudi", {"top": 2.0}),
    ],
)
def test_options_out_of_range_are_refused(name, options, refused):
    (option,) = options
    with refused("USAGE", 2, name, option, f"--option {option}="):
        rule_of(name, **options)


def test_unknown_options_and_choices_are_refused(refused):
    with refused("USAGE", 2, "'kept'", "keep=0.2"):
        rule_of("ties", kept=0.1)
    with refused("USAGE", 2, "qkv", "stored, fused, split"):
        MergeOptions(qkv="both")
    with refused("USAGE", 2, "'tsvm'", "tsv"):
        rule_of("tsvm")
