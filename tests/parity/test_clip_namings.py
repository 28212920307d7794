"""open_clip and Hugging Face: one model, two namings, the same blocks and the same outputs."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from aniso.vectors import Bank, BlockSource, Kind, Layout, TaskVector
from aniso.vectors.convert import convert
from aniso.weights import TensorMap, open_weights, save_safetensors

pytest.importorskip("open_clip")
pytest.importorskip("transformers")


def state(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def test_vit_b32_has_152_blocks_in_both_namings_and_200_when_split():
    import open_clip
    from transformers import CLIPConfig, CLIPModel

    with torch.device("meta"):
        theirs = CLIPModel(CLIPConfig())
    ours = open_clip.create_model("ViT-B-32", load_weights=False)
    hugging_face = TensorMap({k: torch.empty(v.shape) for k, v in theirs.state_dict().items()})
    open_clip_ = TensorMap({k: torch.empty(v.shape) for k, v in ours.state_dict().items()})
    fused = [Layout.of(source) for source in (open_clip_, hugging_face)]
    assert [len(layout.blocks) for layout in fused] == [152, 152]
    assert [b.name for b in fused[0].blocks] == [b.name for b in fused[1].blocks]
    assert fused[0].signature == fused[1].signature
    split = [Layout.of(source, split=True) for source in (open_clip_, hugging_face)]
    assert [len(layout.blocks) for layout in split] == [200, 200]
    assert split[0].signature == split[1].signature
    kinds = [b.kind for b in fused[0].blocks]
    assert (kinds.count(Kind.ATTENTION), kinds.count(Kind.MLP)) == (24, 24)
    assert {b.depth for b in fused[0].blocks} == {None, *range(12)}


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_round_trip_is_bit_identical_and_both_libraries_agree(tmp_path, activation):
    from transformers import CLIPModel

    model = tiny.open_clip_vit(quick_gelu=activation == "quick_gelu")
    original = state(model)
    save_safetensors(tmp_path / "model.safetensors", original)
    convert(
        open_weights(tmp_path / "model.safetensors"),
        tmp_path / "hf",
        to="huggingface",
        activation=activation,
    )
    # heads cannot be told from shapes; the tiny model breaks CLIP's rule of 64 per head
    config = json.loads((tmp_path / "hf/config.json").read_text())
    for tower in ("vision_config", "text_config"):
        config[tower]["num_attention_heads"] = 2
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    convert(open_weights(tmp_path / "hf"), tmp_path / "back", to="open_clip")
    back = open_weights(tmp_path / "back")
    assert set(back.tensors) == set(original)
    for name, tensor in original.items():
        assert torch.equal(back.read(name), tensor), name

    theirs = CLIPModel.from_pretrained(tmp_path / "hf").eval()
    images = torch.randn(3, 3, 16, 16)
    texts = torch.randint(1, 60, (3, tiny.CONTEXT))
    texts[:, -1] = 63  # both pool the end token
    with torch.no_grad():
        vision = theirs.visual_projection(theirs.vision_model(images).pooler_output)
        words = theirs.text_projection(theirs.text_model(texts).pooler_output)
        assert torch.allclose(model.encode_image(images), vision, atol=1e-5)
        assert torch.allclose(model.encode_text(texts), words, atol=1e-5)


def test_converted_directory_loads_in_open_clip(tmp_path):
    import open_clip

    theirs = tiny.hf_clip(activation="quick_gelu")
    theirs.save_pretrained(tmp_path / "hf")
    convert(open_weights(tmp_path / "hf"), tmp_path / "oc", to="open_clip")
    model = open_clip.create_model(f"local-dir:{tmp_path / 'oc'}").eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = theirs.visual_projection(theirs.vision_model(images).pooler_output)
        assert torch.allclose(model.encode_image(images), expected, atol=1e-5)


def open_clip_directory(path, change=lambda config: None, state_=None):
    model = tiny.open_clip_vit()
    path.mkdir()
    save_safetensors(path / "open_clip_model.safetensors", state_ or state(model))
    config = {"embed_dim": tiny.EMBED, "vision_cfg": {"width": tiny.WIDTH, "head_width": 16},
              "text_cfg": {"width": tiny.WIDTH, "heads": 2}}  # fmt: skip
    change(config)
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return path


@pytest.mark.parametrize(
    "setting", ["vision_cfg.pool_type", "vision_cfg.no_ln_pre", "text_cfg.embed_cls", "custom_text"]
)
def test_a_model_that_the_other_library_would_compute_differently_is_refused(tmp_path, refused, setting):
    *parts, name = setting.split(".")

    def change(config):
        (config[parts[0]] if parts else config)[name] = "other"

    source = open_weights(open_clip_directory(tmp_path / "oc", change))
    with refused("LAYOUT-CONVERT", 3, name):
        convert(source, tmp_path / "hf", to="huggingface")
    assert not (tmp_path / "hf").exists()


def test_a_hugging_face_model_with_unusual_settings_is_refused(tmp_path, refused):
    from transformers import CLIPModel

    config = tiny.hf_config()
    config.vision_config.layer_norm_eps = 0.05
    CLIPModel(config).save_pretrained(tmp_path / "hf")
    with refused("LAYOUT-CONVERT", 3, "layer_norm_eps"):
        convert(open_weights(tmp_path / "hf"), tmp_path / "oc", to="open_clip")


def test_text_pooling_is_kept_or_refused(tmp_path, refused):
    """Hugging Face pools a token by its id, open_clip the one with the largest id."""
    from transformers import CLIPModel

    config = tiny.hf_config()
    config.text_config.eos_token_id = 60
    CLIPModel(config).save_pretrained(tmp_path / "hf")
    with refused("LAYOUT-CONVERT", 3, "eos_token_id"):
        convert(open_weights(tmp_path / "hf"), tmp_path / "oc", to="open_clip")
    convert(open_weights(open_clip_directory(tmp_path / "ours")), tmp_path / "theirs", to="huggingface")
    model, theirs = tiny.open_clip_vit(), CLIPModel.from_pretrained(tmp_path / "theirs").eval()
    texts = torch.randint(1, 60, (3, tiny.CONTEXT))
    with torch.no_grad():
        words = theirs.text_projection(theirs.text_model(texts).pooler_output)
        assert torch.allclose(model.encode_text(texts), words, atol=1e-5)


def test_defaults_that_are_written_out_are_not_unusual(tmp_path):
    def change(config):
        config["vision_cfg"]["pool_type"], config["text_cfg"]["pool_type"] = "tok", "argmax"

    convert(open_weights(open_clip_directory(tmp_path / "oc", change)), tmp_path / "hf", to="huggingface")


@pytest.mark.parametrize(
    "lost", ["visual.transformer.resblocks.1.mlp.c_fc.bias", "positional_embedding", "visual.proj"]
)
def test_an_incomplete_model_is_not_converted(tmp_path, refused, lost):
    whole = state(tiny.open_clip_vit())
    del whole[lost]
    source = open_weights(open_clip_directory(tmp_path / "oc", state_=whole))
    with refused("CKPT-KEYS", 3, lost):
        convert(source, tmp_path / "hf", to="huggingface")


@pytest.mark.parametrize(
    ("said", "code"), [("QuickGELU", "there is no activation"), ("quick_gelu", "a different activation")]
)
def test_an_activation_must_exist_and_not_contradict_the_files(tmp_path, refused, said, code):
    source = open_weights(open_clip_directory(tmp_path / "oc"))  # gelu
    for act in (lambda: convert(source, tmp_path / "hf", to="huggingface", activation=said),
                lambda: BlockSource(source, activation=said)):  # fmt: skip
        with refused("CKPT-ACTIVATION", 2 if "there" in code else 3, code):
            act()


def test_an_output_never_replaces_its_input_or_foreign_files(tmp_path, refused):
    oc = open_clip_directory(tmp_path / "oc")
    with refused("OUT-EXISTS", 2, "holds the input"):
        convert(open_weights(oc), oc, to="huggingface", overwrite=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    with refused("OUT-EXISTS", 2, "chapter.tex"):
        convert(open_weights(oc), tmp_path / "thesis", to="huggingface", overwrite=True)
    assert (tmp_path / "thesis/chapter.tex").exists()


def test_every_saved_form_of_one_model_has_the_same_blocks_and_hashes(tmp_path):
    """transformers 4 and 5, open_clip, a training wrapper: names differ, blocks and values do not."""
    hf = state(tiny.hf_clip())
    save_safetensors(tmp_path / "hf.safetensors", hf)
    convert(open_weights(tmp_path / "hf.safetensors"), tmp_path / "oc", to="open_clip", activation="gelu")
    converted = open_weights(tmp_path / "oc/open_clip_model.safetensors")
    oc = {key: converted.read(key) for key in converted.tensors}
    forms = {
        "v5": hf,
        "v4": hf | {"vision_model.embeddings.position_ids": torch.arange(5)[None]},
        "open_clip": oc,
        "visual only": {k: v for k, v in oc.items() if k.startswith("visual.")},
        "bare visual": {k.removeprefix("visual."): v for k, v in oc.items() if k.startswith("visual.")},
        "image encoder": {f"model.{k}": v for k, v in oc.items()},
        "wrapped": {f"clip.{k}": v for k, v in hf.items()},
        "shuffled": dict(sorted(hf.items(), key=lambda item: hash(item[0]))),
    }
    identities = {name: BlockSource(TensorMap(form)).identity() for name, form in forms.items()}
    assert len({identity.content for identity in identities.values()}) == 1, identities
    vision = {k.removeprefix("vision_model."): v for k, v in hf.items() if k.startswith("vision_model.")}
    v5 = Layout.of(TensorMap(vision))
    v4 = Layout.of(TensorMap({f"vision_model.{k}": v for k, v in vision.items()}))
    assert v5.signature == v4.signature
    assert len(v5.blocks) == 12 * tiny.LAYERS + 7


def test_base_and_tuned_may_be_named_differently(tmp_path):
    hf = state(tiny.hf_clip())
    changed = tiny.tuned_vision(hf, tiny.is_hf_vision)
    save_safetensors(tmp_path / "tuned.safetensors", changed)
    convert(open_weights(tmp_path / "tuned.safetensors"), tmp_path / "oc", to="open_clip", activation="gelu")
    same = TaskVector.between(hf, changed, name="same naming")
    cross = TaskVector.between(hf, tmp_path / "oc", name="cross")
    assert cross.cosine(same) == pytest.approx(1.0)
    applied = cross.apply(hf)
    for key, value in changed.items():
        assert torch.equal(applied[key], value), key


@pytest.mark.parametrize("naming", ["huggingface", "open_clip"])
def test_split_attention_gives_the_same_model(tmp_path, naming):
    from aniso.vectors.convert import renamed

    base = state(tiny.hf_clip())
    changed = tiny.tuned_vision(base, tiny.is_hf_vision)
    named = base if naming == "huggingface" else {
        key: read() for key, read in renamed(TensorMap(base), "open_clip").tensors.items()
    }  # fmt: skip
    fused = TaskVector.between(named, changed, name="v")
    split_base = BlockSource(TensorMap(named), split=True)
    split = TaskVector.between(split_base, changed, name="v")
    assert len(split.blocks) == len(fused.blocks) + 4 * tiny.LAYERS
    assert split.norm() == pytest.approx(fused.norm(), rel=1e-6)
    a, b = fused.apply(named), split.apply(split_base)
    assert all(torch.equal(a[key], b[key]) for key in named)


def test_the_naming_can_be_overruled(tmp_path, refused):
    base = state(tiny.hf_clip())
    changed = tiny.tuned(base)
    plain = BlockSource(TensorMap(base), scheme="plain")
    vector = TaskVector.between(plain, changed, name="both towers")
    assert len(vector.blocks) == len(base)
    with refused("LAYOUT-SCHEME", 2, "hf-clip-vit"):
        BlockSource(TensorMap(base), scheme="openclip-vit")
    with refused("LAYOUT-SCHEME", 2, "plain"):
        BlockSource(TensorMap(base), scheme="timm")


def test_a_vision_model_without_projection_fits_a_whole_clip(tmp_path):
    """The form in which public banks publish their checkpoints."""
    hf = state(tiny.hf_clip())
    changed = tiny.tuned_vision(hf, tiny.is_hf_vision)
    published = {k: v for k, v in changed.items() if k.startswith("vision_model.")}
    vector = TaskVector.between(hf, published, name="cars")
    assert "visual.proj" not in vector
    assert len(vector.blocks) == 12 * tiny.LAYERS + 7
    assert any("visual.proj is absent" in note for note in vector.notes)


def test_resnet_keeps_the_bases_statistics(tmp_path):
    model = tiny.open_clip_resnet()
    base = state(model)
    other = tiny.tuned_vision(base, tiny.is_open_clip_vision)
    for key in other:
        if key.endswith("running_mean"):
            other[key] = other[key] + 1
        if key.endswith("num_batches_tracked"):
            other[key] = other[key] + 100
    bank = Bank.build(base, {"cars": other}, to=tmp_path / "bank")
    vector = bank["cars"]
    parameters = {f"visual.{name}" for name, _ in model.visual.named_parameters()}
    assert {b.name for b in vector.blocks} == parameters
    assert any("BatchNorm statistics differ" in note for note in vector.notes)
    composed = vector.apply(base)
    for key, value in composed.items():
        kept = "running" in key or "num_batches" in key or not key.startswith("visual.")
        assert torch.equal(value, base[key] if kept else other[key]), key
    model.load_state_dict(composed)
    with torch.no_grad():
        assert torch.isfinite(model.encode_image(torch.randn(1, 3, 64, 64))).all()


def test_resnet_round_trips_through_the_layout():
    model = tiny.open_clip_resnet()
    base = state(model)
    vector = TaskVector.between(base, tiny.tuned_vision(base, tiny.is_open_clip_vision), name="x")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model.encode_image(images)
        model.load_state_dict(vector.apply(base, 0.0))
        assert torch.equal(model.encode_image(images), before)
