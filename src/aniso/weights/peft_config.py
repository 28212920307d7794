"""The configuration of a PEFT adapter: rank, alpha and patterns, from which the scale of updates follows.

PEFT does not store the scale of an update. Every field of the configuration is either used, known not to
change the finished weights, or refused by name.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aniso.errors import InputError, printable
from aniso.json_value import JsonValue
from aniso.weights.directory import read_json

CONFIG = "adapter_config.json"

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
_MAX_MATCHES = 2_000_000  # matches of a pattern with a module, about a microsecond each
_MAX_STEPS = 10**10  # of all matches together, at worst; ten seconds at the slowest rate measured
_MAX_NUMBER = 1e6
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class LoraSettings:
    """The fields of the configuration that determine the update."""

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
        """Return the rank of a module's update."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor of B A in a module's update."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def formula(self) -> str:
        """Return the formula of updates for provenance."""
        scale = "alpha/sqrt(r)" if self.rslora else "alpha/r"
        return f"DoRA, {scale}" if self.dora else f"{scale} * B A"


def read_settings(path: Path) -> LoraSettings:
    """Read an adapter's configuration; raises if its update cannot be computed exactly."""
    return parse_settings(read_json(path / CONFIG), printable(path / CONFIG))


def parse_settings(config: Mapping[str, JsonValue], label: str) -> LoraSettings:
    """Return the settings in an adapter's configuration; see ``read_settings``."""
    _refuse_other_kinds(config, label)
    try:
        return LoraSettings(
            r=_number(config["r"], int),
            alpha=_number(config.get("lora_alpha", 8), float),
            rslora=_flag(config.get("use_rslora")),
            dora=_flag(config.get("use_dora")),
            fan_in_fan_out=_flag(config.get("fan_in_fan_out")),
            base_model=_text(config.get("base_model_name_or_path")),
            base_class=_text(_object(config.get("auto_mapping")).get("base_model_class")),
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


def _refuse_other_kinds(config: Mapping[str, JsonValue], label: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise refuse_adapter(label, f"peft_type {printable(kind, 40)}")
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
        raise refuse_adapter(label, f"{printable(name, 60)}: {REFUSED.get(name, 'an unknown setting')}")


def refuse_adapter(label: str, found: str) -> InputError:
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


def _object(value: JsonValue) -> Mapping[str, JsonValue]:
    if not value:
        return {}
    if isinstance(value, Mapping):
        return value
    raise TypeError(f"{value!r} is not an object")


def _number(value: object, kind: type[_Number]) -> _Number:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        raise ValueError(f"{printable(value, 40)} is not a usable number")
    if kind is int and (value <= 0 or int(value) != value):
        raise ValueError(f"{value} is not a rank")
    return kind(value)


def _pattern(value: object, kind: type[_Number]) -> dict[str, _Number]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError("a pattern must be an object")
    return {_checked_pattern(key): _number(number, kind) for key, number in value.items()}


def _checked_pattern(text: str) -> str:
    """Refuse regular expressions that could take for ever to match; PEFT matches patterns as such."""
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


def require_quick(label: str, patterns: list[str], modules: list[str]) -> None:
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


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the module's path, as PEFT does."""
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
