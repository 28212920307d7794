"""Fault table D: coefficients that do not belong to the bank, the model or the file they are used with."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tiny
import torch
from hypothesis import given
from torch import nn
from watch import FUZZ, no_hang, peak_below

from aniso.compose import CoefficientIndex, Coefficients, Composition, Partition, Plan, Runtime, plan
from aniso.compose._engine import delta_store
from aniso.compose.coefficients import FORMAT, CoefficientProvenance
from aniso.errors import AnisoError, InputError
from aniso.sizes import parse_bytes, show_bytes
from aniso.vectors import Bank, BlockSource, TaskVector
from aniso.weights import SafetensorsFile, TensorMap, save_safetensors
from aniso.weights.files import RawFile

ALL = ["whole", "blocks", "rows", "columns", "random:3"]


class Small(nn.Module):
    """A matrix, a bias, one element, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 5)
        self.one = nn.Parameter(torch.randn(1))
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.fc(x) * self.gate + self.one


MODEL = Small()
BASE = {k: v.clone() for k, v in MODEL.state_dict().items()}


def small_bank(count=2):
    return Bank.build(BASE, {f"v{i}": tiny.tuned(BASE, i + 1) for i in range(count)})


@pytest.fixture(scope="module")
def bank():
    return small_bank()


def some(bank, partition="blocks", seed=0):
    """Random coefficients."""
    slots = CoefficientIndex.of(bank, Partition.parse(partition))
    g = torch.Generator().manual_seed(seed)
    return Coefficients(slots, torch.randn(slots.count, generator=g), CoefficientProvenance.of(bank))


def changed(coefficients, **cells):
    """The same coefficients with the values of some blocks set, ``{block: {vector: value}}``."""
    values = coefficients.values.clone()
    for block, own in cells.items():
        for vector, value in own.items():
            values[coefficients.index.cell(vector, block)] = value
    return Coefficients(coefficients.index, values, coefficients.provenance)


# D11: 152 blocks or 200


FUSED = "visual.transformer.resblocks.0.attn.in_proj_weight"
BIAS = "visual.transformer.resblocks.1.attn.in_proj_bias"


@pytest.fixture(scope="module")
def clip():
    """A tiny CLIP, its weights and those of two models tuned from it."""
    pytest.importorskip("open_clip")
    model = tiny.open_clip_vit()
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return (
        model,
        base,
        {n: tiny.tuned_vision(base, tiny.is_open_clip_vision, i + 1) for i, n in enumerate("ab")},
    )


@pytest.fixture(scope="module")
def banks(clip):
    """The same vectors, with query, key and value in one block and in three."""
    return both_banks(*clip[1:])


def both_banks(base, tuned):
    source = TensorMap(base)
    return tuple(Bank.build(BlockSource(source, split=split), tuned) for split in (False, True))


def unsplit(name):
    stem, _, letter = name.rpartition(".")
    return (stem, "qkv".index(letter)) if letter in ("q", "k", "v") else (name, None)


@pytest.mark.parametrize("text", ["whole", "blocks", "rows", "columns", "blocks@bias"])
def test_d11_query_key_and_value_take_over_the_coefficients_of_their_block(banks, text):
    fused, split = banks
    made = some(fused, text)
    found = made.for_bank(split)
    assert len(found.blocks) > len(made.blocks)
    for slot in found.index.blocks:
        name, third = unsplit(slot.block.name)
        for vector in slot.vectors:
            theirs = made.of(vector, name)
            by_row = third is not None and text == "rows"
            expected = theirs.chunk(3)[third] if by_row else theirs
            assert torch.equal(found.of(vector, slot.block.name), expected)
    assert by_labels(found.for_bank(fused)) == by_labels(made)


def by_labels(coefficients):
    return {(vector, block, part): value for vector, block, part, value in coefficients.items()}


@pytest.mark.parametrize("text", ["whole", "blocks", "rows", "columns"])
def test_d11_both_block_schemes_compose_the_same_model(clip, banks, text):
    model, fused, split = clip[0], *banks
    made = some(fused, text)
    ours = Composition.of(model, fused, made).weights()
    theirs = Composition.of(model, split, made).weights()
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-6, atol=1e-7), name


def test_d11_a_file_goes_with_the_other_block_scheme(banks, tmp_path):
    fused, split = banks
    made = some(fused)
    made.save(tmp_path / "c")
    found = Coefficients.load(tmp_path / "c").for_bank(split)
    assert torch.equal(found.of("b", f"{FUSED}.k"), made.of("b", FUSED))


def test_d11_the_base_is_the_same_however_it_is_divided(clip, banks):
    """A fingerprint must not depend on blocks, or no coefficients could ever be taken over."""
    fused, split = banks
    assert fused.base.content == split.base.content
    other = dict(clip[1])
    other["visual.proj"] = other["visual.proj"] + 1
    assert BlockSource(TensorMap(other), split=True).identity().content != split.base.content


@pytest.mark.parametrize("letter", ["q", "k", "v"])
@pytest.mark.parametrize("block", [FUSED, BIAS])
def test_d11_three_that_differ_do_not_become_one(banks, block, letter, refused):
    """The vector and the numbers that are named are those that differ, not the first ones."""
    fused, split = banks
    made = changed(some(fused).for_bank(split, any_bank=True), **{f"{block}.{letter}": {"b": 0.8125}})
    with refused("COEF-LAYOUT", 3, block, "different coefficients", "0.8125", "'b'"):
        made.for_bank(fused, any_bank=True)


def test_d11_columns_that_differ_do_not_become_one(banks, refused):
    fused, split = banks
    made = some(fused, "columns").for_bank(split, any_bank=True)
    values = made.values.clone()
    values[made.index.cell("a", f"{FUSED}.v").start + 5] = 0.8125
    made = Coefficients(made.index, values, made.provenance)
    with refused("COEF-LAYOUT", 3, FUSED, "0.8125", "'a'"):
        made.for_bank(fused, any_bank=True)


def test_d11_rows_that_differ_are_rows_of_the_whole(banks):
    fused, split = banks
    made = some(split, "rows")
    found = made.for_bank(fused, any_bank=True)
    for block in (FUSED, BIAS):
        assert torch.equal(found.of("a", block), torch.cat([made.of("a", f"{block}.{p}") for p in "qkv"]))


def test_d11_a_division_at_random_is_not_taken_over(banks, refused):
    """Its parts are drawn over other elements."""
    fused, split = banks
    for bank, other in (banks, banks[::-1]):
        with refused("COEF-LAYOUT", 3, "attn.in_proj", "at random"):
            some(bank, "random:4").for_bank(other, any_bank=True)
    found = some(fused, "random:4@norm").for_bank(split, any_bank=True)
    assert by_labels(found) == by_labels(some(fused, "random:4@norm"))


def tuned_in(base, letters, seed=1):
    """As an adapter on some projections does: the other rows of in_proj stay those of the base."""
    out = tiny.tuned_vision(base, tiny.is_open_clip_vision, seed)
    for key, value in out.items():
        if "attn.in_proj" in key and key.startswith("visual."):
            rows = len(value) // 3
            for i, letter in enumerate("qkv"):
                if letter not in letters:
                    value[i * rows : (i + 1) * rows] = base[key][i * rows : (i + 1) * rows]
    return out


@pytest.mark.parametrize("text", ["whole", "blocks", "rows", "columns"])
@pytest.mark.parametrize("others", ["qv", "qkv"])
def test_d11_a_projection_that_a_vector_does_not_change_needs_no_coefficient(clip, text, others):
    """Adapters on query and value alone are the usual ones; a key that is absent agrees with anything."""
    model, base, _ = clip
    fused, split = both_banks(base, {"a": tuned_in(base, "qv"), "b": tuned_in(base, others, 2)})
    made = some(fused, text)
    found = made.for_bank(split, any_bank=True)
    if text != "whole":
        assert ("a", f"{FUSED}.k", 0) not in by_labels(found)
    back = found.for_bank(fused, any_bank=True)
    if text != "rows":  # rows of the key scale nothing, so they may be anything
        assert by_labels(back) == by_labels(made)
    weights = [Composition.of(model, bank, c, any_bank=True).weights()
               for bank, c in ((fused, made), (split, found), (fused, back))]  # fmt: skip
    for name, tensor in weights[0].items():
        assert all(torch.allclose(tensor, w[name], rtol=1e-6, atol=1e-7) for w in weights[1:]), name


# D14: very few and very many


def test_d14_no_vector_at_all(refused):
    with refused("BANK-NAME", 2, "at least one vector"):
        Bank.build(BASE, {})


@pytest.mark.parametrize("text", ALL)
def test_d14_one_vector_reaches_from_the_base_to_the_tuned_model(text):
    tuned = tiny.tuned(BASE, 1)
    composition = Composition(MODEL, Bank.build(BASE, {"only": tuned}), Partition.parse(text))
    assert all(torch.equal(t, BASE[name]) for name, t in composition.weights().items())
    with torch.no_grad():
        composition.values.fill_(1.0)
    found = composition.weights()
    assert set(found) == set(BASE)
    for name, tensor in found.items():
        assert tensor.shape == BASE[name].shape  # one element and a scalar are two things
        assert torch.allclose(tensor, tuned[name], rtol=1e-6, atol=1e-8)
    composition(torch.randn(2, 6)).sum().backward()
    assert composition.values.grad.isfinite().all()
    assert composition.values.grad.abs().min() > 0


@pytest.mark.parametrize("text", ALL)
def test_d14_sixty_vectors_average_to_their_mean(text):
    tuned = {f"v{i}": tiny.tuned(BASE, i + 1) for i in range(60)}
    composition = Composition(MODEL, Bank.build(BASE, tuned), Partition.parse(text))
    with torch.no_grad():
        composition.values.fill_(1 / 60)
    for name, tensor in composition.weights().items():
        mean = torch.stack([state[name].double() for state in tuned.values()]).mean(0)
        assert torch.allclose(tensor.double(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("memory", ["0", "10", 700, "0.5kB"])
def test_d14_too_little_memory_is_said_before_anything_is_read(memory, stream, refused):
    with refused("PLAN-MEMORY", 5, "at least", "composed weights 148 B", "--memory") as refusal:
        Composition(MODEL, small_bank(4), runtime=Runtime(memory=memory, stream=stream))
    needed = refusal.error.fix.removeprefix("--memory ").split(",")[0]
    runtime = Runtime(memory=needed, stream=stream)
    assert parse_bytes(needed) >= Composition(MODEL, small_bank(4), runtime=runtime).plan.memory


def test_d14_what_is_said_to_be_enough_is_enough(bank, monkeypatch):
    """The least amount works, and gives the same weights from disk; a byte less does not."""
    monkeypatch.setattr(plan, "CHUNK", 100)
    monkeypatch.setattr(delta_store, "CHUNK", 100)
    made = some(bank)
    enough = next(m for m in range(148, 2000) if fits(bank, m))
    assert not fits(bank, enough - 1)
    composition = Composition.of(MODEL, bank, made, runtime=Runtime(memory=enough))
    assert composition.plan.memory <= enough
    assert composition.plan.streamed_bytes > 0
    roomy = Composition.of(MODEL, bank, made).weights()
    for name, tensor in composition.weights().items():
        assert torch.allclose(tensor, roomy[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [100, 32 << 20])
def test_d14_the_least_amount_that_is_said_is_the_least_that_works(bank, stream, chunk, monkeypatch, refused):
    """Small vectors take less memory than the buffers that they would be read through."""
    monkeypatch.setattr(plan, "CHUNK", chunk)
    least = next(m for m in range(148, 2000) if fits(bank, m, stream=stream))
    with refused("PLAN-MEMORY", 5, f"at least {show_bytes(least)}:"):
        Composition(MODEL, bank, runtime=Runtime(memory=1, stream=stream))


def fits(bank, memory, *, stream=False):
    runtime = Runtime(memory=memory, stream=stream)
    try:
        Plan.of(bank, CoefficientIndex.of(bank, Partition.blocks()), runtime, torch.device("cpu"))
    except AnisoError as e:
        assert e.code == "PLAN-MEMORY"
        return False
    return True


def test_d14_a_plan_counts_deltas_larger_than_a_portion(monkeypatch):
    """One delta is read whole, however large, and one more ahead; vectors without it make it no smaller."""
    monkeypatch.setattr(plan, "CHUNK", 1)
    sparse = {f"v{i}": {**BASE, "gate": BASE["gate"] + 0.01 * (i + 1)} for i in range(9)}
    many = Bank.build(BASE, {"full": tiny.tuned(BASE), **sparse})
    made = Composition(MODEL, many, runtime=Runtime(stream=True)).plan
    needed = made.composed + 2 * 4 * BASE["fc.weight"].numel()
    assert made.memory >= needed
    assert not fits(many, needed - 1, stream=True)


@pytest.mark.parametrize("memory", ["nonsense", "", "-5", "1e9", "8 GiB or", "GiB", "٣GB", True, "9" * 400])
def test_d14_what_is_no_amount_of_memory_is_a_usage_error(bank, memory, refused):
    with refused("USAGE", 2, "8GiB"):
        Composition(MODEL, bank, runtime=Runtime(memory=memory))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 << 30),
        ("500 MB", 500_000_000),
        ("1.5k", 1500),
        (" 7 ", 7),
        (7, 7),
        ("2tib", 2 << 40),
        ("9B", 9),
    ],
)
def test_d14_amounts_of_memory_are_read_as_written(text, count):
    assert parse_bytes(text) == count


# D15: another division


def test_d15_another_seed_is_another_partition(bank, refused):
    composition = Composition(MODEL, bank, Partition.random(4, 1))
    with refused("COEF-PARTITION", 3, "seed differs", "seed 1", "seed 2"):
        composition.load(Coefficients.zeros(bank, Partition.random(4, 2)))


def test_d15_another_number_of_parts_is_another_partition(bank, refused):
    composition = Composition(MODEL, bank, Partition.random(4, 1))
    with refused("COEF-PARTITION", 3, "4 coefficients", "5 coefficients") as refusal:
        composition.load(Coefficients.zeros(bank, Partition.random(5, 1)))
    assert "seed differs" not in str(refusal.error)
    with refused("COEF-PARTITION", 3, "one coefficient per vector and block"):
        composition.load(Coefficients.zeros(bank))
    with refused("COEF-PARTITION", 3, "weight blocks only"):
        composition.load(Coefficients.zeros(bank, Partition.random(4, 1).over("weight")))


def test_d15_a_file_brings_its_own_seed(bank, tmp_path):
    made = Coefficients.zeros(bank, Partition.random(4, 77))
    values = torch.linspace(-1, 1, len(made))
    Coefficients(made.index, values, made.provenance).save(tmp_path / "c")
    composition = Composition.of(MODEL, bank, Coefficients.load(tmp_path / "c"))
    assert composition.partition == Partition.random(4, 77)
    assert torch.equal(composition.values.detach(), values)


def test_d15_no_parts_in_a_file(bank, tmp_path, refused):
    """One error is said, not an error inside of another."""
    path = edited(tmp_path, lambda index: index.update(partition={"rule": "random", "parts": 0}))
    with refused("COEF-FILE", 3, "0 parts", str(path)) as refusal:
        Coefficients.load(path)
    assert "PARTITION" not in str(refusal.error)


# D16: damaged files


@functools.cache
def good(partition):
    """What a file of coefficients holds: values and metadata."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good.safetensors"
        some(small_bank(), partition).save(path)
        file = SafetensorsFile(RawFile(path))
        # without its checksum, as in files that something else wrote: what follows changes both
        meta = {key: value for key, value in file.metadata.items() if key != "checksum"}
        return file.read("coefficients"), meta


def edited(folder, edit, values=None, partition="blocks"):
    """Such a file whose index was changed by hand."""
    theirs, meta = good(partition)
    index = json.loads(meta["index"])
    edit(index)
    path = folder / "bad.safetensors"
    tensors = {"coefficients": theirs if values is None else values}
    save_safetensors(path, tensors, meta | {"index": json.dumps(index)}, overwrite=True)
    return path


def untouched(index):
    pass


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("text", ["blocks", "rows", "whole"])
def test_d16_a_coefficient_that_is_no_number_is_named(bank, tmp_path, value, text, refused):
    made = some(bank, text)
    values = made.values.clone()
    values[-1] = value
    vector, block, part = list(made.index.labels())[-1]
    path = edited(tmp_path, untouched, values, text)
    with refused("COEF-VALUES", 3, "1 coefficients", block, f"'{vector}'", f"part {part}", str(path)):
        Coefficients.load(path)
    with refused("COEF-VALUES", 3, block, f"'{vector}'"):
        Coefficients(made.index, values, made.provenance)


def test_d16_a_missing_block_is_named(bank, tmp_path, refused):
    path = edited(tmp_path, lambda index: index["blocks"].pop(0), some(bank).values[2:])
    with refused("COEF-LAYOUT", 3, "fc.bias", "no coefficients"):
        Coefficients.load(path).for_bank(bank)


def test_d16_an_extra_block_is_named(bank, tmp_path, refused):
    path = edited(tmp_path, lambda index: index["blocks"].append(["head", [3, 4], "weight", None]),
                  torch.zeros(10))  # fmt: skip
    with refused("COEF-LAYOUT", 3, "head", "not in the bank"):
        Coefficients.load(path).for_bank(bank)


def test_d16_a_block_of_another_shape_is_named(bank, tmp_path, refused):
    def transpose(index):
        row = next(b for b in index["blocks"] if b[0] == "fc.weight")
        row[1] = row[1][::-1]

    path = edited(tmp_path, transpose)
    with refused("COEF-LAYOUT", 3, "fc.weight", "(6, 5)", "(5, 6)"):
        Coefficients.load(path).for_bank(bank)


def test_d16_a_cell_that_is_missing_on_one_side_is_named(bank, tmp_path, refused):
    path = edited(tmp_path, lambda index: index.update(absent={"gate": ["v1"]}), torch.zeros(7))
    with refused("COEF-LAYOUT", 3, "gate", "'v1'"):
        Coefficients.load(path).for_bank(bank)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("extra", [-1, 1])
def test_d16_a_wrong_number_of_values_is_refused(bank, tmp_path, text, extra, refused):
    count = len(some(bank, text))
    path = edited(tmp_path, untouched, torch.zeros(count + extra), text)
    with refused("COEF-VALUES", 3, f"({count + extra},)", f"{count} numbers", str(path)):
        Coefficients.load(path)


def test_d16_values_in_another_form_are_refused(bank, tmp_path, refused):
    for values in (torch.zeros(2, 4), torch.zeros(8, 1), torch.zeros(())):
        with refused("COEF-VALUES", 3, "8 numbers"):
            Coefficients.load(edited(tmp_path, untouched, values))
    for dtype in (torch.float16, torch.int64, torch.bool, torch.uint8):
        with refused("COEF-VALUES", 3, str(dtype), "float32 or float64"):
            Coefficients.load(edited(tmp_path, untouched, torch.zeros(8, dtype=dtype)))


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "null", "{}", "7", '"x"', "[" * 100_000, '{"scheme": "x"}', '{"a":' * 5000],
)
def test_d16_an_index_that_is_no_index_is_refused(tmp_path, index, refused):
    meta = {"format": FORMAT, "schema": "1", "index": index}
    save_safetensors(tmp_path / "c", {"coefficients": torch.zeros(2)}, meta)
    with refused("COEF-FILE", 3, str(tmp_path / "c"), "index", "reason"):
        Coefficients.load(tmp_path / "c")


@pytest.mark.parametrize("schema", ["0", "2", "", "1.0", None])
def test_d16_another_schema_is_refused_before_its_index_is_read(tmp_path, schema, refused):
    meta = {"format": FORMAT, "index": "{}"} | ({} if schema is None else {"schema": schema})
    save_safetensors(tmp_path / "c", {"coefficients": torch.zeros(2)}, meta)
    with refused("COEF-FILE", 3, "a different version", "schema 1"):
        Coefficients.load(tmp_path / "c")


def test_d16_a_file_of_another_kind_is_refused(bank, tmp_path, refused):
    save_safetensors(tmp_path / "model", BASE)
    TaskVector.between(BASE, tiny.tuned(BASE)).save(tmp_path / "vector")
    save_safetensors(
        tmp_path / "more", {"coefficients": torch.zeros(2), "x": torch.zeros(1)}, {"format": FORMAT}
    )
    for name in ("model", "vector", "more"):
        with refused("COEF-FILE", 3, f"{name}' holds no coefficients"):
            Coefficients.load(tmp_path / name)
    (tmp_path / "page").write_text("<html>not found</html>" * 9)
    with pytest.raises(AnisoError):
        Coefficients.load(tmp_path / "page")
    with refused("FILE-MISSING", 3):
        Coefficients.load(tmp_path / "nowhere")
    with pytest.raises(AnisoError):
        Coefficients.load(tmp_path)


# coefficients that belong to another bank


def test_coefficients_over_another_base_are_refused(bank, refused):
    other = {k: v + 0.1 for k, v in BASE.items()}
    theirs = Bank.build(other, {n: tiny.tuned(other, i + 1) for i, n in enumerate(bank)})
    with refused("COEF-BANK", 3, "a different base"):
        some(bank).for_bank(theirs)
    assert len(some(bank).for_bank(theirs, any_bank=True)) == 8


def test_the_same_weights_with_another_activation_are_another_base(refused):
    banks = [
        Bank.build(BlockSource(TensorMap(BASE, activation=a)), {"v0": tiny.tuned(BASE)})
        for a in ("gelu", "quick_gelu", None)
    ]
    with refused("COEF-BANK", 3, "gelu", "quick_gelu"):
        some(banks[0]).for_bank(banks[1])
    assert len(some(banks[0]).for_bank(banks[2])) == 4


def test_another_vector_of_the_same_name_is_refused(bank, refused):
    theirs = Bank.build(BASE, {"v0": tiny.tuned(BASE, 1), "v1": tiny.tuned(BASE, 9)})
    with refused("COEF-BANK", 3, "'v1'", "any_bank=True"):
        some(bank).for_bank(theirs)
    with refused("COEF-BANK", 3, "'v1'"):
        Composition(MODEL, theirs).load(some(bank))
    assert len(Composition.of(MODEL, theirs, some(bank), any_bank=True).values) == 8


def test_missing_and_extra_vectors_are_named(bank, refused):
    with refused("COEF-BANK", 3, "no vector 'v1'", "v0, v1"):
        some(bank).for_bank(bank.without("v1"))
    with refused("COEF-BANK", 3, "no coefficients for vector 'v0'", "bank.only"):
        some(bank.without("v0")).for_bank(bank)
    with refused("COEF-BANK", 3, "no vector 'v1'"):
        Composition(MODEL, bank.without("v1")).load(some(bank))


def test_a_model_of_some_of_the_vectors_leaves_the_others_out(bank):
    made = some(bank.only("v1"))
    composition = Composition.of(MODEL, bank, made)
    assert composition.bank.names == ("v1",)
    assert torch.equal(composition.values.detach(), made.values)


@pytest.mark.parametrize("left", [("v0",), ("v2",)])
def test_a_composition_over_a_bank_that_lacks_a_vector_says_so(bank, left, refused):
    """However one asks, it is the coefficients and the bank that do not go together."""
    theirs = Bank.build(BASE, {name: tiny.tuned(BASE, int(name[1]) + 1) for name in left})
    with refused("COEF-BANK", 3, "no vector 'v"):
        Composition.of(MODEL, theirs, some(bank))


def test_a_computed_vector_that_is_missing_is_missing_and_not_another(bank, refused):
    computed = Bank({**{name: bank[name] for name in bank}, "twice": 2 * bank["v0"]})
    made = some(computed)
    assert len(made.for_bank(computed)) == 12
    with refused("COEF-BANK", 3, "no vector 'twice'"):
        made.for_bank(bank)
    other = Bank({**{name: bank[name] for name in bank}, "twice": 3 * bank["v0"]})
    with refused("COEF-BANK", 3, "'twice'", "any_bank=True"):
        made.for_bank(other)


# hostile files


def many(count):
    return [[f"n{i}", [2], "bias", None] for i in range(count)]


HUGE = 10**15


def resized(*shape):
    return lambda index: index["blocks"][1].__setitem__(1, list(shape))


def idle(index):
    """A block that all vectors are absent from."""
    index["blocks"].append(["idle", [2], "bias", None])
    index["absent"] = {"idle": ["v0", "v1"]}


HOSTILE = {
    "negative size": (resized(-5), "fc.weight"),
    "two negative sizes": (resized(-5, -6), "fc.weight"),
    "size in words": (resized("six", 5), "blocks"),
    "size that is no number": (resized(None), "blocks"),
    "more dimensions than any": (resized(*[1] * 1000), "fc.weight"),
    "block twice": (lambda index: index["blocks"].append(index["blocks"][1]), "fc.weight"),
    "vector twice": (lambda index: index["vectors"].append(index["vectors"][1]), "'v1'"),
    "absent from no block": (lambda index: index.update(absent={"nowhere": ["v0"]}), "nowhere"),
    "absent no vector": (lambda index: index.update(absent={"gate": ["nobody"]}), "nobody"),
    "block of no vector": (idle, "idle"),
    "block that is not covered": (lambda index: index.update(partition={"families": ["bias"]}), "fc.weight"),
    "unknown family": (lambda index: index.update(partition={"families": ["head"]}), "head"),
    "unknown rule": (lambda index: index.update(partition={"rule": "halves"}), "partition.rule"),
    "unknown field": (lambda index: index.update(more=1), "more"),
    "no vectors": (lambda index: index.update(vectors=[], blocks=[]), "no vector"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index_is_refused_with_the_name_at_fault(tmp_path, what, refused):
    edit, mention = HOSTILE[what]
    path = edited(tmp_path, edit)
    with peak_below(8), refused("COEF-FILE", 3, str(path), mention):
        Coefficients.load(path)


@pytest.mark.parametrize("rule", ["rows", "columns", "random"])
@pytest.mark.parametrize("shape", [[HUGE, HUGE], [HUGE], [1, HUGE, HUGE], [2**62] * 3, [10**4000] * 3])
def test_blocks_of_terabytes_are_not_allocated(bank, tmp_path, rule, shape):
    """Whatever an index says of sizes, memory goes by the size of the file."""

    def edit(index):
        index["blocks"][1][1] = shape
        index["partition"] = {"rule": rule, "parts": HUGE}

    path = edited(tmp_path, edit)
    with peak_below(8), no_hang(5):
        try:
            found = Coefficients.load(path)
        except AnisoError as e:
            assert e.code in ("COEF-FILE", "COEF-VALUES")
            assert len(str(e)) < 2000
        else:
            assert rule == "columns"
            assert shape == [HUGE]
            with pytest.raises(AnisoError, match="COEF-LAYOUT"):
                found.for_bank(bank)


@pytest.mark.parametrize("rule", ["whole", "blocks"])
def test_a_block_of_terabytes_with_one_coefficient_is_refused_by_the_bank(bank, tmp_path, rule, refused):
    def edit(index):
        index["blocks"][1][1] = [10**9, 10**9]
        index["partition"] = {"rule": rule}

    path = edited(tmp_path, edit, torch.zeros(2 if rule == "whole" else 8))
    with peak_below(8), refused("COEF-LAYOUT", 3, "fc.weight"):
        Coefficients.load(path).for_bank(bank)


def test_a_size_of_a_million_digits_takes_no_time(bank, tmp_path):
    path = edited(tmp_path, lambda index: index["blocks"][1].__setitem__(1, [10**4000] * 250))
    with no_hang(1), pytest.raises(AnisoError, match="COEF-FILE"):
        Coefficients.load(path)


@pytest.mark.parametrize("rule", ["blocks", "whole"])
@pytest.mark.parametrize("absent", [False, True])
def test_many_vectors_times_many_blocks_are_not_laid_out_before_they_are_counted(
    bank, tmp_path, rule, absent, refused
):
    """3000 by 3000 cells fit into an index of 200 kB, and 100,000 by 100,000 into one of 6 MB."""

    def edit(index):
        index["vectors"] = [[f"v{i}", ""] for i in range(3000)]
        index["blocks"] = many(3000)
        index["partition"] = {"rule": rule}
        index["absent"] = {f"n{i}": ["v0"] for i in range(3000)} if absent else {}

    path = edited(tmp_path, edit, torch.zeros(3000 if rule == "whole" else 7))
    with peak_below(30), no_hang(5):
        try:
            assert len(Coefficients.load(path)) == 3000
        except AnisoError as e:
            assert e.code in ("COEF-FILE", "COEF-VALUES")


def test_names_that_speak_to_the_terminal_are_made_harmless(bank, tmp_path):
    evil = "\x1b]0;owned\x07\nerror: none"

    def edit(index):
        index["vectors"][0][0] = evil
        index["blocks"][0][0] = evil
        index["base"]["label"] = evil

    with pytest.raises(AnisoError) as caught:
        Coefficients.load(edited(tmp_path, edit)).for_bank(bank)
    assert "\x1b" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def use(path, bank):
    """Everything a reader might do; an error of ours is a good end."""
    try:
        found = Coefficients.load(path)
        repr(found), found.items(), found.matrix()
        found.for_bank(bank, any_bank=True)
    except AnisoError as e:
        str(e)


ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, "", "²", "v0", "gate", "random", [], {}, [0],
     [-1], [2**40, 2**40], ["v0"], {"gate": ["v0", "v1"]}, {"rule": "whole"}, {"rule": "columns"},
     {"rule": "random", "parts": 2**70}]
)  # fmt: skip


@FUZZ
@given(data=st.data())
def test_an_index_with_odd_values_is_read_or_refused(bank, folder, data):
    def edit(index):
        node = index
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
                node[key] = copy.deepcopy(data.draw(ODD))
                return
            node = node[key]

    count = data.draw(st.sampled_from([0, 2, 6, 8, 10]))
    with no_hang(5):
        use(edited(folder, edit, torch.zeros(count)), bank)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_and_short_files_give_only_our_errors(bank, folder, data):
    path, whole = folder / "flipped", folder / "whole"
    if not whole.exists():
        some(bank, "rows").save(whole)
    damaged = bytearray(whole.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3, unique=True)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(
        damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
    )
    with no_hang(5):
        use(path, bank)


def test_a_name_of_70000_letters_is_cut_wherever_it_is_said(tmp_path):
    error = InputError("COEF-BANK", f"the bank has no vector '{'x' * 70_000}'", found="y" * 70_000)
    assert len(str(error)) < 2_000
    assert len(json.dumps(error.to_json())) < 2_000
