"""A composition written back is what ran, under anybody's names."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tiny
import torch

from aniso import Bank, Composition, Partition
from aniso.compose import Baked
from aniso.vectors import BlockSource
from aniso.weights import TensorMap, open_weights, save_safetensors


def _models():
    model = tiny.hf_clip()
    base = model.state_dict()
    tuned = {f"v{i}": tiny.tuned_vision(base, tiny.is_hf_vision, seed=i + 1) for i in range(3)}
    return model, base, tuned


def _learned(model, bank, partition=None) -> Composition:
    composition = Composition(model, bank, partition)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        composition.values.copy_(torch.randn(composition.values.shape, generator=g))
    return composition


@pytest.mark.parametrize("partition", ["whole", "blocks", "rows", "random:5", "blocks@weight"])
@pytest.mark.parametrize("storage", ["fp32", "int4"])
def test_what_is_baked_is_what_ran(tmp_path, partition, storage):
    model, base, tuned = _models()
    bank = Bank.build(base, tuned, to=tmp_path / "bank", storage=storage)
    composition = _learned(model, bank, Partition.parse(partition))
    composition.bake().save(tmp_path / "out.safetensors")
    source = open_weights(tmp_path / "out.safetensors")
    assert set(source.tensors) == set(base)
    weights = composition.weights()
    for key, value in base.items():
        torch.testing.assert_close(source.read(key), weights.get(key, value), rtol=1e-6, atol=1e-7)


def test_transformers_loads_the_directory_and_computes_the_same(tmp_path):
    from transformers import CLIPModel

    model, base, tuned = _models()
    composition = _learned(model, Bank.build(base, tuned))
    composition.bake().save(tmp_path / "hf", to="huggingface")
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    loaded = CLIPModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad(), composition.composed() as composed:
        expected = composed.get_image_features(pixel_values=images).pooler_output
        found = loaded.get_image_features(pixel_values=images).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_open_clip_loads_the_file_and_computes_the_same(tmp_path):
    model = tiny.open_clip_vit()
    base = model.state_dict()
    tuned = {"cars": tiny.tuned_vision(base, tiny.is_open_clip_vision)}
    composition = _learned(model, Bank.build(base, tuned))
    composition.bake().save(tmp_path / "out.safetensors")
    other = tiny.open_clip_vit(seed=9)
    source = open_weights(tmp_path / "out.safetensors")
    other.load_state_dict({k: source.read(k) for k in source.tensors})
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), composition.composed() as composed:
        torch.testing.assert_close(other.encode_image(images), composed.encode_image(images))


def test_coefficient_one_is_the_tuned_model_and_zero_the_base_bit_for_bit(tmp_path):
    _, base, tuned = _models()
    bank = Bank.build(base, tuned, to=tmp_path / "bank")
    composition = Composition(tiny.hf_clip(), bank, Partition.whole())
    assert all(torch.equal(composition.bake().read(k), v) for k, v in base.items())
    with torch.no_grad():
        composition.values[bank.names.index("v1")] = 1
    baked = composition.bake()
    assert all(torch.equal(baked.read(k), v) for k, v in tuned["v1"].items())


def test_a_base_of_16_bits_stays_one_unless_more_are_asked_for(tmp_path):
    model, base, tuned = _models()
    half = {k: v.to(torch.bfloat16) if tiny.is_hf_vision(k) else v for k, v in base.items()}
    bank = Bank.build(half, tuned, allow_distant=True)
    coefficients = _learned(model, Bank.build(base, tuned)).coefficients
    baked = Baked(half, bank, coefficients, any_bank=True)
    wide = Baked(half, bank, coefficients, any_bank=True, dtype=torch.float32)
    key = "vision_model.encoder.layers.0.self_attn.k_proj.weight"
    assert baked.read(key).dtype == torch.bfloat16
    assert torch.equal(wide.read(key).to(torch.bfloat16), baked.read(key))
    assert wide.read("logit_scale").dtype == half["logit_scale"].dtype  # which nothing was added to


def test_the_record_inside_says_what_was_composed(tmp_path):
    model, base, tuned = _models()
    bank = Bank.build(base, tuned)
    _learned(model, bank).bake().save(tmp_path / "out.safetensors")
    said = open_weights(tmp_path / "out.safetensors").metadata
    assert said["format"] == "pt"
    assert said["aniso.vectors"] == "v0,v1,v2"
    assert said["aniso.bank"] == bank.content_hash


def test_vectors_that_coefficients_do_not_name_are_left_out():
    model, base, tuned = _models()
    bank = Bank.build(base, tuned)
    composition = _learned(model, bank.only("v2"))
    baked = Baked(base, bank, composition.coefficients)
    for key, value in composition.weights().items():
        torch.testing.assert_close(baked.read(key), value, rtol=1e-6, atol=1e-7)


def test_another_model_is_not_baked_onto(refused):
    model, base, tuned = _models()
    composition = _learned(model, Bank.build(base, tuned))
    with refused("BANK-BASE", 3, "not the bank's base"):
        Baked(tuned["v0"], composition.bank, composition.coefficients)
    with refused("BANK-LAYOUT", 3, "blocks"):
        Baked(tiny.plain(), composition.bank, composition.coefficients)


def test_split_layouts_bake_under_both_namings():
    model, base, tuned = _models()
    fused = Bank.build(base, tuned)
    split = Bank.build(BlockSource(TensorMap(base), split=True), tuned)
    learned = _learned(model, fused)
    baked = Baked(base, split, learned.coefficients.for_bank(split))
    for key, value in learned.weights().items():
        torch.testing.assert_close(baked.read(key), value, rtol=1e-6, atol=1e-7)


def test_baking_takes_the_memory_of_a_few_blocks(tmp_path: Path):
    """One process of its own: its peak, beyond what it had before, is far below the model's size."""
    numel, blocks = 1 << 20, 24  # 4 MB a block, 100 MB a model
    g = torch.Generator().manual_seed(0)
    base = {f"layer{i}.weight": torch.randn(1024, numel // 1024, generator=g) for i in range(blocks)}
    save_safetensors(tmp_path / "base.safetensors", base)
    for name in ("a", "b", "c"):
        moved = {k: v + 0.01 * torch.randn(v.shape, generator=g) for k, v in base.items()}
        save_safetensors(tmp_path / f"{name}.safetensors", moved)
    tuned = {name: tmp_path / f"{name}.safetensors" for name in ("a", "b", "c")}
    bank = Bank.build(tmp_path / "base.safetensors", tuned, to=tmp_path / "bank")
    from aniso import Coefficients

    zeros = Coefficients.zeros(bank)
    Coefficients(zeros.index, zeros.values + 0.3, zeros.provenance).save(tmp_path / "mix.safetensors")
    program = """
        import sys
        from pathlib import Path
        from aniso import Bank, Coefficients
        from aniso.compose import Baked
        import torch
        root = Path(sys.argv[1])
        # a small one first: what is measured is the memory of tensors, not that of code when it first runs
        small = {"layer.weight": torch.ones(64, 64)}
        bank = Bank.build(small, {"a": {"layer.weight": 1.1 * small["layer.weight"]}})
        Baked(small, bank, Coefficients.zeros(bank)).save(root / "small.safetensors")
        mix = Coefficients.load(root / "mix.safetensors")
        baked = Baked(root / "base.safetensors", Bank.load(root / "bank"), mix)
        def peak():
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        baked.save(root / "out.safetensors")
        print((peak() - before) // 1024)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    # MB: a few blocks of 4 MB each, and pages of mapped files, which the kernel drops when it likes.
    # A model has 100 MB.
    assert int(ran.stdout) < 70, ran.stdout
