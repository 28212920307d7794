"""The interface of weight sources: named tensors that are read one at a time."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from torch import Tensor

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.dtypes import BITS, FLOATS
from aniso.weights.files import ByteFile, Progress

_MAX_NAME = 1 << 16
_MAX_ELEMENTS = 1 << 40


def check_name(label: str, name: str) -> None:
    """Raise for a tensor name that cannot be printed, hashed and written to a file unchanged."""
    found = ""
    if not name:
        found = "an empty name"
    elif len(name) > _MAX_NAME:
        found = f"a name of {len(name)} letters"
    elif not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        found = "half of a surrogate pair"
    if found:
        raise UnsafeError(
            "WEIGHT-LABEL",
            f"'{label}' has a tensor whose name cannot be used",
            key=printable(name) or "''",
            found=found,
            fix="rename the tensor where the file was made, and save it again",
        )


def is_possible(shape: tuple[int, ...]) -> bool:
    """True if a tensor can have this shape; one without elements may claim any size in other dimensions.

    Strides of such a tensor are products of its sizes, which overflow at 2^63 elements.
    """
    return min(shape, default=0) >= 0 and math.prod(n or 1 for n in shape) <= _MAX_ELEMENTS


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a tensor, known before it is read."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return (self.numel * BITS[self.dtype] + 7) // 8

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


@dataclass(frozen=True)
class PickleReport:
    """The calls that a pickle would make if it were run."""

    calls: tuple[str, ...] = ()
    """Functions it would call that no list of tensors needs."""
    classes: tuple[str, ...] = ()
    """Classes and functions it names; recorded by name, never imported."""


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a model from its directory's configuration; nothing in it is imported."""

    architecture: str | None = None
    activation: str | None = None
    heads: tuple[int | None, int | None] = (None, None)
    """Attention heads of the image and the text tower, which do not follow from shapes."""
    unusual: tuple[str, ...] = ()
    """Settings of a CLIP that change its outputs and that not every library has."""
    ignored: tuple[str, ...] = ()
    """Fields that ask for code, which are ignored."""


@dataclass(frozen=True)
class SourceInfo:
    """The format, notes and configuration of a source."""

    format: str
    notes: tuple[str, ...] = ()
    """Sentences for the user on rules applied in reading."""
    pickle: PickleReport | None = None
    config: ModelConfig = field(default_factory=ModelConfig)
    revision: str | None = None
    """The commit of the hub repository."""
    home: Path | None = None
    """The directory with the model's configuration and tokenizer; None if there is none."""


class WeightSource(ABC):
    """Named tensors that are read one at a time.

    ``label`` names the source in messages; ``tensors`` is known without reading any data.
    """

    label: str
    info: SourceInfo

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name, dtype and shape of every tensor, in file order."""

    @property
    @abstractmethod
    def files(self) -> tuple[ByteFile, ...]:
        """The files that hold the tensors."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that share the data of an earlier name."""
        return {}

    @abstractmethod
    def _load(self, name: str) -> Tensor:
        """Read one tensor whose name is known to exist."""

    @final
    def read(self, name: str) -> Tensor:
        """Read one tensor into new contiguous memory; nothing else is read."""
        if name not in self.tensors:
            raise InputError(
                "WEIGHT-NAME",
                f"'{self.label}' has no tensor '{printable(name)}'",
                fix=f"list its tensors with: aniso inspect --keys '{self.label}'",
            )
        return self._load(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Read tensors ahead if their files are remote; local files are read when they are used."""
        return

    def sha256(self, progress: Progress | None = None) -> str:
        """Return the sha256 of the file, or of the names and hashes of several files."""
        if len(self.files) == 1:
            return self.files[0].sha256(progress)
        digest = hashlib.sha256()
        for file in sorted(self.files, key=lambda f: f.name):
            digest.update(f"{file.name}\0{file.sha256(progress)}\n".encode())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


@final
class Renamed(WeightSource):
    """A source under other names; tensors without a new name are left out."""

    def __init__(self, source: WeightSource, names: Mapping[str, str], info: SourceInfo) -> None:
        """``names`` maps the new name to the name in ``source``."""
        self.label = source.label
        self.info = info
        self._source = source
        self._names = dict(names)
        self._tensors = {new: source.tensors[old] for new, old in self._names.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def files(self) -> tuple[ByteFile, ...]:
        return self._source.files

    @property
    def aliases(self) -> Mapping[str, str]:
        first: dict[str, str] = {}  # by the name in the source, if the tensor is left out here
        out: dict[str, str] = {}
        for new, old in self._names.items():
            same = first.setdefault(self._source.aliases.get(old, old), new)
            if same != new:
                out[new] = same
        return out

    def prefetch(self, names: Iterable[str]) -> None:
        self._source.prefetch(self._names[name] for name in names)

    def _load(self, name: str) -> Tensor:
        return self._source.read(self._names[name])
