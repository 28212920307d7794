"""Where the deltas of each block will be while a composition is used, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from aniso.compose import fast
from aniso.compose.runtime import Runtime, show_bytes
from aniso.compose.slots import Slots
from aniso.errors import ResourceError
from aniso.vectors import Bank

CHUNK = 32 << 20  # bytes read at a time when streaming; one more is read ahead


@final
@dataclass(frozen=True)
class BlockPlan:
    block: str
    nbytes: int
    """Of all vectors' deltas as they are stored."""
    resident: bool


@final
@dataclass(frozen=True)
class Plan:
    """Made before anything large is read; printed by ``--plan``."""

    blocks: tuple[BlockPlan, ...]
    budget: int
    composed: int
    """Bytes that composed weights take at most."""
    passing: frozenset[str]
    """Blocks that are composed whenever their layer runs, and not kept, while coefficients are learned."""
    answers_pass: bool
    """Whether they are not kept either while they only answer, batch after batch."""
    buffers: int
    """Bytes that reading from disk takes beside, if anything is read from there."""
    coefficients: int
    storage: tuple[str, ...]
    fast: bool

    @classmethod
    def of(
        cls,
        bank: Bank,
        slots: Slots,
        runtime: Runtime,
        device: torch.device,
        itemsize: int = 4,
        world: int = 1,
        can_pass: Mapping[str, int] | None = None,
    ) -> Plan:
        """``world`` processes hold a share of the vectors each. Blocks that ``can_pass``, with the size of
        their tensors, are kept composed if there is room for that when vectors have theirs.
        """
        sizes = {s.block.name: -(-bank.block_bytes(s.block.name) // world) for s in slots.blocks}
        budget = runtime.budget(device)
        vectors = {slot.block.name: len(slot.vectors) for slot in slots.blocks}
        read = [min(size, max(CHUNK, size // vectors[name])) for name, size in sizes.items()]
        buffers = 2 * max(read, default=0)  # of one block: a portion that is used, and one that is read
        total = sum(sizes.values())
        kept, passed = _composed_bytes(slots, itemsize, can_pass or {})
        passes = passed < kept and (runtime.stream or kept + total > budget)
        composed = passed if passes else kept
        fits = not runtime.stream and composed + total <= budget
        if not fits and composed + buffers > budget:
            raise _no_room(composed, buffers if runtime.stream else min(total, buffers), budget)
        # vectors that are read from disk would be read for every batch that is only answered
        answers_pass = passes and (fits or kept + buffers > budget)
        if passes and not answers_pass:
            composed = kept
        left = budget - composed - (0 if fits else buffers)
        plans = []
        for name, size in sizes.items():
            resident = not runtime.stream and size <= left
            left -= size if resident else 0
            plans.append(BlockPlan(name, size, resident))
        storage = tuple(dict.fromkeys(str(bank.storage_of(name)) for name in bank))
        return cls(
            tuple(plans),
            budget,
            composed,
            frozenset(can_pass or {}) if passes else frozenset(),
            answers_pass,
            buffers,
            slots.count,
            storage,
            runtime.fast and fast.is_installed(),
        )

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(b.block for b in self.blocks if b.resident)

    @property
    def resident_bytes(self) -> int:
        return sum(b.nbytes for b in self.blocks if b.resident)

    @property
    def streamed_bytes(self) -> int:
        return sum(b.nbytes for b in self.blocks if not b.resident)

    @property
    def memory(self) -> int:
        """Beyond the model and its activations."""
        streams = len(self.resident) < len(self.blocks)
        return self.composed + self.resident_bytes + (self.buffers if streams else 0)

    @property
    def strategy(self) -> str:
        """How vectors and weights are kept, in a line."""
        where = "in memory"
        if len(self.resident) < len(self.blocks):
            amount = show_bytes(self.streamed_bytes) if self.resident else "all"
            where = f"{amount} from disk twice a step"
        weights = (
            f"{len(self.passing)} weights composed anew {self._when}" if self.passing else "weights kept"
        )
        code = "compiled code" if self.fast else "plain torch"
        return f"task vectors as {', '.join(self.storage)}, {where}; {weights}; {code}"

    @property
    def _when(self) -> str:
        return "in every pass" if self.answers_pass else "in every step of learning"

    @property
    def _passing(self) -> str:
        return f", of which {len(self.passing)} are composed anew {self._when}" if self.passing else ""

    def as_dict(self) -> dict[str, object]:
        return {
            "coefficients": self.coefficients,
            "blocks": len(self.blocks),
            "resident_blocks": len(self.resident),
            "composed_bytes": self.composed,
            "passing_blocks": len(self.passing),
            "resident_bytes": self.resident_bytes,
            "streamed_bytes_per_pass": self.streamed_bytes,
            "memory_bytes": self.memory,
            "budget_bytes": self.budget,
            "storage": list(self.storage),
            "compiled_path": self.fast,
        }

    def __str__(self) -> str:
        streamed = len(self.blocks) - len(self.resident)
        lines = [
            f"coefficients   {self.coefficients:,}",
            f"composed       {show_bytes(self.composed)} for {len(self.blocks)} blocks{self._passing}",
            f"in memory      {show_bytes(self.resident_bytes)} of task vectors as {', '.join(self.storage)} "
            f"({len(self.resident)} blocks)",
            f"from disk      {show_bytes(self.streamed_bytes)} twice a step ({streamed} blocks)",
            f"memory         {show_bytes(self.memory)} beyond the model and its activations, "
            f"of {show_bytes(self.budget)} allowed",
        ]
        few_bits = [s for s in self.storage if s != "fp32"]
        if few_bits:
            path = "compiled (numba)" if self.fast else "plain torch; pip install 'aniso[fast]' is faster"
            lines.append(f"few-bit path   {path}")
        return "\n".join(lines)


def _no_room(composed: int, vectors: int, budget: int) -> ResourceError:
    least = composed + vectors
    return ResourceError(
        "PLAN-MEMORY",
        "there is not enough memory for this composition, even if vectors are read from disk",
        expected=f"at least {show_bytes(least)}: composed weights {show_bytes(composed)}, "
        f"task vectors or buffers {show_bytes(vectors)}",
        found=f"{show_bytes(budget)}",
        fix=f"--memory {-(-least // 10**6)}MB, or a smaller model",
    )


def _composed_bytes(slots: Slots, itemsize: int, can_pass: Mapping[str, int]) -> tuple[int, int]:
    """Of all composed weights; and of those that must be kept, with what the others take in passing."""
    sizes = {slot.block.name: itemsize * slot.block.numel for slot in slots.blocks}
    kept = sum(size for name, size in sizes.items() if name not in can_pass)
    # a weight and its gradient; in fewer bits than 32, also what these are made in
    each = 2 * itemsize + (8 if itemsize < 4 else 0)
    return sum(sizes.values()), kept + each * max(can_pass.values(), default=0)
