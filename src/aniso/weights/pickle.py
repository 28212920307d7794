"""A pickle reader that cannot run anything.

A pickle is a program for a small stack machine. This module is that machine without the two things that
make it dangerous: it never imports what the program names, and it never calls anything. Names become
``Global`` values, objects become ``Inert`` records of what the program wanted to build, and the few
constructors that checkpoints need (ordered dictionaries, tensors as views of a storage) are understood as
data. What remains is a tree of plain values to look for tensors in, and a report of the calls the program
would have made.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import IO, Any, cast, final

from aniso.errors import AnisoError, InputError, printable
from aniso.weights.pickle_budget import Bounded, Budget
from aniso.weights.pickle_known import (
    ENUMERATIONS,
    KNOWN,
    MAX_SIZE,
    enum_member,
    give_state,
    is_suspicious,
    keeps_state,
)
from aniso.weights.pickle_values import (
    Global,
    Inert,
    Storage,
    as_key,
    malformed,
    over_limit,
    storage_of,
)
from aniso.weights.source import PickleReport

# Real checkpoints stay far below each of these: a tensor takes 40 operations and 250 bytes.
MAX_BYTES = 64 << 20
MAX_OPCODES = 4_000_000
MAX_STACK = 1_000_000
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_MAX_NAME = 1_000
_MAX_REPORTED = 200  # letters of a call's name; more than are printed
_MAX_INSIDE = 2  # files of torch.save inside of pickles inside of pickles
_RESULT = "the result of "
_ENDS_EARLY = ("exhausted", "not enough data", "no newline", "remain")
_MARK = object()


@final
class Machine:
    """Runs pickles that share one set of storages, and remembers what they asked for."""

    def __init__(self, budget: Budget | None = None, depth: int = 0) -> None:
        self.storages: dict[str, Storage] = {}
        self.budget = budget or Budget(MAX_OPCODES, MAX_STACK)
        self._depth = depth
        self._calls: dict[str, None] = {}
        self._names: dict[str, Global] = {}
        self._inside: dict[int, tuple[object, object]] = {}

    @property
    def report(self) -> PickleReport:
        calls = dict.fromkeys(map(printable, self._calls))
        return PickleReport(tuple(calls), tuple(printable(n) for n in self._names if n not in KNOWN))

    def run(self, stream: IO[bytes]) -> object:
        """The value one pickle describes; the stream is left just behind it."""
        try:
            return _Run(self).value(Bounded(stream, MAX_BYTES))
        except AnisoError:
            raise
        except ValueError as e:
            if any(sign in str(e) for sign in _ENDS_EARLY):
                raise InputError(
                    "FILE-TRUNCATED", "the pickle ends in the middle", fix="download it again"
                ) from None
            raise malformed(printable(e)) from None
        except (IndexError, KeyError, TypeError, AttributeError, OverflowError, LookupError) as e:
            raise malformed(f"{type(e).__name__}: {printable(e)}") from None
        except (RecursionError, MemoryError):
            raise over_limit("more memory or nesting than it may use") from None

    def name(self, module: object, attribute: object) -> Global:
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise malformed("a global whose name is not text")
        if len(module) + len(attribute) > _MAX_NAME:
            raise over_limit(f"a name of more than {_MAX_NAME} letters")
        full = f"{module}.{attribute}"
        if full not in self._names:
            self.budget.name(len(self._names))
            self._names[full] = Global(full, attribute)
        # the attribute with the most steps decides, whichever way the name was split before
        if attribute.count(".") > self._names[full].attribute.count("."):
            self._names[full] = Global(full, attribute)
        return self._names[full]

    def call(self, function: object, args: object) -> object:
        """What ``function(*args)`` stands for; recorded as a call if it is not plain data."""
        if isinstance(function, Global) and isinstance(args, tuple):
            known = KNOWN.get(function.name)
            if known is not None:
                return known(self, args)
            if function.name.endswith(".getattr") and (named := enum_member(args)):
                return self.name(*named)
            if function.name not in ENUMERATIONS:
                self.would_call(function.name)
            return Inert(function.name, args)
        called = getattr(function, "name", type(function).__name__)
        # results of results keep one name, or it would grow with every call
        self.would_call(name := called if called.startswith(_RESULT) else _RESULT + called)
        return Inert(name, args)

    def copy(self, values: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
        """Values about to be copied."""
        self.budget.copies(len(values))
        return values

    def make(self, cls: Global) -> None:
        """Note that the program makes an object of this class, without calling the class itself."""
        if is_suspicious(cls):
            self.would_call(cls.name)

    def fill(self, target: Inert, method: str) -> None:
        """Note that the program fills an object by a method of its class.

        Pickle fills an object once, items first. The method of an object that has its state already may be
        an attribute that the state gave it.
        """
        if target.state is not None or not keeps_state(target.name):
            self.would_call(f"{target.name}.{method}")

    def would_call(self, name: str) -> None:
        """Record a call for the report."""
        self._calls[name[:_MAX_REPORTED]] = None

    def read_inside(self, data: object) -> object:
        """Read a ``torch.save`` file that lies inside of a pickle; None if that is not possible.

        The calls it would make are the calls of this pickle. One text may be used many times, so each is
        read once.
        """
        if isinstance(data, Inert) and data.name == "_codecs.encode":  # how protocols 0 to 2 write bytes
            data = data.args[0] if isinstance(data.args, tuple) and data.args else None
        if id(data) not in self._inside:
            self._inside[id(data)] = data, self._read_inside(data)
        return self._inside[id(data)][1]

    def _read_inside(self, data: object) -> object:
        if isinstance(data, str) and len(data) <= MAX_BYTES:
            data = data.encode("latin-1", "replace")
        if not isinstance(data, bytes | bytearray) or self._depth >= _MAX_INSIDE:
            return None
        machine = Machine(self.budget, self._depth + 1)
        stream = io.BytesIO(data)
        try:
            magic = machine.run(stream)
            _, _, value, _ = [machine.run(stream) for _ in range(4)] if magic == LEGACY_MAGIC else [None] * 4
        except AnisoError as e:
            if e.code == "PICKLE-LIMIT":
                raise
            return None
        finally:
            self._calls.update(machine._calls)
            for name, target in machine._names.items():
                self._names.setdefault(name, target)
        return value

    def persistent(self, ident: object) -> object:
        match ident:
            case ("storage", Global(name=kind), str(key), str(), int(numel), *view) if (
                view in ([], [None]) and abs(numel) < MAX_SIZE
            ):
                if not (kind.startswith("torch.") and kind.endswith("Storage")):
                    self.would_call(kind)  # old versions of torch make the storage by calling its type
                storage = storage_of(key, kind.rsplit(".", 1)[-1], numel)
                if self.storages.setdefault(key, storage) != storage:
                    raise malformed(f"storage {printable(key)} is declared twice, differently")
                return storage
            case ("module", Global() as kind, *_):
                return kind  # legacy checkpoints keep a module's source beside its class
        raise malformed("a reference to something outside of the file")


class _Run:
    """One pass of the stack machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def value(self, stream: Bounded) -> object:
        charge = self.machine.budget.operation
        for opcode, arg, _ in pickletools.genops(cast(Any, stream)):
            charge(opcode.name, arg, len(self.stack))
            if opcode.name == "STOP":
                return self.stack.pop()
            _OPERATIONS.get(opcode.name, _Run._refuse)(self, arg)
        raise InputError("FILE-TRUNCATED", "the pickle has no end", fix="download it again")

    def _refuse(self, arg: object) -> None:
        raise malformed("an operation that no checkpoint uses")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise malformed("a group that was never opened")

    def top(self, n: int) -> tuple[Any, ...]:
        if len(self.stack) < n:
            raise malformed("fewer values than needed")
        items = tuple(self.stack[-n:])
        del self.stack[-n:]
        return items

    # operations, named after what they do; the table below gives them their opcodes

    def put(self, index: Any) -> None:
        # pickle counts up from zero; chosen numbers could all fall into one slot of the dictionary
        if not 0 <= (at := int(index)) <= MAX_OPCODES:
            raise over_limit(f"more than {MAX_OPCODES} remembered values")
        self.memo[at] = self.stack[-1]

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
        if kwargs and isinstance(cls, Global) and cls.name in KNOWN:
            self.machine.would_call(cls.name)  # no constructor that is known takes names
        self._instance(cls, args if kwargs == {} else (args, kwargs))

    def inst(self, arg: Any) -> None:
        module, _, attribute = arg.partition(" ")
        args = tuple(self.to_mark())
        self.push(self.machine.call(self.machine.name(module, attribute), args))

    def obj(self, _: object) -> None:
        cls, *args = self.to_mark()
        self.push(self.machine.call(cls, tuple(args)))

    def _instance(self, cls: object, args: object) -> None:
        if not isinstance(cls, Global):
            raise malformed("an object of something that is not a class")
        if cls.name in KNOWN and isinstance(args, tuple):
            self.push(KNOWN[cls.name](self.machine, args))
            return
        self.machine.make(cls)
        self.push(Inert(cls.name, args))

    def build(self, _: object) -> None:
        (state,) = self.top(1)
        give_state(self.machine, self.stack[-1], state)

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
            self.machine.fill(target, "extend")
            target.add_items(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise malformed("items for a value that holds none")

    def set_item(self, _: object) -> None:
        self._update(list(self.top(2)))

    def set_items(self, _: object) -> None:
        self._update(self.to_mark())

    def _update(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Inert):
            self.machine.fill(target, "__setitem__")
            target = target.entries()
        if not isinstance(target, dict) or len(flat) % 2:
            raise malformed("entries for a value that holds none")
        self.machine.budget.entries(len(flat) // 2)
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[as_key(key)] = value

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
