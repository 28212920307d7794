"""The memory and the reading that a merge takes, before anything large is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

from aniso.json_value import JsonObject
from aniso.merge.merge_rule import MergeRule
from aniso.merge.merging import MergeOptions, Merging, is_matrix
from aniso.merge.sources import require_sources
from aniso.merge.units import Unit
from aniso.sizes import show_bytes
from aniso.vectors import Bank

_FLOAT64 = 8
_AVERAGING = 5
"""Float64 tensors that averaging a block holds: the sum, a delta as read and in float64, the result."""


@final
@dataclass(frozen=True)
class MergePlan:
    """What ``aniso bank merge --plan`` prints."""

    rule: str
    vectors: int
    blocks: int
    matrices: int
    """Units that the rule treats as matrices; the others are averaged, unless it works on elements."""
    largest: str
    """The unit that takes most memory."""
    memory_bytes: int
    """An estimate of the peak, beyond the libraries; for low-rank vectors that of full matrices."""
    read_bytes: int
    """Bytes of stored deltas that are read, over all passes."""
    written_bytes: int
    """Bytes of the merged vector as a dense one in fp32; low-rank vectors merged in core space take fewer."""

    def as_dict(self) -> JsonObject:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"rule      {self.rule}",
                f"vectors   {self.vectors}",
                f"blocks    {self.blocks}, {self.matrices} matrices",
                f"memory    about {show_bytes(self.memory_bytes)}, for {self.largest}",
                f"reads     {show_bytes(self.read_bytes)}",
                f"writes    {show_bytes(self.written_bytes)}",
            ]
        )


def plan_merge(bank: Bank, rule: MergeRule, options: MergeOptions | None = None) -> MergePlan:
    """Return the plan of a merge; raises the errors that need no deltas to be read."""
    options = options or MergeOptions()
    require_sources(bank, rule)
    merging = Merging(bank, rule, options)

    def memory(unit: Unit) -> int:
        if not is_matrix(unit, options) and rule.spectral:
            return _FLOAT64 * _AVERAGING * unit.numel
        rows = unit.shape[0] if unit.shape else 1
        return _FLOAT64 * rule.workspace(rows, unit.numel // max(1, rows))

    largest = max(merging.units, key=memory)
    return MergePlan(
        rule=rule.kind,
        vectors=len(bank),
        blocks=len(merging.blocks),
        matrices=sum(is_matrix(unit, options) for unit in merging.units),
        largest=largest.name,
        memory_bytes=memory(largest),
        read_bytes=rule.reads * sum(bank.block_bytes(block.name) for block in merging.blocks),
        written_bytes=4 * sum(block.numel for block in merging.blocks),
    )
