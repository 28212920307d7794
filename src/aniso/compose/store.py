"""The deltas of a bank while a composition is used: in memory, or read as they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final

import torch

from aniso.compose.plan import CHUNK, Plan
from aniso.compose.sharded import Sharding
from aniso.compose.slots import Slot, Slots
from aniso.compose.stack import LowRankStack, Stack, stacks_of
from aniso.vectors import Bank
from aniso.weights.files import Progress, ReadBuffer

Key = tuple[str, int, bool]
"""Block, portion, and whether it is read for a backward pass, in which blocks follow in another order."""


@final
class Store:
    """Gives the stacks of a block. Resident blocks are read once; the others a piece at a time, one ahead."""

    def __init__(
        self,
        bank: Bank,
        slots: Slots,
        plan: Plan,
        device: torch.device,
        *,
        fast: bool = True,
        sharding: Sharding | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.plan = plan
        self._bank = bank
        self._slots = slots.by_block
        self._device = device
        self._fast = fast
        self._sharding = sharding
        self._resident: dict[str, list[Stack]] = {}
        for block in plan.blocks:
            if block.resident:
                self._resident[block.block] = self._load(self._slots[block.block], bank)
            if progress:
                progress(block.nbytes)
        self._chunks = {
            b.block: _chunks(bank, self._slots[b.block], b.nbytes) for b in plan.blocks if not b.resident
        }
        self._ahead = _ReadAhead()
        self._reading = threading.RLock()
        self._buffers = [ReadBuffer(), ReadBuffer()]  # of what is used, and of what is read ahead

    @property
    def is_resident(self) -> bool:
        """Whether it only gives what it has, so that several compositions may use it at once."""
        return not self._chunks

    def stacks(self, slot: Slot, *, backward: bool = False) -> Iterator[Stack]:
        """All deltas of a block, a stack at a time, each valid until the next."""
        name = slot.block.name
        if name in self._resident:
            yield from self._resident[name]
            return
        with self._reading:  # what is read lies in one of two buffers
            for i in range(len(self._chunks[name])):
                yield from self._ahead.get((name, i, backward), self._read)

    def factored(self, slot: Slot) -> LowRankStack | None:
        """The one low-rank stack that a block consists of, if so."""
        found = [] if self._sharding else self._resident.get(slot.block.name, [])
        return found[0] if len(found) == 1 and isinstance(found[0], LowRankStack) else None

    def _read(self, key: Key) -> list[Stack]:
        name, i, _ = key
        self._buffers.reverse()
        with self._buffers[0].in_use():
            return self._load(self._slots[name], self._chunks[name][i])

    def _load(self, slot: Slot, bank: Bank) -> list[Stack]:
        index = {vector: i for i, vector in enumerate(slot.vectors)}
        stacks = stacks_of(bank.read_block(slot.block.name, exact=False), index)
        if self._sharding:
            stacks = [self._sharding.cut(slot, stack) for stack in stacks]
        stacks = [stack.to(self._device) for stack in stacks]
        for stack in stacks:
            stack.fast = self._fast
        return stacks


def _chunks(bank: Bank, slot: Slot, nbytes: int) -> list[Bank]:
    """The bank in portions of which one block of each fits into a chunk."""
    each = max(1, nbytes // len(slot.vectors))
    size = max(1, CHUNK // each)
    return [bank.only(*slot.vectors[i : i + size]) for i in range(0, len(slot.vectors), size)]


@final
class _ReadAhead:
    """Reads what followed last time while the caller works; a thread of its own, one item ahead."""

    def __init__(self) -> None:
        self._after: dict[Key, Key] = {}
        self._last: Key | None = None
        self._waiting: tuple[Key, Future[list[Stack]]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def get(self, key: Key, read: Callable[[Key], list[Stack]]) -> list[Stack]:
        if self._last is not None:
            self._after[self._last] = key
        self._last = key
        waiting, self._waiting = self._waiting, None
        if self._process != os.getpid():  # a fork has no threads but its own
            self._pool, self._process, waiting = None, os.getpid(), None
        if waiting and waiting[0] == key:
            found = waiting[1].result()
        else:
            if waiting and not waiting[1].cancel():
                wait([waiting[1]])  # one reader at a time, and no more memory than planned
            found = read(key)
        following = self._after.get(key)
        if following is not None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "aniso-read-ahead")
            self._waiting = (following, self._pool.submit(read, following))
        return found
