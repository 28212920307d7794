"""Configurations from untrusted files, reduced to numbers, flags and words before a library sees them.

A library that builds what a configuration describes may also fetch what it names: a checkpoint, a backbone, a
repository, a module. So nothing that could name one is passed on. The rules, for every key at any depth:

* Keys that ask for code (``auto_map`` and its like) are dropped, and listed as ignored by ``aniso inspect``.
* Keys for information alone (``_name_or_path``, ``transformers_version``, number formats) are dropped.
* Keys that name a file, a module, a URL or a repository are refused, wherever they stand.
* Keys that the configuration class declares may hold numbers, flags, words and lists of these; dictionaries
  only where the class has a sub-configuration, for rotary embeddings, and for the names of classes.
* Keys that it does not declare may hold numbers and flags, which is what models of older versions need;
  anything else in them is dropped.
* Numbers are bounded by what the weights can hold, so that no loop or allocation outgrows the file.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from aniso.errors import InputError, UnsafeError, printable
from aniso.json_value import JsonObject
from aniso.weights import WeightSource
from aniso.weights.dtypes import BITS

_ASKS_FOR_CODE = frozenset({"auto_map", "trust_remote_code", "_target_", "custom_pipelines"})
_INFORMATION = (
    "transformers_version",
    "tokenizer_class",
    "processor_class",
    "feature_extractor_type",
    "image_processor_type",
    "finetuning_task",
    "task_specific_params",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "model_type",
    "origin_url",
)
_LABELS = ("id2label", "label2id")
_ROTARY = ("rope_parameters", "rope_scaling")

# Refused whatever they hold, unless that is nothing.
_REFERENCES = (
    "backbone",
    "backbone_config",
    "backbone_kwargs",
    "cache_dir",
    "checkpoint_path",
    "gguf_file",
    "hf_hub_id",
    "hf_hub_filename",
    "per_layer_config",
    "pretrained",
    "pretrained_backbone",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_model_args",
    "pretrained_custom_load",
    "pretrained_strict",
    "pretrained_filter_fn",
    "use_pretrained_backbone",
    "use_timm_backbone",
)
# Refused if they hold text; numbers and flags pass (drop_path, use_checkpoint).
_REFERENCE = re.compile(
    r"(?:^|_)(?:path|dir|directory|files?|filename|urls?|uri|hub_id|repo|repo_id|module|checkpoint)$"
)

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}")
_DEEPEST = 4

# Numbers that no loop runs to: ids, bases of a frequency, lengths, vocabularies (whose tables are budgeted).
_NO_COUNT = re.compile(
    r"theta|base|freq|mask|position|length|window|_ids?$|seq|context|_ctx|token|value|vocab"
)
_IMAGE = re.compile(r"^(?:image|img|input)_(?:size|resolution)$")
_FACTOR = re.compile(r"factor|pct|ratio|rate|multiplier|coefficient|dropout")
# Floors: some configurations have numbers for parts that a file lacks, such as BEiT's 8,192 visual words.
_MOST, _MOST_UNCOUNTED, _MOST_FACTOR = 1 << 16, 1 << 53, 1 << 12
_MOST_PIXELS = 4096  # on a side; the largest models in use take 1,024


@final
@dataclass(frozen=True)
class Limits:
    """The largest numbers that a configuration may hold, given the weights beside it."""

    tensors: int
    largest: int
    """The largest dimension of a tensor; every width, number of classes or vocabulary is one in the file."""
    numbers: int

    @classmethod
    def of(cls, source: WeightSource) -> Limits:
        """Return the limits for a file: tensors that share their data count once, and its size bounds all."""
        shared = source.aliases  # computed anew at every access
        own = {name: info for name, info in source.tensors.items() if name not in shared}
        held = [info for info in own.values() if info.numel]
        largest = max((max(info.shape, default=1) for info in held), default=1)
        numbers = sum(info.numel for info in held)
        if source.files and held:  # views that overlap in a pickle are more numbers than the file has bytes
            numbers = min(numbers, 8 * source.nbytes // min(BITS[info.dtype] for info in held))
        return cls(len(own), largest, numbers)

    def most(self, key: str) -> int:
        """Return the largest number that a key may hold."""
        if _FACTOR.search(key):
            return _MOST_FACTOR
        if _IMAGE.search(key):
            return _MOST_PIXELS
        return _MOST_UNCOUNTED if _NO_COUNT.search(key) else max(_MOST, self.largest, self.tensors)


@final
@dataclass(frozen=True)
class Settings:
    """Checks one configuration file: every method raises, naming key and file, for what is not plain data."""

    where: str
    limits: Limits

    def of(self, config: Mapping[str, Any], kind: Any, at: str = "") -> JsonObject:
        """Return the settings to build a configuration of class ``kind`` from."""
        out: JsonObject = {}
        declared, nested = _declared(kind), sub_configurations(kind)
        for key, value in config.items():
            name = f"{at}{key}"
            if _is_dropped(key) and not (key in declared and _only_numbers(value)):  # OPT has a private flag
                continue
            if is_reference(key, value):
                raise self._unsafe(name, value)
            if isinstance(value, dict):
                inner = self._dictionary(key, value, nested, name)
                if inner is not None:
                    out[key] = inner
                elif key in declared and value:
                    raise self._unsafe(name, value)
            elif key in declared:
                out[key] = self.value(name, value)
            elif self._is_plain_number(name, value):
                out[key] = value
            else:
                self.require_no_reference(value, f"{name}.")
        return out

    def _dictionary(
        self, key: str, value: JsonObject, nested: Mapping[str, type], name: str
    ) -> JsonObject | None:
        """Return the settings in a dictionary, or None if the key is not known to hold one."""
        if key in nested:
            return self.of(value, nested[key], f"{name}.")
        if key in _LABELS:
            return self._labels(name, value)
        if key in _ROTARY:
            return self.plain(value, f"{name}.")
        self.require_no_reference(value, f"{name}.")
        return None

    def plain(self, config: Mapping[str, Any], at: str = "", depth: int = 0) -> JsonObject:
        """Return a dictionary of numbers, flags, words, and dictionaries of these."""
        out: JsonObject = {}
        for key, value in config.items():
            if is_reference(key, value):
                raise self._unsafe(f"{at}{key}", value)
            if isinstance(value, dict) and depth < _DEEPEST:
                out[key] = self.plain(value, f"{at}{key}.", depth + 1)
            else:
                out[key] = self.value(f"{at}{key}", value)
        return out

    def value(self, name: str, value: Any, depth: int = 0) -> Any:
        """Return a value that is a number, a flag, a word, None, or a list of these."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._number(name, value)
        if isinstance(value, str) and (not value or _WORD.fullmatch(value)):
            return value
        if isinstance(value, list) and depth < _DEEPEST:
            if len(value) > self.limits.most(""):
                raise self._too_large(name, f"{len(value):,} entries")
            return [self.value(name, entry, depth + 1) for entry in value]
        raise self._unsafe(name, value)

    def require_no_reference(self, config: object, at: str) -> None:
        """Raise an error if a key at any depth names something to be read."""
        for name, key, value in _entries(config, at):
            if is_reference(key, value):
                raise self._unsafe(name, value)

    def _number(self, name: str, value: int | float) -> int | float:
        most = self.limits.most(name.rpartition(".")[2])
        if not math.isfinite(value) or abs(value) > most:
            raise self._too_large(name, printable(value, 40), f"at most {most:,}, given the weights")
        return value

    def _is_plain_number(self, name: str, value: Any) -> bool:
        """True if a value consists of numbers, flags or None within the limits."""
        if isinstance(value, list):
            return len(value) <= self.limits.most("") and all(self._is_plain_number(name, v) for v in value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return math.isfinite(value) and abs(value) <= self.limits.most(name.rpartition(".")[2])
        return value is None or isinstance(value, bool)

    def _labels(self, name: str, value: JsonObject) -> JsonObject:
        """Return class names, which are free text: they are shown and compared, nothing else."""
        if len(value) > self.limits.most(""):
            raise self._too_large(name, f"{len(value):,} classes")
        if not all(isinstance(entry, str | int) for entry in value.values()):
            raise self._unsafe(name, next(e for e in value.values() if not isinstance(e, str | int)))
        return dict(value)

    def _unsafe(self, name: str, value: object) -> UnsafeError:
        return UnsafeError(
            "DIR-CONFIG",
            f"a key in '{self.where}' could name something to load, not only an architecture",
            key=printable(name),
            found=printable(value),
            expected="numbers, true or false, and single words such as gelu",
            fix="remove the key, or name the architecture and give the directory as its weights",
        )

    def _too_large(self, name: str, found: str, expected: str = "") -> InputError:
        return InputError(
            "DIR-CONFIG",
            f"'{self.where}' describes a model far larger than the weights beside it",
            key=printable(name),
            found=found,
            expected=expected,
            fix="use the configuration that belongs to these weights",
        )


def is_reference(key: str, value: object) -> bool:
    """True if a key names a file, a module, a URL or a repository, and holds a value."""
    if not value or _is_dropped(key):
        return False
    if key in _REFERENCES:
        return True
    return _REFERENCE.search(key) is not None and not _only_numbers(value)


def sub_configurations(kind: Any) -> dict[str, type]:
    """Return the sub-configurations of a class of transformers by key, and by their names in old CLIPs."""
    from transformers import PretrainedConfig

    known = {
        key: sub
        for key, sub in dict(getattr(kind, "sub_configs", None) or {}).items()
        if isinstance(sub, type) and issubclass(sub, PretrainedConfig)
    }
    return {**known, **{f"{key}_dict": sub for key, sub in known.items()}}


def _declared(kind: Any) -> Collection[str]:
    """Return the keys that a configuration class declares, under all their names."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    named = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    return fields | named | {"num_labels"}  # which every class takes, and none declares


def _is_dropped(key: str) -> bool:
    """True if a key is ignored: it asks for code, is information, or chooses a number format or a kernel."""
    return (
        key in _ASKS_FOR_CODE
        or key in _INFORMATION
        or key.startswith("_")
        or key.endswith("name_or_path")
        or "implementation" in key
    )


def _only_numbers(value: object) -> bool:
    if isinstance(value, list):
        return all(_only_numbers(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float)


def _entries(value: object, at: str) -> Iterator[tuple[str, str, object]]:
    """Yield every key below a value with its path; class names are not keys."""
    waiting = [(at, value)]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, dict):
            for key, inner in node.items():
                yield f"{prefix}{key}", str(key), inner
                if key not in _LABELS and key not in _ASKS_FOR_CODE:
                    waiting.append((f"{prefix}{key}.", inner))
        elif isinstance(node, list):
            waiting += [(prefix, inner) for inner in node]
