"""The constructors in pickled checkpoints that are understood as data: dictionaries, tensors, plain values.

Everything that is not listed here and that runs code of a class when it is unpickled (calling the class,
``__setstate__``, adding items) counts as a call, whatever it is called.

A constructor listed here gives data only if its arguments are data. Python and torch look many methods up on
an object before its class (``keys``, ``items``, ``detach``, ``__torch_function__``), so an object whose
attributes come from the file could run any function that the file names.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from aniso.weights.pickle_values import (
    DTYPE_NAMES,
    STORAGE_TYPES,
    Global,
    Host,
    Inert,
    OddTensor,
    Storage,
    TensorView,
    as_key,
    is_module_state,
    malformed,
)

_MAX_DIMENSIONS = 64
MAX_SIZE = 2**63
_FEW = 16  # arguments; checking more is charged, since one tuple may be the arguments of many calls
_REBUILD = "torch._utils._rebuild_tensor_v2"
_DATA = bool, int, float, str, bytes, bytearray, tuple, list, dict, Storage, TensorView, OddTensor
# types, layouts and quantisation schemes, which torch pickles by name
_TORCH_CONSTANT = re.compile(
    r"torch\.(u?int\d*|b?float\d*\w*|complex\w+|bool|half|double|long|short|q?u?int\w+|sparse_\w+|strided|per_\w+)"
)


Constructor = Callable[[Host, tuple[Any, ...]], object]


def is_harmless(value: object) -> bool:
    """True if the value has no attributes from the file, so that its methods are those of its class."""
    if isinstance(value, Inert):
        # arrays and dtypes of NumPy are built with a state and have no attributes of their own
        known = value.name in KNOWN or value.name in _SHORT_NAMES
        return known and (value.state is None or value.name.startswith("numpy."))
    if isinstance(value, Global):
        return _TORCH_CONSTANT.fullmatch(value.name) is not None
    return value is None or isinstance(value, _DATA)


def _checked(name: str, construct: Constructor) -> Constructor:
    """Return a constructor that records a call if an argument could make it run code."""

    def call(machine: Host, args: tuple[Any, ...]) -> object:
        if not all(map(is_harmless, args if len(args) < _FEW else machine.copy(args))):
            machine.would_call(name)
        return construct(machine, args)

    return call


def check_parts(machine: Host, name: str, args: tuple[Any, ...] | list[Any]) -> None:
    """Record a call unless the arguments, and the elements of those that are sequences, are data."""
    parts = [machine.copy(arg) for arg in args if isinstance(arg, tuple | list)]
    if not all(is_harmless(value) for values in (args, *parts) for value in values):
        machine.would_call(name)


def check_attributes(machine: Host, name: str, state: object) -> None:
    """Record a call if a state gives an object an attribute that can be called, or is no plain state."""
    if not is_harmless(state):
        machine.would_call(f"{name}.__setstate__")
    for part in state if isinstance(state, tuple) else (state,):
        attributes = part.mapping if isinstance(part, Inert) else part
        if isinstance(attributes, dict):
            machine.copy(list(attributes))
            if any(isinstance(value, Global | Inert) for value in attributes.values()):
                machine.would_call(f"{name}.__setstate__")


def give_state(machine: Host, target: object, state: object) -> None:
    """Record the calls that giving a state to a value would make, and keep the state of an object."""
    match target:
        case Inert():
            _fill_object(machine, target, state)
        case dict():  # an ordered dictionary may carry attributes, such as torch's _metadata
            check_attributes(machine, "collections.OrderedDict", state)
        case TensorView() | OddTensor():
            check_attributes(machine, "torch.Tensor", state)
            check_parts(machine, "torch.Tensor.__setstate__", state if isinstance(state, tuple) else ())
        case Storage():
            machine.would_call("torch.storage.TypedStorage.__setstate__")
        case _:
            raise malformed("state for a value that has none")


def _fill_object(machine: Host, target: Inert, state: object) -> None:
    if target.state is not None or not is_module_state(state):
        machine.fill(target, "__setstate__")
    if not is_harmless(state):
        machine.would_call(f"{target.name}.__setstate__")
    if target.name.startswith("torch.optim."):
        _check_optimiser(machine, target.name, state)
    if target.name == "functools.partial":
        check_callable(machine, state[0] if isinstance(state, tuple) and state else None)
    target.state = () if state is None else state


def _check_optimiser(machine: Host, name: str, state: object) -> None:
    """Record a call if an optimiser's ``__setstate__`` could find a function of the file's choice.

    It calls methods of its own and of its values: ``self._patch_step_function()``, ``group.setdefault()``.
    """
    values = machine.copy(list(state.values())) if isinstance(state, dict) else [state]
    groups = [machine.copy(value) for value in values if isinstance(value, list)]
    for value in (inner for several in (values, *groups) for inner in several):
        own = isinstance(value, Inert) and value.name.startswith("torch.optim.")
        if isinstance(value, Global | Inert) and not own:
            machine.would_call(f"{name}.__setstate__")


def _ordered_dict(machine: Host, args: tuple[Any, ...]) -> object:
    pairs = machine.copy(args[0]) if args and isinstance(args[0], list) else []
    return {as_key(key): value for key, value in pairs}


def _view(machine: Host, args: tuple[Any, ...], dtype: str | None = None) -> object:
    storage, offset, shape, stride = args
    sizes, steps = _ints(shape), _ints(stride)
    if type(offset) is int and abs(offset) >= MAX_SIZE:
        raise malformed("a tensor of impossible size")
    if isinstance(storage, Storage) and type(offset) is int and sizes is not None and steps is not None:
        kind = dtype or storage.dtype
        if kind is not None and len(sizes) == len(steps):
            return TensorView(storage, kind, offset, sizes, steps)
    check_parts(machine, _REBUILD, args)
    return OddTensor("a tensor of an unknown storage")


def _ints(value: object) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list) and len(value) > _MAX_DIMENSIONS:
        raise malformed("a tensor of impossible size")
    if isinstance(value, tuple | list) and all(type(n) is int for n in value):
        if any(abs(n) >= MAX_SIZE for n in value):
            raise malformed("a tensor of impossible size")
        return tuple(value)
    return None


def _rebuild_v2(machine: Host, args: tuple[Any, ...]) -> object:
    # storage, offset, shape, stride, requires_grad, hooks, marks such as "negate when read"
    if len(args) > 6 and args[6]:
        check_parts(machine, _REBUILD, (*args[:5], *args[6:]))
        return OddTensor("a tensor that is changed when read")
    return _view(machine, args[:4])


def _rebuild_v3(machine: Host, args: tuple[Any, ...]) -> object:
    # storage, offset, shape, stride, requires_grad, hooks, dtype
    kind = args[6].name.rsplit(".", 1)[-1] if isinstance(args[6], Global) else ""
    return _view(machine, args[:4], DTYPE_NAMES.get(kind))


def _rebuild_from_type(machine: Host, args: tuple[Any, ...]) -> object:
    # function, type, arguments, state: a tensor with attributes
    value = machine.call(args[0], args[2])
    if not isinstance(value, TensorView | OddTensor):
        machine.would_call("torch._tensor._rebuild_from_type_v2")
    if isinstance(args[1], Global):
        machine.make(args[1])
        # the attributes of a subclass of tensors are a dictionary, or a pair of them where it has slots
        parts = args[3] if isinstance(args[3], tuple) and len(args[3]) == 2 else (args[3],)
        stored = all(part is None or isinstance(part, dict) for part in parts)
        if not stored and not keeps_state(args[1].name):
            machine.would_call(f"{args[1].name}.__setstate__")
    check_attributes(machine, "torch.Tensor", args[3])
    return value


def _load_from_bytes(machine: Host, args: tuple[Any, ...]) -> object:
    # a whole file of torch.save in a text, which torch unpickles in turn
    value = machine.read_inside(args[0])
    if isinstance(value, Storage | TensorView | OddTensor):
        return OddTensor("a tensor written by pickle.dump")
    if value is None:
        machine.would_call("torch.storage._load_from_bytes")
    return Inert("a file inside of the pickle")


def _size(machine: Host, args: tuple[Any, ...]) -> object:
    return tuple(machine.copy(args[0])) if args and isinstance(args[0], tuple | list) else ()


def _odd(name: str, what: str) -> Constructor:
    def construct(machine: Host, args: tuple[Any, ...]) -> object:
        check_parts(machine, name, args)
        return OddTensor(what)

    return construct


def _inert(name: str) -> Constructor:
    return lambda _, args: Inert(name, args)


def _parameter(machine: Host, args: tuple[Any, ...]) -> object:
    # data, requires_grad, hooks, attributes: torch calls data.detach()
    if not isinstance(args[0], TensorView | OddTensor):
        machine.would_call("torch._utils._rebuild_parameter")
    if len(args) > 3:
        check_attributes(machine, "torch.nn.Parameter", args[3])
    return args[0]


def check_callable(machine: Host, target: object) -> None:
    """Record a call of what a partial or a default factory would call, unless that makes an object."""
    if isinstance(target, Inert) and target.name == "functools.partial":
        return  # checked when it was made
    if not isinstance(target, Global):
        machine.would_call("functools.partial")
    elif is_suspicious(target):
        machine.would_call(target.name)


def _partial(machine: Host, args: tuple[Any, ...]) -> object:
    check_callable(machine, args[0])
    return Inert("functools.partial", args)


def _default_dict(machine: Host, args: tuple[Any, ...]) -> object:
    if args and args[0] is not None:
        check_callable(machine, args[0])
    if not all(map(is_harmless, args[1:2])):
        machine.would_call("collections.defaultdict")
    return {}


def _array(machine: Host, args: tuple[Any, ...]) -> object:
    # class, shape, type: an object of that class, which its state fills
    cls = args[0]
    if not isinstance(cls, Global):
        raise malformed("an array of something that is not a class")
    machine.make(cls)
    check_parts(machine, "numpy.ndarray", args[1:])
    return Inert(cls.name, args)


def _reconstructor(machine: Host, args: tuple[Any, ...]) -> object:
    # class, base, state: makes an object by base.__new__(class, state), then base.__init__(object, state)
    cls, base = args[0], args[1]
    if not isinstance(cls, Global):
        raise malformed("an object of something that is not a class")
    machine.make(cls)
    if not isinstance(base, Global):
        machine.would_call("copyreg._reconstructor")
    elif base.name not in _BUILTINS:
        machine.would_call(f"{base.name}.__init__")
    if not all(map(is_harmless, args[2:3])):
        machine.would_call(f"{cls.name}.__init__")
    return Inert(cls.name, args[2:])


_PLAIN = [
    "torch.device",
    "torch.dtype",
    "torch.Generator",
    "torch.layout",
    "_codecs.encode",
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
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.numeric._frombuffer",
    "numpy.core.numeric._frombuffer",
    "torch.serialization._get_layout",
]
_ODD = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantised tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor",
    "_rebuild_device_tensor_from_numpy": "a tensor kept as a NumPy array",
}
_BUILTIN_VALUES = (
    "set frozenset list tuple dict object int float str bytes bytearray slice range complex bool xrange long"
)

_BUILTINS = {f"{m}.{n}": n for m in ("builtins", "__builtin__") for n in _BUILTIN_VALUES.split()}

KNOWN: dict[str, Constructor] = {
    **{name: _checked(name, _inert(name)) for name in _PLAIN},
    **{name: _checked(name, _inert(kind)) for name, kind in _BUILTINS.items()},
    **{f"torch.{kind}": _checked(f"torch.{kind}", _inert(kind)) for kind in STORAGE_TYPES},
    **{f"torch.storage.{k}": _checked(f"torch.{k}", _inert(k)) for k in ("TypedStorage", "UntypedStorage")},
    **{f"{m}.multiarray._reconstruct": _array for m in ("numpy.core", "numpy._core")},
    "functools.partial": _partial,
    "collections.OrderedDict": _checked("collections.OrderedDict", _ordered_dict),
    "collections.defaultdict": _default_dict,
    "copyreg._reconstructor": _reconstructor,
    "copy_reg._reconstructor": _reconstructor,
    "torch.Size": _checked("torch.Size", _size),
    "torch._utils._rebuild_tensor": lambda machine, args: _view(machine, args[:4]),
    _REBUILD: _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    # tensors that are not plain arrays: recorded by name, refused when one is read
    **{f"torch._utils.{name}": _odd(f"torch._utils.{name}", what) for name, what in _ODD.items()},
    "torch.storage._load_from_bytes": _load_from_bytes,
}

ENUMERATIONS = frozenset({"torchvision.transforms.functional.InterpolationMode"})
"""Enumerations are pickled as a call of their class; these are in many pickled image encoders."""

_NOT_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "__builtin__", "copy_reg", "posix", "nt", "pip", "setuptools", "pkg_resources", "distutils", "commands",
}  # fmt: skip


# Classes whose methods only store what they are given, and that real checkpoints hold beside their weights.
_KEEPS_STATE = re.compile(
    r"""
    torch\.(nn|optim)\.[\w.]+                                      # parts of modules; optimisers
    | torch\.(_tensor\.)?Tensor | torchvision\.tv_tensors\.[\w.]+
    | torchvision\.transforms\.[\w.]+ | open_clip\.transform\.\w+    # preprocessing
    | transformers\.(models\.\w+\.|generation\.)?configuration_\w+\.\w+Config
    | omegaconf\.(dictconfig|listconfig|base|nodes)\.\w+
    | (pytorch_lightning|lightning\.pytorch)\.utilities\.parsing\.AttributeDict
    | (lightning_fabric|lightning\.fabric)\.utilities\.data\.AttributeDict
    | easydict\.EasyDict | yacs\.config\.CfgNode | munch\.Munch
    """,
    re.VERBOSE,
)


_SHORT_NAMES = frozenset({*_BUILTINS.values(), *STORAGE_TYPES, "TypedStorage", "UntypedStorage"})


@functools.lru_cache(maxsize=1024)
def keeps_state(name: str) -> bool:
    """True if ``__setstate__`` and item assignment of this class are known only to store values."""
    if name == "logging.getLogger":
        return False  # every part of a program shares its loggers
    return name in KNOWN or name in _SHORT_NAMES or _KEEPS_STATE.fullmatch(name) is not None


def is_suspicious(target: Global) -> bool:
    """True if making an instance of this could be more than making an object of a model's class.

    Pickle looks an attribute with dots up step by step. Each step must be a class, written with a capital;
    a step in small letters is a module or a function, and ``_utils.subprocess.Popen`` of an innocent
    library is ``subprocess.Popen``.
    """
    if target.name in KNOWN:
        return False
    if target.name.split(".", 1)[0] in _NOT_LIBRARIES:
        return True
    attribute = target.attribute or target.name.rsplit(".", 1)[-1]
    return not all(step.lstrip("_")[:1].isupper() for step in attribute.split("."))


def enum_member(args: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return module and attribute of ``getattr(SomeEnum, "MEMBER")``, as Python 3.11 pickles enumerations."""
    match args:
        case (Global(name=name) as owner, str(member)) if (
            not is_suspicious(owner) and name not in KNOWN and not member.startswith("_")
        ):
            attribute = owner.attribute or name.rsplit(".", 1)[-1]
            return name.removesuffix(f".{attribute}"), f"{attribute}.{member}"
    return None
