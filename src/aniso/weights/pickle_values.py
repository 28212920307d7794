"""The values of an interpreted pickle: names, inert objects, storages and tensor views."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from aniso.errors import UnsafeError
from aniso.weights.dtypes import BITS

DTYPE_NAMES = {
    "float32": "F32", "float": "F32", "float64": "F64", "double": "F64", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "uint8": "U8", "int8": "I8", "int16": "I16", "short": "I16", "int32": "I32",
    "int": "I32", "int64": "I64", "long": "I64", "bool": "BOOL", "uint16": "U16", "uint32": "U32",
    "uint64": "U64",
}  # fmt: skip

STORAGE_TYPES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16", "IntStorage": "I32",
    "LongStorage": "I64", "BoolStorage": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Global:
    """A name that the pickle refers to."""

    name: str
    attribute: str = field(default="", compare=False)
    """The part of the name that pickle looks up inside the module; it may have dots."""


@final
@dataclass(eq=False, slots=True)
class Inert:
    """An object that the pickle would build: its class, arguments and state."""

    name: str
    args: object = ()
    state: object = None
    # One byte of a program makes an object, and few objects have items: lists and dictionaries are made
    # when the first item comes, so that a million objects take 80 MB and not 300.
    items: list[object] | None = None
    mapping: dict[Any, object] | None = None

    def add_items(self, items: list[object]) -> None:
        """Append items, as pickle would with ``extend`` or ``add``."""
        self.items = self.items or []
        self.items.extend(items)

    def entries(self) -> dict[Any, object]:
        """Return the dictionary that pickle would fill with ``__setitem__``."""
        if self.mapping is None:
            self.mapping = {}
        return self.mapping


@dataclass(frozen=True)
class Storage:
    """A storage whose data is outside of the pickle."""

    key: str
    dtype: str | None  # none for types that cannot be computed with, and for untyped storages
    numel: int
    odd_size: int = 1
    """Bytes per element if there is no dtype."""

    @property
    def itemsize(self) -> int:
        return BITS[self.dtype] // 8 if self.dtype else self.odd_size


def storage_of(key: str, kind: str, numel: int) -> Storage:
    """Return the storage of a torch type, by the last part of the type's name."""
    if kind in STORAGE_TYPES:
        return Storage(key, STORAGE_TYPES[kind], numel)
    # of types that cannot be computed with only the size matters, to find what lies behind
    sizes = {"ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt32Storage": 4}
    return Storage(key, None, numel, sizes.get(kind, 1))


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
        """The number of storage elements from the view's first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class OddTensor:
    """A tensor in a form that cannot be read as a plain array."""

    what: str


class Host(Protocol):
    """The pickle machine as constructors use it."""

    def call(self, function: object, args: object) -> object: ...
    def make(self, cls: Global) -> None: ...
    def would_call(self, name: str) -> None: ...
    def read_inside(self, data: object) -> object: ...
    def fill(self, target: Inert, method: str) -> None: ...
    def copy(self, values: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]: ...


def is_module_state(state: object) -> bool:
    """True if this is the state of a ``torch.nn.Module``, whose ``__setstate__`` stores it."""
    return isinstance(state, dict) and all(
        isinstance(state.get(k), dict) for k in ("_modules", "_parameters")
    )


class OddKey:
    """Stands for a key that must not be hashed, and equals nothing but itself.

    Hashing a deep tuple could overflow the C stack. Numbers are hashed without a secret, so a file can hold
    many that fall into one slot of a dictionary: 100,000 of them would take minutes to insert.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "a key that is not a name"


_SMALL_NUMBER = 1 << 20  # parameters are numbered from zero; too narrow a range to choose collisions from


def as_key(key: object) -> object:
    """The key as a dictionary may have it: texts, bytes (both hashed with a secret) and small integers."""
    if key is None or isinstance(key, str | bytes):
        return key
    return key if isinstance(key, int) and -_SMALL_NUMBER < key < _SMALL_NUMBER else OddKey()


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
