"""Merges of LoRA banks in core space: lossless, of mixed ranks, and one adapter again."""

from __future__ import annotations

import merges
import pytest
import torch

import aniso
from aniso.compose import Coefficients, merge_adapters
from aniso.merge import CoreSpace, new_merge_rule
from aniso.merge import merge as merge_vectors
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank, LowRank

SHAPES = {"fc.weight": (24, 32), "out.weight": (32, 24), "fc.bias": (24,)}
SAME_IN_BOTH = ("mean", "task-arithmetic", "tsv", "iso-c", "aswudi")
"""Rules whose result does not depend on the space: linear ones, and those that use no rank of the layer."""


def lora_bank(ranks: tuple[int, ...] = (3, 3, 3)) -> Bank:
    vectors = {
        f"v{i}": {
            "fc.weight": merges.low_rank((24, 32), rank, 10 * i + 1),
            "out.weight": merges.low_rank((32, 24), rank, 10 * i + 2),
            "fc.bias": merges.random_delta((24,), i),
        }
        for i, rank in enumerate(ranks)
    }
    return merges.bank_of(vectors, SHAPES)


def test_vectors_between_the_bases_are_the_vectors_again():
    deltas = {f"v{i}": merges.low_rank((24, 32), rank, i) for i, rank in enumerate((1, 4, 2))}
    core = CoreSpace.of(deltas)
    assert core.u.shape == (24, 7) and core.v.shape == (32, 7)
    for basis in (core.u, core.v):
        torch.testing.assert_close(basis.T @ basis, torch.eye(7).double())
    for name, delta in deltas.items():
        (term,) = delta.terms
        exact = term.scale * term.b.double() @ term.a.double()
        torch.testing.assert_close(core.u @ core.matrices[name] @ core.v.T, exact)
        assert core.low_rank(core.matrices[name]).rank == term.rank


# TSV-M keeps a third of the rank, of ranks 1, 4 and 2: 2 in core space, 8 in full space
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, ranks) for name in SAME_IN_BOTH for ranks in ((3, 3, 3), (16, 16, 16))),
        *((name, (1, 4, 2)) for name in SAME_IN_BOTH if name != "tsv"),
    ],
)
def test_core_space_gives_what_full_space_gives(name, ranks):
    bank = lora_bank(ranks)
    core, full = (merge_vectors(bank, new_merge_rule(name), space=space) for space in ("core", "full"))
    for block in SHAPES:
        expected = full[block].dense()
        size = float(expected.abs().max())
        torch.testing.assert_close(core[block].dense(), expected, rtol=1e-4, atol=2e-6 * size)


@pytest.mark.parametrize("name", MERGE_RULES.names)
def test_the_result_is_low_rank_unless_a_rule_works_on_elements(name):
    bank = lora_bank((5, 5, 5))
    rule = new_merge_rule(name, {"common": 0.5} if name == "iso-cts" else {})
    merged = merge_vectors(bank, rule)
    elementwise = name in ("ties", "dare")
    for block in ("fc.weight", "out.weight"):
        delta = merged[block]
        assert isinstance(delta, LowRank) != elementwise
        assert not isinstance(delta, LowRank) or delta.rank <= 15
    inside = merge_vectors(bank, rule, space="core")
    assert isinstance(inside["fc.weight"], LowRank)


def test_tsv_inside_core_space_is_the_definition_there():
    bank = lora_bank((1, 4, 2))
    core = CoreSpace.of({name: bank[name]["fc.weight"] for name in bank})
    expected = merges.tsv([core.matrices[name].numpy() for name in bank])
    found = merge_vectors(bank, new_merge_rule("tsv"))["fc.weight"].dense().double()
    torch.testing.assert_close(core.u.T @ found @ core.v, torch.from_numpy(expected), rtol=1e-4, atol=1e-6)


def test_the_size_of_a_vector_matters_inside_core_space():
    """A property that an implementation elsewhere lacked: it ignored the weights."""
    bank = lora_bank()
    heavy = Bank({**{n: bank[n] for n in bank}, "v0": 10.0 * bank["v0"]})
    for rule in ("mean", "tsv", "cart"):
        made = new_merge_rule(rule, {"rank": 0.5} if rule == "cart" else {})
        one, ten = (merge_vectors(b, made)["fc.weight"].dense() for b in (bank, heavy))
        assert not torch.allclose(one, ten, rtol=1e-2)


def test_updates_of_query_and_value_alone_keep_their_rows():
    shapes = {"attn.in_proj_weight": (24, 8)}
    vectors = {}
    for i, name in enumerate("xy"):
        query, value = (merges.low_rank((24, 8), 2, 5 * i + j, start, 8) for j, start in ((1, 0), (2, 16)))
        vectors[name] = {"attn.in_proj_weight": LowRank((24, 8), (*query.terms, *value.terms))}
    bank = merges.bank_of(vectors, shapes)
    for qkv in ("fused", "split"):
        merged = merge_vectors(bank, new_merge_rule("tsv"), qkv=qkv)["attn.in_proj_weight"]
        assert isinstance(merged, LowRank)
        assert float(merged.dense()[8:16].abs().max()) < 1e-7
    apart = merge_vectors(bank, new_merge_rule("tsv"), qkv="split")["attn.in_proj_weight"].dense()
    queries = {n: {"q.weight": LowRank((8, 8), vectors[n]["attn.in_proj_weight"].terms[:1])} for n in "xy"}
    alone = merge_vectors(merges.bank_of(queries, {"q.weight": (8, 8)}), new_merge_rule("tsv"))
    torch.testing.assert_close(apart[:8], alone["q.weight"].dense(), rtol=1e-4, atol=1e-7)


def test_low_rank_and_dense_vectors_are_merged_in_full_space():
    bank = lora_bank((3, 3))
    dense = merges.random_delta((24, 32), 77)
    mixed = merges.bank_of({"a": {"fc.weight": bank["v0"]["fc.weight"]}, "b": {"fc.weight": dense}}, SHAPES)
    found = aniso.merge.mean(mixed)["fc.weight"]
    torch.testing.assert_close(found.dense(), (bank["v0"]["fc.weight"].dense() + dense) / 2)


def test_more_vectors_than_ranks_in_core_space(refused):
    """Equal directions leave fewer dimensions than vectors."""
    one = merges.low_rank((24, 32), 1, 3)
    vectors = {f"v{i}": {"fc.weight": one.scaled(1.0 + i)} for i in range(3)}
    with refused("MERGE-RANK", 2, "fc.weight", "1 x 1, 3 vectors"):
        aniso.merge.tsv(merges.bank_of(vectors, SHAPES))


def test_the_merge_is_written_as_one_peft_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    from adapters import language_models, random_adapter

    make, config = language_models()["llama"]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    for i, rank in enumerate((2, 3)):
        model = make()
        model.load_state_dict(_loaded(tmp_path / "base", make))
        random_adapter(model, tmp_path / f"a{i}", seed=i, r=rank, **config)
    bank = Bank.build(tmp_path / "base", {f"a{i}": tmp_path / f"a{i}" for i in range(2)})
    merged = aniso.merge.tsv(bank)
    one = Bank({"merged": merged})
    merge_adapters(tmp_path / "base", one, Coefficients.ones(one)).save(tmp_path / "merged")
    model = make()
    model.load_state_dict(_loaded(tmp_path / "base", make))
    joined = peft.PeftModel.from_pretrained(model, tmp_path / "merged").merge_and_unload().state_dict()
    for key, value in merged.apply(tmp_path / "base").items():
        torch.testing.assert_close(joined[key], value, rtol=1e-4, atol=1e-6)


def _loaded(path, make):
    return type(make()).from_pretrained(path).state_dict()
