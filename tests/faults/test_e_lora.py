"""Fault table E: adapters that would be misread. Exact merges are in tests/parity/test_peft.py."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
import torch

from aniso.vectors import Bank, TaskVector
from aniso.weights import open_weights, save_safetensors

peft = pytest.importorskip("peft")
TARGETS = r"vision_model.*\.(q_proj|fc1)"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base and an adapter on it."""
    root = tmp_path_factory.mktemp("lora")
    model = tiny.hf_clip()
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.05)
    wrapped.save_pretrained(root / "lora")
    save_safetensors(root / "base.safetensors", base)
    return base, root


@pytest.fixture
def lora(made, tmp_path):
    """A copy to spoil."""
    shutil.copytree(made[1] / "lora", tmp_path / "lora")
    return tmp_path / "lora"


def configure(lora, **changes):
    path = lora / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(lora, change):
    source = open_weights(lora / "adapter_model.safetensors")
    tensors = {k: source.read(k) for k in source.tensors}
    save_safetensors(lora / "adapter_model.safetensors", change(tensors), overwrite=True)


def test_the_unspoilt_adapter_is_read(made, lora):
    assert len(TaskVector.between(made[0], lora).blocks) == 2 * tiny.LAYERS


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("target_parameters", ["experts.weight"], "bare parameters"),
        ("trainable_token_indices", [1, 2], "trainable tokens"),
        ("layer_replication", [[0, 2]], "replicated layers"),
        ("alora_invocation_tokens", [5], "aLoRA"),
        ("use_qalora", True, "QALoRA"),
        ("arrow_config", {"top_k": 2}, "Arrow"),
        ("peft_type", "LOHA", "peft_type LOHA"),
        ("peft_type", "IA3", "peft_type IA3"),
        ("peft_type", None, "peft_type"),
        ("a_future_setting", {"x": 1}, "a_future_setting"),
    ],
)
def test_e2_what_is_not_supported_is_refused_by_name(made, lora, refused, field, value, named):
    configure(lora, **{field: value})
    with refused("LORA-KIND", 3, named):
        TaskVector.between(made[0], lora)


def test_e2_settings_that_do_not_change_the_update_are_accepted(made, lora):
    configure(lora, lora_dropout=0.5, inference_mode=False, a_future_setting=None, revision="main")
    TaskVector.between(made[0], lora)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new"])
def test_e3_initialisations_that_change_the_base_are_refused(made, lora, refused, init):
    configure(lora, init_lora_weights=init)
    with refused("LORA-INIT", 3, init, "path_initial_model_for_weight_conversion"):
        TaskVector.between(made[0], lora)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_e3_initialisations_that_keep_the_base_are_read(made, lora, init):
    configure(lora, init_lora_weights=init)
    TaskVector.between(made[0], lora)


def test_e4_a_key_without_a_place_is_an_error(made, lora, aniso, tmp_path):
    rewrite(lora, lambda t: t | {k.replace("layers.0", "layers.7"): v for k, v in t.items()})
    ran = aniso("bank", "build", "--base", made[1] / "base.safetensors", lora, "-o", tmp_path / "bank")
    assert ran.code == 3
    assert "LORA-KEYS" in ran.err
    assert "layers.7" in ran.err
    assert not (tmp_path / "bank").exists()
    fixed = aniso("bank", "build", "--base", made[1] / "base.safetensors", lora, "-o", tmp_path / "bank",
                  "--skip-key", "*layers.7*")  # fmt: skip
    assert fixed.code == 0
    assert "left out on request" in fixed.err


def test_e4_adapters_with_other_targets_form_a_union(made, lora, tmp_path):
    base, _ = made
    model = tiny.hf_clip()
    other = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r"vision_model.*fc2"))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.05)
    other.save_pretrained(tmp_path / "other")
    bank = Bank.build(base, {"a": lora, "b": tmp_path / "other"}, to=tmp_path / "bank")
    touched = {name: {b.name for b in bank[name].blocks} for name in bank}
    assert not touched["a"] & touched["b"]
    assert len(touched["a"] | touched["b"]) == 3 * tiny.LAYERS
    assert any("absent" in note for note in bank.notes)


@pytest.mark.parametrize("named", ["someone/other-model", "/home/author/secret/base", None])
def test_e5_the_named_base_is_compared_and_never_opened(made, lora, named, monkeypatch):
    configure(lora, base_model_name_or_path=named)
    opened = []
    import os

    original = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: opened.append(str(p)) or original(p, *a, **k))
    vector = TaskVector.between(made[0], lora)
    assert not [p for p in opened if named and named in p]
    warned = [note for note in vector.notes if note.startswith("warning:")]
    assert bool(warned) == (named is not None)


def test_e6_only_a_or_only_b(made, lora, refused):
    rewrite(lora, lambda t: {k: v for k, v in t.items() if "layers.0.mlp.fc1.lora_B" not in k})
    with refused("LORA-KEYS", 3, "layers.0.mlp.fc1", "lora_B"):
        TaskVector.between(made[0], lora)


def test_e6_rank_of_config_and_tensors_differ(made, lora, refused):
    configure(lora, r=8)
    with refused("LORA-RANK", 3, "rank 8", "rank_pattern"):
        TaskVector.between(made[0], lora)


@pytest.mark.parametrize("r", [0, -1, 2.5, "4", None, True, 1e400])
def test_e6_nonsense_in_the_configuration(made, lora, aniso, tmp_path, r):
    configure(lora, r=r if r != 1e400 else 10**400)
    ran = aniso("vector", "make", "--base", made[1] / "base.safetensors", lora, "-o", tmp_path / "v")
    assert ran.code == 3
    assert "LORA-" in ran.err or (r == 1e400 and "DIR-CONFIG" in ran.err)  # no number of JSON that fits


@pytest.mark.parametrize("adapter", ["default", "weight", "lora_A", "my.adapter"])
def test_e6_an_adapters_own_name_in_its_keys(made, lora, adapter):
    expected = TaskVector.between(made[0], lora)
    rewrite(lora, lambda t: {k.replace(".weight", f".{adapter}.weight"): v for k, v in t.items()})
    vector = TaskVector.between(made[0], lora)
    assert dict(vector.norms) == dict(expected.norms)


def test_e6_a_pickled_adapter_is_read_without_running_it(made, lora, refused, tmp_path):
    source = open_weights(lora)
    tensors = {k: source.read(k) for k in source.tensors}
    expected = TaskVector.between(made[0], lora)
    (lora / "adapter_model.safetensors").unlink()
    torch.save(tensors, lora / "adapter_model.bin")
    assert dict(TaskVector.between(made[0], lora).norms) == dict(expected.norms)
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return marker.write_text, ("x",)

    torch.save(tensors | {"evil": Evil()}, lora / "adapter_model.bin")
    with refused("PICKLE-CALL", 4):
        TaskVector.between(made[0], lora)
    assert not marker.exists()


def test_e7_identity(made, lora):
    base, _ = made
    model = tiny.hf_clip()
    merged = peft.PeftModel.from_pretrained(model, lora).merge_and_unload().state_dict()
    vector = TaskVector.between(base, lora)
    one, zero, minus = (vector.apply(base, c) for c in (1.0, 0.0, -1.0))
    for key in base:
        assert torch.allclose(one[key], merged[key], rtol=0, atol=1e-6)
        assert torch.equal(zero[key], base[key])
        assert torch.allclose(one[key] + minus[key], 2 * base[key], atol=1e-5)


def test_e9_other_formats_are_recognised(tmp_path, aniso, made):
    save_safetensors(tmp_path / "kohya.safetensors", {
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.zeros(4, 8),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.zeros(8, 4),
    })  # fmt: skip
    ran = aniso("inspect", tmp_path / "kohya.safetensors")
    assert ran.code == 3
    assert "kohya" in ran.err


def test_nan_in_a_factor_is_named(made, lora, refused, tmp_path):
    def spoil(tensors):
        key = next(k for k in tensors if "layers.1.mlp.fc1.lora_B" in k)
        tensors[key][2, 1] = float("nan")
        return tensors

    rewrite(lora, spoil)
    with refused("WEIGHT-NONFINITE", 3, "layers.1.mlp.fc1.lora_B", "element 9"):
        TaskVector.between(made[0], lora)
    with refused("WEIGHT-NONFINITE", 3):
        Bank.build(made[0], {"a": lora}, to=tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_updates_of_the_text_tower_never_land_in_the_image_encoder(made, lora, refused):
    """Layers of both towers have the same names but for a prefix that a bare vision model lacks."""
    rewrite(lora, lambda t: {k.replace("vision_model", "text_model"): v for k, v in t.items()})
    vision = {k.removeprefix("vision_model."): v for k, v in made[0].items() if k.startswith("vision_model.")}
    for base in (made[0], vision):
        with refused("LORA-KEYS", 3, "text_model"):
            TaskVector.between(base, lora)


def test_an_adapter_of_the_whole_model_fits_a_bare_vision_model(made, lora):
    vision = {k.removeprefix("vision_model."): v for k, v in made[0].items() if k.startswith("vision_model.")}
    whole, bare = TaskVector.between(made[0], lora), TaskVector.between(vision, lora)
    assert dict(whole.norms) == dict(bare.norms)


def wrapped_adapter(tmp_path, keys):
    tensors = {}
    for key in keys:
        tensors[f"base_model.model.{key}.lora_A.weight"] = torch.ones(2, 3) * 0.01
        tensors[f"base_model.model.{key}.lora_B.weight"] = torch.ones(4, 2) * 0.01
    (tmp_path / "w").mkdir(exist_ok=True)
    save_safetensors(tmp_path / "w/adapter_model.safetensors", tensors, overwrite=True)
    (tmp_path / "w/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return tmp_path / "w"


def on_open_clip(tmp_path, targets):
    model = tiny.open_clip_vit()
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.05)
    wrapped.save_pretrained(tmp_path / "oc")
    return base, tmp_path / "oc"


@pytest.mark.parametrize("targets", [["c_fc"], r"transformer\.resblocks.*c_fc"])
def test_open_clips_text_tower_never_lands_in_the_image_encoder(tmp_path, refused, targets):
    """Both towers are of one width and their layers of one name but for "visual."."""
    base, lora = on_open_clip(tmp_path, targets)
    with refused("LORA-KEYS", 3, "image encoder", "model.transformer.resblocks"):
        TaskVector.between(base, lora)


def test_a_bare_encoders_adapter_is_the_image_encoders_only_if_that_is_known(made, lora, refused):
    rewrite(lora, lambda t: {k.replace("vision_model.", ""): v for k, v in t.items()})
    mapping = {"parent_library": "transformers.models.clip.modeling_clip"}
    configure(lora, auto_mapping=mapping | {"base_model_class": "CLIPTextModel"})
    with refused("LORA-KEYS", 3, "text encoder"):
        TaskVector.between(made[0], lora)
    configure(lora, auto_mapping=mapping | {"base_model_class": "CLIPVisionModel"})
    vector = TaskVector.between(made[0], lora)
    assert len(vector.blocks) == 2 * tiny.LAYERS
    assert any("'vision_model.' in place of ''" in note for note in vector.notes)
    configure(lora, auto_mapping=None)
    with refused("LORA-KEYS", 3, "more than one part", "vision_model.", "text_model."):
        TaskVector.between(made[0], lora)


def bare_vision(made):
    return {k.removeprefix("vision_model."): v for k, v in made[0].items() if k.startswith("vision_model.")}


@pytest.mark.parametrize("prefix", ["text_encoder.", "text_model.", "text.", "model.text_model."])
def test_a_text_encoders_adapter_never_lands_in_a_bare_image_encoder(made, lora, refused, prefix):
    configure(lora, auto_mapping=None)
    rewrite(lora, lambda t: {k.replace("vision_model.", prefix): v for k, v in t.items()})
    with refused("LORA-KEYS", 3):
        TaskVector.between(bare_vision(made), lora)
    rewrite(lora, lambda t: {k.replace(prefix, ""): v for k, v in t.items()})
    configure(lora, auto_mapping={"base_model_class": "CLIPTextModel"})
    with refused("LORA-KEYS", 3, "text encoder"):
        TaskVector.between(bare_vision(made), lora)
    configure(lora, auto_mapping={"base_model_class": "CLIPVisionModel"})
    assert len(TaskVector.between(bare_vision(made), lora).blocks) == 2 * tiny.LAYERS


def test_a_whole_models_adapter_on_a_bare_open_clip_tower(tmp_path, refused):
    base, lora = on_open_clip(tmp_path, r"visual.*c_fc")
    visual = {k.removeprefix("visual."): v for k, v in base.items() if k.startswith("visual.")}
    assert len(TaskVector.between(visual, lora).blocks) == tiny.LAYERS
    _, lora = on_open_clip(tmp_path / "both", ["c_fc"])
    with refused("LORA-KEYS", 3, "model.transformer.resblocks"):
        TaskVector.between(visual, lora)


@pytest.mark.parametrize("prefix", ["vision_tower.", "model.", "a.b."])
def test_a_wrapper_around_a_tower_is_seen_through_on_any_base(made, lora, prefix):
    expected = dict(TaskVector.between(made[0], lora).norms)
    rewrite(lora, lambda t: {k.replace("vision_model.", f"{prefix}vision_model."): v for k, v in t.items()})
    for base in (made[0], bare_vision(made)):
        assert dict(TaskVector.between(base, lora).norms) == expected


def test_a_wrapper_around_open_clip(tmp_path):
    base, lora = on_open_clip(tmp_path, r"visual.*c_fc")
    expected = dict(TaskVector.between(base, lora).norms)
    rewrite(lora, lambda t: {k.replace(".visual.", ".model.visual."): v for k, v in t.items()})
    visual = {k.removeprefix("visual."): v for k, v in base.items() if k.startswith("visual.")}
    for each in (base, visual):
        assert dict(TaskVector.between(each, lora).norms) == expected


def test_an_adapter_on_any_name_of_a_tied_tensor(tmp_path):
    w = torch.randn(4, 3)
    base = {"z.weight": w, "a.weight": w, "m.weight": w, "x.weight": torch.randn(4, 3)}
    for name in "zam":
        vector = TaskVector.between(base, wrapped_adapter(tmp_path, [name]))
        assert [b.name for b in vector.blocks] == ["a.weight"]


def test_only_the_keys_without_a_place_are_listed(tmp_path, refused):
    base = {f"block.{i}.fc.weight": torch.randn(4, 3) for i in range(2)}
    adapter = wrapped_adapter(tmp_path, ["vit.block.0.fc", "vit.block.1.fc", "classifier"])
    with refused("LORA-KEYS", 3, "classifier.lora_A") as refusal:
        TaskVector.between(base, adapter)
    assert "block" not in str(refusal.error)


def test_an_adapter_that_fits_two_parts_of_the_base_is_refused(tmp_path, refused):
    halves = ("encoder", "decoder")
    base = {f"{half}.layers.{i}.fc.weight": torch.randn(4, 3) for half in halves for i in range(2)}
    adapter = wrapped_adapter(tmp_path, [f"layers.{i}.fc" for i in range(2)])
    with refused("LORA-KEYS", 3, "more than one part", "encoder.", "decoder."):
        TaskVector.between(base, adapter)


def test_two_updates_for_one_place_are_refused(made, lora, refused):
    def twice(tensors):
        return tensors | {k.replace("vision_model.", "model.vision_model."): v for k, v in tensors.items()}

    rewrite(lora, twice)
    with refused("LORA-KEYS", 3):
        TaskVector.between(made[0], lora)


def test_dora_on_weights_that_are_all_zero_is_refused(tmp_path, refused):
    lora = wrapped_adapter(tmp_path, ["fc"])
    rewrite(lora, lambda t: {k: v * 0 if "lora_B" in k else v for k, v in t.items()}
            | {"base_model.model.fc.lora_magnitude_vector": torch.ones(4)})  # fmt: skip
    configure(lora, use_dora=True)
    base = {"fc.weight": torch.randn(4, 3)}
    base["fc.weight"][2] = 0
    with refused("LORA-KIND", 3, "all zero", "output 2"):
        TaskVector.between(base, lora)


@pytest.mark.parametrize(("a", "b"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)])
def test_factors_of_two_dtypes_are_both_kept_exactly(made, lora, tmp_path, a, b):
    rewrite(lora, lambda t: {k: v.to(a) if "lora_A" in k else (v * 1e6).to(b) for k, v in t.items()})
    vector = TaskVector.between(made[0], lora)
    bank = Bank.build(made[0], {"a": lora}, to=tmp_path / "bank")
    assert bank.check() == []
    for block in vector.blocks:
        assert torch.equal(bank["a"][block.name].dense(), vector[block.name].dense())


def test_a_wrapper_of_the_model_is_seen_through_only_if_it_fits_every_key(tmp_path, refused):
    base = {f"block.{i}.fc.weight": torch.randn(4, 3) for i in range(2)}
    for prefix in ("", "encoder.", "model.encoder."):
        adapter = wrapped_adapter(tmp_path, [f"{prefix}block.{i}.fc" for i in range(2)])
        assert len(TaskVector.between(base, adapter).blocks) == 2
    inner = {f"model.{k}": v for k, v in base.items()}
    assert len(TaskVector.between(inner, wrapped_adapter(tmp_path, ["block.0.fc"])).blocks) == 1
    with refused("LORA-KEYS", 3):  # two halves of a model must not both land in one
        TaskVector.between(base, wrapped_adapter(tmp_path, ["encoder.block.0.fc", "decoder.block.0.fc"]))


def test_a_saved_module_of_another_size_is_refused(made, lora, refused):
    key = "base_model.model.vision_model.embeddings.position_embedding.weight"
    rewrite(lora, lambda t: t | {key: torch.zeros(9, tiny.WIDTH)})
    with refused("CKPT-SHAPE", 3, "position_embedding", "(5, 32)", "(9, 32)"):
        TaskVector.between(made[0], lora)


def test_an_adapter_is_not_a_base(made, lora, refused):
    with refused("LORA-KIND", 3, "is an adapter, not a model"):
        TaskVector.between(lora, made[0])


def test_an_adapter_for_a_model_of_another_size(made, lora, refused):
    rewrite(lora, lambda t: {k: v.repeat(1, 2) if "lora_A" in k else v for k, v in t.items()})
    with refused("CKPT-SHAPE", 3, "fc1"):
        TaskVector.between(made[0], lora)
