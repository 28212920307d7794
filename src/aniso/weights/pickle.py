"""A pickle reader that cannot run anything.

A pickle is a program for a small stack machine. This module is that machine without the two things that
make it dangerous: it never imports what the program names, and it never calls anything. Names become
``Global`` values, objects become ``Inert`` records of what the program wanted to build, and the few
constructors that checkpoints need (ordered dictionaries, tensors as views of a storage) are understood as
data. What remains is a tree of plain values to look for tensors in, and a report of the calls the program
would have made.
"""

from __future__ import annotations

import itertools
import math
import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, cast, final

from aniso.errors import AnisoError, InputError, UnsafeError, printable
from aniso.weights.dtypes import BITS
from aniso.weights.source import PickleReport

# Real checkpoints stay two orders of magnitude below each of these.
MAX_BYTES = 64 << 20
MAX_OPCODES = 4_000_000
MAX_STACK = 1_000_000
_MAX_NAME = 1_000
_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63
_RESULT = "the result of "
_ENDS_EARLY = ("exhausted", "not enough data", "no newline", "remain")


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


class _Mark:
    pass


_MARK = _Mark()


class _KeyById:
    """Stands for a key that is not a plain value: hashing deep tuples could overflow the C stack."""


class _Bounded:
    """A stream that stops a pickle from reading on for ever."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = MAX_BYTES

    def _take(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def read(self, n: int) -> bytes:
        if n > self._left:
            raise _limit(f"more than {MAX_BYTES} bytes")
        return self._take(self._stream.read(n))

    def readline(self) -> bytes:
        line = self._stream.readline(self._left + 1)
        if len(line) > self._left:
            raise _limit(f"more than {MAX_BYTES} bytes")
        return self._take(line)

    def tell(self) -> int:
        return self._stream.tell()


@final
class Machine:
    """Runs pickles that share one set of storages, and remembers what they asked for."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}
        self._calls: dict[str, None] = {}
        self._names: dict[str, None] = {}
        self._copied = 0

    @property
    def report(self) -> PickleReport:
        return PickleReport(tuple(self._calls), tuple(n for n in self._names if n not in _KNOWN))

    def run(self, stream: IO[bytes]) -> object:
        """The value one pickle describes; the stream is left just behind it."""
        try:
            return _Run(self).value(_Bounded(stream))
        except AnisoError:
            raise
        except ValueError as e:
            if any(sign in str(e) for sign in _ENDS_EARLY):
                raise InputError(
                    "FILE-TRUNCATED", "the pickle ends in the middle", fix="download it again"
                ) from None
            raise _malformed(printable(e)) from None
        except (IndexError, KeyError, TypeError, AttributeError, OverflowError, LookupError) as e:
            raise _malformed(f"{type(e).__name__}: {printable(e)}") from None
        except (RecursionError, MemoryError):
            raise _limit("more memory or nesting than it may use") from None

    def name(self, module: object, attribute: object) -> Global:
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise _malformed("a global whose name is not text")
        if len(module) + len(attribute) > _MAX_NAME:
            raise _limit(f"a name of more than {_MAX_NAME} letters")
        full = f"{module}.{attribute}"
        self._names[printable(full)] = None
        return Global(full)

    def call(self, function: object, args: object) -> object:
        """What ``function(*args)`` stands for; recorded if it is not plain data."""
        if isinstance(function, Global) and isinstance(args, tuple):
            known = _KNOWN.get(function.name)
            if known is not None:
                return known(self, args)
            if function.name.endswith(".getattr") and (named := _attribute(args)):
                return self.name(*named)
            name = function.name
        else:
            called = getattr(function, "name", type(function).__name__)
            # results of results keep one name, or it would grow with every call
            name = called if called.startswith(_RESULT) else _RESULT + called
            self._calls[printable(name)] = None
            return Inert(name, args)
        self.build(name)
        return Inert(name, args)

    def copy(self, values: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
        """Values about to be copied; a short program could copy a long list for ever."""
        self._copied += len(values)
        if self._copied > MAX_OPCODES:
            raise _limit(f"more than {MAX_OPCODES} values copied")
        return values

    def build(self, name: str) -> None:
        """Note that the program makes or fills an object of this name."""
        if _is_suspicious(name):
            self._calls[printable(name)] = None

    def persistent(self, ident: object) -> object:
        match ident:
            case ("storage", Global(name=kind), str(key), _, int(numel), *view) if (
                view in ([], [None]) and abs(numel) < _MAX_SIZE
            ):
                storage = _storage(key, kind.rsplit(".", 1)[-1], numel)
                if self.storages.setdefault(key, storage) != storage:
                    raise _malformed(f"storage {printable(key)} is declared twice, differently")
                return storage
            case ("module", Global() as kind, *_):
                return kind  # legacy checkpoints keep a module's source beside its class
        raise _malformed("a reference to something outside of the file")


class _Run:
    """One pass of the stack machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def value(self, stream: _Bounded) -> object:
        count = itertools.count(1)
        for opcode, arg, _ in pickletools.genops(cast(Any, stream)):
            if next(count) > MAX_OPCODES or len(self.stack) > MAX_STACK:
                raise _limit(f"more than {MAX_OPCODES} operations or {MAX_STACK} open values")
            if opcode.name == "STOP":
                return self.stack.pop()
            _OPERATIONS.get(opcode.name, _Run._refuse)(self, arg)
        raise InputError("FILE-TRUNCATED", "the pickle has no end", fix="download it again")

    def _refuse(self, arg: object) -> None:
        raise _malformed("an operation that no checkpoint uses")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise _malformed("a group that was never opened")

    def top(self, n: int) -> tuple[Any, ...]:
        if len(self.stack) < n:
            raise _malformed("fewer values than needed")
        items = tuple(self.stack[-n:])
        del self.stack[-n:]
        return items

    # operations, named after what they do; the table below gives them their opcodes

    def put(self, index: Any) -> None:
        self.memo[int(index)] = self.stack[-1]

    def memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, index: Any) -> None:
        self.push(self.memo[int(index)])

    def global_name(self, arg: Any) -> None:
        module, _, attribute = arg.partition(" ")
        self.push(self.machine.name(module, attribute))

    def stack_global(self, _: object) -> None:
        self.push(self.machine.name(*self.top(2)))

    def extension(self, code: object) -> None:
        # a number that stands for a global registered elsewhere: no telling what it is
        self.push(self.machine.name("copyreg.extension", str(code)))

    def reduce(self, _: object) -> None:
        self.push(self.machine.call(*self.top(2)))

    def new_object(self, _: object) -> None:
        cls, args = self.top(2)
        self._instance(cls, args)

    def new_object_ex(self, _: object) -> None:
        cls, args, kwargs = self.top(3)
        self._instance(cls, (args, kwargs))

    def inst(self, arg: Any) -> None:
        module, _, attribute = arg.partition(" ")
        args = tuple(self.to_mark())
        self.push(self.machine.call(self.machine.name(module, attribute), args))

    def obj(self, _: object) -> None:
        cls, *args = self.to_mark()
        self.push(self.machine.call(cls, tuple(args)))

    def _instance(self, cls: object, args: object) -> None:
        if not isinstance(cls, Global):
            raise _malformed("an object of something that is not a class")
        if cls.name in _KNOWN and isinstance(args, tuple):
            self.push(_KNOWN[cls.name](self.machine, args))
            return
        self.machine.build(cls.name)
        self.push(Inert(cls.name, args))

    def build(self, _: object) -> None:
        (state,) = self.top(1)
        target = self.stack[-1]
        if isinstance(target, Inert):
            self.machine.build(target.name)
            target.state = state
        elif not isinstance(target, dict | TensorView | Storage):
            # an ordered dictionary may carry attributes (torch's _metadata); nothing else plain does
            raise _malformed("state for a value that has none")

    def persistent(self, _: object) -> None:
        self.push(self.machine.persistent(self.top(1)[0]))

    def persistent_text(self, arg: object) -> None:
        self.push(self.machine.persistent(arg))

    def append(self, _: object) -> None:
        (item,) = self.top(1)
        self._extend([item])

    def appends(self, _: object) -> None:
        self._extend(self.to_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Inert):
            target.items.extend(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise _malformed("items for a value that holds none")

    def set_item(self, _: object) -> None:
        self._update(list(self.top(2)))

    def set_items(self, _: object) -> None:
        self._update(self.to_mark())

    def _update(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        mapping = target.mapping if isinstance(target, Inert) else target
        if not isinstance(mapping, dict) or len(flat) % 2:
            raise _malformed("entries for a value that holds none")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            plain = key is None or isinstance(key, str | bytes | int | float)
            mapping[key if plain else _KeyById()] = value

    def dictionary(self, _: object) -> None:
        flat = self.to_mark()
        self.push({})
        self._update(flat)

    def pop(self, _: object) -> None:
        self.top(1)

    def pop_mark(self, _: object) -> None:
        self.to_mark()

    def duplicate(self, _: object) -> None:
        self.push(self.stack[-1])


def _tuple_of(n: int) -> Callable[[_Run, Any], None]:
    return lambda run, _: run.push(run.top(n))


def _constant(value: object) -> Callable[[_Run, Any], None]:
    return lambda run, _: run.push(value)


_ARGUMENTS = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 FLOAT BINFLOAT"
)

_OPERATIONS: dict[str, Callable[[_Run, Any], None]] = {
    **dict.fromkeys(_ARGUMENTS.split(), _Run.push),
    "PROTO": lambda run, _: None,
    "FRAME": lambda run, _: None,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda run, _: run.push(tuple(run.to_mark())),
    "EMPTY_LIST": lambda run, _: run.push([]),
    "LIST": lambda run, _: run.push(run.to_mark()),
    "EMPTY_DICT": lambda run, _: run.push({}),
    "DICT": _Run.dictionary,
    "EMPTY_SET": lambda run, _: run.push(Inert("builtins.set")),
    "FROZENSET": lambda run, _: run.push(Inert("builtins.frozenset", run.to_mark())),
    "ADDITEMS": _Run.appends,
    "APPEND": _Run.append,
    "APPENDS": _Run.appends,
    "SETITEM": _Run.set_item,
    "SETITEMS": _Run.set_items,
    "POP": _Run.pop,
    "POP_MARK": _Run.pop_mark,
    "DUP": _Run.duplicate,
    "PUT": _Run.put,
    "BINPUT": _Run.put,
    "LONG_BINPUT": _Run.put,
    "MEMOIZE": _Run.memoize,
    "GET": _Run.get,
    "BINGET": _Run.get,
    "LONG_BINGET": _Run.get,
    "GLOBAL": _Run.global_name,
    "STACK_GLOBAL": _Run.stack_global,
    "EXT1": _Run.extension,
    "EXT2": _Run.extension,
    "EXT4": _Run.extension,
    "REDUCE": _Run.reduce,
    "NEWOBJ": _Run.new_object,
    "NEWOBJ_EX": _Run.new_object_ex,
    "INST": _Run.inst,
    "OBJ": _Run.obj,
    "BUILD": _Run.build,
    "BINPERSID": _Run.persistent,
    "PERSID": _Run.persistent_text,
}


# What is known to be plain data


def _ordered_dict(machine: Machine, args: tuple[Any, ...]) -> object:
    pairs = machine.copy(args[0]) if args and isinstance(args[0], list) else []
    return {p[0]: p[1] for p in pairs if len(p) == 2 and isinstance(p[0], str)}


def _view(storage: object, offset: object, shape: object, stride: object, dtype: str | None = None) -> object:
    sizes, steps = _ints(shape), _ints(stride)
    if type(offset) is int and abs(offset) >= _MAX_SIZE:
        raise _malformed("a tensor of impossible size")
    if isinstance(storage, Storage) and type(offset) is int and sizes is not None and steps is not None:
        kind = dtype or storage.dtype
        if kind is not None and len(sizes) == len(steps):
            return TensorView(storage, kind, offset, sizes, steps)
    return Inert("a tensor of an unknown storage")


def _ints(value: object) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list) and len(value) > _MAX_DIMENSIONS:
        raise _malformed("a tensor of impossible size")
    if isinstance(value, tuple | list) and all(type(n) is int for n in value):
        if any(abs(n) >= _MAX_SIZE for n in value):
            raise _malformed("a tensor of impossible size")
        return tuple(value)
    return None


def _rebuild_v2(_: Machine, args: tuple[Any, ...]) -> object:
    # storage, offset, shape, stride, requires_grad, hooks, marks such as "negate when read"
    if len(args) > 6 and args[6]:
        return Inert("a tensor that is changed when read")
    return _view(*args[:4])


def _rebuild_v3(_: Machine, args: tuple[Any, ...]) -> object:
    # storage, offset, shape, stride, requires_grad, hooks, dtype
    kind = args[6].name.rsplit(".", 1)[-1] if isinstance(args[6], Global) else ""
    storage, offset, shape, stride = args[:4]
    return _view(storage, offset, shape, stride, _DTYPE_NAMES.get(kind))


def _rebuild_from_type(machine: Machine, args: tuple[Any, ...]) -> object:
    # function, type, arguments, state: a tensor with attributes
    return machine.call(args[0], args[2])


def _size(machine: Machine, args: tuple[Any, ...]) -> object:
    return tuple(machine.copy(args[0])) if args and isinstance(args[0], tuple | list) else ()


def _inert(name: str) -> Callable[[Machine, tuple[Any, ...]], object]:
    return lambda _, args: Inert(name, args)


def _first(_: Machine, args: tuple[Any, ...]) -> object:
    return args[0]


def _reconstructor(machine: Machine, args: tuple[Any, ...]) -> object:
    cls = args[0]
    if not isinstance(cls, Global):
        raise _malformed("an object of something that is not a class")
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

_KNOWN: dict[str, Callable[[Machine, tuple[Any, ...]], object]] = {
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
    "torch._utils._rebuild_sparse_tensor": _inert("a sparse tensor"),
    "torch._utils._rebuild_qtensor": _inert("a quantised tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _inert("a meta tensor"),
    "torch._utils._rebuild_device_tensor_from_numpy": _inert("a tensor kept as a NumPy array"),
    "torch.storage._load_from_bytes": _inert("a tensor written by pickle.dump"),
}

_NOT_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "__builtin__", "copy_reg", "posix", "nt", "pip", "setuptools", "pkg_resources", "distutils", "commands",
}  # fmt: skip


def _is_suspicious(name: str) -> bool:
    """Whether making or calling this is more than recording an object of some model's class."""
    if name in _KNOWN:
        return False
    if name.split(".", 1)[0] in _NOT_LIBRARIES:
        return True
    # classes are written in capitals, functions are not; a checkpoint has no reason to call functions
    return not name.rsplit(".", 1)[-1].lstrip("_")[:1].isupper()


def _attribute(args: tuple[Any, ...]) -> tuple[str, str] | None:
    """``getattr(SomeEnum, "MEMBER")``, the way Python 3.11 pickles members of enumerations."""
    match args:
        case (Global(name=owner), str(member)) if (
            not _is_suspicious(owner) and owner not in _KNOWN and not member.startswith("_")
        ):
            return owner, member
    return None


def _storage(key: str, kind: str, numel: int) -> Storage:
    if kind in _STORAGE_TYPES:
        return Storage(key, _STORAGE_TYPES[kind], numel)
    # of types that cannot be computed with only the size matters, to find what lies behind
    sizes = {"ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt32Storage": 4}
    return Storage(key, None, numel, sizes.get(kind, 1))


def _limit(what: str) -> UnsafeError:
    return UnsafeError(
        "PICKLE-LIMIT", f"the pickle wants {what}", fix="ask its author for a safetensors file"
    )


def _malformed(what: str) -> UnsafeError:
    return UnsafeError(
        "PICKLE-MALFORMED",
        "the pickle is malformed",
        found=what,
        fix="ask its author for a safetensors file",
    )
