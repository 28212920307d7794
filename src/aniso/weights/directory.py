"""Model directories of Hugging Face and open_clip: one weight file, or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.errors import AnisoError, InputError, UnsafeError, printable
from aniso.json_value import JsonObject, as_object
from aniso.weights.files import ByteFile, RawFile
from aniso.weights.jsontext import JsonError, parse_object
from aniso.weights.single import open_file
from aniso.weights.source import ModelConfig, SourceInfo, TensorInfo, WeightSource

_JSON_LIMIT = 16 << 20  # an index of 100,000 tensors
_WHOLE = ("model.safetensors", "open_clip_model.safetensors")
_PICKLED = ("pytorch_model.bin", "open_clip_pytorch_model.bin")
_SHARDED = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}
ASKS_FOR_CODE = (
    "auto_map", "trust_remote_code", "_target_", "_attn_implementation_internal", "custom_pipelines",
)  # fmt: skip


_QUICK, _SMALL = 2 << 30, 64 << 10
# The settings of a CLIP in both libraries; any other setting means another model.
_OPEN_CLIP_MODEL = ("embed_dim", "quick_gelu", "vision_cfg", "text_cfg")
_OPEN_CLIP_VISION = ("image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size")
_OPEN_CLIP_TEXT = (
    "context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name",
)  # fmt: skip
_OPEN_CLIP_DEFAULTS = {"vision_cfg.pool_type": "tok", "text_cfg.pool_type": "argmax"}
_CLIP_DEFAULTS = {"layer_norm_eps": 1e-5, "num_channels": 3}


def open_directory(path: Path, *, tensors_only: bool = False) -> WeightSource:
    """Open the weights of a model directory; safetensors are preferred to pickles, with a note."""
    present = [name for name in (*_WHOLE, *_SHARDED, *_PICKLED) if (path / name).exists()]
    safe = [name for name in present if name in _WHOLE or "safetensors" in name]
    if not present:
        raise InputError(
            "DIR-EMPTY",
            f"'{printable(path)}' holds no model weights",
            expected=", ".join((*_WHOLE, *_PICKLED, "adapter_config.json")),
            found=printable(", ".join(sorted(p.name for p in path.iterdir())[:12]) or "nothing"),
            fix="name a weight file, or the directory that holds one under such a name",
        )
    chosen = present[0]
    source = _open_member(path, chosen, tensors_only)
    notes = list(source.info.notes)
    unused = [name for name in present if name != chosen]
    if unused:
        notes.append(f"{chosen} used; {', '.join(unused)} not used")
        if safe:
            notes += [w for name in unused if (w := _difference(source, path, name))]
    config, config_notes = _read_config(path)
    source.label = printable(path)
    source.info = replace(source.info, notes=(*notes, *config_notes), config=config, home=path)
    return source


def read_json(path: Path) -> JsonObject:
    """Read a JSON object from an untrusted directory."""
    return read_object(RawFile(path))


def read_object(file: ByteFile) -> JsonObject:
    """Read a JSON object from an untrusted file."""
    try:
        if file.size > _JSON_LIMIT:
            raise JsonError(f"{file.size} bytes long")
        return parse_object(file.read(0, file.size))
    except JsonError as e:
        raise InputError(
            "DIR-CONFIG",
            f"'{file.label}' is not a valid configuration",
            reason=printable(e),
            fix="download it again",
        ) from None


def _open_member(path: Path, name: str, tensors_only: bool = False) -> WeightSource:
    if name in _SHARDED:
        return ShardedWeights(path / name, _SHARDED[name], tensors_only=tensors_only)
    return open_file(path / name, tensors_only=tensors_only)


def _difference(source: WeightSource, path: Path, name: str) -> str:
    """Return a warning if another weight file of the directory differs from the one in use."""
    try:
        other = _open_member(path, name)
        ours, theirs = ({n: i for n, i in s.tensors.items() if i.is_float} for s in (source, other))
        if set(ours) != set(theirs):
            return f"warning: {name}, which is not used, has tensors of other names and was not compared"
        # models beyond a few seconds of reading are compared by their small tensors
        limit = _SMALL if source.nbytes > _QUICK else source.nbytes
        same = ours == theirs and all(
            torch.equal(source.read(key), other.read(key))
            for key, info in ours.items()
            if info.nbytes <= limit
        )
    except AnisoError as e:
        return f"warning: {name}, which is not used, cannot be read ({e.code})"
    return "" if same else f"warning: {name}, which is not used, holds other weights"


def _read_config(path: Path) -> tuple[ModelConfig, list[str]]:
    if (path / "config.json").exists():
        return transformers_config(read_json(path / "config.json"))
    if (path / "open_clip_config.json").exists():
        config = read_json(path / "open_clip_config.json")
        ignored, notes = _not_followed(config, "open_clip_config.json")
        return replace(open_clip_config(config), ignored=ignored), notes
    return ModelConfig(), []


def _not_followed(config: JsonObject, name: str) -> tuple[tuple[str, ...], list[str]]:
    ignored = tuple(sorted({key for key in _keys(config) if key in ASKS_FOR_CODE}))
    return ignored, [f"{name} fields not followed: {', '.join(ignored)}"] if ignored else []


def open_clip_config(config: JsonObject) -> ModelConfig:
    """Return the activation, heads and unusual settings from an ``open_clip_config.json``."""
    model = as_object(config.get("model_cfg"))
    vision, text = as_object(model.get("vision_cfg")), as_object(model.get("text_cfg"))
    width, head_width = _count(vision.get("width")), _count(vision.get("head_width", 64))
    heads = (width // head_width if width and head_width else None, _count(text.get("heads", 8)))
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    plain = {"model_cfg": _OPEN_CLIP_MODEL, "vision_cfg": _OPEN_CLIP_VISION, "text_cfg": _OPEN_CLIP_TEXT}
    unusual = [
        f"{part}.{name} = {printable(value, 60)}"
        for part, fields in (("model_cfg", model), ("vision_cfg", vision), ("text_cfg", text))
        for name, value in fields.items()
        if name not in plain[part] and value and value != _OPEN_CLIP_DEFAULTS.get(f"{part}.{name}")
    ]
    return ModelConfig("open_clip", activation, heads, tuple(unusual))


def transformers_config(config: JsonObject) -> tuple[ModelConfig, list[str]]:
    """Return the activation, heads and unusual settings from a ``config.json``, and notes."""
    ignored, notes = _not_followed(config, "config.json")
    named = config.get("architectures")
    vision, text = as_object(config.get("vision_config")), as_object(config.get("text_config"))
    architecture = named[0] if isinstance(named, list) and named else config.get("model_type")
    activation = config.get("hidden_act", vision.get("hidden_act"))
    if activation is None and config.get("model_type") in ("clip", "clip_vision_model"):
        activation = "quick_gelu"  # transformers' default for a CLIP
    heads = (
        _count(vision.get("num_attention_heads", config.get("num_attention_heads"))),
        _count(text.get("num_attention_heads")),
    )
    unusual = []
    if config.get("model_type") == "clip":
        heads = (heads[0] or 12, heads[1] or 8)  # transformers' defaults
        unusual = [
            f"{part}.{name} = {printable(fields[name], 60)}"
            for part, fields in (("vision_config", vision), ("text_config", text))
            for name, default in _CLIP_DEFAULTS.items()
            if fields.get(name, default) != default
        ]
        vocabulary = _count(text.get("vocab_size", 49408)) or 0
        end = text.get("eos_token_id", vocabulary - 1)
        if end not in (2, vocabulary - 1):  # both mean the largest id, which is what open_clip pools
            unusual.append(f"text_config.eos_token_id = {printable(end, 60)}")
        if text.get("hidden_act", "quick_gelu") != activation:
            unusual.append(f"text_config.hidden_act = {printable(text.get('hidden_act'), 60)}")
    return ModelConfig(_text(architecture), _text(activation), heads, tuple(unusual), ignored), notes


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _keys(value: object) -> Iterator[str]:
    open_values = [value]
    while open_values:
        node = open_values.pop()
        if isinstance(node, dict):
            yield from node
            open_values += node.values()
        elif isinstance(node, list):
            open_values += node


def _text(value: object) -> str | None:
    return printable(value, 80) if isinstance(value, str) else None


@final
class ShardedWeights(WeightSource):
    """Tensors in several files with an index, which is compared with every shard."""

    def __init__(self, index: Path, suffix: str, *, tensors_only: bool = False) -> None:
        self.label = printable(index)
        self.info = SourceInfo(f"{suffix.lstrip('.')} shards")
        places = _weight_map(index, suffix)
        self._shards: dict[str, WeightSource] = {}
        problems = []
        for name in dict.fromkeys(places.values()):
            if not (index.parent / name).exists():
                problems.append(f"shard {name} is missing")
                continue
            self._shards[name] = open_file(index.parent / name, tensors_only=tensors_only)
        problems += _disagreements(places, self._shards)
        if problems:
            raise InputError(
                "DIR-INDEX",
                f"'{self.label}' and its shards disagree",
                found=[printable(p) for p in problems[:10]],
                more=f"{len(problems) - 10} more" if len(problems) > 10 else "",
                fix="download the directory again",
            )
        self._places = places
        self._tensors = {name: self._shards[shard].tensors[name] for name, shard in places.items()}
        notes = dict.fromkeys(note for shard in self._shards.values() for note in shard.info.notes)
        self.info = replace(self.info, notes=tuple(notes))

    @property
    def aliases(self) -> Mapping[str, str]:
        return {new: first for shard in self._shards.values() for new, first in shard.aliases.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def files(self) -> tuple[ByteFile, ...]:
        return tuple(file for shard in self._shards.values() for file in shard.files)

    def _load(self, name: str) -> Tensor:
        return self._shards[self._places[name]].read(name)


def _weight_map(index: Path, suffix: str) -> dict[str, str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError("DIR-INDEX", f"'{printable(index)}' has no weight_map", fix="download it again")
    for name in places.values():
        plain = isinstance(name, str) and not set(name) & set("/\\:\0") and name.endswith(suffix)
        if not plain or name.startswith(".") or len(name.encode("utf-8", "replace")) > 255:
            raise UnsafeError(
                "DIR-PATH",
                f"'{printable(index)}' points outside of its directory or to another kind of file",
                entry=printable(name),
                expected=f"a plain file name ending in {suffix}",
                fix="download it again from a source you trust",
            )
    return places


def _disagreements(places: dict[str, str], shards: dict[str, WeightSource]) -> list[str]:
    problems = []
    homes: dict[str, list[str]] = {}
    for shard, source in shards.items():
        for name in source.tensors:
            homes.setdefault(name, []).append(shard)
    for name, shard in places.items():
        if shard in shards and shard not in homes.get(name, ()):
            problems.append(f"{name} is not in {shard}")
    for name, found in homes.items():
        if name not in places:
            problems.append(f"{name} in {found[0]} is not in the index")
        elif len(found) > 1:
            problems.append(f"{name} is in {' and '.join(found)}")
    return problems
