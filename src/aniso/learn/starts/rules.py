"""Starts at a merge rule: as coefficients where the rule is a sum, else as one more vector."""

from __future__ import annotations

from typing import Unpack

from aniso.compose import Partition
from aniso.learn.starts.profiles import constant
from aniso.learn.starts.start import Start, filled_coefficients
from aniso.merge import MergeKeywords, MergeRule, merge
from aniso.vectors import Bank, TaskVector


def from_rule(
    bank: Bank, rule: MergeRule, partition: Partition | None = None, **how: Unpack[MergeKeywords]
) -> Start:
    """Return the start at what a merge rule makes of the bank.

    Mean and task arithmetic are coefficients of the vectors themselves. The result of any other rule joins
    the bank as one more vector with coefficient 1, and the others start at 0. Keywords are those of
    ``merge``: with ``to`` the merged vector is written to a file::

        start = starts.from_rule(bank, merge.TSV(), to="tsv.safetensors").scaled(1.5)
    """
    coefficient = rule.coefficient(len(bank))
    if coefficient is None:
        return from_vector(bank, merge(bank, rule, **how), partition)
    start = constant(bank, coefficient, partition)
    return Start(start.bank, start.coefficients, f"{rule.kind}: {start.description}")


def from_vector(bank: Bank, vector: TaskVector, partition: Partition | None = None) -> Start:
    """Return the start at one more vector, which gets coefficient 1, while those of the bank get 0."""
    joined = bank.with_vectors({vector.name: vector})
    found = filled_coefficients(
        joined, partition or Partition.blocks(), lambda name, block: float(name == vector.name)
    )
    return Start(joined, found, f"vector '{vector.name}': {vector.provenance.formula}")
