"""Coefficients: where each one belongs, and the small file that they are kept in."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from aniso.compose import CoefficientIndex, Coefficients, Composition, Partition
from aniso.compose.card import CardDetails, model_card
from aniso.compose.card_metadata import Export
from aniso.compose.coefficients import CoefficientProvenance
from aniso.errors import AnisoError
from aniso.vectors import Bank, BaseInfo, Block, KeyEdits, Kind
from aniso.vectors.convert import convert
from aniso.weights import open_weights, save_safetensors

PARTITIONS = ["whole", "blocks", "rows", "columns", "random:5", "blocks@weight", "random:3@norm,bias"]
PARTITIONS.append("components:5")
LACKING = "layers.1.fc.weight"
"""The block that vector b does not change."""
STILL = "layers.2.ln.weight"
"""The block that no vector changes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("coefficients")
    base = tiny.plain()
    tuned = {name: tiny.tuned(base, i + 1) | {STILL: base[STILL]} for i, name in enumerate("abc")}
    tuned["b"][LACKING] = base[LACKING]
    for name, state in {"base": base, **tuned}.items():
        save_safetensors(root / f"{name}.safetensors", state)
    return root


@pytest.fixture(scope="module")
def bank(folder):
    """In memory; two of its cells are absent for a reason of their own."""
    return Bank.build(folder / "base.safetensors", {n: folder / f"{n}.safetensors" for n in "abc"})


def some(bank, partition=None, seed=0):
    """Random coefficients."""
    slots = CoefficientIndex.of(bank, partition or Partition.blocks())
    g = torch.Generator().manual_seed(seed)
    return Coefficients(slots, torch.randn(slots.count, generator=g), CoefficientProvenance.of(bank))


def places(coefficients):
    """All that slots say, except for where the blocks lie in some file."""
    return [
        (s.block.name, s.block.shape, s.block.kind, s.block.depth, s.vectors, s.partition, s.start)
        for s in coefficients.index.blocks
    ]


def by_label(coefficients):
    return {(vector, block, part): value for vector, block, part, value in coefficients.items()}


# where each one belongs

SHAPES = {"fc.weight": (96, 64), "fc.bias": (96,), "ln.weight": (64,), "gate": ()}
PARTS = {
    "whole": dict.fromkeys(SHAPES, 1),
    "blocks": dict.fromkeys(SHAPES, 1),
    "rows": {"fc.weight": 96, "fc.bias": 96, "ln.weight": 64, "gate": 1},
    "columns": {"fc.weight": 64, "fc.bias": 1, "ln.weight": 1, "gate": 1},
    "random:5": {"fc.weight": 5, "fc.bias": 5, "ln.weight": 5, "gate": 1},
    "blocks@weight": {"fc.weight": 1},
    "random:3@norm,bias": {"fc.bias": 3, "ln.weight": 3},
    "components:5": {"fc.weight": 5, "fc.bias": 1, "ln.weight": 1, "gate": 1},
}


@pytest.mark.parametrize("text", PARTITIONS)
def test_there_is_a_coefficient_for_each_vector_and_part_of_what_it_changes(bank, text):
    slots = CoefficientIndex.of(bank, Partition.parse(text))
    expected = {
        (vector, f"layers.{layer}.{name}", part)
        for layer in range(3)
        for name, count in PARTS[text].items()
        for vector in "abc"
        for part in range(count)
        if f"layers.{layer}.{name}" != STILL and (vector, f"layers.{layer}.{name}") != ("b", LACKING)
    }
    labels = list(slots.labels())
    if text == "whole":
        assert labels == [(vector, "*", 0) for vector in "abc"]
    else:
        assert set(labels) == expected
    assert len(labels) == len(set(labels)) == slots.count == len(Coefficients.zeros(bank, slots.partition))
    covered = {f"layers.{i}.{name}" for i in range(3) for name in PARTS[text]} - {STILL}
    assert {s.block.name for s in slots.blocks} == covered


@pytest.mark.parametrize("text", [t for t in PARTITIONS if t != "whole"])
def test_labels_index_items_and_matrices_agree(bank, text):
    made = some(bank, Partition.parse(text))
    found = by_label(made)
    assert list(found) == list(made.index.labels())
    for slot, own in zip(made.index.blocks, made.index.divided(made.values), strict=True):
        assert own.shape == slot.shape
        for i, vector in enumerate(slot.vectors):
            cell = made.of(vector, slot.block.name)
            assert torch.equal(cell, own[i])
            expected = [found[vector, slot.block.name, part] for part in range(slot.partition.count)]
            assert cell.tolist() == expected


def test_a_coefficient_of_a_whole_vector_is_that_of_all_its_blocks(bank):
    made = some(bank, Partition.whole())
    for slot, own in zip(made.index.blocks, made.index.divided(made.values), strict=True):
        assert own.reshape(-1).tolist() == [float(made.values["abc".index(v)]) for v in slot.vectors]
    assert torch.equal(made.of("c", "layers.0.gate"), made.values[2:])
    assert made.items() == [(v, "*", 0, float(made.values[i])) for i, v in enumerate("abc")]


@pytest.mark.parametrize("text", PARTITIONS)
def test_the_matrix_has_means_of_cells_and_nan_where_there_is_none(bank, text):
    made = some(bank, Partition.parse(text))
    matrix = made.matrix()
    assert matrix.shape == (3, len(made.blocks))
    for i, vector in enumerate(made.vectors):
        for j, block in enumerate(made.blocks):
            if (vector, block) == ("b", LACKING):
                assert matrix[i, j].isnan()
            else:
                assert float(matrix[i, j]) == pytest.approx(float(made.of(vector, block).mean()), abs=1e-6)
    assert STILL not in made.blocks


@pytest.mark.parametrize("text", PARTITIONS)
def test_gradients_of_blocks_come_back_to_the_values(bank, text):
    """What a block's coefficients get adds up at the value that they were made from."""
    slots = CoefficientIndex.of(bank, Partition.parse(text))
    values = torch.zeros(slots.count, requires_grad=True)
    sum(((i + 1.0) * own).sum() for i, own in enumerate(slots.divided(values))).backward()
    expected = torch.zeros(slots.count)
    for i, slot in enumerate(slots.blocks):
        for vector in slot.vectors:
            expected[slots.cell(vector, slot.block.name)] += i + 1.0
    assert torch.equal(values.grad, expected)


@pytest.mark.parametrize(
    ("vector", "block"),
    [("b", LACKING), ("a", STILL), ("a", "no.such"), ("z", "layers.0.gate")],
)
def test_asking_for_a_coefficient_that_is_not_there_is_answered_in_words(bank, vector, block):
    with pytest.raises(AnisoError, match=f"'{vector}'") as caught:
        some(bank).of(vector, block)
    assert block in str(caught.value)


def test_a_skipped_block_has_no_coefficients(folder):
    base = folder / "base.safetensors"
    skipping = Bank.build(base, {"a": folder / "a.safetensors"}, edits=KeyEdits(("layers.0.fc.weight",)))
    assert "layers.0.fc.weight" not in Coefficients.zeros(skipping).blocks


def test_coefficients_say_what_they_are(bank):
    made = Coefficients.zeros(bank)
    assert repr(made) == "Coefficients(32: 3 vectors, 11 blocks, one coefficient per vector and block)"
    assert made.partition == Partition.blocks()
    assert not made.values.any()


# the file


@pytest.mark.parametrize("text", PARTITIONS)
def test_a_saved_file_gives_back_everything(bank, text, tmp_path):
    made = some(bank, Partition.parse(text, seed=4))
    made.save(tmp_path / "c.safetensors")
    found = Coefficients.load(tmp_path / "c.safetensors")
    assert torch.equal(found.values, made.values)
    assert (found.partition, found.provenance, found.vectors) == (
        made.partition,
        made.provenance,
        made.vectors,
    )
    assert places(found) == places(made)
    assert found.items() == made.items()
    assert torch.equal(found.matrix().nan_to_num(9.0), made.matrix().nan_to_num(9.0))
    assert torch.equal(found.for_bank(bank).values, made.values)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("values") / "c.safetensors"


@pytest.mark.parametrize("width", [32, 64])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_number_survives_bit_for_bit(bank, scratch, width, data):
    count = CoefficientIndex.of(bank, Partition.blocks()).count
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False)
    values = torch.from_numpy(data.draw(arrays(f"float{width}", count, elements=numbers)).copy())
    Coefficients(CoefficientIndex.of(bank, Partition.blocks()), values, CoefficientProvenance.of(bank)).save(
        scratch, overwrite=True
    )
    found = Coefficients.load(scratch).values
    bits = torch.int32 if width == 32 else torch.int64
    assert found.dtype == values.dtype
    assert torch.equal(found.view(bits), values.view(bits))  # -0.0 is not 0.0


def test_the_same_coefficients_are_the_same_bytes(bank, tmp_path):
    hashes = [some(bank).save(tmp_path / name) for name in ("one", "two")]
    assert hashes[0] == hashes[1]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_how_vectors_were_chosen_is_in_the_file_its_card_and_its_report(bank, tmp_path, aniso):
    made = dataclasses.replace(Coefficients.zeros(bank), selection="gradient, budget 2")
    made.save(tmp_path / "c.safetensors")
    again = Coefficients.load(tmp_path / "c.safetensors")
    assert again.selection == again.for_bank(bank).selection == "gradient, budget 2"
    assert "- vectors selected by gradient, budget 2\n" in model_card(
        again, bank, Export("huggingface"), CardDetails()
    )
    assert "selected by gradient, budget 2" in aniso("coefficients", "show", tmp_path / "c.safetensors").out
    assert "chosen" not in model_card(Coefficients.zeros(bank), bank, Export("huggingface"), CardDetails())


def test_a_file_is_never_overwritten_unasked(bank, tmp_path, refused):
    some(bank).save(tmp_path / "c")
    with refused("OUT-EXISTS", 2, "--overwrite"):
        some(bank, seed=1).save(tmp_path / "c")
    some(bank, seed=1).save(tmp_path / "c", overwrite=True)
    assert torch.equal(Coefficients.load(tmp_path / "c").values, some(bank, seed=1).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coefficients_of_a_model_in_half_precision_survive_their_file(dtype, tmp_path):
    """``composition.to(bfloat16)`` moves the values, too; what was saved must not be refused afterwards."""
    model = torch.nn.Linear(4, 3)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    composition = Composition(model, Bank.build(base, {"a": tiny.tuned(base)})).to(dtype)
    with torch.no_grad():
        composition.values.copy_(torch.tensor([0.25, -1.5]))
    composition.coefficients.save(tmp_path / "c")
    assert Coefficients.load(tmp_path / "c").values.tolist() == [0.25, -1.5]


def vit_names():
    """The 152 blocks of ViT-B-32."""
    layer = ("ln_1.weight", "ln_1.bias", "attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight",
             "attn.out_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias",
             "mlp.c_proj.weight", "mlp.c_proj.bias")  # fmt: skip
    others = ("class_embedding", "positional_embedding", "conv1.weight", "ln_pre.weight", "ln_pre.bias",
              "ln_post.weight", "ln_post.bias", "proj")  # fmt: skip
    layers = [f"visual.transformer.resblocks.{i}.{name}" for i in range(12) for name in layer]
    return [*(f"visual.{name}" for name in others), *layers]


def test_the_file_is_a_few_kilobytes(bank, tmp_path):
    """It is to be sent by mail and kept in git: 21 vectors and 152 blocks, as in the paper."""
    vectors = tuple(f"dataset-{i}" for i in range(21))
    cells = [(Block(name, (768, 768), Kind.ATTENTION, 3), vectors) for name in vit_names()]
    slots = CoefficientIndex.from_cells(Partition.blocks(), vectors, cells)
    assert slots.count == 152 * 21
    base = BaseInfo("openai/clip-vit-base-patch32", "1" * 64, "quick_gelu")
    provenance = CoefficientProvenance(
        "open_clip", "0" * 64, base, "2" * 64, dict.fromkeys(vectors, "3" * 64)
    )
    Coefficients(slots, torch.randn(slots.count), provenance).save(tmp_path / "large")
    assert (tmp_path / "large").stat().st_size < 40_000
    assert Coefficients.load(tmp_path / "large").provenance == provenance
    some(bank).save(tmp_path / "small")
    assert (tmp_path / "small").stat().st_size < 8_000


# the same vectors elsewhere


@pytest.mark.parametrize("storage", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("text", ["whole", "blocks", "random:5"])
def test_coefficients_go_with_the_same_vectors_in_another_storage(bank, storage, text, tmp_path):
    packed = bank.save(tmp_path / "bank", storage=storage)
    assert packed.content_hash != bank.content_hash
    made = some(bank, Partition.parse(text))
    made.save(tmp_path / "c")
    found = Coefficients.load(tmp_path / "c").for_bank(packed)
    assert torch.equal(found.values, made.values)
    assert found.items() == made.items()
    assert found.provenance == CoefficientProvenance.of(packed)
    assert torch.equal(found.for_bank(bank).values, made.values)


def test_the_order_of_vectors_in_a_bank_plays_no_part(bank, folder):
    base = folder / "base.safetensors"
    turned = Bank.build(base, {n: folder / f"{n}.safetensors" for n in "cab"})
    for text in PARTITIONS:
        made = some(bank, Partition.parse(text))
        found = made.for_bank(turned)
        assert found.vectors == ("c", "a", "b")
        assert by_label(found) == by_label(made)


def test_wrong_numbers_of_coefficients_are_refused(bank, refused):
    made = some(bank)
    for values in (made.values[1:], made.values.reshape(1, -1), torch.zeros(())):
        with refused("COEF-VALUES", 3, "32 numbers"):
            Coefficients(made.index, values, made.provenance)


# the same model under other names


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Files of a tiny CLIP and of two models tuned from it, in open_clip's and Hugging Face's form."""
    pytest.importorskip("open_clip")
    root = tmp_path_factory.mktemp("clip")
    base = {k: v.detach().clone() for k, v in tiny.open_clip_vit().state_dict().items()}
    states = {n: tiny.tuned_vision(base, tiny.is_open_clip_vision, i + 1) for i, n in enumerate("ab")}
    for name, state in {"base": base, **states}.items():
        save_safetensors(root / f"{name}.safetensors", state)
        opened = open_weights(root / f"{name}.safetensors")
        convert(opened, root / f"{name}-hf", to="huggingface", activation="gelu")
    return root


def open_clip_bank(clip):
    return Bank.build(clip / "base.safetensors", {n: clip / f"{n}.safetensors" for n in "ab"})


@pytest.mark.parametrize("text", ["whole", "blocks", "rows", "columns", "random:5"])
def test_coefficients_go_with_a_base_under_other_names(clip, text, tmp_path):
    """The base is Hugging Face's file of the same model: its blocks are the same."""
    made = some(open_clip_bank(clip), Partition.parse(text))
    made.save(tmp_path / "c")
    other = Bank.build(clip / "base-hf", {n: clip / f"{n}.safetensors" for n in "ab"})
    assert other.layout.scheme != made.provenance.scheme
    found = Coefficients.load(tmp_path / "c").for_bank(other)
    assert found.items() == made.items()


def test_vectors_from_converted_files_are_taken_on_request(clip, refused):
    """A converted file has another hash; that it is the same model is the user's word."""
    made = some(open_clip_bank(clip))
    other = Bank.build(clip / "base-hf", {n: clip / f"{n}-hf" for n in "ab"})
    with refused("COEF-BANK", 3, "vector 'a'", "any_bank=True"):
        made.for_bank(other)
    assert made.for_bank(other, any_bank=True).items() == made.items()
