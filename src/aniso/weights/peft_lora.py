"""PEFT adapter directories: which tensors belong together, and the update that they form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.directory import read_object
from aniso.weights.files import ByteFile, RawFile, refuse_unknown
from aniso.weights.peft_config import (
    CONFIG,
    LoraSettings,
    parse_settings,
    read_settings,
    refuse_adapter,
    require_quick,
)
from aniso.weights.safetensors import SafetensorsFile, looks_like_safetensors
from aniso.weights.single import open_file
from aniso.weights.source import ModelConfig, Renamed, SourceInfo, TensorInfo, WeightSource

LORA = "PEFT LoRA"
"""The name of the format."""
_FILES = ("adapter_model.safetensors", "adapter_model.bin")

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
    """The tensor of DoRA's row norms."""
    bias: str | None = None


@final
class PeftAdapter(WeightSource):
    """A LoRA adapter: its tensors, the updates they form, and tensors that replace the base's."""

    def __init__(
        self, label: str, settings: LoraSettings, source: WeightSource, info: SourceInfo, config: ByteFile
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
        info = SourceInfo(LORA, tuple(notes), source.info.pickle, ModelConfig(), home=path)
        return cls(label, settings, source, info, RawFile(path / CONFIG))

    @classmethod
    def of_files(cls, label: str, config: ByteFile, weights: ByteFile) -> PeftAdapter:
        """Return the adapter in a configuration and a safetensors file, wherever they are stored."""
        settings = parse_settings(read_object(config), label)
        if not looks_like_safetensors(weights.head(16)):
            raise refuse_unknown(weights)
        info = SourceInfo(LORA, (f"update computed as {settings.formula()}",))
        return cls(label, settings, SafetensorsFile(weights), info, config)

    def under(self, names: Mapping[str, str], info: SourceInfo) -> PeftAdapter:
        """Return the adapter with other names for its tensors; tensors without one are left out."""
        return PeftAdapter(self.label, self.settings, Renamed(self._source, names, info), info, self._config)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    @property
    def files(self) -> tuple[ByteFile, ...]:
        return (*self._source.files, self._config)  # alpha decides the update as much as the factors do

    def prefetch(self, names: Iterable[str]) -> None:
        self._source.prefetch(names)

    def _load(self, name: str) -> Tensor:
        return self._source.read(name)

    def _sort_keys(self) -> tuple[tuple[LoraUpdate, ...], dict[str, str]]:
        """Group the adapter's tensors by module; tensors that are no factors replace tensors of the base."""
        parts: dict[str, dict[str, str]] = {}
        replacements: dict[str, str] = {}
        for key in self.tensors:
            match = _LORA_KEY.match(key)
            if match is None:
                if replacements.setdefault(_base_name(key), key) != key:
                    raise self._twice(key, replacements[_base_name(key)])
                continue
            if ".base_layer.out_proj" in match["module"]:
                raise refuse_adapter(
                    self.label,
                    "LoRA on torch's MultiheadAttention: PEFT up to 0.21 adds its output projection's update "
                    "twice (peft pull request 3774), so the file alone does not tell the model",
                )
            # an adapter's name may stand between the part and ".weight"
            suffix = ".bias" if (match["rest"] or "").split(".")[-1] == "bias" else ""
            found = parts.setdefault(_base_name(match["module"]), {})
            if found.setdefault(match["part"] + suffix, key) != key:
                raise self._twice(key, found[match["part"] + suffix])
        require_quick(self.label, [*self.settings.rank_pattern, *self.settings.alpha_pattern], list(parts))
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


def _base_name(key: str) -> str:
    """Return the name of a tensor or module in the model that the adapter was trained on."""
    key = key.removeprefix("base_model.model.")
    key = key.replace(".base_layer.", ".").removesuffix(".base_layer")
    return re.sub(r"\.modules_to_save(\.default)?\.", ".", key)
