"""Where the deltas of each block will be while a composition is used, and what that takes."""

from __future__ import annotations

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
    """Bytes of the composed weights."""
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
    ) -> Plan:
        """``world`` processes hold a share of the vectors each."""
        sizes = {s.block.name: -(-bank.block_bytes(s.block.name) // world) for s in slots.blocks}
        composed = sum(itemsize * slot.block.numel for slot in slots.blocks)
        budget = runtime.budget(device)
        vectors = {slot.block.name: len(slot.vectors) for slot in slots.blocks}
        read = [min(size, max(CHUNK, size // vectors[name])) for name, size in sizes.items()]
        buffers = 2 * max(read, default=0)  # of one block: a portion that is used, and one that is read
        total = sum(sizes.values())
        fits = not runtime.stream and composed + total <= budget
        least = composed + (buffers if runtime.stream else min(total, buffers))
        if not fits and composed + buffers > budget:
            raise ResourceError(
                "PLAN-MEMORY",
                "there is not enough memory for this composition, even if vectors are read from disk",
                expected=f"at least {show_bytes(least)}: composed weights {show_bytes(composed)}, "
                f"task vectors or buffers {show_bytes(least - composed)}",
                found=f"{show_bytes(budget)}",
                fix=f"--memory {-(-least // 10**6)}MB, or a smaller model",
            )
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

    def as_dict(self) -> dict[str, object]:
        return {
            "coefficients": self.coefficients,
            "blocks": len(self.blocks),
            "resident_blocks": len(self.resident),
            "composed_bytes": self.composed,
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
            f"composed       {show_bytes(self.composed)} for {len(self.blocks)} blocks",
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
