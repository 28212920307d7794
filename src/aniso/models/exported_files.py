"""The small files beside the weights of an exported model: configuration, tokenizer, preprocessing.

Other libraries need them to load a directory. They are read from the directory of the base as data; fields
that ask for code are left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from aniso.errors import InputError, printable
from aniso.json_value import JsonObject, as_object
from aniso.models.dual_encoder import copied_files
from aniso.models.hugging_face import processor_pixels, processor_settings
from aniso.models.open_clip import preprocess_pixels
from aniso.models.sentence_modules import sentence_files
from aniso.models.transforms import Pixels
from aniso.vectors.clip_config import clip_sizes
from aniso.vectors.convert import DUAL, HUGGING_FACE, OPEN_CLIP, SENTENCE, is_clip, renamed
from aniso.weights import WeightSource
from aniso.weights.directory import ASKS_FOR_CODE, read_json
from aniso.weights.files import RawFile

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "chat_template.jinja",
)
_WHOLE = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
"""Files that hold a whole vocabulary; the others are settings."""
_SETTINGS = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
_OPEN_AI = 49408  # tokens of CLIP's own byte pairs, which open_clip includes
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@final
@dataclass(frozen=True)
class ExportedFiles:
    """Files for a directory by name, settings for its configuration, and notes for the user."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    """Settings of a CLIP's configuration that do not follow from its weights."""
    notes: tuple[str, ...] = ()


def exported_files(source: WeightSource, to: str) -> ExportedFiles:
    """Return what a directory of kind ``to`` needs beside the weights of ``source``.

    ``huggingface`` takes a CLIP under any names, or any other model from a directory of transformers, whose
    configuration, tokenizer and preprocessing are copied. ``open_clip`` takes a CLIP.
    """
    home = home_of(source)
    if to == SENTENCE:
        return ExportedFiles(sentence_files(_require_home(home, source.label)))
    if to == DUAL:
        return ExportedFiles(copied_files(_require_home(home, source.label)))
    if is_clip(source):
        renamed(source, to)  # raises for a model that has no form there
        return _clip_files(source, to, home)
    if to == HUGGING_FACE and home is not None and (home / "config.json").is_file():
        return ExportedFiles(_copied(home, ("config.json", *_SETTINGS), _TOKENIZER))
    return ExportedFiles()


def home_of(source: WeightSource) -> Path | None:
    """Return the directory with the model's configuration, or None."""
    if source.info.home is not None:
        return source.info.home
    file = source.files[0] if source.files else None
    parent = file.path.parent if isinstance(file, RawFile) else None
    names = ("config.json", "open_clip_config.json")
    return parent if parent is not None and any((parent / name).is_file() for name in names) else None


def tokenizer_files(home: Path) -> dict[str, bytes]:
    """Return the files of the tokenizer in a directory, by name."""
    return _copied(home, (), _TOKENIZER) if _has_tokenizer(home) else {}


def processor_file(pixels: Pixels) -> bytes:
    """Return ``preprocessor_config.json`` for images that are prepared in this way."""
    return _text(processor_settings(pixels))


def _clip_files(source: WeightSource, to: str, home: Path | None) -> ExportedFiles:
    size, vocabulary, length = clip_sizes(source)
    pixels = _pixels(home, size)
    tokenizer = tokenizer_files(home) if home is not None else {}
    standard = vocabulary == _OPEN_AI and (not tokenizer or _is_open_ai(tokenizer))
    notes: tuple[str, ...] = ()
    if to == OPEN_CLIP:
        config: JsonObject = {"preprocess_cfg": _preprocess_cfg(pixels)}
        if standard:
            return ExportedFiles({}, config)  # open_clip includes this tokenizer
        if tokenizer:
            name = home.resolve().name if home is not None else ""
            config["model_cfg"] = {"text_cfg": {"hf_tokenizer_name": name}}
    else:
        config = {"text_config": _token_ids(home)}
        if not tokenizer and standard:
            tokenizer = _open_ai_tokenizer(length)
        tokenizer["preprocessor_config.json"] = processor_file(pixels)
    if not any(name in tokenizer for name in _WHOLE):
        notes = ("no tokenizer was found beside the base: add its files to encode texts",)
    return ExportedFiles(tokenizer, config, notes)


def _has_tokenizer(home: Path) -> bool:
    return any((home / name).is_file() for name in _WHOLE)


def _copied(home: Path, settings: tuple[str, ...], others: tuple[str, ...]) -> dict[str, bytes]:
    """Return files of a directory; settings are JSON, whose fields that ask for code are left out."""
    out = {}
    for name in settings:
        if (home / name).is_file():
            plain = {key: value for key, value in read_json(home / name).items() if key not in ASKS_FOR_CODE}
            out[name] = _text(plain)
    for name in others:
        if (home / name).is_file():
            file = RawFile(home / name)
            out[name] = bytes(file.read(0, file.size))
    return out


def _text(value: JsonObject) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _pixels(home: Path | None, size: int) -> Pixels:
    """Return the preprocessing of a directory, with CLIP's values where it has none."""
    if home is not None and (home / "open_clip_config.json").is_file():
        config = read_json(home / "open_clip_config.json")
        return preprocess_pixels(home, size, as_object(config.get("preprocess_cfg")))
    return Pixels(size) if home is None else processor_pixels(home, size)


def _preprocess_cfg(pixels: Pixels) -> JsonObject:
    """Return open_clip's settings; it always scales to the size of the network, without a margin."""
    if pixels.margin != 1:
        raise InputError(
            "LAYOUT-CONVERT",
            "open_clip cannot prepare images as this model needs it",
            found=f"scaled to {int(pixels.size / pixels.margin)} pixels, and cropped to {pixels.size}",
            expected="scaled and cropped to the same size",
            fix="--to huggingface",
        )
    return {
        "mean": list(pixels.mean),
        "std": list(pixels.std),
        "interpolation": pixels.interpolation,
        "resize_mode": pixels.resize,
    }


def _token_ids(home: Path | None) -> JsonObject:
    """Return the ids of special tokens from the configuration of a CLIP of transformers."""
    if home is None or not (home / "config.json").is_file():
        return {}
    text = as_object(read_json(home / "config.json").get("text_config"))
    return {name: text[name] for name in _IDS if isinstance(text.get(name), int)}


def _open_ai_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]] | None:
    """Return the tokens and merges that open_clip includes, as transformers names them; None without it."""
    try:
        from open_clip.tokenizer import SimpleTokenizer
    except ImportError:
        return None
    known = SimpleTokenizer()
    marks = {known.sot_token_id: "<|startoftext|>", known.eot_token_id: "<|endoftext|>"}
    return {marks.get(i, token): i for token, i in known.encoder.items()}, list(known.bpe_ranks)


def _is_open_ai(tokenizer: Mapping[str, bytes]) -> bool:
    """True if a tokenizer has the vocabulary that open_clip includes."""
    known = _open_ai_vocabulary()
    model: Any = json.loads(tokenizer.get("tokenizer.json", b"{}")).get("model") or {}
    vocabulary = model.get("vocab") or json.loads(tokenizer.get("vocab.json", b"{}"))
    return known is not None and vocabulary == known[0]


def _open_ai_tokenizer(length: int) -> dict[str, bytes]:
    """Return open_clip's tokenizer as files of transformers; empty if one of the libraries is missing."""
    known = _open_ai_vocabulary()
    try:
        from transformers import CLIPTokenizer
    except ImportError:
        return {}
    if known is None:
        return {}
    merges: Any = known[1]
    made = CLIPTokenizer(vocab=known[0], merges=merges, model_max_length=length)
    with tempfile.TemporaryDirectory() as place:
        made.save_pretrained(place)
        return _copied(Path(place), (), _TOKENIZER)


def _require_home(home: Path | None, label: str) -> Path:
    """Return the directory of the base, which has the configuration and the tokenizer."""
    if home is None or not (home / "config.json").is_file():
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(label)}' is no directory of a model",
            expected="config.json beside the base's weights, and what else belongs to its kind",
            fix="--base DIRECTORY, or --to safetensors",
        )
    return home
