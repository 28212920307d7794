"""Limits on the cost of reading a pickle: bytes, operations, memory and names.

A pickle makes an object of 200 bytes with one byte, so the size of a file says little about what reading it
costs. Everything that reading allocates is charged here before it is made.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import IO, final

from aniso.weights.pickle_values import over_limit

MAX_MEMORY = 256 << 20
"""Bytes for all values of one file; a state dict of 100,000 tensors is charged 180 MB."""
MAX_NAMES = 20_000
"""Distinct classes and functions one file may name; real checkpoints name fewer than a hundred."""

# Bytes that an operation allocates beside its argument, measured on CPython and rounded up.
_COST: defaultdict[str, int] = defaultdict(
    lambda: 16,
    {
        **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), 96),
        **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST"), 80),
        **dict.fromkeys(("EMPTY_DICT", "DICT"), 80),
        **dict.fromkeys(("EMPTY_SET", "FROZENSET", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "INST", "OBJ"), 200),
        **dict.fromkeys(("BINPERSID", "PERSID", "GLOBAL", "STACK_GLOBAL"), 120),
    },
)

_ENTRY = 100


@final
class Budget:
    """The remaining operations and memory for the pickles of one file."""

    def __init__(self, opcodes: int, stack: int, memory: int = MAX_MEMORY) -> None:
        self._limits = f"more than {opcodes} operations or {stack} open values"
        self._opcodes, self._stack, self._memory = opcodes, stack, memory
        self._copies = opcodes

    def operation(self, name: str, arg: object, open_values: int) -> None:
        """Charge one operation and the memory it allocates."""
        self._opcodes -= 1
        if self._opcodes < 0 or open_values > self._stack:
            raise over_limit(self._limits)
        self._allocate(_COST[name] + (sys.getsizeof(arg) if arg is not None else 0))

    def entries(self, count: int) -> None:
        """Charge entries of a dictionary."""
        self._allocate(_ENTRY * count)

    def copies(self, count: int) -> None:
        """Charge copying of values; a short program could copy a long list very often."""
        self._copies -= count
        if self._copies < 0:
            raise over_limit("more values copied than a checkpoint has")
        self.entries(count)

    def name(self, known: int) -> None:
        """Charge a new name; few texts can be combined to very many names."""
        if known >= MAX_NAMES:
            raise over_limit(f"more than {MAX_NAMES} names")

    def _allocate(self, nbytes: int) -> None:
        self._memory -= nbytes
        if self._memory < 0:
            raise over_limit(f"more than {MAX_MEMORY >> 20} MB of memory")


class Bounded:
    """A stream that raises an error after a number of bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._left = self._limit = limit

    def _take(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data

    def read(self, n: int) -> bytes:
        if n > self._left:
            raise over_limit(f"more than {self._limit} bytes")
        return self._take(self._stream.read(n))

    def readline(self) -> bytes:
        line = self._stream.readline(self._left + 1)
        if len(line) > self._left:
            raise over_limit(f"more than {self._limit} bytes")
        return self._take(line)

    def tell(self) -> int:
        return self._stream.tell()
