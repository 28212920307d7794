"""Partitions: which coefficients exist, and which elements of the model each one scales."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import final

from aniso.compose._engine.block_partition import BlockPartition
from aniso.compose.partition_rule import PartitionRule
from aniso.errors import UsageError, printable
from aniso.json_value import JsonValue
from aniso.registry import PARTITIONS
from aniso.vectors import Block, Kind
from aniso.vectors.block import MATRICES

# A family of blocks: its name in --partition, and the kinds that it covers.
FAMILIES: dict[str, frozenset[Kind]] = {
    "weight": MATRICES,
    "attention": frozenset({Kind.ATTENTION}),
    "mlp": frozenset({Kind.MLP}),
    "conv": frozenset({Kind.CONV}),
    "projection": frozenset({Kind.PROJECTION}),
    "pooler": frozenset({Kind.POOLER}),
    "embedding": frozenset({Kind.EMBEDDING}),
    "norm": frozenset({Kind.NORM}),
    "bias": frozenset({Kind.BIAS}),
}


_WRITTEN = re.compile(r"(?P<rule>[^:@]*)(?::(?P<parts>[0-9]{1,9}))?(?:@(?P<families>.*))?")


@final
@dataclass(frozen=True)
class Partition:
    """A rule that divides every block into parts with one coefficient per vector each.

    The rules are the files of ``compose/partitions``. Partitions can be written as text::

        Partition.parse("random:4@weight") == Partition.random(4, seed=0).over("weight")
    """

    rule: str = "blocks"
    """A name in ``aniso.registry.PARTITIONS``: whole, blocks, rows, columns, random or components."""
    families: tuple[str, ...] = ()
    """Only blocks of these families have coefficients; all of them when empty."""
    parts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for family in self.families:
            if family not in FAMILIES:
                raise _usage(f"there is no family of blocks '{printable(family)}'", ", ".join(FAMILIES))
        # in any order they are the same partition
        object.__setattr__(self, "families", tuple(f for f in FAMILIES if f in self.families))
        if self.rule not in PARTITIONS:
            raise _usage(f"there is no partition '{printable(self.rule)}'", _choices())
        if self.parts < 1:
            raise _usage(f"a block cannot be divided into {self.parts} parts", "1 or more")

    @classmethod
    def whole(cls) -> Partition:
        """One coefficient for each vector: task arithmetic."""
        return cls("whole")

    @classmethod
    def blocks(cls) -> Partition:
        """One coefficient for each vector and block: the method of the paper."""
        return cls("blocks")

    @classmethod
    def kinds(cls, *families: str) -> Partition:
        """One coefficient for each vector and block of these families, such as ``weight``; no other moves."""
        if not families:
            raise _usage("no family of blocks was named", ", ".join(FAMILIES))
        return cls("blocks", families)

    @classmethod
    def rows(cls) -> Partition:
        """One coefficient for each row of a weight matrix and each element of a bias."""
        return cls("rows")

    @classmethod
    def columns(cls) -> Partition:
        """One coefficient for each column of a weight matrix; biases and norms have one."""
        return cls("columns")

    @classmethod
    def random(cls, parts: int, seed: int) -> Partition:
        """``parts`` coefficients for each vector and block, each over a random share of its elements."""
        return cls("random", (), parts, seed)

    @classmethod
    def components(cls, count: int) -> Partition:
        """``count`` coefficients for each vector and matrix, one for each of its largest singular components.

        Vectors must be LoRA adapters, or of a bank in storage ``svd:K``.
        """
        return cls("components", (), count)

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> Partition:
        """Read a partition such as ``blocks``, ``rows`` or ``components:8``, maybe with ``@weight,norm``.

        ``seed`` is used by rules that draw at random, and ignored by others.
        """
        match = _WRITTEN.fullmatch(text)
        rule = _rule(match["rule"]) if match and match["rule"] in PARTITIONS else None
        if match is None or rule is None or rule.takes_parts != (match["parts"] is not None):
            raise _usage(f"'{printable(text)}' is no partition", f"{_choices()}, with @weight")
        parts = int(match["parts"] or 1)
        partition = cls(match["rule"], parts=parts, seed=seed if rule.takes_seed else 0)
        return partition.over(*match["families"].split(",")) if match["families"] is not None else partition

    def over(self, *families: str) -> Partition:
        """Return the same rule for the blocks of some families only."""
        return replace(self, families=families)

    @property
    def is_shared(self) -> bool:
        """True if all blocks of a vector share one coefficient."""
        return _rule(self.rule).is_shared

    def covers(self, block: Block) -> bool:
        """Return True if the block has coefficients."""
        return not self.families or any(_is_of(block, family) for family in self.families)

    def for_block(self, block: Block) -> BlockPartition:
        """Return the partition of one block."""
        return _rule(self.rule)(self.parts, self.seed).for_block(block)

    @property
    def note_on_fewer(self) -> str:
        """What to tell about blocks with fewer coefficients than were asked for."""
        return _rule(self.rule).note_on_fewer

    def __str__(self) -> str:
        rule = _rule(self.rule)(self.parts, self.seed).describe()
        return f"{rule}, {' and '.join(self.families)} blocks only" if self.families else rule

    def as_dict(self) -> dict[str, JsonValue]:
        return asdict(self)


def require_rule(name: str) -> str:
    """Return the name of a rule; raises ValueError if no rule has it."""
    if name not in PARTITIONS:
        raise ValueError(f"there is no partition '{printable(name)}'; known: {_choices()}")
    return name


def _rule(name: str) -> type[PartitionRule]:
    rule: type[PartitionRule] = PARTITIONS.get(name)
    return rule


def _choices() -> str:
    *names, last = [f"{name}:K" if _rule(name).takes_parts else name for name in PARTITIONS.names]
    return f"{', '.join(names)} or {last}"


def _is_of(block: Block, family: str) -> bool:
    return block.is_matrix if family == "weight" else block.kind in FAMILIES[family]


def _usage(message: str, expected: str) -> UsageError:
    return UsageError("PARTITION", message, expected=expected, fix="choose one of these")
