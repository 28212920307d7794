"""The opcodes of pickles as operations on a stack of plain values; nothing is imported or called."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, Protocol, cast, final

from aniso.errors import InputError
from aniso.weights.pickle_budget import Bounded, Budget
from aniso.weights.pickle_known import KNOWN, give_state
from aniso.weights.pickle_values import Global, Host, Inert, as_key, malformed, over_limit

_MARK = object()


class Interpreter(Host, Protocol):
    """The pickle machine as the operations use it."""

    budget: Budget

    def name(self, module: object, attribute: object) -> Global: ...
    def persistent(self, ident: object) -> object: ...


@final
class PickleStack:
    """The stack and memo of one pickle, and the operations on them."""

    def __init__(self, machine: Interpreter, most_memoized: int) -> None:
        self.machine = machine
        self.most_memoized = most_memoized
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: Bounded) -> object:
        """Execute the opcodes of a stream and return the value they leave."""
        charge = self.machine.budget.operation
        for opcode, arg, _ in pickletools.genops(cast(Any, stream)):
            charge(opcode.name, arg, len(self.stack))
            if opcode.name == "STOP":
                return self.stack.pop()
            _OPERATIONS.get(opcode.name, PickleStack._refuse)(self, arg)
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
        if not 0 <= (at := int(index)) <= self.most_memoized:
            raise over_limit(f"more than {self.most_memoized} remembered values")
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
        # a number for a global that is registered elsewhere and cannot be known here
        self.push(self.machine.name("copyreg.extension", str(code)))

    def reduce(self, _: object) -> None:
        self.push(self.machine.call(*self.top(2)))

    def new_object(self, _: object) -> None:
        cls, args = self.top(2)
        self._instance(cls, args)

    def new_object_ex(self, _: object) -> None:
        cls, args, kwargs = self.top(3)
        if kwargs and isinstance(cls, Global) and cls.name in KNOWN:
            self.machine.would_call(cls.name)  # no known constructor takes keyword arguments
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


def _tuple_of(n: int) -> Callable[[PickleStack, Any], None]:
    return lambda stack, _: stack.push(stack.top(n))


def _constant(value: object) -> Callable[[PickleStack, Any], None]:
    return lambda stack, _: stack.push(value)


_ARGUMENTS = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 FLOAT BINFLOAT"
)

_OPERATIONS: dict[str, Callable[[PickleStack, Any], None]] = {
    **dict.fromkeys(_ARGUMENTS.split(), PickleStack.push),
    "PROTO": lambda stack, _: None,
    "FRAME": lambda stack, _: None,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda stack, _: stack.push(tuple(stack.to_mark())),
    "EMPTY_LIST": lambda stack, _: stack.push([]),
    "LIST": lambda stack, _: stack.push(stack.to_mark()),
    "EMPTY_DICT": lambda stack, _: stack.push({}),
    "DICT": PickleStack.dictionary,
    "EMPTY_SET": lambda stack, _: stack.push(Inert("builtins.set")),
    "FROZENSET": lambda stack, _: stack.push(Inert("builtins.frozenset", stack.to_mark())),
    "ADDITEMS": PickleStack.appends,
    "APPEND": PickleStack.append,
    "APPENDS": PickleStack.appends,
    "SETITEM": PickleStack.set_item,
    "SETITEMS": PickleStack.set_items,
    "POP": PickleStack.pop,
    "POP_MARK": PickleStack.pop_mark,
    "DUP": PickleStack.duplicate,
    "PUT": PickleStack.put,
    "BINPUT": PickleStack.put,
    "LONG_BINPUT": PickleStack.put,
    "MEMOIZE": PickleStack.memoize,
    "GET": PickleStack.get,
    "BINGET": PickleStack.get,
    "LONG_BINGET": PickleStack.get,
    "GLOBAL": PickleStack.global_name,
    "STACK_GLOBAL": PickleStack.stack_global,
    "EXT1": PickleStack.extension,
    "EXT2": PickleStack.extension,
    "EXT4": PickleStack.extension,
    "REDUCE": PickleStack.reduce,
    "NEWOBJ": PickleStack.new_object,
    "NEWOBJ_EX": PickleStack.new_object_ex,
    "INST": PickleStack.inst,
    "OBJ": PickleStack.obj,
    "BUILD": PickleStack.build,
    "BINPERSID": PickleStack.persistent,
    "PERSID": PickleStack.persistent_text,
}
