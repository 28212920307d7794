"""Configurations and tokenizers of strangers: only plain settings of known architectures count."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import language
import pytest
import tiny
import torch

from aniso.classes import ClassList
from aniso.models import load_language_model, load_model, loading
from aniso.models.architectures import CLIP, IMAGE_CLASSIFIER, LANGUAGE_MODEL, SENTENCE_ENCODER
from aniso.models.settings import Limits, Settings, sub_configurations
from aniso.models.tokenizer_file import TokenizerError, TokenizerFile
from aniso.weights import open_weights, save_safetensors
from aniso.weights.jsontext import JsonError, parse_object

pytest.importorskip("open_clip")
transformers = pytest.importorskip("transformers")

WIDE = Limits(tensors=10**6, largest=10**9, numbers=10**15)


def vit(path: Path) -> Path:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
    model.save_pretrained(path)
    return path


def open_clip_directory(path: Path, **text: Any) -> Path:
    path.mkdir()
    sizes = {"width": tiny.WIDTH, "layers": tiny.LAYERS}
    vision = {**sizes, "image_size": 16, "patch_size": 8, "head_width": 16}
    text |= {**sizes, "context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "heads": 2}
    config = {"embed_dim": tiny.EMBED, "vision_cfg": vision, "text_cfg": text}
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    save_safetensors(path / "open_clip_model.safetensors", dict(tiny.open_clip_vit().state_dict()))
    return path


def edit(path: Path, file: str = "config.json", **settings: Any) -> Path:
    said = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps(said | settings))
    return path


# the table of architectures


def listed() -> list[str]:
    return sorted(
        {
            kind
            for loader in (CLIP, IMAGE_CLASSIFIER, LANGUAGE_MODEL, SENTENCE_ENCODER)
            for kind in loader.model_types
        }
    )


@pytest.mark.parametrize("kind", listed())
def test_a_listed_architecture_has_plain_settings_alone(kind: str) -> None:
    """Its configuration holds no model by name, and passes with nothing changed."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    configuration = transformers.CONFIG_MAPPING[kind]
    parts = dict(configuration.sub_configs or {})
    assert set(parts) <= set(sub_configurations(configuration)), "a sub-configuration of any class"
    usual = json.loads(json.dumps(configuration().to_dict()))
    assert not [key for key in usual if "backbone" in key]
    settings = Settings("config.json", WIDE).of(usual, configuration)
    assert json.loads(json.dumps(configuration(**settings).to_dict())) == usual


def test_wrappers_of_other_models_are_not_listed() -> None:
    wrappers = {"timm_wrapper", "timm_backbone", "encoder-decoder", "vision-encoder-decoder", "rag", "mamba"}
    assert not wrappers & set(listed())


@pytest.mark.parametrize("kind", ["timm_backbone", "dpt", "encoder-decoder", "evil", None, ["vit"], {"a": 1}])
def test_an_architecture_that_is_not_listed_is_refused_with_a_way_on(
    tmp_path: Path, refused: Any, kind: Any
) -> None:
    path = edit(vit(tmp_path / "m"), model_type=kind)
    with refused("MODEL-NAME", 3, "supported", "convnext", "timm:NAME", "open an issue"):
        load_model(path)
    with refused("MODEL-NAME", 3, "supported", "gpt2", "open an issue"):
        load_language_model(path)


# published configurations, with what only they have

PUBLISHED = {
    "clip": {
        "_commit_hash": "f4881ba4", "architectures": ["CLIPModel"], "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592, "projection_dim": 512, "text_config_dict": None,
        "text_config": {
            "_name_or_path": "", "add_cross_attention": False, "architectures": None,
            "bad_words_ids": None, "bos_token_id": 0, "chunk_size_feed_forward": 0,
            "finetuning_task": None, "hidden_act": "quick_gelu",
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
            "layer_norm_eps": 1e-05, "model_type": "clip_text_model", "num_beams": 1, "prefix": None,
            "pruned_heads": {}, "task_specific_params": None, "torch_dtype": None, "torchscript": False,
            "transformers_version": "4.16.0.dev0", "use_bfloat16": False, "vocab_size": 49408,
        },
        "torch_dtype": "float32", "transformers_version": None,
    },
    "vit": {
        "_name_or_path": "google/vit-base-patch16-224-in21k", "architectures": ["ViTForImageClassification"],
        "hidden_act": "gelu", "id2label": {"0": "tench, Tinca tinca", "1": "a/b: \\u00e9.pth"},
        "label2id": {"tench, Tinca tinca": "0", "a/b: \\u00e9.pth": "1"}, "qkv_bias": True,
        "problem_type": "single_label_classification", "transformers_version": "4.13.0.dev0",
    },
    "gpt2": {
        "activation_function": "gelu_new", "n_ctx": 1024, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_activation": None,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "t5": {
        "feed_forward_proj": "gated-gelu", "tokenizer_class": "T5Tokenizer", "output_past": True,
        "task_specific_params": {"summarization": {"prefix": "summarize: ", "num_beams": 4}},
    },
    "opt": {"prefix": "</s>", "activation_function": "relu", "_remove_final_layer_norm": True},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 10000, "use_parallel_residual": True},
    "llama": {
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 3580165449.0, "max_position_embeddings": 131072, "pretraining_tp": 1,
        "quantization_config": {"quant_method": "gptq", "dataset": "wikitext/x"},
    },
    "swin": {"path_norm": True, "drop_path_rate": 0.1, "use_checkpoint": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_settings_of_published_configurations_are_followed(kind: str) -> None:
    configuration = transformers.CONFIG_MAPPING[kind]
    settings = Settings("config.json", WIDE).of(PUBLISHED[kind], configuration)
    passing = ("dtype", "torch_dtype", "quantization_config", "_name_or_path", "transformers_version")
    known = {key: value for key, value in PUBLISHED[kind].items() if key not in passing}
    ours, theirs = configuration(**settings), configuration(**known)
    for key in configuration().to_dict():
        if not isinstance(getattr(ours, key, None), transformers.PretrainedConfig):
            assert getattr(ours, key, None) == getattr(theirs, key, None), key
    if kind == "gpt_neox":
        assert ours.rope_parameters["partial_rotary_factor"] == 0.5
    if kind == "opt":
        assert ours._remove_final_layer_norm is True


SMALL = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=300,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LANGUAGE_MODELS = {
    "opt": dict(SMALL, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": dict(SMALL, rotary_pct=0.5),
    "mistral": dict(SMALL, num_key_value_heads=2),
    "qwen2": dict(SMALL, num_key_value_heads=2),
    "phi": SMALL,
    "gemma": dict(SMALL, num_key_value_heads=2, head_dim=8),
    "bloom": dict(SMALL, n_head=4),
    "bart": dict(SMALL, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                 decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48),
}  # fmt: skip


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_language_models_of_many_families_load_as_transformers_has_them(tmp_path: Path, kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind](**LANGUAGE_MODELS[kind])
    seq2seq = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    library = auto.from_config(config).eval()
    library.save_pretrained(tmp_path)
    language.tokenizer("gpt2").save_pretrained(tmp_path)
    ours = load_language_model(tmp_path)
    assert type(ours._network) is type(library)
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in library.state_dict().items())
    ids = torch.tensor([[5, 6, 7, 8]])
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if seq2seq else {})}
    with torch.no_grad():
        assert torch.equal(ours._network(**given).logits, library(**given).logits)


# keys and values

REFUSED = {
    "checkpoint_path": "/etc/passwd",
    "pretrained_cfg": {"file": "x"},
    "backbone": "owner/name",
    "use_pretrained_backbone": True,
    "weights_url": "https://example.org",
    "vocab_file": "x",
    "some_module": "evil",
    "hidden_act": "evil.Evil",
    "problem_type": "../evil",
    "image_size": ["C:\\evil"],
    "patch_size": {"a": 1},
    "architectures": ["x" * 65],
}


def with_setting(path: Path, settings: dict[str, Any]) -> Path:
    config = {k: v for k, v in json.loads((path / "config.json").read_text()).items() if k not in settings}
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_that_is_no_plain_setting_is_refused_by_name(tmp_path: Path, refused: Any, key: str) -> None:
    with refused("DIR-CONFIG", 4, key, "config.json"):
        load_model(with_setting(vit(tmp_path / "m"), {key: REFUSED[key]}))


@pytest.mark.parametrize("key", ["checkpoint_path", "pretrained_cfg", "backbone", "use_pretrained_backbone"])
@pytest.mark.parametrize("where", ["other", "attention", "rope_parameters", "id2label_more"])
def test_a_name_of_something_to_load_is_refused_at_any_depth(
    tmp_path: Path, refused: Any, key: str, where: str
) -> None:
    inner = {"deep": {key: REFUSED[key]}}
    for settings in ({where: inner}, {where: [1, [inner]]}):
        with refused("DIR-CONFIG", 4, key, "config.json"):
            load_model(with_setting(vit(tmp_path / "m"), settings))
        shutil.rmtree(tmp_path / "m")


@pytest.mark.parametrize("key", ["num_hidden_layers", "layer_norm_eps"])
def test_numbers_without_an_end_are_refused(tmp_path: Path, refused: Any, key: str) -> None:
    path = with_setting(vit(tmp_path / "m"), {key: "END"})
    (path / "config.json").write_text((path / "config.json").read_text().replace('"END"', "1e999"))
    with refused("DIR-CONFIG", 3, "config.json"):
        load_model(path)


def test_unknown_text_is_not_passed_on(tmp_path: Path) -> None:
    settings = Settings("config.json", WIDE).of(
        {"nobody": "../evil", "knows": {"a": "b"}, "number": 3, "flag": True, "many": [1, 2.5], "_x": "y"},
        transformers.ViTConfig,
    )
    assert settings == {"number": 3, "flag": True, "many": [1, 2.5]}


@pytest.mark.parametrize(
    "said",
    [{"crop_size": 10**6}, {"size": 10**9}, {"image_std": [0, 1, 1]}, {"size": 256, "crop_pct": 1e-9}],
)  # fmt: skip
def test_images_of_absurd_size_are_refused(tmp_path: Path, refused: Any, said: dict[str, Any]) -> None:
    path = vit(tmp_path / "m")
    said = {"do_center_crop": "crop_size" in said, **said}
    (path / "preprocessor_config.json").write_text(json.dumps(said))
    with refused("DIR-CONFIG", 3, "8192 pixels"):
        load_model(path)


def test_a_hub_id_fetches_its_own_repository_alone(tmp_path: Path, monkeypatch: Any, refused: Any) -> None:
    import huggingface_hub

    asked = []
    path = open_clip_directory(tmp_path / "m", hf_tokenizer_name="other/tokenizer")

    def snapshot(repository: str, **_: Any) -> str:
        asked.append(repository)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    encoder = load_model("owner/name")
    with refused("MODEL-TOKENIZER", 3, "hf download other/tokenizer"):
        encoder.class_weights(ClassList(("cat", "dog")))
    tiny.tokenizer(tiny.CONTEXT).save_pretrained(path)
    assert load_model("owner/name").class_weights(ClassList(("cat", "dog"))).weight.shape == (2, tiny.EMBED)
    assert set(asked) == {"owner/name"}


def test_loading_leaves_the_random_numbers_of_a_language_model_s_user_alone(tmp_path: Path) -> None:
    language.save("gpt2", tmp_path / "m")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_language_model(tmp_path / "m")
    assert torch.equal(torch.rand(3), expected)


# tokenizers

TEXTS = ["", "a cat", "The  Cat, sat on\tthe mat.", "é ü 漢字 🙂", "</s> x <s>", "don't", "  two"]


def tokenizers_of_the_library() -> dict[str, Any]:
    """Small ones of classes that build their own pipeline."""
    from transformers import CLIPTokenizer, GPT2Tokenizer, T5Tokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz.,'ĠĊTC", "Ã", "©"]
    bytes_ = {letter: i for i, letter in enumerate([*letters, "at", "Ġc", "<|endoftext|>"])}
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((c, -2.0) for c in "▁abcdehimnorstuTC.,")]
    return {
        "gpt2": GPT2Tokenizer(vocab=bytes_, merges=[("a", "t"), ("Ġ", "c")]),
        "t5": T5Tokenizer(vocab=pieces, extra_ids=0),
        "clip": CLIPTokenizer(
            vocab={**{c: i for i, c in enumerate(letters)}, "<|startoftext|>": 90, "<|endoftext|>": 91},
            merges=[],
        ),
        "language": language.tokenizer("llama"),
    }


@pytest.mark.parametrize("kind", ["gpt2", "t5", "clip", "language"])
def test_a_tokenizer_reads_texts_as_transformers_does(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    made = tokenizers_of_the_library()[kind]
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind if kind != "language" else "llama"}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), TokenizerFile.read(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("kind", ["gpt2", "clip"])
def test_special_tokens_that_no_file_names_are_those_of_the_class(tmp_path: Path, kind: str) -> None:
    """As in GPT-2's own repository, whose tokenizer_config.json has a length and nothing else."""
    from transformers import AutoTokenizer

    tokenizers_of_the_library()[kind].save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), TokenizerFile.read(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert ours.bos_token_id == theirs.bos_token_id


def test_a_clip_s_vocabulary_and_merges_are_read_as_its_tokenizer_is(tmp_path: Path) -> None:
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    tokens = [
        *letters,
        *(f"{c}</w>" for c in letters),
        "at</w>",
        "cat</w>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na t</w>\nc at</w>\n")
    library = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    ours = TokenizerFile.read_clip(tmp_path)
    texts = ["a Cat", "cat cat sat", "x"]
    ids, cut = ours.batch(texts, 5)
    theirs = library(texts, padding="longest", truncation=True, max_length=5, return_tensors="pt")
    assert torch.equal(ids, theirs["input_ids"])
    assert cut == [i for i, text in enumerate(texts) if len(library(text)["input_ids"]) > 5] == [1]


def changed(path: Path, **changes: Any) -> Path:
    language.tokenizer("gpt2").save_pretrained(path)
    return edit(path, "tokenizer.json", **changes)


def test_a_length_to_pad_to_is_not_followed(tmp_path: Path) -> None:
    padding = dict(strategy={"Fixed": 10**12}, direction="Right", pad_to_multiple_of=None, pad_id=0,
                   pad_type_id=0, pad_token="<pad>")  # fmt: skip
    assert len(TokenizerFile.read(changed(tmp_path, padding=padding)).encode("a cat")) < 10


def test_ids_beyond_the_model_are_refused(tmp_path: Path, refused: Any) -> None:
    language.save("gpt2", tmp_path)
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    said["model"]["vocab"][last] = 1 << 30
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with refused("MODEL-TOKENIZER", 3, str(1 << 30)):
        load_language_model(tmp_path).tokens.whole("a cat")


@pytest.mark.parametrize(
    "part", ["model", "normalizer", "pre_tokenizer", "post_processor", "added_tokens", "version"]
)
@pytest.mark.parametrize(
    "value", [None, 7, "x", [], {}, {"type": "Evil"}, [{"id": -1}], {"type": "BPE", "vocab": 3}]
)
def test_any_damage_to_a_tokenizer_is_one_error_or_none(tmp_path: Path, part: str, value: Any) -> None:
    changed(tmp_path, **{part: value})
    try:
        TokenizerFile.read(tmp_path, 300).encode("a cat")
    except TokenizerError as e:
        assert str(e)


def replaced(text: str, content: str, pattern: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {pattern: text}, "content": content}


def in_a_row(kind: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def templated(length: int, ids: int = 1) -> dict[str, Any]:
    text = [{"Sequence": {"id": "A", "type_id": 0}}] * length
    end = [{"SpecialToken": {"id": "<e>", "type_id": 0}}]
    special = {"<e>": {"id": "<e>", "ids": [0] * ids, "tokens": ["<e>"] * ids}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": text + end, "pair": pair, "special_tokens": special}


def charsmap(text: str) -> dict[str, Any]:
    """A table of SentencePiece's with an index of one entry, and one text."""
    table = (4).to_bytes(4, "little") + bytes(4) + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING: dict[str, dict[str, Any]] = {
    "replaced": {"normalizer": in_a_row("normalizers", [replaced("a", "aaaa")] * 5)},
    "nested": {
        "normalizer": in_a_row("normalizers", [in_a_row("normalizers", [replaced("a", "aa")] * 3)] * 3)
    },
    "start": {"normalizer": in_a_row("normalizers", [replaced("^", "a" * 7, "Regex")] * 3)},
    "nowhere": {"normalizer": replaced("", "a" * 300)},
    "regular": {"normalizer": replaced("(?=a)", "a" * 300, "Regex")},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "a" * 300}},
    "mapped": {"normalizer": charsmap("a" * 300)},
    "bytes": {"normalizer": in_a_row("normalizers", [{"type": "ByteLevel"}] * 9)},
    "pieces": {"pre_tokenizer": in_a_row("pretokenizers", [BYTES] * 9)},
    "both": {
        "normalizer": replaced("a", "a" * 20),
        "pre_tokenizer": in_a_row("pretokenizers", [BYTES] * 4),
    },
    "template": {"post_processor": templated(64)},
    "templates": {"post_processor": in_a_row("processors", [templated(2)] * 4)},
    "ids": {"post_processor": templated(1, ids=64)},
    "decoder": {"decoder": in_a_row("decoders", [replaced("a", "aaaa")] * 5)},
    "untyped": {"normalizer": {"pattern": {"String": "a"}, "content": "a" * 300}},
    "added": {
        "normalizer": replaced("a", "a" * 200),
        "added_tokens": [
            dict(id=300, content="a" * (1 << 19), single_word=False, lstrip=False, rstrip=False,
                 normalized=False, special=False)
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_that_makes_texts_far_longer_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: Any, name: str
) -> None:
    import tokenizers

    changed(tmp_path, **GROWING[name])

    class NotBuilt:
        from_str = staticmethod(lambda text: pytest.fail("built"))

    monkeypatch.setattr(tokenizers, "Tokenizer", NotBuilt)
    with pytest.raises(TokenizerError, match=r"times as long|has no type|too long"):
        TokenizerFile.read(tmp_path)


def test_a_tokenizer_that_makes_texts_far_longer_is_a_plain_error(tmp_path: Path, refused: Any) -> None:
    language.save("gpt2", tmp_path)
    edit(tmp_path, "tokenizer.json", **GROWING["replaced"])
    with refused("MODEL-TOKENIZER", 3, "2,048 times as long"):
        load_language_model(tmp_path).tokens.whole("a cat")


def test_long_special_tokens_in_the_settings_of_a_tokenizer_are_refused(tmp_path: Path) -> None:
    edit(changed(tmp_path), "tokenizer_config.json", additional_special_tokens=["a" * (1 << 19)])
    with pytest.raises(TokenizerError, match="262,144 letters"):
        TokenizerFile.read(tmp_path)


def test_the_steps_of_published_tokenizers_are_within_the_bounds() -> None:
    """ALBERT's and XLM-RoBERTa's grow most: their table has 18 letters for one, an Arabic ligature."""
    from aniso.models.tokenizer_growth import require_bounded_growth

    quotes = [replaced("``", '"'), replaced("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}]
    albert = [*quotes, {"type": "Lowercase"}, charsmap("a" * 18), replaced(" {2,}", " ", "Regex")]
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    llama = [{"type": "Prepend", "prepend": "▁"}, replaced(" ", "▁")]
    decoders = [replaced("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # fmt: skip
    require_bounded_growth(
        {
            "normalizer": in_a_row("normalizers", albert),
            "pre_tokenizer": in_a_row("pretokenizers", [{"type": "WhitespaceSplit"}, mark]),
            "post_processor": templated(1, ids=2),
            "decoder": None,
        }
    )
    require_bounded_growth(
        {
            "normalizer": in_a_row("normalizers", llama),
            "pre_tokenizer": in_a_row("pretokenizers", [{"type": "Split"}] * 3 + [BYTES]),
            "post_processor": in_a_row("processors", [BYTES, templated(1)]),
            "decoder": in_a_row("decoders", decoders),
            "model": {"continuing_subword_prefix": "##"},
        }
    )


# what shares its data, and what does not fit


def views(path: Path, distinct: bool) -> Path:
    """A pickle with 400 views of one storage of 256 kB: 26 million numbers in 65,536."""
    path.mkdir()
    one = torch.zeros(1 << 16)
    torch.save({f"w{i}": one[i * distinct :] for i in range(400)}, path / "pytorch_model.bin")
    return path


@pytest.mark.parametrize("distinct", [False, True])
def test_views_of_one_storage_do_not_lift_the_limits_on_a_configuration(
    tmp_path: Path, refused: Any, distinct: bool
) -> None:
    path = views(tmp_path / "m", distinct)
    limits = Limits.of(open_weights(path))
    assert limits.numbers <= (path / "pytorch_model.bin").stat().st_size // 4
    assert limits.tensors == (400 if distinct else 1)
    transformers.ViTConfig(hidden_size=512, num_hidden_layers=3, intermediate_size=4096).save_pretrained(path)
    with refused("CKPT-SHAPE", 3, "by its configuration"):
        load_model(path)


def test_views_that_a_network_does_not_need_are_not_all_read(
    tmp_path: Path, refused: Any, monkeypatch: Any
) -> None:
    from aniso.weights.torch_file import TorchFile

    path = vit(views(tmp_path / "m", True))
    (path / "model.safetensors").unlink()
    monkeypatch.setattr(TorchFile, "_load", lambda *_: pytest.fail("read"))
    with refused("CKPT-KEYS", 3, "w0"):
        load_model(path)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_a_lack_of_memory_is_not_taken_for_a_fault_of_the_file(
    tmp_path: Path, monkeypatch: Any, error: Exception
) -> None:
    def build(*_: Any) -> None:
        raise error

    monkeypatch.setattr(loading, "transformers_network", build)
    with pytest.raises(type(error)):
        load_model(vit(tmp_path / "m"))
    with pytest.raises(type(error)), loading.building("m"):
        build()


def levit(path: Path) -> Path:
    three = dict(hidden_sizes=[16] * 3, num_attention_heads=[2] * 3, depths=[1] * 3, key_dim=[8] * 3)
    config = transformers.LevitConfig(image_size=32, num_labels=2, **three)
    transformers.LevitForImageClassification(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("sizes", [{"image_size": 272}, {"patch_size": 1}])
def test_a_levit_that_loops_over_many_patches_is_refused(
    tmp_path: Path, refused: Any, monkeypatch: Any, sizes: dict[str, Any]
) -> None:
    path = edit(levit(tmp_path / "m"), **sizes)
    monkeypatch.setattr(loading, "built", lambda *_: pytest.fail("built"))
    with refused("DIR-CONFIG", 3, "16 patches", "image_size"):
        load_model(path)


@pytest.mark.parametrize("key", ["image_size", "img_size", "input_size"])
def test_a_model_for_images_of_absurd_size_is_refused(refused: Any, key: str) -> None:
    with refused("DIR-CONFIG", 3, "at most 4,096", key):
        Settings("config.json", WIDE).plain({key: [3, 4097]})


BEYOND = 10**400  # no float is so large


@pytest.mark.parametrize("said", [{"image_mean": [BEYOND, 0, 0]}, {"size": BEYOND}, {"crop_size": -BEYOND}])
def test_integers_beyond_every_float_in_the_settings_for_images_are_refused(
    tmp_path: Path, refused: Any, said: dict[str, Any]
) -> None:
    path = edit(vit(tmp_path / "m"), "preprocessor_config.json", **said)
    with refused("DIR-CONFIG", 3, "preprocessor_config.json", "too large a number"):
        load_model(path)


@pytest.mark.parametrize("said", [{"num_classes": BEYOND}, {"pretrained_cfg": {"crop_pct": BEYOND}}])
def test_integers_beyond_every_float_in_a_timm_configuration_are_refused(
    tmp_path: Path, refused: Any, said: dict[str, Any]
) -> None:
    save_safetensors(tmp_path / "model.safetensors", {"head.weight": torch.zeros(4, 64)})
    with refused("DIR-CONFIG", 3, "config.json", "too large a number"):
        load_model(edit(tmp_path, architecture="test_vit", **said))


def test_integers_that_fit_a_float_are_read_exactly() -> None:
    for value in (0, -1, 2**63, 10**308, -(10**308) + 1):
        assert parse_object(json.dumps({"a": value}).encode()) == {"a": value}
    for value in (10**309, -(10**309), 10**4000):
        with pytest.raises(JsonError, match="too large"):
            parse_object(json.dumps({"a": value}).encode())


def test_images_of_another_size_than_the_model_takes_are_refused_at_once(
    tmp_path: Path, refused: Any
) -> None:
    path = edit(vit(tmp_path / "m"), "preprocessor_config.json", size=100)
    with refused("DIR-CONFIG", 3, "100 x 100", "16 x 16"):
        load_model(path)


def test_a_model_that_takes_images_of_any_size_has_them_as_its_settings_say(tmp_path: Path) -> None:
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1)
    config = transformers.Dinov2Config(image_size=32, patch_size=8, num_labels=2, **sizes)
    transformers.Dinov2ForImageClassification(config).save_pretrained(tmp_path)
    encoder = load_model(edit(tmp_path, "preprocessor_config.json", size={"height": 24, "width": 24}))
    assert encoder.transforms.eval.pixels.size == 24
    assert encoder(torch.zeros(1, 3, 24, 24)).shape == (1, 32)


def test_images_of_another_size_than_a_timm_model_takes_are_refused_at_once(
    tmp_path: Path, refused: Any
) -> None:
    timm = pytest.importorskip("timm")
    name, small = "vit_tiny_patch16_224", dict(depth=1, embed_dim=16, num_heads=2)
    network = timm.create_model(name, num_classes=2, **small)
    save_safetensors(tmp_path / "model.safetensors", network.state_dict())
    edit(tmp_path, architecture=name, num_classes=2, model_args=small)
    assert load_model(tmp_path).transforms.eval.pixels.size == 224
    with refused("DIR-CONFIG", 3, "96 x 96", "224 x 224"):
        load_model(edit(tmp_path, pretrained_cfg={"input_size": [3, 96, 96]}))


def test_classes_without_names_are_numbered(tmp_path: Path) -> None:
    """As of PVT, whose configuration is saved with a number of classes and no names."""
    sizes = dict(hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, num_attention_heads=[1, 2, 3, 4])
    config = transformers.PvtConfig(num_labels=7, image_size=32, **sizes)
    transformers.PvtForImageClassification(config).save_pretrained(tmp_path)
    assert edit(tmp_path, id2label=None, label2id=None, num_labels=7)
    family = load_model(tmp_path).family
    assert family.own_classes == tuple("0123456")
