"""What a pickle is made of, once nothing in it can run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

from aniso.errors import UnsafeError
from aniso.weights.dtypes import BITS


@dataclass(frozen=True)
class Global:
    """A name the program refers to."""

    name: str


@final
@dataclass(eq=False, slots=True)
class Inert:
    """An object the program wanted to build: what of, from what, with which state."""

    name: str
    args: object = ()
    state: object = None
    items: list[object] = field(default_factory=list)
    mapping: dict[Any, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Storage:
    """A run of numbers that lies outside of the pickle."""

    key: str
    dtype: str | None  # none for types that cannot be computed with, and for untyped storages
    numel: int
    odd_size: int = 1
    """Bytes per element where there is no dtype."""

    @property
    def itemsize(self) -> int:
        return BITS[self.dtype] // 8 if self.dtype else self.odd_size


@dataclass(frozen=True, eq=False)
class TensorView:
    """A tensor as a strided view of a storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements of the storage from the view's first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class OddTensor:
    """A tensor in a form that cannot be read as a plain array."""

    what: str


class _KeyById:
    """Stands for a key that is not a plain value: hashing deep tuples could overflow the C stack."""

    def __str__(self) -> str:
        return "a key that is not a name"


def as_key(key: object) -> object:
    plain = key is None or isinstance(key, str | bytes | int | float)
    return key if plain else _KeyById()


def over_limit(what: str) -> UnsafeError:
    return UnsafeError(
        "PICKLE-LIMIT", f"the pickle wants {what}", fix="ask its author for a safetensors file"
    )


def malformed(what: str) -> UnsafeError:
    return UnsafeError(
        "PICKLE-MALFORMED",
        "the pickle is malformed",
        found=what,
        fix="ask its author for a safetensors file",
    )
