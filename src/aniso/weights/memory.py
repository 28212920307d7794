"""Tensors in memory as a weight source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.errors import InputError
from aniso.weights.dtypes import NAMES, as_bytes
from aniso.weights.files import Progress, RawFile
from aniso.weights.source import ModelConfig, SourceInfo, TensorInfo, WeightSource


@final
class TensorMap(WeightSource):
    """A state dict as a weight source; tensors are copied when read."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        label: str = "a state dict",
        activation: str | None = None,
        config: ModelConfig | None = None,
        home: Path | None = None,
    ) -> None:
        """``config`` describes the model beside its tensors; ``activation`` alone is enough."""
        self.label = label
        self.info = SourceInfo("memory", config=config or ModelConfig(activation=activation), home=home)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise InputError(
                    "WEIGHT-DTYPE",
                    f"{label} has a {type(tensor).__name__}",
                    key=name,
                    fix="give a mapping of names to tensors",
                )
            if tensor.dtype not in NAMES or tensor.layout != torch.strided:
                raise InputError(
                    "WEIGHT-DTYPE",
                    f"{label} has an unusual tensor",
                    key=name,
                    found=tensor.dtype,
                    fix="convert it to a dense float tensor",
                )
        self._data = {name: tensor.detach() for name, tensor in tensors.items()}
        self._tensors = {n: TensorInfo(NAMES[t.dtype], tuple(t.shape)) for n, t in self._data.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def files(self) -> tuple[RawFile, ...]:
        return ()

    @property
    def aliases(self) -> Mapping[str, str]:
        first: dict[tuple[object, ...], str] = {}
        out = {}
        for name, t in self._data.items():
            if t.numel() == 0:
                continue
            same = first.setdefault((t.data_ptr(), t.dtype, tuple(t.shape), t.stride()), name)
            if same != name:
                out[name] = same
        return out

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._tensors.values())

    def sha256(self, progress: Progress | None = None) -> str:
        digest = hashlib.sha256()
        for name, info in sorted(self._tensors.items()):
            digest.update(f"{name}\0{info.dtype}\0{info.shape}\n".encode())
            digest.update(as_bytes(self._load(name)))
            if progress:
                progress(info.nbytes)
        return digest.hexdigest()

    def _load(self, name: str) -> Tensor:
        # contiguous_format, so that a transposed parameter is stored in the order of its shape
        return self._data[name].cpu().clone(memory_format=torch.contiguous_format)
