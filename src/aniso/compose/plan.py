"""The memory plan of a composition: where the deltas and the composed weights of each block are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from aniso.compose._engine.coefficient_index import CoefficientIndex
from aniso.compose._kernels import dispatch
from aniso.compose.runtime import Runtime
from aniso.errors import ResourceError
from aniso.sizes import show_bytes
from aniso.vectors import Bank

CHUNK = 32 << 20  # bytes read at a time when streaming; one more is read ahead


@final
@dataclass(frozen=True)
class BlockPlan:
    """Whether the deltas of one block stay in memory."""

    block: str
    nbytes: int
    """Bytes of all vectors' deltas as they are stored."""
    resident: bool
    """Kept in memory; else read from disk in every pass."""


@final
@dataclass(frozen=True)
class Plan:
    """Where vectors and weights are kept, decided before anything large is read; printed by ``--plan``."""

    blocks: tuple[BlockPlan, ...]
    budget: int
    composed: int
    """Bytes that composed weights take at most."""
    recomputed: frozenset[str]
    """Blocks that are composed whenever their layer runs, and not kept, while coefficients are learned."""
    recomputed_in_evaluation: bool
    """Whether these blocks are not kept in evaluation either."""
    buffers: int
    """Bytes of the buffers for reading from disk, if anything is read from there."""
    coefficients: int
    storage: tuple[str, ...]
    compiler: str | None
    """The package that compiles kernels over few-bit vectors; None for plain torch."""

    @classmethod
    def of(
        cls,
        bank: Bank,
        index: CoefficientIndex,
        runtime: Runtime,
        device: torch.device,
        itemsize: int = 4,
        world: int = 1,
        recomputable: Mapping[str, int] | None = None,
    ) -> Plan:
        """Make the plan for a memory budget: vectors come first, then composed weights.

        ``world`` is the number of processes that share the vectors. ``recomputable`` blocks, with the
        elements of their tensors, are kept composed only if there is room beside the vectors.
        """
        sizes = {s.block.name: -(-bank.block_bytes(s.block.name) // world) for s in index.blocks}
        budget = runtime.budget(device)
        vectors = {entry.block.name: len(entry.vectors) for entry in index.blocks}
        read = [min(size, max(CHUNK, size // vectors[name])) for name, size in sizes.items()]
        buffers = 2 * max(read, default=0)  # of one block: a chunk that is used, and one that is read
        total = sum(sizes.values())
        kept, least = _composed_bytes(index, itemsize, recomputable or {})
        recomputes = least < kept and (runtime.stream or runtime.shard_base or kept + total > budget)
        composed = least if recomputes else kept
        fits = not runtime.stream and composed + total <= budget
        if not fits and composed + buffers > budget:
            raise _no_room(composed, buffers if runtime.stream else min(total, buffers), budget)
        # vectors on disk would be read for every batch of an evaluation
        recomputed_in_evaluation = recomputes and (fits or runtime.shard_base or kept + buffers > budget)
        if recomputes and not recomputed_in_evaluation:
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
            frozenset(recomputable or {}) if recomputes else frozenset(),
            recomputed_in_evaluation,
            buffers,
            index.count,
            storage,
            dispatch.compiler(device) if runtime.fast else None,
        )

    @property
    def fast(self) -> bool:
        """True if compiled kernels are used."""
        return self.compiler is not None

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
        """Bytes beyond the model and its activations."""
        streams = len(self.resident) < len(self.blocks)
        return self.composed + self.resident_bytes + (self.buffers if streams else 0)

    @property
    def strategy(self) -> str:
        """One line on how vectors and weights are kept."""
        where = "in memory"
        if len(self.resident) < len(self.blocks):
            amount = show_bytes(self.streamed_bytes) if self.resident else "all"
            where = f"{amount} from disk twice a step"
        weights = (
            f"{len(self.recomputed)} weights recomputed {self._when}" if self.recomputed else "weights kept"
        )
        code = "compiled code" if self.fast else "plain torch"
        return f"task vectors as {', '.join(self.storage)}, {where}; {weights}; {code}"

    @property
    def _when(self) -> str:
        return "in every pass" if self.recomputed_in_evaluation else "in every training step"

    @property
    def _recomputed(self) -> str:
        return f", of which {len(self.recomputed)} are recomputed {self._when}" if self.recomputed else ""

    def as_dict(self) -> dict[str, object]:
        return {
            "coefficients": self.coefficients,
            "blocks": len(self.blocks),
            "resident_blocks": len(self.resident),
            "composed_bytes": self.composed,
            "recomputed_blocks": len(self.recomputed),
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
            f"composed       {show_bytes(self.composed)} for {len(self.blocks)} blocks{self._recomputed}",
            f"in memory      {show_bytes(self.resident_bytes)} of task vectors as {', '.join(self.storage)} "
            f"({len(self.resident)} blocks)",
            f"from disk      {show_bytes(self.streamed_bytes)} twice a step ({streamed} blocks)",
            f"memory         {show_bytes(self.memory)} beyond the model and its activations, "
            f"of {show_bytes(self.budget)} allowed",
        ]
        few_bits = [s for s in self.storage if s != "fp32" and not s.startswith("svd:")]
        if few_bits:
            path = (
                f"compiled ({self.compiler})"
                if self.fast
                else "plain torch; pip install 'aniso[fast]' is faster"
            )
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


def _composed_bytes(
    index: CoefficientIndex, itemsize: int, recomputable: Mapping[str, int]
) -> tuple[int, int]:
    """Return the bytes of all composed weights, and the bytes if all recomputable ones are recomputed."""
    sizes = {entry.block.name: itemsize * entry.block.numel for entry in index.blocks}
    kept = sum(size for name, size in sizes.items() if name not in recomputable)
    # a weight and its gradient; in fewer bits than 32, also the 32-bit buffers of both
    each = 2 * itemsize + (8 if itemsize < 4 else 0)
    return sum(sizes.values()), kept + each * max(recomputable.values(), default=0)
