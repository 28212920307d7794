"""LoRA adapters read by us against PEFT's own merge, for every kind that is supported."""

from __future__ import annotations

import pytest
import tiny
import torch
from adapters import language_models, random_adapter

from aniso.vectors import Bank, LowRank, TaskVector
from aniso.vectors.block import Layout
from aniso.weights import TensorMap, open_weights

peft = pytest.importorskip("peft")


def state(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


ATTENTION = ["q_proj", "k_proj", "v_proj", "out_proj"]
VISION = r"vision_model.*\.(q_proj|v_proj|fc1|fc2|out_proj)"
LINEAR = r"vision_model.*\.(q_proj|k_proj|fc1)|visual_projection"
SETTINGS = {
    "plain": dict(r=4, lora_alpha=32),
    "alpha below rank": dict(r=8, lora_alpha=2),
    "rslora": dict(r=8, lora_alpha=16, use_rslora=True),
    "rank pattern": dict(r=4, lora_alpha=8, rank_pattern={"fc1": 2, r"layers\.0\.self_attn\.q_proj": 6}),
    "alpha pattern": dict(r=4, lora_alpha=8, alpha_pattern={"v_proj": 3, "encoder.layers.1.mlp.fc2": 40}),
    "both, rslora": dict(
        r=4, lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 9}, alpha_pattern={"q_proj": 5}
    ),
    "dora": dict(r=4, lora_alpha=8, use_dora=True),
    "dora, every linear": dict(r=4, lora_alpha=8, use_dora=True, target_modules=LINEAR),
    "lora bias": dict(r=4, lora_alpha=8, lora_bias=True),
    "biases of lora layers": dict(r=4, lora_alpha=8, bias="lora_only"),
    "modules to save": dict(r=4, lora_alpha=8, modules_to_save=["post_layernorm", "visual_projection"]),
    "orthogonal": dict(r=4, lora_alpha=8, init_lora_weights="orthogonal"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_coefficient_one_equals_peft_merge(name, tmp_path):
    model = tiny.hf_clip()
    base = state(model)
    merged = random_adapter(model, tmp_path / "lora", **{"target_modules": VISION, **SETTINGS[name]})
    vector = TaskVector.between(base, tmp_path / "lora")
    applied = vector.apply(base)
    for key, value in merged.items():
        assert torch.allclose(applied[key], value, rtol=0, atol=1e-6), key
    assert any(not torch.equal(applied[k], base[k]) for k in base)
    zero = vector.apply(base, 0.0)
    assert all(torch.equal(zero[k], base[k]) for k in base)


def test_plain_updates_stay_factored(tmp_path):
    model = tiny.hf_clip()
    base = state(model)
    random_adapter(model, tmp_path / "lora", target_modules=VISION, r=4, lora_alpha=8)
    vector = TaskVector.between(base, tmp_path / "lora")
    assert all(isinstance(vector[b.name], LowRank) for b in vector.blocks)
    fused = vector["visual.transformer.resblocks.0.attn.in_proj_weight"]
    assert [(t.start, t.rank) for t in fused.terms] == [(0, 4), (2 * tiny.WIDTH, 4)]
    assert len(vector.blocks) == 4 * tiny.LAYERS  # in_proj, out_proj and two of the mlp; the rest is absent


def test_mixed_ranks_and_targets_share_a_bank_with_a_dense_vector(tmp_path):
    base = state(tiny.hf_clip())
    merged = {}
    for i, config in enumerate(
        (
            dict(r=2, lora_alpha=4, target_modules=r"vision_model.*q_proj"),
            dict(r=16, lora_alpha=16, target_modules=r"vision_model.*\.(fc1|k_proj)"),
            dict(r=4, lora_alpha=8, use_rslora=True, target_modules=VISION),
        )
    ):
        merged[f"lora{i}"] = random_adapter(tiny.hf_clip(), tmp_path / f"lora{i}", seed=i, **config)
    merged["dense"] = tiny.tuned_vision(base, tiny.is_hf_vision)
    refs = {name: tmp_path / name for name in merged if name != "dense"} | {"dense": merged["dense"]}
    bank = Bank.build(base, refs, to=tmp_path / "bank")
    assert bank.check() == []
    for name, expected in merged.items():
        applied = bank[name].apply(base)
        for key in expected:
            assert torch.allclose(applied[key], expected[key], rtol=0, atol=1e-6), (name, key)
    row = bank.read_block("visual.transformer.resblocks.1.attn.in_proj_weight")
    assert list(row) == list(merged)
    assert [type(delta).__name__ for delta in row.values()] == ["LowRank"] * 3 + ["Dense"]
    touched = bank.read_block("visual.transformer.resblocks.1.ln_1.weight")
    assert list(touched) == ["dense"]


@pytest.mark.parametrize("split", [False, True])
def test_hf_adapter_on_an_open_clip_base_lands_in_the_right_third(tmp_path, split):
    from aniso.vectors import BlockSource
    from aniso.vectors.convert import renamed

    model = tiny.hf_clip()
    base = state(model)
    merged = random_adapter(model, tmp_path / "lora", target_modules=VISION, r=4, lora_alpha=8)
    ours = {k: read() for k, read in renamed(TensorMap(base), "open_clip").tensors.items()}
    expected = {k: read() for k, read in renamed(TensorMap(merged), "open_clip").tensors.items()}
    blocks = BlockSource(TensorMap(ours), split=split)
    applied = TaskVector.between(blocks, tmp_path / "lora").apply(blocks)
    for key in expected:
        assert torch.allclose(applied[key], expected[key], rtol=0, atol=1e-6), key


def test_lora_on_torchs_own_attention_is_refused_by_name(tmp_path, refused):
    """PEFT applies one of its two updates twice, so reading the file as it is would be wrong."""
    model = tiny.open_clip_vit()
    base = state(model)
    random_adapter(model, tmp_path / "lora", target_modules=r"visual.*\.attn", r=4, lora_alpha=8)
    with refused("LORA-KIND", 3, "MultiheadAttention"):
        TaskVector.between(base, tmp_path / "lora")


def test_peft_on_open_clips_mlp(tmp_path):
    model = tiny.open_clip_vit()
    base = state(model)
    merged = random_adapter(
        model, tmp_path / "lora", target_modules=r"visual.*\.(c_fc|c_proj)", r=4, lora_alpha=8
    )
    applied = TaskVector.between(base, tmp_path / "lora").apply(base)
    for key in base:
        assert torch.allclose(applied[key], merged[key], rtol=0, atol=1e-6), key


def test_convolution_and_projection(tmp_path):
    model = tiny.hf_clip()
    base = state(model)
    targets = ["visual_projection", "patch_embedding"]
    merged = random_adapter(model, tmp_path / "lora", target_modules=targets, r=4, lora_alpha=8)
    vector = TaskVector.between(base, tmp_path / "lora")
    applied = vector.apply(base)
    assert {b.name for b in vector.blocks} == {"visual.proj", "visual.conv1.weight"}
    for key in base:
        assert torch.allclose(applied[key], merged[key], rtol=0, atol=1e-6), key


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_language_models(family, tmp_path):
    make, config = language_models()[family]
    torch.manual_seed(0)
    model = make().eval()
    base = model.state_dict()
    plain = {k: v.clone() for k, v in base.items()}
    merged = random_adapter(model, tmp_path / "lora", r=4, lora_alpha=8, **config)
    model.save_pretrained(tmp_path / "unused")
    layout = Layout.of(TensorMap(plain))
    assert layout.scheme == "plain"
    vector = TaskVector.between(plain, tmp_path / "lora")
    applied = vector.apply(plain)
    for key in plain:
        if key == "lm_head.weight" and family != "llama":
            continue  # tied to the embedding; PEFT's merge unties it
        assert torch.allclose(applied[key], merged[key], rtol=0, atol=1e-6), key


def test_half_precision_factors(tmp_path):
    model = tiny.hf_clip()
    base = state(model)
    random_adapter(model, tmp_path / "lora", target_modules=VISION, r=4, lora_alpha=8)
    source = open_weights(tmp_path / "lora")
    from aniso.weights import save_safetensors

    half = {k: source.read(k).to(torch.bfloat16) for k in source.tensors}
    save_safetensors(tmp_path / "lora/adapter_model.safetensors", half, overwrite=True)
    vector = TaskVector.between(base, tmp_path / "lora")
    delta = vector["visual.transformer.resblocks.0.mlp.c_fc.weight"]
    key = "base_model.model.vision_model.encoder.layers.0.mlp.fc1.lora_{}.weight"
    expected = (half[key.format("B")].float() @ half[key.format("A")].float()) * 2.0
    assert torch.allclose(delta.dense(), expected, atol=1e-7)
    bank = Bank.build(base, {"a": tmp_path / "lora"}, to=tmp_path / "bank")
    stored = bank["a"]["visual.transformer.resblocks.0.mlp.c_fc.weight"]
    assert stored.terms[0].a.dtype == torch.bfloat16
    assert torch.equal(stored.dense(), delta.dense())
