"""Provides the deltas of a bank to a composition: from memory, or read from disk as they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final

import torch

from aniso.compose._engine.coefficient_index import BlockCoefficients, CoefficientIndex
from aniso.compose._engine.delta_stack import DeltaStack
from aniso.compose._engine.low_rank_stack import LowRankStack
from aniso.compose._engine.sharded import Sharding
from aniso.compose._engine.stacking import stack_deltas
from aniso.compose.plan import CHUNK, Plan
from aniso.vectors import Bank
from aniso.weights.files import Progress, ReadBuffer

Key = tuple[str, int, bool]
"""Block, chunk, and whether it is read for a backward pass, which takes blocks in another order."""


@final
class DeltaStore:
    """Provides the stacks of each block.

    Resident blocks are read once; the others a chunk at a time, with one more read ahead.
    """

    def __init__(
        self,
        bank: Bank,
        index: CoefficientIndex,
        plan: Plan,
        device: torch.device,
        *,
        fast: bool = True,
        sharding: Sharding | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.plan = plan
        self._bank = bank
        self._entries = index.by_block
        self._device = device
        self._fast = fast
        self._sharding = sharding
        self._resident: dict[str, list[DeltaStack]] = {}
        for block in plan.blocks:
            if block.resident:
                self._resident[block.block] = self._load(self._entries[block.block], bank)
            if progress:
                progress(block.nbytes)
        self._chunks = {
            b.block: _chunks(bank, self._entries[b.block], b.nbytes) for b in plan.blocks if not b.resident
        }
        self._ahead = _ReadAhead()
        self._reading = threading.RLock()
        self._buffers = [ReadBuffer(), ReadBuffer()]  # one chunk is used while the next is read

    @property
    def is_resident(self) -> bool:
        """True if nothing is read any more, so that several compositions may share the store."""
        return not self._chunks

    def stacks(self, entry: BlockCoefficients, *, backward: bool = False) -> Iterator[DeltaStack]:
        """Yield all deltas of a block, a stack at a time, each valid until the next."""
        name = entry.block.name
        if name in self._resident:
            yield from self._resident[name]
            return
        with self._reading:  # two buffers serve all readers
            for i in range(len(self._chunks[name])):
                yield from self._ahead.get((name, i, backward), self._read)

    def low_rank_stack(self, entry: BlockCoefficients) -> LowRankStack | None:
        """Return the stack of a resident block that consists of one low-rank stack, else None."""
        stacks = [] if self._sharding else self._resident.get(entry.block.name, [])
        return stacks[0] if len(stacks) == 1 and isinstance(stacks[0], LowRankStack) else None

    def _read(self, key: Key) -> list[DeltaStack]:
        name, i, _ = key
        self._buffers.reverse()
        with self._buffers[0].in_use():
            return self._load(self._entries[name], self._chunks[name][i])

    def _load(self, entry: BlockCoefficients, bank: Bank) -> list[DeltaStack]:
        row_of = {vector: i for i, vector in enumerate(entry.vectors)}
        stacks = stack_deltas(entry, bank.read_block(entry.block.name, exact=False), row_of)
        if self._sharding:
            stacks = [self._sharding.cut(entry, stack) for stack in stacks]
        stacks = [stack.to(self._device) for stack in stacks]
        for stack in stacks:
            stack.fast = self._fast
        return stacks


def _chunks(bank: Bank, entry: BlockCoefficients, nbytes: int) -> list[Bank]:
    """Return the bank in groups of vectors whose deltas of the block fit into a chunk."""
    each = max(1, nbytes // len(entry.vectors))
    size = max(1, CHUNK // each)
    return [bank.only(*entry.vectors[i : i + size]) for i in range(0, len(entry.vectors), size)]


@final
class _ReadAhead:
    """Reads the chunk that followed last time, in a thread of its own, while the caller works."""

    def __init__(self) -> None:
        self._after: dict[Key, Key] = {}
        self._last: Key | None = None
        self._waiting: tuple[Key, Future[list[DeltaStack]]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def get(self, key: Key, read: Callable[[Key], list[DeltaStack]]) -> list[DeltaStack]:
        if self._last is not None:
            self._after[self._last] = key
        self._last = key
        waiting, self._waiting = self._waiting, None
        if self._process != os.getpid():  # threads do not survive a fork
            self._pool, self._process, waiting = None, os.getpid(), None
        if waiting and waiting[0] == key:
            stacks = waiting[1].result()
        else:
            if waiting and not waiting[1].cancel():
                wait([waiting[1]])  # one reader at a time, and no more memory than planned
            stacks = read(key)
        following = self._after.get(key)
        if following is not None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "aniso-read-ahead")
            self._waiting = (following, self._pool.submit(read, following))
        return stacks
