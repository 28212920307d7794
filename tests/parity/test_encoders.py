"""An encoder computes what its library computes, whichever library that is."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from dataclasses import replace

import pytest
import tiny
import torch

from aniso import Bank, Composition, Layout, Partition, TaskVector
from aniso.classes import ClassList
from aniso.models import load_model
from aniso.vectors.convert import convert
from aniso.weights import open_weights, save_safetensors

pytest.importorskip("open_clip")
pytest.importorskip("transformers")
pytest.importorskip("timm")


def images(count=3, size=16, seed=5):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def token_ids():
    ids = torch.randint(1, 60, (4, tiny.CONTEXT), generator=torch.Generator().manual_seed(6))
    ids[:, -1] = 63  # the end token, which both libraries pool
    return ids


class Given:
    """A tokenizer that says what it was told to say."""

    fingerprint = "given"

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, texts):
        return self.ids, []


def text_features(encoder, ids):
    encoder.family = replace(encoder.family, tokens=Given(ids))
    return encoder.text_features(["given"] * len(ids))


def features(encoder, pixels):
    with torch.no_grad():
        return encoder(pixels)


def shaken(model, seed=0):
    """Weights of a size at which nothing is hidden by being zero or one."""
    g = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            positive = name.endswith("running_var")
            noise = torch.rand(tensor.shape, generator=g) + 0.5 if positive else None
            tensor.copy_(noise if positive else torch.randn(tensor.shape, generator=g) * 0.3)
    return model.eval()


def edited(path, change, name="config.json"):
    config = json.loads((path / name).read_text())
    change(config)
    (path / name).write_text(json.dumps(config))
    return path


def made_pair(home, activation):
    tiny.hf_clip(activation=activation).save_pretrained(home / "hf")
    convert(open_weights(home / "hf"), home / "oc", to="open_clip")
    return home / "oc", home / "hf"


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def pair(request, tmp_path_factory):
    """One model as an open_clip and as a Hugging Face directory; tests that change files take copies."""
    return made_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return made_pair(tmp_path_factory.mktemp("gelu"), "gelu")[1]


# both libraries


def test_the_same_weights_give_the_same_features_in_both(pair):
    ours, theirs = (load_model(path) for path in pair)
    torch.testing.assert_close(features(ours, images()), features(theirs, images()), rtol=1e-5, atol=1e-5)
    words = [text_features(encoder, token_ids()) for encoder in (ours, theirs)]
    torch.testing.assert_close(*words, rtol=1e-5, atol=1e-5)


def test_the_same_weights_are_the_same_model_in_both(pair):
    ours, theirs = (load_model(path) for path in pair)
    assert ours.fingerprint == theirs.fingerprint
    assert [b.name for b in ours.layout.blocks] == [b.name for b in theirs.layout.blocks]
    assert ours.layout.signature == theirs.layout.signature
    assert ours.logit_scale == theirs.logit_scale
    assert ours.transforms.pixels == theirs.transforms.pixels
    said = json.loads((pair[1] / "config.json").read_text())["vision_config"]["hidden_act"]
    assert ours.model_config.activation == theirs.model_config.activation == said
    assert ours.model_config.heads == theirs.model_config.heads == (2, 2)
    assert len(ours.layout.blocks) == 12 * tiny.LAYERS + 8


def test_the_activation_makes_another_model_of_the_same_weights(tmp_path):
    a, b = (load_model(made_pair(tmp_path / kind, kind)[0]) for kind in ("quick_gelu", "gelu"))
    assert a.fingerprint == b.fingerprint  # of the weights
    assert not torch.allclose(features(a, images()), features(b, images()), atol=1e-5)


def test_a_hugging_face_encoder_is_transformers_bit_for_bit(pair):
    from transformers import CLIPModel

    encoder, library = load_model(pair[1]), CLIPModel.from_pretrained(pair[1]).eval()
    with torch.no_grad():
        pooled = library.get_image_features(pixel_values=images()).pooler_output
        words = library.get_text_features(input_ids=token_ids()).pooler_output
        whole = library(input_ids=token_ids(), pixel_values=images())
    assert torch.equal(features(encoder, images()), pooled)
    assert torch.equal(text_features(encoder, token_ids()), words)
    assert encoder.logit_scale == pytest.approx(library.logit_scale.exp().item(), rel=1e-6)
    assert torch.allclose(torch.nn.functional.normalize(pooled), whole.image_embeds, atol=1e-6)
    assert list(encoder.state_dict()) == list(library.state_dict())


def test_an_open_clip_encoder_is_open_clip_bit_for_bit(pair):
    import open_clip

    encoder, library = load_model(pair[0]), open_clip.create_model(f"local-dir:{pair[0]}").eval()
    with torch.no_grad():
        assert torch.equal(features(encoder, images()), library.encode_image(images()))
        assert torch.equal(text_features(encoder, token_ids()), library.encode_text(token_ids()))
        assert encoder.logit_scale == pytest.approx(library.logit_scale.exp().item(), rel=1e-6)
    assert list(encoder.state_dict()) == list(library.state_dict())


def test_a_directory_with_both_forms_loads_in_open_clip_s(tmp_path, pair):
    """As most of open_clip's repositories on the hub are: config.json and model.safetensors lie beside."""
    for path in reversed(pair):
        shutil.copytree(path, tmp_path / "both", dirs_exist_ok=True)
    both = load_model(tmp_path / "both")
    assert both.fingerprint == load_model(pair[0]).fingerprint
    assert torch.equal(features(both, images()), features(load_model(pair[0]), images()))


def test_weights_may_come_from_elsewhere(tmp_path, pair):
    for path, is_vision in zip(pair, (tiny.is_open_clip_vision, tiny.is_hf_vision), strict=True):
        base = load_model(path)
        tuned = tiny.tuned_vision(base.state_dict(), is_vision)
        found = load_model(path, weights=tuned)
        assert all(torch.equal(value, tuned[key]) for key, value in found.state_dict().items())
        save_safetensors(tmp_path / f"{path.name}.safetensors", tuned)
        assert (
            load_model(path, weights=tmp_path / f"{path.name}.safetensors").fingerprint == found.fingerprint
        )
        assert found.fingerprint != base.fingerprint


def test_an_image_encoder_alone_takes_its_text_from_the_directory(hf):
    base = load_model(hf)
    tuned = tiny.tuned_vision(base.state_dict(), tiny.is_hf_vision)
    found = load_model(hf, weights={k: v for k, v in tuned.items() if tiny.is_hf_vision(k)})
    assert all(torch.equal(value, tuned[key]) for key, value in found.state_dict().items())


@pytest.mark.parametrize("prefix", ["vision_model.", ""])
def test_a_published_vision_model_takes_its_projection_from_the_directory(hf, prefix):
    """The form in which public banks are: CLIPVisionModel, as transformers 4 and 5 save it."""
    base = load_model(hf)
    tuned = tiny.tuned_vision(base.state_dict(), lambda key: key.startswith("vision_model."))
    published = {k: v for k, v in tuned.items() if k.startswith("vision_model.")}
    found = load_model(
        hf, weights={prefix + k.removeprefix("vision_model."): v for k, v in published.items()}
    )
    assert all(torch.equal(value, tuned[key]) for key, value in found.state_dict().items())


@pytest.mark.parametrize(
    "lost", ["logit_scale", "text_projection.weight", "text_model.final_layer_norm.bias"]
)
def test_nothing_of_a_text_tower_is_ever_left_at_random(hf, refused, lost):
    whole = dict(load_model(hf).state_dict())
    del whole[lost]
    with refused("CKPT-KEYS", 3, lost):
        load_model(hf, weights=whole)


def test_a_vision_model_with_projection_has_no_text(tmp_path, refused):
    from transformers import CLIPVisionModelWithProjection

    torch.manual_seed(0)
    library = shaken(CLIPVisionModelWithProjection(tiny.hf_config().vision_config))
    library.save_pretrained(tmp_path / "vision")
    encoder = load_model(tmp_path / "vision")
    with torch.no_grad():
        assert torch.equal(encoder(images()), library(pixel_values=images()).image_embeds)
    assert not encoder.has_text
    assert encoder.logit_scale == 1.0
    assert len(encoder.layout.blocks) == 12 * tiny.LAYERS + 8
    for ask in (lambda: encoder.text_features(["a cat"]), lambda: encoder.class_weights(ClassList(("cat",)))):
        with refused("MODEL-TEXT", 2, "no text tower"):
            ask()


# names


def named(monkeypatch, model, tags=None, quick_gelu=False):
    """open_clip with one more architecture, Tiny-B-32."""
    import open_clip

    config = {
        "embed_dim": tiny.EMBED,
        "quick_gelu": quick_gelu,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": tiny.WIDTH, "layers": tiny.LAYERS,
                       "head_width": 16},
        "text_cfg": {"context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "width": tiny.WIDTH,
                     "heads": 2, "layers": tiny.LAYERS},
    }  # fmt: skip
    monkeypatch.setattr(open_clip, "list_models", lambda: ["Tiny-B-32", "Tiny-B-32-quickgelu", "Other"])
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: copy.deepcopy(config))
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda name, tag: dict((tags or {}).get(tag, {})))
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: list(tags or {}))
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["Tiny-B-32", "Tiny-B/32", "Tiny/B/32"])
def test_an_architecture_by_name_with_a_file(tmp_path, monkeypatch, name):
    library = tiny.open_clip_vit()
    save_safetensors(tmp_path / "w.safetensors", named(monkeypatch, library))
    encoder = load_model(name, tmp_path / "w.safetensors")
    assert encoder.name == "Tiny-B-32:w.safetensors"
    with torch.no_grad():
        assert torch.equal(encoder(images()), library.encode_image(images()))


@pytest.mark.parametrize("quick", [True, False])
def test_a_tag_says_with_which_activation_its_weights_run(tmp_path, monkeypatch, quick):
    import huggingface_hub

    library = tiny.open_clip_vit(quick_gelu=quick)
    tags = {"openai": {"hf_hub": "owner/tiny/", "quick_gelu": quick, "mean": [0.5, 0.4, 0.3]}}
    save_safetensors(tmp_path / "open_clip_model.safetensors", named(monkeypatch, library, tags))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path))
    encoder = load_model("Tiny-B-32", "openai")
    assert encoder.model_config.activation == ("quick_gelu" if quick else "gelu")
    assert encoder.transforms.pixels.mean == (0.5, 0.4, 0.3)
    with torch.no_grad():
        assert torch.equal(encoder(images()), library.encode_image(images()))


def test_a_tag_s_repository_may_hold_other_forms_beside_open_clip_s(tmp_path, monkeypatch):
    """timm's repositories, where OpenAI's weights are, have timm's image encoder as model.safetensors."""
    import huggingface_hub

    library = tiny.open_clip_vit()
    tags = {"laion": {"hf_hub": "owner/tiny/"}}
    save_safetensors(tmp_path / "open_clip_model.safetensors", named(monkeypatch, library, tags))
    save_safetensors(tmp_path / "model.safetensors", {"blocks.0.attn.qkv.weight": torch.zeros(3, 3)})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path))
    with torch.no_grad():
        assert torch.equal(load_model("Tiny-B-32", "laion")(images()), library.encode_image(images()))


def test_a_directory_goes_before_a_name(tmp_path, monkeypatch, hf):
    named(monkeypatch, tiny.open_clip_vit())
    shutil.copytree(hf, tmp_path / "Tiny-B-32")
    monkeypatch.chdir(tmp_path)
    assert load_model("Tiny-B-32").fingerprint == load_model(hf).fingerprint


def test_a_hub_id_is_fetched_as_a_directory(monkeypatch, hf):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(hf))
    encoder = load_model("owner/name@main")
    assert (encoder.name, encoder.fingerprint) == ("owner/name@main", load_model(hf).fingerprint)


# ResNets of open_clip


def resnet_directory(path):
    model = tiny.open_clip_resnet()
    config = {
        "embed_dim": tiny.EMBED,
        "vision_cfg": {"image_size": 64, "width": 8, "layers": [1, 1, 1, 1]},
        "text_cfg": {"context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "width": tiny.WIDTH,
                     "heads": 2, "layers": 1},
    }  # fmt: skip
    path.mkdir()
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    save_safetensors(path / "open_clip_model.safetensors", dict(model.state_dict()))
    return path, model


def test_a_resnet_is_open_clip_bit_for_bit(tmp_path):
    path, library = resnet_directory(tmp_path / "rn")
    encoder = load_model(path)
    with torch.no_grad():
        assert torch.equal(encoder(images(2, 64)), library.encode_image(images(2, 64)))
        assert torch.equal(text_features(encoder, token_ids()), library.encode_text(token_ids()))
    assert encoder.transforms.pixels.size == 64


def test_a_resnet_keeps_its_statistics_in_training(tmp_path):
    encoder = load_model(resnet_directory(tmp_path / "rn")[0])
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    expected = features(encoder, images(2, 64))
    encoder.train()
    assert encoder.training
    norms = [m for m in encoder.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) > 10
    assert not any(norm.training for norm in norms)
    assert torch.equal(features(encoder, images(2, 64)), expected)
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())
    assert not any(module.training for module in encoder.eval().modules())


def test_a_resnet_goes_through_vectors_and_banks(tmp_path):
    path, library = resnet_directory(tmp_path / "rn")
    encoder = load_model(path)
    tuned = tiny.tuned_vision(encoder.state_dict(), tiny.is_open_clip_vision)
    library.load_state_dict(tuned)
    with torch.no_grad():
        expected = library.encode_image(images(2, 64))
    vector = TaskVector.between(encoder, tuned, name="tuned")
    parameters = {f"visual.{name}" for name, _ in library.visual.named_parameters()}
    assert {b.name for b in encoder.layout.blocks} == {b.name for b in vector.blocks} == parameters
    applied = copy.deepcopy(encoder)
    applied.load_state_dict(vector.apply(encoder))
    assert torch.equal(features(applied, images(2, 64)), expected)
    composition = Composition(encoder, Bank.build(encoder, {"tuned": tuned}), Partition.whole())
    assert torch.equal(features(composition, images(2, 64)), features(encoder, images(2, 64)))
    with torch.no_grad():
        composition.values.fill_(1)
    torch.testing.assert_close(features(composition, images(2, 64)), expected, rtol=1e-4, atol=1e-5)


# an encoder is a module


def test_a_copy_is_its_own(hf):
    encoder = load_model(hf)
    expected = features(encoder, images())
    twin = copy.deepcopy(encoder)
    assert torch.equal(features(twin, images()), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert torch.equal(features(encoder, images()), expected)
    assert not torch.allclose(features(twin, images()), expected)
    assert twin.fingerprint != encoder.fingerprint


def test_an_encoder_crosses_processes(pair):
    for path in pair:
        encoder = load_model(path)
        text_features(encoder, token_ids())
        twin = pickle.loads(pickle.dumps(encoder))
        assert torch.equal(features(twin, images()), features(encoder, images()))
        assert (twin.name, twin.fingerprint) == (encoder.name, encoder.fingerprint)
        assert twin.transforms.pixels == encoder.transforms.pixels
        with torch.no_grad():  # what it runs is what it shows
            for parameter in twin.parameters():
                parameter.mul_(0.5)
        assert twin.fingerprint != encoder.fingerprint
        assert not torch.allclose(features(twin, images()), features(encoder, images()))


def test_an_encoder_changes_its_format(pair):
    for path in pair:
        encoder = load_model(path)
        expected = features(encoder, images())
        words = text_features(encoder, token_ids())
        encoder.double()
        assert {p.dtype for p in encoder.parameters()} == {torch.float64}
        found = features(encoder, images().double())
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(text_features(encoder, token_ids()), words, rtol=1e-5, atol=1e-5)
        encoder.float()
        assert torch.equal(features(encoder, images()), expected)


def test_an_encoder_is_loaded_in_32_bits_from_less(tmp_path, hf):
    from transformers import CLIPModel

    CLIPModel.from_pretrained(hf).half().save_pretrained(tmp_path / "half")
    encoder, half = load_model(tmp_path / "half"), open_weights(tmp_path / "half")
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert all(torch.equal(v, half.read(k).float()) for k, v in encoder.state_dict().items())


def test_an_encoder_does_not_learn_unless_asked(pair):
    encoder = load_model(pair[0])
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())
    assert not any(module.training for module in encoder.modules())


def test_a_composition_over_an_encoder(tmp_path, pair):
    for path, is_vision in zip(pair, (tiny.is_open_clip_vision, tiny.is_hf_vision), strict=True):
        encoder = load_model(path)
        base = {key: value.clone() for key, value in encoder.state_dict().items()}
        tuned = tiny.tuned_vision(base, is_vision)
        expected = features(load_model(path, weights=tuned), images())
        bank = Bank.build(encoder, {"tuned": tuned}, to=tmp_path / path.name)
        assert bank.base.content == encoder.fingerprint
        composition = Composition(encoder, bank)
        assert torch.equal(features(composition, images()), features(encoder, images()))
        with torch.no_grad():
            composition.values.fill_(1)
        torch.testing.assert_close(features(composition, images()), expected, rtol=1e-5, atol=1e-6)
        composition(images()).square().sum().backward()
        assert composition.values.grad.abs().min() > 0
        assert all(torch.equal(value, base[key]) for key, value in encoder.state_dict().items())


def test_banks_of_one_library_compose_over_an_encoder_of_the_other(pair):
    ours, theirs = (load_model(path) for path in pair)
    tuned = tiny.tuned_vision(theirs.state_dict(), tiny.is_hf_vision)
    bank = Bank.build(theirs, {"tuned": tuned})
    composition = Composition(ours, bank)
    with torch.no_grad():
        composition.values.fill_(1)
    expected = features(load_model(pair[1], weights=tuned), images())
    torch.testing.assert_close(features(composition, images()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", ["huggingface", "open_clip", "safetensors"])
def test_what_is_baked_loads_again(tmp_path, pair, to):
    encoder = load_model(pair[1])
    tuned = tiny.tuned_vision(encoder.state_dict(), tiny.is_hf_vision)
    composition = Composition(encoder, Bank.build(encoder, {"tuned": tuned}))
    with torch.no_grad():
        composition.values.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    out = tmp_path / ("out.safetensors" if to == "safetensors" else "out")
    composition.bake().save(out, to=to)
    again = load_model(pair[1], weights=out) if to == "safetensors" else load_model(out)
    assert again.model_config.activation == encoder.model_config.activation
    torch.testing.assert_close(
        features(again, images()), features(composition, images()), rtol=1e-5, atol=1e-5
    )
    words = text_features(again, token_ids()), text_features(encoder, token_ids())
    torch.testing.assert_close(*words, rtol=1e-5, atol=1e-5)


def test_a_model_that_transformers_would_compute_differently_is_not_baked_for_it(tmp_path, pair, refused):
    shutil.copytree(pair[0], tmp_path / "oc")

    def change(config):
        config["model_cfg"]["text_cfg"]["pool_type"] = "last"

    encoder = load_model(edited(tmp_path / "oc", change, "open_clip_config.json"))
    tuned = tiny.tuned_vision(encoder.state_dict(), tiny.is_open_clip_vision)
    baked = Composition(encoder, Bank.build(encoder, {"tuned": tuned})).bake()
    with refused("LAYOUT-CONVERT", 3, "pool_type"):
        baked.save(tmp_path / "out", to="huggingface")


# plain classifiers

LABELS = {0: "Tench", 1: "great_white shark", 2: "hen", 3: "ox", 4: "cock"}
TASK = ("hen", "tench", "Great white shark")
ROWS = [2, 0, 1]


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], id2label=LABELS)
    )


def convnext():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, id2label=LABELS)
    )


def vit(**settings):
    from transformers import ViTConfig, ViTForImageClassification

    common = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                  image_size=32, patch_size=8, id2label=LABELS)  # fmt: skip
    return ViTForImageClassification(ViTConfig(**{**common, **settings}))


def dinov2():
    from transformers import Dinov2Config, Dinov2ForImageClassification

    common = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2)
    return Dinov2ForImageClassification(Dinov2Config(image_size=32, patch_size=8, id2label=LABELS, **common))


def levit():
    from transformers import LevitConfig, LevitForImageClassification

    three = dict(hidden_sizes=[16] * 3, num_attention_heads=[2] * 3, depths=[1] * 3, key_dim=[8] * 3)
    return LevitForImageClassification(LevitConfig(image_size=32, id2label=LABELS, **three))


def swiftformer():
    from transformers import SwiftFormerConfig, SwiftFormerForImageClassification

    return SwiftFormerForImageClassification(
        SwiftFormerConfig(embed_dims=[8, 8, 16, 16], depths=[1] * 4, id2label=LABELS)
    )


def agrees(encoder, library, pixels):
    """Features and the head's rows make the library's own logits, in the task's order."""
    weights = encoder.class_weights(ClassList(TASK))
    with torch.no_grad():
        logits = library(pixels)
    logits = getattr(logits, "logits", logits)
    assert logits.abs().max() > 0.01
    assert weights.names == TASK
    assert not weights.by_angle
    torch.testing.assert_close(weights.logits(features(encoder, pixels)), logits[:, ROWS])
    return True


@pytest.mark.parametrize("make", [resnet, convnext])
def test_a_classifier_of_transformers(tmp_path, refused, make):
    library = shaken(make())
    library.save_pretrained(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    assert agrees(encoder, library, images(2, 32))
    assert list(encoder.state_dict()) == list(library.state_dict())
    assert not encoder.has_text
    with refused("MODEL-CLASSES", 3, "zebra"):
        encoder.class_weights(ClassList(("hen", "zebra")))


def beit():
    from transformers import BeitConfig, BeitForImageClassification

    common = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return BeitForImageClassification(
        BeitConfig(image_size=32, patch_size=8, id2label=LABELS, out_indices=[1, 2], **common)
    )


def deit():
    from transformers import DeiTConfig, DeiTForImageClassification

    common = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    return DeiTForImageClassification(DeiTConfig(image_size=32, patch_size=8, id2label=LABELS, **common))


def swin():
    from transformers import SwinConfig, SwinForImageClassification

    common = dict(embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2)
    return SwinForImageClassification(SwinConfig(image_size=32, patch_size=4, id2label=LABELS, **common))


@pytest.mark.parametrize("make", [beit, deit, swin])
def test_more_classifiers_of_transformers(tmp_path, make):
    library = shaken(make())
    library.save_pretrained(tmp_path / "m")
    assert agrees(load_model(tmp_path / "m"), library, images(2, 32))


@pytest.mark.parametrize("make", [vit, dinov2])
def test_a_classifier_that_transformers_renames(tmp_path, refused, make):
    """Its files have the names of old, its modules new ones; DINOv2 even other tensors."""
    library = shaken(make())
    library.save_pretrained(tmp_path / "m")
    assert set(open_weights(tmp_path / "m").tensors) != set(library.state_dict())
    encoder = load_model(tmp_path / "m")
    assert agrees(encoder, library, images(2, 32))
    assert list(encoder.state_dict()) == list(library.state_dict())


def test_a_renamed_classifier_that_does_not_fit_is_refused(tmp_path, refused):
    shaken(vit()).save_pretrained(tmp_path / "m")
    source = open_weights(tmp_path / "m")
    whole = {key: source.read(key) for key in source.tensors}
    with refused("CKPT-KEYS", 3, "classifier.bias", "more.weight"):
        lost = {key: value for key, value in whole.items() if key != "classifier.bias"}
        load_model(tmp_path / "m", weights=lost | {"more.weight": torch.zeros(2)})
    with refused("CKPT-SHAPE", 3, "classifier.weight", "(5, 32)", "(4, 32)"):
        load_model(tmp_path / "m", weights=whole | {"classifier.weight": torch.zeros(4, 32)})


def test_renamed_classifiers_make_vectors_once_loaded(tmp_path):
    shaken(vit()).save_pretrained(tmp_path / "base")
    tuned = vit()
    tuned.load_state_dict(tiny.tuned(load_model(tmp_path / "base").state_dict()))
    tuned.eval().save_pretrained(tmp_path / "tuned")
    base, other = load_model(tmp_path / "base"), load_model(tmp_path / "tuned")
    composition = Composition(base, Bank.build(base, {"tuned": other}))
    with torch.no_grad():
        composition.values.fill_(1)
    torch.testing.assert_close(
        features(composition, images(2, 32)), features(other, images(2, 32)), rtol=1e-4, atol=1e-5
    )


def test_weights_are_not_rounded_to_the_format_a_configuration_names(tmp_path):
    library = shaken(resnet())
    library.save_pretrained(tmp_path / "m")
    edited(tmp_path / "m", lambda config: config.update(dtype="bfloat16"))
    found = load_model(tmp_path / "m").state_dict()
    assert all(torch.equal(found[key], value) for key, value in library.state_dict().items())


def test_a_head_that_is_more_than_a_linear_layer_is_refused(tmp_path, refused):
    shaken(levit()).save_pretrained(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    assert features(encoder, images(1, 32)).shape == (1, 16)
    with refused("MODEL-CLASSES", 3, "BatchNorm1d"):
        encoder.class_weights(ClassList(TASK))


def test_two_heads_are_refused(tmp_path, refused):
    import timm

    shaken(swiftformer()).save_pretrained(tmp_path / "m")
    with refused("MODEL-NAME", 3, "more than one"):
        load_model(tmp_path / "m")
    distilled = "deit_tiny_distilled_patch16_224"
    with torch.device("meta"):
        state = timm.create_model(distilled, num_classes=5).state_dict()
    with refused("MODEL-NAME", 3, "more than one"):
        load_model(f"timm:{distilled}", {key: torch.zeros(value.shape) for key, value in state.items()})


def test_a_class_that_a_head_has_twice_is_not_guessed(tmp_path, refused):
    """ImageNet's crane is a bird and a machine."""
    model = resnet()
    model.config.id2label = {0: "crane", 1: "crane", 2: "hen", 3: "ox", 4: "cock"}
    model.save_pretrained(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    assert encoder.class_weights(ClassList(("ox", "hen"))).weight.shape == (2, 16)
    with refused("MODEL-CLASSES", 3, "crane"):
        encoder.class_weights(ClassList(("ox", "crane")))


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_classifier_of_timm(tmp_path, refused, name):
    import timm

    library = shaken(timm.create_model(name, num_classes=5))
    save_safetensors(tmp_path / "w.safetensors", dict(library.state_dict()))
    encoder = load_model(f"timm:{name}", tmp_path / "w.safetensors")
    size = encoder.transforms.pixels.size
    assert size == library.default_cfg["input_size"][-1]
    with torch.no_grad():
        logits = library(images(2, size))
    weights = encoder.class_weights(ClassList(("3", "0")))
    torch.testing.assert_close(weights.logits(features(encoder, images(2, size))), logits[:, [3, 0]])
    assert set(Layout.of(encoder.weight_source()).places) <= set(library.state_dict())
    with refused("MODEL-CLASSES", 3, "hen"):
        encoder.class_weights(ClassList(("hen", "0")))
    with refused("MODEL-WEIGHTS", 2):
        load_model(f"timm:{name}")
    with refused("MODEL-NAME", 2, "nosuch"):
        load_model("timm:nosuch", tmp_path / "w.safetensors")


def test_a_directory_as_timm_pushes_it(tmp_path):
    import timm

    library = shaken(timm.create_model("test_resnet", num_classes=5))
    save_safetensors(tmp_path / "model.safetensors", dict(library.state_dict()))
    config = {
        "architecture": "test_resnet",
        "num_classes": 5,
        "label_names": list(LABELS.values()),
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "interpolation": "bilinear", "crop_pct": 0.9,
                           "input_size": [3, 64, 64]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_model(tmp_path)
    assert agrees(encoder, library, images(2, 64))
    pixels = encoder.transforms.pixels
    assert (pixels.size, pixels.mean, pixels.margin) == (64, (0.1, 0.2, 0.3), 0.9)
    assert (pixels.interpolation, pixels.resize) == ("bilinear", "shortest")


def test_a_timm_model_as_transformers_saves_it(tmp_path):
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    config = TimmWrapperConfig(architecture="test_vit", id2label=LABELS)
    library = shaken(TimmWrapperForImageClassification(config))
    library.save_pretrained(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    assert agrees(encoder, library, images(2, encoder.transforms.pixels.size))
    assert set(encoder.state_dict()) == set(open_weights(tmp_path / "m").tensors)


def test_more_labels_than_rows_are_refused_not_read_past_the_end(tmp_path, refused):
    import timm

    save_safetensors(
        tmp_path / "model.safetensors", dict(timm.create_model("test_vit", num_classes=2).state_dict())
    )
    config = {"architecture": "test_vit", "num_classes": 2, "label_names": ["a", "b", "c"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("MODEL-CLASSES", 3, "c"):
        load_model(tmp_path).class_weights(ClassList(("a", "c")))
