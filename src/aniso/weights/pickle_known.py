"""What pickles of checkpoints build, understood as data: dictionaries, tensors, plain values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from aniso.weights.pickle_values import (
    Global,
    Inert,
    OddTensor,
    Storage,
    TensorView,
    as_key,
    malformed,
)

_MAX_DIMENSIONS = 64
MAX_SIZE = 2**63


class Host(Protocol):
    """The machine, as far as constructors need it."""

    def call(self, function: object, args: object) -> object: ...
    def build(self, name: str) -> None: ...
    def copy(self, values: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]: ...


Constructor = Callable[[Host, tuple[Any, ...]], object]


def _ordered_dict(machine: Host, args: tuple[Any, ...]) -> object:
    pairs = machine.copy(args[0]) if args and isinstance(args[0], list) else []
    return {as_key(key): value for key, value in pairs}


def _view(storage: object, offset: object, shape: object, stride: object, dtype: str | None = None) -> object:
    sizes, steps = _ints(shape), _ints(stride)
    if type(offset) is int and abs(offset) >= MAX_SIZE:
        raise malformed("a tensor of impossible size")
    if isinstance(storage, Storage) and type(offset) is int and sizes is not None and steps is not None:
        kind = dtype or storage.dtype
        if kind is not None and len(sizes) == len(steps):
            return TensorView(storage, kind, offset, sizes, steps)
    return OddTensor("a tensor of an unknown storage")


def _ints(value: object) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list) and len(value) > _MAX_DIMENSIONS:
        raise malformed("a tensor of impossible size")
    if isinstance(value, tuple | list) and all(type(n) is int for n in value):
        if any(abs(n) >= MAX_SIZE for n in value):
            raise malformed("a tensor of impossible size")
        return tuple(value)
    return None


def _rebuild_v2(_: Host, args: tuple[Any, ...]) -> object:
    # storage, offset, shape, stride, requires_grad, hooks, marks such as "negate when read"
    if len(args) > 6 and args[6]:
        return OddTensor("a tensor that is changed when read")
    return _view(*args[:4])


def _rebuild_v3(_: Host, args: tuple[Any, ...]) -> object:
    # storage, offset, shape, stride, requires_grad, hooks, dtype
    kind = args[6].name.rsplit(".", 1)[-1] if isinstance(args[6], Global) else ""
    storage, offset, shape, stride = args[:4]
    return _view(storage, offset, shape, stride, _DTYPE_NAMES.get(kind))


def _rebuild_from_type(machine: Host, args: tuple[Any, ...]) -> object:
    # function, type, arguments, state: a tensor with attributes
    return machine.call(args[0], args[2])


def _size(machine: Host, args: tuple[Any, ...]) -> object:
    return tuple(machine.copy(args[0])) if args and isinstance(args[0], tuple | list) else ()


def _odd(what: str) -> Constructor:
    return lambda _, args: OddTensor(what)


def _inert(name: str) -> Constructor:
    return lambda _, args: Inert(name, args)


def _first(_: Host, args: tuple[Any, ...]) -> object:
    return args[0]


def _reconstructor(machine: Host, args: tuple[Any, ...]) -> object:
    cls = args[0]
    if not isinstance(cls, Global):
        raise malformed("an object of something that is not a class")
    machine.build(cls.name)
    return Inert(cls.name, args[2:])


_DTYPE_NAMES = {
    "float32": "F32", "float": "F32", "float64": "F64", "double": "F64", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "uint8": "U8", "int8": "I8", "int16": "I16", "short": "I16", "int32": "I32",
    "int": "I32", "int64": "I64", "long": "I64", "bool": "BOOL", "uint16": "U16", "uint32": "U32",
    "uint64": "U64",
}  # fmt: skip

_STORAGE_TYPES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16", "IntStorage": "I32",
    "LongStorage": "I64", "BoolStorage": "BOOL",
}  # fmt: skip

_PLAIN = [
    "torch.device",
    "torch.dtype",
    "torch.Generator",
    "torch.layout",
    "_codecs.encode",
    "functools.partial",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "collections.Counter",
    "collections.deque",
    "uuid.UUID",
    "decimal.Decimal",
    "fractions.Fraction",
    "datetime.datetime",
    "datetime.date",
    "datetime.time",
    "datetime.timedelta",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "logging.getLogger",
    "numpy.core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.numeric._frombuffer",
    "numpy.core.numeric._frombuffer",
    "torch.serialization._get_layout",
]
_BUILTIN_VALUES = (
    "set frozenset list tuple dict object int float str bytes bytearray slice range complex bool xrange"
)

KNOWN: dict[str, Constructor] = {
    **{name: _inert(name) for name in _PLAIN},
    **{f"{m}.{n}": _inert(n) for m in ("builtins", "__builtin__") for n in _BUILTIN_VALUES.split()},
    **{f"torch.{kind}": _inert(kind) for kind in _STORAGE_TYPES},
    **{f"torch.storage.{kind}": _inert(kind) for kind in ("TypedStorage", "UntypedStorage")},
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": lambda _, args: {},
    "copyreg._reconstructor": _reconstructor,
    "copy_reg._reconstructor": _reconstructor,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": lambda _, args: _view(*args[:4]),
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    # forms of tensor that are not plain arrays: kept by name, refused where one is asked for
    "torch._utils._rebuild_sparse_tensor": _odd("a sparse tensor"),
    "torch._utils._rebuild_qtensor": _odd("a quantised tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _odd("a meta tensor"),
    "torch._utils._rebuild_device_tensor_from_numpy": _odd("a tensor kept as a NumPy array"),
    "torch.storage._load_from_bytes": _odd("a tensor written by pickle.dump"),
}

_NOT_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "__builtin__", "copy_reg", "posix", "nt", "pip", "setuptools", "pkg_resources", "distutils", "commands",
}  # fmt: skip


def is_suspicious(name: str) -> bool:
    """Whether making or calling this is more than recording an object of some model's class."""
    if name in KNOWN:
        return False
    if name.split(".", 1)[0] in _NOT_LIBRARIES:
        return True
    # classes are written in capitals, functions are not; a checkpoint has no reason to call functions
    return not name.rsplit(".", 1)[-1].lstrip("_")[:1].isupper()


def enum_member(args: tuple[Any, ...]) -> tuple[str, str] | None:
    """``getattr(SomeEnum, "MEMBER")``, the way Python 3.11 pickles members of enumerations."""
    match args:
        case (Global(name=owner), str(member)) if (
            not is_suspicious(owner) and owner not in KNOWN and not member.startswith("_")
        ):
            return owner, member
    return None


def storage_of(key: str, kind: str, numel: int) -> Storage:
    if kind in _STORAGE_TYPES:
        return Storage(key, _STORAGE_TYPES[kind], numel)
    # of types that cannot be computed with only the size matters, to find what lies behind
    sizes = {"ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt32Storage": 4}
    return Storage(key, None, numel, sizes.get(kind, 1))
