"""PEFT adapter directories: which tensors belong together, and the exact formula of their update.

PEFT does not store the scale of an update; it follows from rank, alpha, patterns and rsLoRA. Every field of
the configuration is either used, known not to matter for the finished weights, or refused by name.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.directory import read_json
from aniso.weights.files import RawFile
from aniso.weights.single import open_file
from aniso.weights.source import ModelConfig, Renamed, SourceInfo, TensorInfo, WeightSource

CONFIG = "adapter_config.json"
LORA = "PEFT LoRA"
"""What the format is called."""
_FILES = ("adapter_model.safetensors", "adapter_model.bin")

USED = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "use_dora",
        "bias",
        "lora_bias",
        "init_lora_weights",
        "base_model_name_or_path",
        "auto_mapping",
    ]
)
# Steer training, loading or which modules get an update, all of which the tensors already show.
WITHOUT_EFFECT = frozenset(
    [
        "task_type",
        "peft_version",
        "revision",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "lora_dropout",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "eva_config",
        "velora_config",
        "runtime_config",
        "qalora_group_size",
        "ensure_weight_tying",
        "loftq_config",
        "corda_config",
        "lora_ga_config",
    ]
)
# Change the update itself.
REFUSED = {
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trainable tokens",
    "layer_replication": "replicated layers",
    "megatron_config": "a Megatron adapter",
    "alora_invocation_tokens": "an activated LoRA (aLoRA), which changes with the prompt",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "an Arrow router, which changes with the input",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
_MAX_PATTERN = 512
_MAX_MATCHES = 2_000_000  # of a pattern with a module, at about a microsecond
_MAX_STEPS = 10**10  # of all matches together at worst; ten seconds at the slowest rate measured
_MAX_NUMBER = 1e6

_LORA_KEY = re.compile(
    r"^(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<rest>.+))?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class LoraUpdate:
    """One module's update; the fields name tensors of the adapter."""

    module: str
    a: str
    b: str
    scale: float
    embedding: bool = False
    magnitude: str | None = None
    """DoRA's lengths of the rows."""
    bias: str | None = None


@dataclass(frozen=True)
class LoraSettings:
    """The fields of the configuration that decide the update."""

    r: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    fan_in_fan_out: bool = False
    base_model: str | None = None
    base_class: str | None = None
    """The class of the model it was trained on, where PEFT recorded it."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def formula(self) -> str:
        scale = "alpha/sqrt(r)" if self.rslora else "alpha/r"
        return f"DoRA, {scale}" if self.dora else f"{scale} * B A"


@final
class PeftAdapter(WeightSource):
    """A LoRA adapter: its tensors, the updates they form, and tensors that replace the base's."""

    def __init__(
        self, label: str, settings: LoraSettings, source: WeightSource, info: SourceInfo, config: RawFile
    ) -> None:
        self.label = label
        self.settings = settings
        self.info = info
        self._source = source
        self._config = config
        self.updates, self.replacements = self._sort_keys()

    @classmethod
    def open(cls, path: Path, name: str | None = None) -> PeftAdapter:
        label, settings = printable(path), read_settings(path)
        present = [name] if name else [name for name in _FILES if (path / name).exists()]
        if not present:
            raise InputError(
                "DIR-EMPTY",
                f"'{label}' is an adapter without weights",
                expected=" or ".join(_FILES),
                fix="download the directory again",
            )
        source = _open_factors(path / present[0])
        notes = [*source.info.notes, f"update computed as {settings.formula()}"]
        if len(present) > 1:
            notes.append(f"{present[0]} used; {present[1]} not used")
        info = SourceInfo(LORA, tuple(notes), source.info.pickle, ModelConfig())
        return cls(label, settings, source, info, RawFile(path / CONFIG))

    def under(self, names: Mapping[str, str], info: SourceInfo) -> PeftAdapter:
        """The adapter with other names for its tensors; tensors without one are left out."""
        return PeftAdapter(self.label, self.settings, Renamed(self._source, names, info), info, self._config)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    @property
    def files(self) -> tuple[RawFile, ...]:
        return (*self._source.files, self._config)  # alpha decides the update as much as the factors do

    def _load(self, name: str) -> Tensor:
        return self._source.read(name)

    def _sort_keys(self) -> tuple[tuple[LoraUpdate, ...], dict[str, str]]:
        """Group the adapter's tensors by module; what is no factor replaces a tensor of the base."""
        parts: dict[str, dict[str, str]] = {}
        replacements: dict[str, str] = {}
        for key in self.tensors:
            match = _LORA_KEY.match(key)
            if match is None:
                if replacements.setdefault(_base_name(key), key) != key:
                    raise self._twice(key, replacements[_base_name(key)])
                continue
            if ".base_layer.out_proj" in match["module"]:
                raise _refusal(
                    self.label,
                    "LoRA on torch's MultiheadAttention: PEFT up to 0.21 adds its output projection's update "
                    "twice (peft pull request 3774), so the file alone does not tell the model",
                )
            # an adapter's name may stand between the part and ".weight"
            suffix = ".bias" if (match["rest"] or "").split(".")[-1] == "bias" else ""
            found = parts.setdefault(_base_name(match["module"]), {})
            if found.setdefault(match["part"] + suffix, key) != key:
                raise self._twice(key, found[match["part"] + suffix])
        _require_quick(self.label, [*self.settings.rank_pattern, *self.settings.alpha_pattern], list(parts))
        return tuple(self._update(module, found) for module, found in parts.items()), replacements

    def _update(self, module: str, found: dict[str, str]) -> LoraUpdate:
        embedding = "lora_embedding_A" in found or "lora_embedding_B" in found
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        missing = [name for name in names if name not in found]
        unknown = sorted(set(found) - {*names, "lora_magnitude_vector", "lora_B.bias"})
        if missing or unknown or ("lora_magnitude_vector" in found) != self.settings.dora:
            raise InputError(
                "LORA-KEYS",
                f"'{self.label}' has an incomplete update",
                module=module,
                found=", ".join(sorted(found)),
                expected=", ".join(names) + (", lora_magnitude_vector" if self.settings.dora else ""),
                fix="download the adapter again",
            )
        a, b = (found[name] for name in names)
        self._check_rank(module, a, b)
        return LoraUpdate(
            module,
            a,
            b,
            self.settings.scale(module),
            embedding,
            found.get("lora_magnitude_vector"),
            found.get("lora_B.bias"),
        )

    def _twice(self, key: str, first: str) -> InputError:
        return InputError(
            "LORA-KEYS",
            f"'{self.label}' has two tensors for one place",
            found=[first, key],
            fix="download the adapter again",
        )

    def _check_rank(self, module: str, a: str, b: str) -> None:
        shape_a, shape_b = self.tensors[a].shape, self.tensors[b].shape
        rank = self.settings.rank(module)
        if len(shape_a) < 2 or len(shape_b) < 2 or not shape_a[0] == shape_b[1] == rank:
            raise InputError(
                "LORA-RANK",
                f"'{self.label}' has a rank that its configuration does not",
                module=module,
                expected=f"rank {rank}",
                found=f"A {shape_a}, B {shape_b}",
                fix=f"check r and rank_pattern in '{self.label}/{CONFIG}'",
            )


def _open_factors(path: Path) -> WeightSource:
    try:
        return open_file(path)
    except UnsafeError as e:
        if e.code == "PICKLE-CALL":  # tensors without their configuration are no adapter: nothing to extract
            e.fix = f"ask its author for {_FILES[0]}"
        raise


def is_factor(key: str) -> bool:
    return _LORA_KEY.match(key) is not None


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).exists()


def read_settings(path: Path) -> LoraSettings:
    """The adapter's configuration, if its update can be computed exactly."""
    config = read_json(path / CONFIG)
    label = printable(path / CONFIG)
    _refuse_other_kinds(config, label)
    try:
        return LoraSettings(
            r=_number(config["r"], int),
            alpha=_number(config.get("lora_alpha", 8), float),
            rslora=_flag(config.get("use_rslora")),
            dora=_flag(config.get("use_dora")),
            fan_in_fan_out=_flag(config.get("fan_in_fan_out")),
            base_model=_text(config.get("base_model_name_or_path")),
            base_class=_text((config.get("auto_mapping") or {}).get("base_model_class")),
            rank_pattern=_pattern(config.get("rank_pattern"), int),
            alpha_pattern=_pattern(config.get("alpha_pattern"), float),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise InputError(
            "LORA-CONFIG",
            f"'{label}' is not a usable LoRA configuration",
            reason=printable(f"{type(e).__name__}: {e}"),
            fix="download the adapter again",
        ) from None


def _refuse_other_kinds(config: dict[str, Any], label: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _refusal(label, f"peft_type {printable(kind, 40)}")
    init = config.get("init_lora_weights", True)
    if init not in _KEEPS_BASE:
        raise InputError(
            "LORA-INIT",
            f"'{label}' was initialised in a way that changes the base",
            found=f"init_lora_weights = {printable(init, 40)}",
            fix="save it again with path_initial_model_for_weight_conversion",
        )
    for name, value in config.items():
        if name in USED or name in WITHOUT_EFFECT or not value:
            continue
        raise _refusal(label, f"{printable(name, 60)}: {REFUSED.get(name, 'an unknown setting')}")


def _refusal(label: str, found: str) -> InputError:
    return InputError(
        "LORA-KIND",
        f"'{label}' is an adapter whose update cannot be computed exactly",
        found=found,
        expected="LoRA, rsLoRA or DoRA",
        fix="merge it with the tool that made it and use the merged checkpoint",
    )


def _flag(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise TypeError(f"{value!r} is not true or false")


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise TypeError(f"{value!r} is not text")


def _number(value: object, kind: type[int] | type[float]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise ValueError(f"{printable(value, 40)} is not a usable number")
    if kind is int and (value <= 0 or int(value) != value):
        raise ValueError(f"{value} is not a rank")
    return kind(value)


def _pattern(value: object, kind: type[int] | type[float]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError("a pattern must be an object")
    return {_checked_pattern(key): _number(number, kind) for key, number in value.items()}


def _checked_pattern(text: str) -> str:
    """PEFT matches these as regular expressions; refuse those that could take for ever."""
    bare = re.sub(r"\\.", "x", text)  # escaped characters repeat nothing
    repeats = re.findall(r"[*+{?]", bare)
    if (
        len(text) > _MAX_PATTERN
        or len(repeats) > 2
        or bare.count("(") > 2
        or re.search(r"\)\s*[*+{?]|\\\d|\(\?", text)
    ):
        raise ValueError(f"pattern {printable(text, 60)!r} is too complex")
    try:
        re.compile(text)
    except re.error as e:
        raise ValueError(f"pattern {printable(text, 60)!r}: {e}") from None
    return text


def _require_quick(label: str, patterns: list[str], modules: list[str]) -> None:
    """Refuse an adapter whose patterns could take minutes to match with all of its modules."""
    longest = min(max(map(len, modules), default=0), _MAX_PATTERN)
    steps = max((module.count(".") + 1 for module in modules), default=0)
    # each pattern is tried behind every dot, and each repetition in it at every place
    ways = sum((1 + p.count("|")) * longest ** len(re.findall(r"[*+{?]", p)) for p in patterns)
    if len(patterns) * len(modules) > _MAX_MATCHES or len(modules) * steps * ways > _MAX_STEPS:
        raise InputError(
            "LORA-CONFIG",
            f"'{label}' has patterns that take too long to match",
            found=f"{len(patterns)} patterns, {len(modules)} modules",
            fix="merge the adapter with PEFT and use the merged checkpoint",
        )


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of the module's path, as PEFT does."""
    if patterns and len(module) > _MAX_PATTERN:  # matching may take time cubic in the length
        raise InputError(
            "LORA-KEYS",
            "a module's name is too long to match patterns",
            module=module,
            fix="merge the adapter with PEFT and use the merged checkpoint",
        )
    for pattern, value in patterns.items():
        if _compiled(pattern).match(module):
            return float(value)
    return float(patterns.get(module, default))  # PEFT takes a literal name, too


def _base_name(key: str) -> str:
    """A tensor's or module's name in the model the adapter was made for."""
    key = key.removeprefix("base_model.model.")
    key = key.replace(".base_layer.", ".").removesuffix(".base_layer")
    return re.sub(r"\.modules_to_save(\.default)?\.", ".", key)
