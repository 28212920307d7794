"""Dual encoders: two towers of other libraries in one directory, and what does not fit together."""

from __future__ import annotations

import json

import pytest
import sentences
import torch
from towers import timm_directory

from aniso.compose import Composition, Partition
from aniso.errors import InputError, UsageError
from aniso.models import load_model, mini_directory
from aniso.models.dual_encoder import dual_encoder_files, join_towers, save_directory, without_projection
from aniso.models.image_tower import load_tower
from aniso.vectors import Bank, Kind

pytest.importorskip("timm")
NAMES = ("test_efficientnet", "test_vit", "test_resnet")


@pytest.fixture
def towers(tmp_path):
    """The directories of a convolutional image tower and of a sentence encoder, and the first's network."""
    network = timm_directory(tmp_path / "image")
    sentences.save(tmp_path / "text")
    return tmp_path / "image", tmp_path / "text", network


def made(image, text, out, size=64):
    """A dual encoder with a random projection, written and loaded again."""
    tower = load_tower(image)
    encoder = join_towers("dual", tower, load_model(text), size=size)
    torch.manual_seed(1)
    with torch.no_grad():
        for name in ("visual_projection.weight", "visual_projection.bias"):
            encoder.state_dict()[name].normal_()
    files = dual_encoder_files(tower.config, encoder.transforms.pixels, text)
    save_directory(out, encoder.state_dict(), files)
    return encoder, load_model(out)


@pytest.mark.parametrize("name", NAMES)
def test_features_of_the_tower_are_those_of_timm(tmp_path, name):
    network = timm_directory(tmp_path / "image", name)
    sentences.save(tmp_path / "text")
    size = 96 if name != "test_vit" else 160
    _, loaded = made(tmp_path / "image", tmp_path / "text", tmp_path / "out", size)
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        wanted = network.forward_head(network.forward_features(images), pre_logits=True)
        torch.testing.assert_close(without_projection(loaded)(images), wanted, rtol=1e-5, atol=1e-5)
        state = loaded.state_dict()
        projected = wanted @ state["visual_projection.weight"].T + state["visual_projection.bias"]
        torch.testing.assert_close(loaded(images), projected, rtol=1e-4, atol=1e-4)


def test_a_directory_gives_the_same_model_as_was_written(towers, tmp_path):
    image, text, _ = towers
    encoder, loaded = made(image, text, tmp_path / "out")
    assert loaded.fingerprint == encoder.fingerprint
    assert loaded.text_fingerprint == encoder.text_fingerprint
    assert loaded.transforms.identity() == encoder.transforms.identity()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder(images))
        assert torch.equal(loaded.text_features(["rain"]), encoder.text_features(["rain"]))


def test_text_features_are_those_of_the_text_tower(towers, tmp_path):
    image, text, _ = towers
    _, loaded = made(image, text, tmp_path / "out")
    texts = sentences.TEXTS
    torch.testing.assert_close(loaded.text_features(texts), load_model(text).text_features(texts))


def test_a_clip_can_be_the_text_tower(towers, tmp_path):
    image, _, _ = towers
    _, loaded = made(image, mini_directory(), tmp_path / "out")
    torch.testing.assert_close(loaded.text_features(["a cat"]), load_model("mini").text_features(["a cat"]))


def test_a_transformers_classifier_can_be_the_image_tower(towers, tmp_path):
    import transformers

    _, text, _ = towers
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    network = transformers.ResNetForImageClassification(config).eval()
    network.save_pretrained(tmp_path / "resnet")
    _, loaded = made(tmp_path / "resnet", text, tmp_path / "out")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = network.resnet(images).pooler_output.flatten(1)
        torch.testing.assert_close(without_projection(loaded)(images), wanted, rtol=1e-5, atol=1e-5)


def test_layout_has_kinds_and_depth_and_leaves_out_text_scale_and_statistics(towers, tmp_path):
    image, text, _ = towers
    encoder, _ = made(image, text, tmp_path / "out")
    blocks = {block.name: block for block in encoder.layout.blocks}
    assert all(name.startswith("visual") for name in blocks)
    kinds = {block.kind for block in blocks.values()}
    assert {Kind.CONV, Kind.NORM, Kind.PROJECTION, Kind.BIAS} <= kinds
    assert {block.depth for block in blocks.values()} >= {0, 1, 2, None}
    outside = {block.kind for block in encoder.layout.outside}
    assert outside == {Kind.STATISTIC, Kind.BUFFER, Kind.LOGIT_SCALE}


def test_compositions_at_zero_are_the_base_and_at_one_the_tuned_model(towers, tmp_path):
    image, text, _ = towers
    _, base = made(image, text, tmp_path / "out")
    tuned = {key: value.clone() for key, value in base.state_dict().items()}
    torch.manual_seed(2)
    for key, value in tuned.items():
        if value.is_floating_point() and "running" not in key and key != "logit_scale":
            value.add_(torch.randn_like(value) * 0.01)
    bank = Bank.build(base, {"tuned": tuned})
    composition = Composition(base, bank, Partition.blocks())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(composition(images), base(images))
        composition.values.fill_(1.0)
        wanted = load_model(tmp_path / "out", weights=tuned)(images)
        torch.testing.assert_close(composition(images), wanted, rtol=1e-4, atol=1e-4)


def test_batch_norms_stay_in_evaluation_mode(towers, tmp_path):
    image, text, _ = towers
    _, loaded = made(image, text, tmp_path / "out")
    before = {key: value.clone() for key, value in loaded.state_dict().items() if "running" in key}
    loaded.train()
    with torch.no_grad():
        loaded(torch.randn(4, 3, 64, 64))
    assert before
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in before.items())


def test_towers_of_different_widths_need_a_projection(towers):
    image, text, _ = towers
    with pytest.raises(UsageError, match="different widths") as caught:
        join_towers("dual", load_tower(image), load_model(text), size=64, project=False)
    assert caught.value.code == "MODEL-TOWER"
    assert "of images" in str(caught.value.facts["found"])


def test_a_tower_without_pooling_is_refused(tmp_path):
    timm_directory(tmp_path / "image", "test_resnet", global_pool="")
    with pytest.raises(InputError, match="no pooling") as caught:
        load_tower(tmp_path / "image")
    assert caught.value.code == "MODEL-TOWER"


def test_a_model_without_text_cannot_be_the_text_tower(towers):
    image, _, _ = towers
    with pytest.raises(UsageError, match="no text tower"):
        join_towers("dual", load_tower(image), load_model(image), size=64)


def test_a_path_without_configuration_is_no_tower(tmp_path):
    with pytest.raises(InputError, match="is no image tower"):
        load_tower(tmp_path)


@pytest.mark.parametrize("schema", [None, 2, "1"])
def test_another_schema_is_refused(towers, tmp_path, schema):
    image, text, _ = towers
    made(image, text, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps({**config, "schema": schema}))
    with pytest.raises(InputError, match="another version"):
        load_model(tmp_path / "out")


def test_a_projection_of_another_tower_is_refused(towers, tmp_path):
    image, text, _ = towers
    encoder, _ = made(image, text, tmp_path / "out")
    state = {**encoder.state_dict(), "visual_projection.weight": torch.zeros(16, 5)}
    files = dual_encoder_files(load_tower(image).config, encoder.transforms.pixels, text)
    save_directory(tmp_path / "wrong", state, files)
    with pytest.raises(InputError, match="does not fit its tower") as caught:
        load_model(tmp_path / "wrong")
    assert caught.value.facts["key"] == "visual_projection.weight"


def test_a_baked_directory_is_the_composition(towers, tmp_path):
    from aniso.compose import Baked

    image, text, _ = towers
    _, base = made(image, text, tmp_path / "out")
    tuned = {key: value.clone() for key, value in base.state_dict().items()}
    tuned["visual_projection.weight"].mul_(1.01)
    bank = Bank.build(tmp_path / "out", {"tuned": tuned})
    composition = Composition(base, bank, Partition.blocks())
    with torch.no_grad():
        composition.values.fill_(0.5)
    baked = Baked(tmp_path / "out", bank, composition.coefficients)
    baked.save(tmp_path / "baked", to="dual-encoder")
    loaded = load_model(tmp_path / "baked")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), composition(images), rtol=1e-5, atol=1e-5)
    assert loaded.text_fingerprint == base.text_fingerprint
    assert (tmp_path / "baked/README.md").is_file()


def test_many_texts_are_taken_by_length_and_returned_in_order(tmp_path):
    sentences.save(tmp_path / "text")
    encoder = load_model(tmp_path / "text")
    texts = [" ".join(sentences.WORDS[i % 7 : i % 7 + 1 + i % 9]) for i in range(300)]
    texts.insert(7, "rain " * 40)
    alone = torch.cat([encoder.text_features([text]) for text in texts])
    torch.testing.assert_close(encoder.text_features(texts), alone, rtol=1e-5, atol=1e-6)
    assert encoder._texts(texts, None)[1] == [7]


def test_the_image_tower_of_a_dual_encoder_can_be_joined_again(towers, tmp_path):
    image, text, _ = towers
    encoder, _ = made(image, text, tmp_path / "out")
    tower = load_tower(tmp_path / "out")
    again = join_towers("again", tower, load_model(text), size=64)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(without_projection(again)(images), without_projection(encoder)(images))
