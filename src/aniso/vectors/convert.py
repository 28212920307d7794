"""Checkpoints written as files and directories; CLIPs under the names of open_clip or Hugging Face."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from aniso.errors import InputError, NumericalError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.vectors import naming
from aniso.vectors.block_source import require_model
from aniso.vectors.clip_config import clip_config
from aniso.vectors.naming import TEXT, VISION, Rule, expanded, layers_of, recognise
from aniso.weights import SafetensorsWriter, WeightSource, header_room
from aniso.weights.atomic import atomic_directory, atomic_file, require_space
from aniso.weights.dtypes import FLOATS
from aniso.weights.files import Progress, RawFile

OPEN_CLIP, HUGGING_FACE = "open_clip", "huggingface"
_TARGETS = {OPEN_CLIP: naming.OPEN_CLIP, HUGGING_FACE: naming.HUGGING_FACE}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SENTENCE = "sentence-transformers"
"""A directory under the source's own names, whose configuration comes with it in ``Extras``."""
DUAL = "dual-encoder"
"""Likewise, with the text tower in a directory of its own."""
DIRECTORY_FILES = re.compile(
    r"(open_clip_)?(model\.safetensors|config\.json)|(generation|preprocessor|processor)_config\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|spiece\.model|tokenizer\.model|chat_template\.jinja"
    r"|README\.md|(coefficients|head|class_weights)\.safetensors|record\.json"
    r"|modules\.json|sentence_bert_config\.json|1_Pooling|2_Normalize|classes\.json|image|text"
)
"""Names of the files and folders in a directory that is written here."""
_FILES = {
    OPEN_CLIP: "open_clip_model.safetensors",
    HUGGING_FACE: "model.safetensors",
    SENTENCE: "model.safetensors",
    DUAL: "model.safetensors",
}


@dataclass(frozen=True)
class Conversion:
    """A renamed checkpoint: each tensor's new name and a function that reads it."""

    tensors: Mapping[str, Callable[[], Tensor]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Extras:
    """What a converted checkpoint gets beside its weights."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the safetensors file."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """More files for a directory, by name; ``config.json`` is that of a model other than a CLIP."""
    config: JsonObject = field(default_factory=dict)
    """Settings of a CLIP's configuration that do not follow from its weights."""


def is_clip(source: WeightSource) -> bool:
    """True if the names are those of a CLIP with both towers, in one of the libraries."""
    names = recognise(source.tensors)
    return names.scheme in _TARGETS.values() and any(key.endswith("logit_scale") for key in names.keys)


def convert(
    source: WeightSource,
    out: Path,
    *,
    to: str = "safetensors",
    dtype: str | None = None,
    activation: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    extras: Extras | None = None,
) -> tuple[str, ...]:
    """Write weights as one safetensors file, or as an ``open_clip`` or ``huggingface`` directory.

    ``activation`` is needed if the source does not name its own; ``dtype`` (fp32, fp16, bf16) is the source's
    by default. Returns notes; raises if a tensor has no name in the other library.
    """
    extras = extras or Extras()
    own_names = to in (HUGGING_FACE, SENTENCE, DUAL) and "config.json" in extras.files
    if to not in ("safetensors", *_TARGETS) and not own_names:
        raise UsageError(
            "USAGE",
            f"cannot convert to '{to}'",
            expected=", ".join(("safetensors", *_TARGETS)),
            fix="choose one of these with --to",
        )
    require_model(source)
    local = [file for file in source.files if isinstance(file, RawFile)]
    inside = [file.label for file in local if out.absolute() in file.path.absolute().parents]
    if inside and to != "safetensors":
        raise UsageError(
            "OUT-EXISTS", f"'{printable(out)}' holds the input", found=inside[0], fix="name another directory"
        )
    require_space(out, source.nbytes)
    files: dict[str, bytes] = {}
    notes: list[str] = []
    if to == "safetensors" or own_names:
        plan = Conversion({n: partial(source.read, n) for n in source.tensors}, ())
    else:
        plan = renamed(source, to)
        config, notes = clip_config(source, to, activation)
        name = "config.json" if to == HUGGING_FACE else "open_clip_config.json"
        files = {name: _json(_merged(config, extras.config))}
    if to == "safetensors":
        _write(out, plan, dtype, progress, extras.metadata, overwrite=overwrite)
        return (*source.info.notes, *plan.notes)
    with atomic_directory(out, overwrite=overwrite, ours=DIRECTORY_FILES) as unfinished:
        _write(unfinished / _FILES[to], plan, dtype, progress, extras.metadata)
        for name, content in {**files, **extras.files}.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(unfinished / name) as small:
                small.stream.write(content)
    return (*source.info.notes, *plan.notes, *notes)


def _json(config: JsonObject) -> bytes:
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _merged(config: JsonObject, more: JsonObject) -> JsonObject:
    """Return a configuration with more settings; objects in it are merged in turn."""
    out = dict(config)
    for key, value in more.items():
        known = out.get(key)
        out[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return out


def renamed(source: WeightSource, to: str) -> Conversion:
    """Return the tensors of a CLIP checkpoint under the names of ``to``; raises if one has no name there."""
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
        for rule in expanded(rules, layers_of(rules, left)):
            theirs = (rule.open_clip,) if names.scheme == naming.OPEN_CLIP else rule.hugging_face
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
            f"'{source.label}' is not a complete CLIP model: its tensors are not those of {to}",
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


def _moved(
    source: WeightSource, rule: Rule, keys: list[str], scheme: str, target: str
) -> dict[str, Callable[[], Tensor]]:
    def whole() -> Tensor:
        """The tensor in open_clip's form."""
        tensors = [source.read(key) for key in keys]
        turned = rule.transposed and scheme == naming.HUGGING_FACE
        tensors = [t.T.contiguous() if turned else t for t in tensors]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    if target == naming.OPEN_CLIP:
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
