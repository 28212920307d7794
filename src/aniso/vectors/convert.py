"""CLIP checkpoints between open_clip's names and Hugging Face's, in both directions, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aniso.errors import InputError, NumericalError, UsageError, printable
from aniso.vectors.block_source import ACTIVATIONS, agreed_activation, require_model
from aniso.vectors.naming import HUGGING_FACE, OPEN_CLIP, TEXT, VISION, Rule, expanded, layers_of, recognise
from aniso.weights import SafetensorsWriter, WeightSource, header_room
from aniso.weights.atomic import atomic_directory, atomic_file, require_space, write_text
from aniso.weights.dtypes import FLOATS
from aniso.weights.files import Progress

_TARGETS = {"open_clip": OPEN_CLIP, "huggingface": HUGGING_FACE}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What a model directory holds beside weights and configuration, and needs to read text and pictures."""
_BESIDE = (*TOKENIZER, "README.md", "coefficients.safetensors")
_OURS = re.compile(
    r"(open_clip_)?(model\.safetensors|config\.json)|" + "|".join(re.escape(name) for name in _BESIDE)
)
_FILES = {"open_clip": "open_clip_model.safetensors", "huggingface": "model.safetensors"}


@dataclass(frozen=True)
class Conversion:
    """A checkpoint under other names: each tensor's new name and how to read it."""

    tensors: Mapping[str, Callable[[], Tensor]]
    notes: tuple[str, ...]


def convert(
    source: WeightSource,
    out: Path,
    *,
    to: str = "safetensors",
    dtype: str | None = None,
    activation: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    metadata: Mapping[str, str] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> tuple[str, ...]:
    """Write a source as one safetensors file, or as an open_clip or Hugging Face directory. Returns notes.

    ``beside`` are small files that a directory gets, too.
    """
    if to not in ("safetensors", *_TARGETS):
        raise UsageError(
            "USAGE",
            f"cannot convert to '{to}'",
            expected=", ".join(("safetensors", *_TARGETS)),
            fix="choose one of these with --to",
        )
    require_model(source)
    inside = [file.label for file in source.files if out.absolute() in file.path.absolute().parents]
    if inside and to != "safetensors":
        raise UsageError(
            "OUT-EXISTS", f"'{printable(out)}' is where the input lies", found=inside[0], fix="name another"
        )
    require_space(out, source.nbytes)
    if to == "safetensors":
        plan = Conversion({n: partial(source.read, n) for n in source.tensors}, ())
        _write(out, plan, dtype, progress, metadata or {}, overwrite=overwrite)
        return (*source.info.notes, *plan.notes)
    plan = renamed(source, to)
    config, notes = _config(source, to, activation)
    with atomic_directory(out, overwrite=overwrite, ours=_OURS) as unfinished:
        _write(unfinished / _FILES[to], plan, dtype, progress, metadata or {})
        name = "config.json" if to == "huggingface" else "open_clip_config.json"
        write_text(unfinished / name, json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name, content in (beside or {}).items():
            with atomic_file(unfinished / name) as small:
                small.stream.write(content)
    return (*source.info.notes, *plan.notes, *notes)


def renamed(source: WeightSource, to: str) -> Conversion:
    """The tensors of a CLIP checkpoint under the names of ``to``; everything must have a name there."""
    names = recognise(source.tensors)
    if names.scheme not in _TARGETS.values():
        raise InputError(
            "LAYOUT-CONVERT",
            f"'{source.label}' has no {to} form",
            found=f"naming {names.scheme}",
            expected="a CLIP model with a vision transformer",
            fix="convert it with --to safetensors to keep its names",
        )
    left = dict(names.keys)
    missing: list[str] = []
    tensors: dict[str, Callable[[], Tensor]] = {}
    for rules in (VISION, TEXT):
        for rule in _filled(rules, left):
            theirs = (rule.open_clip,) if names.scheme == OPEN_CLIP else rule.hugging_face
            missing += [name for name in theirs if name not in left]
            if not all(name in left for name in theirs):
                continue
            keys = [left.pop(name) for name in theirs]
            tensors |= _moved(source, rule, keys, names.scheme, _TARGETS[to])
    buffers = sorted(name for name, key in left.items() if source.tensors[key].dtype not in FLOATS)
    unknown = sorted(set(left) - set(buffers))
    if unknown or missing:
        raise InputError(
            "CKPT-KEYS",
            f"'{source.label}' is not a whole CLIP model with the tensors that {to} knows",
            missing=[printable(name) for name in missing[:8]],
            extra=[printable(name) for name in unknown[:8]],
            fix="leave extra ones out with --skip-key; parts of a model convert with --to safetensors",
        )
    if source.info.config.unusual:
        raise InputError(
            "LAYOUT-CONVERT",
            f"'{source.label}' has settings without a counterpart in {to}",
            found=list(source.info.config.unusual),
            fix="convert it with --to safetensors to keep its names",
        )
    notes = (f"buffers that the model makes itself, left out: {', '.join(buffers)}",) if buffers else ()
    return Conversion(tensors, notes)


def _filled(rules: tuple[Rule, ...], names: Iterable[str]) -> list[Rule]:
    return expanded(rules, layers_of(rules, names))


def _moved(
    source: WeightSource, rule: Rule, keys: list[str], scheme: str, target: str
) -> dict[str, Callable[[], Tensor]]:
    def whole() -> Tensor:
        """In open_clip's form."""
        tensors = [source.read(key) for key in keys]
        turned = rule.transposed and scheme == HUGGING_FACE
        tensors = [t.T.contiguous() if turned else t for t in tensors]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    if target == OPEN_CLIP:
        return {rule.open_clip: whole}
    count = len(rule.hugging_face)

    def share(i: int) -> Tensor:
        tensor = whole()
        part = tensor if count == 1 else tensor.chunk(count)[i]
        return (part.T if rule.transposed else part).contiguous()

    return {name: partial(share, i) for i, name in enumerate(rule.hugging_face)}


def _write(
    path: Path,
    plan: Conversion,
    dtype: str | None,
    progress: Progress | None,
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> None:
    room = header_room(plan.tensors, 4096 + 2 * len(json.dumps(dict(metadata))))
    with atomic_file(path, overwrite=overwrite) as out:
        writer = SafetensorsWriter(out.stream, room)
        for name, tensor in _cast_all(plan, dtype):
            writer.add(name, tensor)
            if progress:
                progress(tensor.numel() * tensor.element_size())
        writer.finish({"format": "pt", **metadata})


def _cast_all(plan: Conversion, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            "USAGE",
            f"there is no dtype '{dtype}'",
            expected=", ".join(DTYPES),
            fix="choose one of these with --dtype",
        )
    for name, read in plan.tensors.items():
        tensor = read()
        if dtype is None or not tensor.is_floating_point():
            yield name, tensor
            continue
        narrow = tensor.to(DTYPES[dtype])
        if bool((torch.isinf(narrow) & torch.isfinite(tensor)).any()):
            raise NumericalError(
                "VECTOR-RANGE",
                f"a weight leaves the range of {dtype}",
                key=name,
                found=f"{float(tensor.abs().max()):.4g}",
                fix="use --dtype bf16 or fp32",
            )
        yield name, narrow


# configurations


def _config(source: WeightSource, to: str, activation: str | None) -> tuple[dict[str, Any], list[str]]:
    """The configuration the other library needs; most of it can be read off the shapes."""
    found = agreed_activation(source, activation)
    notes = []
    if found not in ACTIVATIONS:
        raise UsageError(
            "CKPT-ACTIVATION",
            f"'{source.label}' does not say which of the two activations it was trained with",
            found=found,
            expected="quick_gelu (OpenAI's weights) or gelu",
            fix="add --activation quick_gelu or --activation gelu",
        )
    vision, text = _towers(source)
    for tower, key in ((vision, "vision"), (text, "text")):
        if tower["heads"] is None:
            tower["heads"] = max(1, tower["width"] // 64)
            notes.append(f"{key} tower: {tower['heads']} attention heads, by CLIP's rule of width / 64")
    make = _hugging_face_config if to == "huggingface" else _open_clip_config
    return make(vision, text, str(found)), notes


def _towers(source: WeightSource) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of a whole model's towers, from its shapes."""
    names = recognise(source.tensors)
    shapes = {name: source.tensors[key].shape for name, key in names.keys.items()}
    ours = names.scheme == OPEN_CLIP

    def shape(rule: Rule) -> tuple[int, ...]:
        found = shapes[rule.open_clip if ours else rule.hugging_face[0]]
        return found[::-1] if rule.transposed and not ours else found

    by_name = {rule.open_clip: rule for rules in (VISION, TEXT) for rule in _filled(rules, shapes)}
    heads = source.info.config.heads
    conv, proj = shape(by_name["visual.conv1.weight"]), shape(by_name["visual.proj"])
    positions = shape(by_name["visual.positional_embedding"])[0] - 1
    vision = {
        "width": conv[0],
        "patch": conv[2],
        "image": conv[2] * round(positions**0.5),
        "layers": layers_of(VISION, shapes),
        "mlp": shape(by_name["visual.transformer.resblocks.0.mlp.c_fc.weight"])[0],
        "embed": proj[1],
        "heads": heads[0],
    }
    vocabulary, width = shape(by_name["token_embedding.weight"])
    text = {
        "width": width,
        "vocabulary": vocabulary,
        "context": shape(by_name["positional_embedding"])[0],
        "layers": layers_of(TEXT, shapes),
        "mlp": shape(by_name["transformer.resblocks.0.mlp.c_fc.weight"])[0],
        "heads": heads[1],
    }
    return vision, text


def _hugging_face_config(vision: dict[str, Any], text: dict[str, Any], activation: str) -> dict[str, Any]:
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": vision["embed"],
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": activation,
            "hidden_size": vision["width"],
            "intermediate_size": vision["mlp"],
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": vision["heads"],
            "image_size": vision["image"],
            "patch_size": vision["patch"],
            "projection_dim": vision["embed"],
        },
        "text_config": {
            "model_type": "clip_text_model",
            "hidden_act": activation,
            "hidden_size": text["width"],
            "intermediate_size": text["mlp"],
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "max_position_embeddings": text["context"],
            "vocab_size": text["vocabulary"],
            "projection_dim": vision["embed"],
            # 2 makes transformers pool the token with the largest id, as open_clip does
            "eos_token_id": 2,
        },
    }


def _open_clip_config(vision: dict[str, Any], text: dict[str, Any], activation: str) -> dict[str, Any]:
    return {
        "model_cfg": {
            "embed_dim": vision["embed"],
            "quick_gelu": activation == "quick_gelu",
            "vision_cfg": {
                "image_size": vision["image"],
                "layers": vision["layers"],
                "width": vision["width"],
                "head_width": vision["width"] // vision["heads"],
                "mlp_ratio": vision["mlp"] / vision["width"],
                "patch_size": vision["patch"],
            },
            "text_cfg": {
                "context_length": text["context"],
                "vocab_size": text["vocabulary"],
                "width": text["width"],
                "heads": text["heads"],
                "layers": text["layers"],
                "mlp_ratio": text["mlp"] / text["width"],
            },
        },
        "preprocess_cfg": {
            "mean": [0.48145466, 0.4578275, 0.40821073],
            "std": [0.26862954, 0.26130258, 0.27577711],
        },
    }
