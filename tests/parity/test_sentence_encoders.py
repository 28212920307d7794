"""Sentence encoders against transformers with the stated pooling, and against sentence-transformers."""

from __future__ import annotations

import copy

import pytest
import sentences
import torch

from aniso.classes import ClassList
from aniso.compose import Baked, Composition, Partition
from aniso.errors import InputError
from aniso.models import WeightsCache, load_model
from aniso.vectors import Bank, Kind
from aniso.weights import TensorMap

pytest.importorskip("transformers")

CLASSES = ClassList(("animal", "place"), ("a text about {}", "{}"), ("a cat or a bird", "the old town"))


@torch.no_grad()
def features(encoder, texts=sentences.TEXTS):
    return encoder(encoder.family.tokens(texts)[0])


@pytest.mark.parametrize("kind", sentences.KINDS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_features_equal_those_of_transformers_with_the_stated_pooling(tmp_path, kind, pooling):
    normalise = pooling != "max"
    sentences.save(tmp_path / "m", kind, pooling=pooling, normalise=normalise)
    expected = sentences.embedded(tmp_path / "m", sentences.TEXTS, pooling=pooling, normalise=normalise)
    found = features(load_model(tmp_path / "m"))
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing(tmp_path):
    sentences.save(tmp_path / "m", "roberta")
    encoder = load_model(tmp_path / "m")
    together = features(encoder)
    alone = torch.cat([features(encoder, [text]) for text in sentences.TEXTS])
    assert torch.allclose(together, alone, atol=1e-6)


def test_a_plain_transformers_directory_is_pooled_by_the_mean(tmp_path):
    sentences.save(tmp_path / "m", length=None)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        (tmp_path / "m" / name).unlink()
    found = features(load_model(tmp_path / "m"))
    expected = sentences.embedded(tmp_path / "m", sentences.TEXTS, normalise=False, length=40)
    assert torch.allclose(found, expected, atol=1e-5)


def test_texts_beyond_the_limit_are_cut_and_counted(tmp_path):
    sentences.save(tmp_path / "m", length=6)
    encoder = load_model(tmp_path / "m")
    ids, cut = encoder.family.tokens(sentences.TEXTS)
    assert ids.shape[1] == 6 and cut == [0, 1, 3, 5]
    assert encoder.transforms.eval.tokens.tokenise("cat " * 30).cut


@pytest.mark.parametrize("kind", sentences.KINDS)
def test_layout_has_kinds_and_depths_and_separate_queries_keys_and_values(tmp_path, kind):
    sentences.save(tmp_path / "m", kind)
    layout = load_model(tmp_path / "m").layout
    assert not layout.outside
    kinds = {block.kind for block in layout.blocks}
    assert {Kind.ATTENTION, Kind.MLP, Kind.NORM, Kind.EMBEDDING, Kind.BIAS} <= kinds
    attention = [b for b in layout.blocks if b.kind is Kind.ATTENTION and b.depth == 1]
    assert len(attention) == 4 and all(b.shape == (16, 16) for b in attention)
    assert {b.depth for b in layout.blocks} == {None, 0, 1}
    poolers = [b for b in layout.blocks if "pooler" in b.name and b.name.endswith("weight")]
    assert all(b.kind is Kind.POOLER for b in poolers)


# class weights


def tuned(encoder, scale=0.05, seed=1):
    rng = torch.Generator().manual_seed(seed)
    state = encoder.state_dict()
    moved = {k: v + scale * v.std() * torch.randn(v.shape, generator=rng) for k, v in state.items()}
    return TensorMap(moved, "tuned", config=encoder.model_config)


def test_class_weights_are_the_normalised_mean_over_prompts_of_descriptions(tmp_path):
    sentences.save(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    weights = encoder.class_weights(CLASSES, cache=WeightsCache(None))
    for row, description in zip(weights.weight, CLASSES.descriptions, strict=True):
        prompts = [prompt.format(description) for prompt in CLASSES.prompts]
        mean = sentences.embedded(tmp_path / "m", prompts).mean(0)
        assert torch.allclose(row, 40.0 * mean / mean.norm(), atol=1e-4)


def test_class_weights_do_not_change_when_coefficients_or_weights_do(tmp_path):
    sentences.save(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    before = encoder.class_weights(CLASSES, cache=WeightsCache(None)).weight
    fingerprint = encoder.text_fingerprint
    bank = Bank.build(encoder.weight_source(), {"a": tuned(encoder)}, allow_distant=True)
    composition = Composition(encoder, bank, Partition.blocks())
    with torch.no_grad():
        composition.values.fill_(1.0)
    moved = features_of(composition)
    assert not torch.allclose(moved, features_of(load_model(tmp_path / "m")), atol=1e-3)
    copied = copy.deepcopy(encoder)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    for model in (encoder, composition.model, copied):
        assert torch.equal(model.class_weights(CLASSES, cache=WeightsCache(None)).weight, before)
        assert model.text_fingerprint == fingerprint


def test_tuned_weights_are_compared_with_the_base_s_class_weights(tmp_path):
    sentences.save(tmp_path / "m")
    sentences.save(tmp_path / "tuned", seed=3)
    base, other = load_model(tmp_path / "m"), load_model(tmp_path / "m", tmp_path / "tuned")
    assert not torch.allclose(features(base), features(other), atol=1e-3)
    cache = WeightsCache(None)
    assert torch.equal(
        base.class_weights(CLASSES, cache=cache).weight, other.class_weights(CLASSES, cache=cache).weight
    )


# composition


def features_of(model):
    inner = getattr(model, "model", model)
    with torch.no_grad():
        return model(inner.family.tokens(sentences.TEXTS)[0])


@pytest.mark.parametrize("kind", ["bert", "mpnet", "distilbert"])
def test_a_composition_at_zero_is_the_base_bit_for_bit(tmp_path, kind):
    sentences.save(tmp_path / "m", kind)
    encoder = load_model(tmp_path / "m")
    base = features(encoder)
    bank = Bank.build(encoder.weight_source(), {"a": tuned(encoder)}, allow_distant=True)
    composition = Composition(encoder, bank, Partition.blocks())
    assert torch.equal(features_of(composition), base)
    with torch.no_grad():
        composition.values.fill_(1.0)
    whole = load_model(tmp_path / "m", tuned(load_model(tmp_path / "m")))
    assert torch.allclose(features_of(composition), features(whole), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_baked_directory_gives_the_same_embeddings(tmp_path, kind, pooling):
    sentences.save(tmp_path / "m", kind, pooling=pooling)
    encoder = load_model(tmp_path / "m")
    bank = Bank.build(tmp_path / "m", {"a": tuned(encoder)}, allow_distant=True)
    composition = Composition(encoder, bank, Partition.blocks())
    with torch.no_grad():
        composition.values.copy_(
            torch.linspace(-0.5, 1.0, composition.values.numel()).view_as(composition.values)
        )
    Baked(tmp_path / "m", bank, composition.coefficients).save(tmp_path / "baked", to="sentence-transformers")
    expected = features_of(composition)
    assert torch.allclose(features(load_model(tmp_path / "baked")), expected, atol=1e-5)
    outside = sentences.embedded(tmp_path / "baked", sentences.TEXTS, pooling=pooling)
    assert torch.allclose(outside, expected, atol=1e-5)
    Baked(tmp_path / "m", bank, composition.coefficients).save(
        tmp_path / "baked", to="sentence-transformers", overwrite=True
    )


def test_sentence_transformers_loads_what_is_baked(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    sentences.save(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    bank = Bank.build(tmp_path / "m", {"a": tuned(encoder)}, allow_distant=True)
    composition = Composition(encoder, bank, Partition.whole())
    with torch.no_grad():
        composition.values.fill_(0.7)
    Baked(tmp_path / "m", bank, composition.coefficients).save(tmp_path / "baked", to="sentence-transformers")
    found = library.SentenceTransformer(str(tmp_path / "baked"), device="cpu")
    rows = found.encode(sentences.TEXTS, convert_to_tensor=True)
    assert torch.allclose(rows, features_of(composition), atol=1e-5)


def test_baking_to_a_directory_needs_the_base_s_directory(tmp_path):
    sentences.save(tmp_path / "m")
    encoder = load_model(tmp_path / "m")
    bank = Bank.build(encoder.weight_source(), {"a": tuned(encoder)}, allow_distant=True)
    coefficients = Composition(encoder, bank, Partition.whole()).coefficients
    with pytest.raises(InputError) as caught:
        Baked(encoder.state_dict(), bank, coefficients).save(tmp_path / "x", to="sentence-transformers")
    assert caught.value.code == "DIR-CONFIG"
    Baked(encoder, bank, coefficients).save(tmp_path / "x", to="sentence-transformers")  # it knows its own
    assert load_model(tmp_path / "x").transforms.identity() == encoder.transforms.identity()
