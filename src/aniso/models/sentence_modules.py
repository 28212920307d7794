"""The small files of a sentence-transformers directory: which modules it has, and how they pool."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from aniso.errors import InputError, UnsafeError, printable
from aniso.json_value import JsonObject, JsonValue
from aniso.weights.directory import ASKS_FOR_CODE, read_json
from aniso.weights.files import RawFile
from aniso.weights.jsontext import JsonError, parse_value

MODULES = "modules.json"
MODES = ("mean", "cls", "max")
_TYPE = re.compile(r"sentence_transformers(?:\.\w+)*\.(\w+)")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KNOWN = ("Transformer", "Pooling", "Normalize")
_LARGEST = 1 << 20
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}


@final
@dataclass(frozen=True)
class Pooling:
    """How the features of tokens become the features of a text."""

    mode: str = "mean"
    """mean, cls or max over the tokens of the text, special tokens included."""
    normalise: bool = False

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return one row per text from ``hidden``, texts x tokens x width; ``mask`` is False for padding."""
        if self.mode == "cls":
            pooled = hidden[:, 0]
        elif self.mode == "max":
            pooled = hidden.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
        else:
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return functional.normalize(pooled, dim=-1) if self.normalise else pooled


@final
@dataclass(frozen=True)
class SentenceModules:
    """What the files of a directory say about a sentence encoder, beside its network."""

    network: Path
    """The directory of the configuration, the weights and the tokenizer."""
    pooling: Pooling
    length: int | None
    """The most tokens of a text, if the directory limits them."""
    lower: bool = False
    files: tuple[str, ...] = ()
    """These small files, relative to the directory."""


def read_modules(path: Path) -> SentenceModules:
    """Read modules.json, the pooling's configuration and sentence_bert_config.json.

    Without modules.json, texts are pooled by their mean and not normalised, as sentence-transformers does.
    """
    if not (path / MODULES).is_file():
        length, lower, files = _limits(path)
        return SentenceModules(path, Pooling(), length, lower, files)
    listed = _listed(path)
    kinds = [kind for kind, _ in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(path / MODULES)}' lists modules that are not supported",
            found=printable(", ".join(kinds)) or "no modules",
            expected="Transformer, Pooling, and Normalize or nothing",
            fix="use a sentence encoder without dense layers or routers",
        )
    folders = [folder for _, folder in listed]
    network = path / folders[0] if folders[0] else path
    pooling = _pooling(path / folders[1] if folders[1] else path, "Normalize" in kinds)
    length, lower, files = _limits(network)
    prefix = f"{folders[0]}/" if folders[0] else ""
    named = (MODULES, *(f"{folder}/config.json" for folder in folders[1:2]), *(prefix + f for f in files))
    return SentenceModules(network, pooling, length, lower, named)


def _listed(path: Path) -> list[tuple[str, str]]:
    """Return the kind and folder of every module; a class of another package is refused, never imported."""
    file = RawFile(path / MODULES)
    try:
        found = parse_value(file.read(0, min(file.size, _LARGEST + 1)), largest=_LARGEST)
    except JsonError as e:
        raise _damaged(path / MODULES, printable(e)) from None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise _damaged(path / MODULES, "not a list of modules")
    out = []
    for entry in found:
        kind, folder = entry.get("type"), entry.get("path")
        match = _TYPE.fullmatch(kind) if isinstance(kind, str) else None
        if match is None:
            raise _unsafe(path, "type", kind, ", ".join(f"sentence_transformers.models.{k}" for k in _KNOWN))
        if not isinstance(folder, str) or (folder and not _FOLDER.fullmatch(folder)):
            raise _unsafe(path, "path", folder, "a folder of the same directory, such as 1_Pooling")
        out.append((match[1], folder))
    return out


def _pooling(folder: Path, normalise: bool) -> Pooling:
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(file)}' is missing, so nothing says how texts are pooled",
            fix="download the whole directory",
        )
    found = read_json(file)
    named = found.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named) if isinstance(named, list) else []
    modes += [_FLAGS.get(key, key) for key in found if key.startswith("pooling_mode_") and found[key] is True]
    if len(modes) != 1 or modes[0] not in MODES:
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(file)}' pools texts in a way that is not supported",
            key="pooling_mode",
            found=printable(", ".join(map(str, modes))) or "none",
            expected=" or ".join(MODES),
            fix="use a sentence encoder with one of these",
        )
    return Pooling(modes[0], normalise)


def _limits(folder: Path) -> tuple[int | None, bool, tuple[str, ...]]:
    """Return the limit of tokens, whether texts are put into lower case, and the file that says so."""
    name = "sentence_bert_config.json"
    if not (folder / name).is_file():
        return None, False, ()
    found: JsonObject = read_json(folder / name)
    length, lower = found.get("max_seq_length"), found.get("do_lower_case", False)
    is_count = isinstance(length, int) and not isinstance(length, bool) and length > 2
    if not (length is None or is_count) or not isinstance(lower, bool):
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(folder / name)}' is not a valid configuration",
            key="max_seq_length" if isinstance(lower, bool) else "do_lower_case",
            found=printable(length if isinstance(lower, bool) else lower),
            expected="a number of tokens, at least 3" if isinstance(lower, bool) else "true or false",
            fix="download it again",
        )
    return (length if isinstance(length, int) else None), lower, (name,)


def _unsafe(path: Path, key: str, found: object, expected: str) -> UnsafeError:
    return UnsafeError(
        "DIR-CONFIG",
        f"'{printable(path / MODULES)}' names something to load, and nothing but known modules is built",
        key=key,
        found=printable(found),
        expected=expected,
        fix="use a model that sentence-transformers itself can build without extra code",
    )


def _damaged(file: Path, reason: str) -> InputError:
    return InputError(
        "DIR-CONFIG",
        f"'{printable(file)}' is not a valid configuration",
        reason=reason,
        fix="download it again",
    )


def sentence_files(network: Path) -> dict[str, bytes]:
    """Return the files of a sentence-transformers directory beside its weights, by relative path.

    ``network`` is the directory of the base's weights; keys in its config.json that ask for code are dropped.
    """
    outer = network if (network / MODULES).is_file() else network.parent
    inside = (outer / MODULES).is_file() and read_modules(outer).network.resolve() == network.resolve()
    modules = read_modules(outer if inside else network)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if modules.pooling.normalise else [])]
    listed: list[JsonValue] = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    config = read_json(network / "config.json")
    plain = {key: value for key, value in config.items() if key not in ASKS_FOR_CODE}
    modes: JsonObject = {flag: mode == modules.pooling.mode for flag, mode in _FLAGS.items()}
    width = config.get("hidden_size", config.get("dim"))
    out: dict[str, JsonValue] = {
        "config.json": plain,
        MODULES: listed,
        "1_Pooling/config.json": {"word_embedding_dimension": width, **modes},
    }
    if modules.length is not None or modules.lower:
        limits: JsonObject = {"max_seq_length": modules.length, "do_lower_case": modules.lower}
        out["sentence_bert_config.json"] = limits
    files = {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in out.items()}
    for name in _TOKENIZER:
        if (network / name).is_file():
            file = RawFile(network / name)
            files[name] = bytes(file.read(0, file.size))
    return files
