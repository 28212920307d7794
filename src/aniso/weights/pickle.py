"""A pickle reader that cannot run anything.

A pickle is a program for a small stack machine. This module is that machine without the two things that
make it dangerous: it never imports what the program names, and it never calls anything. Names become
``Global`` values, objects become ``Inert`` records of what the program would build, and the few
constructors that checkpoints need (ordered dictionaries, tensors as views of a storage) are understood as
data. The result is a tree of plain values to look for tensors in, and a report of the calls the program would
have made. The opcodes themselves are in ``pickle_stack``.
"""

from __future__ import annotations

import io
from typing import IO, Any, final

from aniso.errors import AnisoError, InputError, printable
from aniso.weights.pickle_budget import Bounded, Budget
from aniso.weights.pickle_known import (
    ENUMERATIONS,
    KNOWN,
    MAX_SIZE,
    enum_member,
    is_suspicious,
    keeps_state,
)
from aniso.weights.pickle_stack import PickleStack
from aniso.weights.pickle_values import Global, Inert, Storage, malformed, over_limit, storage_of
from aniso.weights.source import PickleReport

# Real checkpoints stay far below each of these: a tensor takes 40 operations and 250 bytes.
MAX_BYTES = 64 << 20
MAX_OPCODES = 4_000_000
MAX_STACK = 1_000_000
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_MAX_NAME = 1_000
_MAX_REPORTED = 200  # letters of a call's name, more than are printed
_MAX_INSIDE = 2  # levels of torch.save files inside of pickles
_RESULT = "the result of "
_ENDS_EARLY = ("exhausted", "not enough data", "no newline", "remain")


@final
class Machine:
    """Interprets pickles that share one set of storages, and records the calls they would make."""

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
        """Return the value that one pickle describes; the stream is left just behind it."""
        try:
            return PickleStack(self, MAX_OPCODES).run(Bounded(stream, MAX_BYTES))
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
        """Return what ``function(*args)`` stands for; recorded as a call if it is not plain data."""
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
        """Charge the budget for copying these values, and return them."""
        self.budget.copies(len(values))
        return values

    def make(self, cls: Global) -> None:
        """Record that the program makes an object of this class without calling the class itself."""
        if is_suspicious(cls):
            self.would_call(cls.name)

    def fill(self, target: Inert, method: str) -> None:
        """Record that the program fills an object by a method of its class.

        Pickle fills an object once, items first. The method of an object that has its state already may be
        an attribute that the state gave it.
        """
        if target.state is not None or not keeps_state(target.name):
            self.would_call(f"{target.name}.{method}")

    def would_call(self, name: str) -> None:
        """Record a call for the report."""
        self._calls[name[:_MAX_REPORTED]] = None

    def read_inside(self, data: object) -> object:
        """Read a ``torch.save`` file inside of a pickle; returns None if that is not possible.

        The calls it would make count as calls of this pickle. One text may be used many times, so each is
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
