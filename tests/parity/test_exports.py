"""Baked models loaded by the libraries they are written for: the same logits, and no warnings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import language
import pictures
import pytest
import tiny
import torch
from adapters import random_adapter
from torch import Tensor, nn

from aniso import Bank, Composition, load_model
from aniso.compose import Baked, Coefficients
from aniso.models import load_language_model
from aniso.models.exported_files import exported_files
from aniso.vectors.convert import Extras, convert
from aniso.weights import open_weights

open_clip = pytest.importorskip("open_clip")
transformers = pytest.importorskip("transformers")

CLOSE = dict(rtol=1e-5, atol=1e-5)
WORDS = ["a cat", "two dogs on a mat", "0.123"]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def half(bank: Bank) -> Coefficients:
    zero = Coefficients.zeros(bank)
    return Coefficients(zero.index, torch.full((len(zero),), 0.5), zero.provenance)


def logits(model: Composition, image: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
    """A composition's inputs for one image, and its logits for texts."""
    encoder: Any = model.model
    inputs = encoder.transforms.eval.finish(encoder.transforms.eval(image, torch.Generator())[None])
    with torch.no_grad():
        rows = nn.functional.normalize(model(inputs), dim=-1)
    words = nn.functional.normalize(encoder.text_features(texts), dim=-1)
    return inputs, encoder.logit_scale * rows @ words.T


@pytest.fixture(scope="module", params=["gelu", "quick_gelu", "mini"])
def composed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Composition:
    """A composition over a CLIP of a directory, whose tokenizer is not that of OpenAI."""
    if request.param == "mini":
        encoder, bank = load_model("mini"), Bank.load("mini").only("mnist", "svhn")
        return Composition.of(encoder, bank, half(bank))
    home = tiny.hf_clip_directory(tmp_path_factory.mktemp("clip") / "base", activation=request.param)
    base = tiny.hf_clip_state(home)
    bank = Bank.build(home, {"a": tiny.tuned_vision(base, tiny.is_hf_vision, 1)})
    return Composition.of(load_model(home), bank, half(bank))


@pytest.fixture(scope="module")
def hugging_face(composed: Composition, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hf") / "model"
    composed.bake().save(out, to="huggingface")
    return out


def test_transformers_loads_a_clip_without_a_warning(
    hugging_face: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = logging.getLogger("transformers")
    heard.addHandler(caplog.handler)
    try:
        transformers.CLIPModel.from_pretrained(hugging_face)
        transformers.AutoProcessor.from_pretrained(hugging_face)
    finally:
        heard.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_processor_and_model_of_transformers_give_the_composition_s_logits(
    composed: Composition, hugging_face: Path
) -> None:
    image = pictures.picture(3).resize((64, 32))  # margins are even: transformers rounds odd ones down
    inputs, expected = logits(composed, image, WORDS)
    model = transformers.CLIPModel.from_pretrained(hugging_face, dtype=torch.float32).eval()
    given = transformers.AutoProcessor.from_pretrained(hugging_face)(
        text=WORDS, images=image, padding=True, return_tensors="pt"
    )
    torch.testing.assert_close(given["pixel_values"], inputs, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits_per_image, expected, **CLOSE)
        exact = model(**{**given, "pixel_values": inputs}).logits_per_image
    torch.testing.assert_close(exact, expected, **CLOSE)


def test_the_zero_shot_pipeline_gives_the_composition_s_probabilities(
    composed: Composition, hugging_face: Path
) -> None:
    image = pictures.picture(4).resize((64, 32))
    _, expected = logits(composed, image, ["a cat", "a dog"])
    run = transformers.pipeline(
        "zero-shot-image-classification", model=str(hugging_face), dtype=torch.float32
    )
    found = {row["label"]: row["score"] for row in run(image, ["cat", "dog"], hypothesis_template="a {}")}
    torch.testing.assert_close(torch.tensor([found["cat"], found["dog"]]), expected.softmax(-1)[0], **CLOSE)


def test_open_clip_loads_a_directory_with_its_tokenizer(composed: Composition, tmp_path: Path) -> None:
    composed.bake().save(tmp_path / "oc", to="open_clip")
    model, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'oc'}")
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'oc'}")
    encoder: Any = composed.model
    size = encoder.transforms.pixels.size
    image = pictures.picture(5).resize((size, size))
    inputs, expected = logits(composed, image, WORDS)
    torch.testing.assert_close(prepare(image)[None], inputs, **CLOSE)
    with torch.no_grad():
        rows = nn.functional.normalize(model.eval().encode_image(inputs), dim=-1)
        words = nn.functional.normalize(model.encode_text(tokens(WORDS)), dim=-1)
        found = model.logit_scale.exp() * rows @ words.T
    torch.testing.assert_close(found, expected, **CLOSE)
    again = load_model(tmp_path / "oc")
    torch.testing.assert_close(again.text_features(WORDS), encoder.text_features(WORDS), **CLOSE)


def test_an_open_clip_directory_becomes_one_of_transformers_again(
    composed: Composition, hugging_face: Path, tmp_path: Path
) -> None:
    composed.bake().save(tmp_path / "oc", to="open_clip")
    source = open_weights(tmp_path / "oc")
    beside = exported_files(source, "huggingface")
    convert(source, tmp_path / "hf", to="huggingface", extras=Extras({}, beside.files, beside.config))
    ours, theirs = load_model(tmp_path / "hf"), load_model(hugging_face)
    assert ours.transforms.pixels == theirs.transforms.pixels
    torch.testing.assert_close(ours.text_features(WORDS), theirs.text_features(WORDS), **CLOSE)


def standard_clip() -> nn.Module:
    """A small CLIP with the vocabulary of OpenAI's."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(image_size=16, patch_size=8, width=32, layers=1, head_width=16)
    text = CLIPTextCfg(context_length=77, vocab_size=49408, width=8, heads=2, layers=1)
    return CLIP(24, vision, text).eval()


def test_weights_without_a_directory_get_the_tokenizer_of_open_clip(tmp_path: Path) -> None:
    base = state(standard_clip())
    bank = Bank.build(base, {"a": tiny.tuned_vision(base, tiny.is_open_clip_vision, 1)})
    baked = Baked(base, bank, half(bank))
    notes = baked.save(tmp_path / "hf", to="huggingface", activation="gelu")
    assert not any("tokenizer" in note for note in notes)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "hf")
    texts = ["A photo of a cat, 12 o'clock.", "naïve café", "it's"]
    ids = processor(text=texts, padding="max_length", return_tensors="pt")["input_ids"]
    theirs = open_clip.get_tokenizer("ViT-B-32")(texts)
    for ours, other in zip(ids.tolist(), theirs.tolist(), strict=True):
        end = ours.index(49407)
        assert ours[: end + 1] == other[: end + 1]
    baked.save(tmp_path / "oc", to="open_clip", activation="gelu")
    assert not (tmp_path / "oc" / "tokenizer.json").exists()  # open_clip has it
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path / 'oc'}")(texts).equal(theirs)


def test_a_missing_tokenizer_is_noted(tmp_path: Path) -> None:
    base = state(tiny.open_clip_vit())
    bank = Bank.build(base, {"a": tiny.tuned_vision(base, tiny.is_open_clip_vision, 1)})
    for to in ("huggingface", "open_clip"):
        notes = Baked(base, bank, half(bank)).save(tmp_path / to, to=to, activation="gelu")
        assert any("no tokenizer" in note for note in notes)


def test_an_image_classifier_runs_in_its_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
        patch_size=8, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    )  # fmt: skip
    home = tmp_path / "vit"
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(home)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(home)
    encoder = load_model(home)
    bank = Bank.build(encoder, {"a": tiny.tuned(state(encoder))})
    composition = Composition.of(encoder, bank, half(bank))
    composition.bake().save(tmp_path / "out", to="huggingface")
    image = pictures.picture(1)
    inputs = encoder.transforms.eval.finish(encoder.transforms.eval(image, torch.Generator())[None])
    with torch.no_grad(), composition.composed() as whole:
        expected = whole.classifier(composition(inputs))
        loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(loaded(inputs).logits, expected, **CLOSE)
    rows = transformers.pipeline("image-classification", model=str(tmp_path / "out"))(image)
    assert {row["label"] for row in rows} == {"cat", "dog"}


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_a_language_model_becomes_a_directory_with_its_tokenizer(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    home = tmp_path / "base"
    network = language.save(family, home)
    (home / "generation_config.json").write_text(json.dumps({"max_length": 33}))
    targets = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "t5": ["q", "v"]}[family]
    for seed in (1, 2):
        fresh = type(network).from_pretrained(home)
        random_adapter(
            fresh, tmp_path / f"a{seed}", seed, r=2, target_modules=targets, fan_in_fan_out=family == "gpt2"
        )
    bank = Bank.build(home, {f"a{seed}": tmp_path / f"a{seed}" for seed in (1, 2)})
    model = load_language_model(home)
    composition = Composition.of(model, bank, half(bank))
    composition.bake().save(tmp_path / "one", to="huggingface")
    Baked(home, bank, half(bank)).save(tmp_path / "two", to="huggingface")
    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    rows = model.rows("the cat", " sat on a mat", 32)[0]
    for out in (tmp_path / "one", tmp_path / "two"):
        tokens = transformers.AutoTokenizer.from_pretrained(out)
        loaded = kind.from_pretrained(out).eval()
        given = tokens("the cat sat", return_tensors="pt", return_token_type_ids=False)
        if family == "t5":
            given["decoder_input_ids"] = torch.arange(3)[None]
        with torch.no_grad(), composition.composed() as whole:
            expected = whole._network(**given).logits
            base = network(**given).logits
            torch.testing.assert_close(loaded(**given).logits, expected, **CLOSE)
        assert float((expected - base).abs().max()) > 1e-3
        assert loaded.generation_config.max_length == 33
        again = load_language_model(out)
        assert again.rows("the cat", " sat on a mat", 32)[0][0][0].equal(rows[0][0])


def test_fields_that_ask_for_code_are_not_copied(tmp_path: Path) -> None:
    home = tmp_path / "base"
    language.save("gpt2", home)
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    found = exported_files(open_weights(home), "huggingface")
    assert "auto_map" not in json.loads(found.files["config.json"])
    assert "tokenizer.json" in found.files
