"""Checks of the vectors that a merge starts from."""

from __future__ import annotations

import hashlib
import itertools
import math

import torch

from aniso.errors import InputError, UsageError
from aniso.merge.merge_rule import MergeRule
from aniso.vectors import Bank, TaskVector

_RATIO = 3.0
"""Vectors whose norms differ by more than this dominate a merge (DisTaC)."""


def require_sources(bank: Bank, rule: MergeRule) -> None:
    """Raise an error unless the rule is defined for these vectors."""
    if len(bank) < rule.least_vectors:
        raise UsageError(
            "MERGE-VECTORS",
            f"merge rule '{rule.kind}' needs {rule.least_vectors} vectors or more",
            found=f"{len(bank)}: {', '.join(bank)}",
            fix="name more of them with --vectors a,b",
        )
    for name in bank:
        _require_usable(bank[name])
    if rule.distinct:
        _require_distinct(bank, rule)


def _require_usable(vector: TaskVector) -> None:
    broken = [block for block, norm in vector.norms.items() if not math.isfinite(norm)]
    if broken:
        raise InputError(
            "WEIGHT-NONFINITE",
            f"vector '{vector.name}' has values that are NaN or infinite",
            key=broken[0],
            fix="leave the vector out with --vectors, or find out why its training diverged",
        )
    if vector.norm() == 0:
        raise InputError(
            "VECTOR-ZERO",
            f"vector '{vector.name}' is zero in every block",
            fix="leave the vector out with --vectors",
        )


def _require_distinct(bank: Bank, rule: MergeRule) -> None:
    for one, two in itertools.combinations(bank, 2):
        if bank[one].norms == bank[two].norms and _are_equal(bank[one], bank[two]):
            raise UsageError(
                "MERGE-VECTORS",
                f"vectors '{one}' and '{two}' are equal, which merge rule '{rule.kind}' is not defined for",
                fix=f"leave '{two}' out with --vectors",
            )


def _are_equal(one: TaskVector, two: TaskVector) -> bool:
    return all(torch.equal(one[block.name].dense(), two[block.name].dense()) for block in one.blocks)


def source_hash(bank: Bank, name: str) -> str:
    """Return the sha256 of the file that a vector was made from, or of its recorded content."""
    vector = bank[name]
    if vector.provenance.sha256:
        return vector.provenance.sha256
    content = f"{vector.provenance.formula}\0{sorted(vector.norms.items())}"
    return hashlib.sha256(content.encode()).hexdigest()


def source_notes(bank: Bank) -> list[str]:
    """Return warnings on vectors that a merge is unlikely to go well with."""
    notes = []
    norms = {name: bank[name].norm() for name in bank}
    small, large = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    if norms[large] > _RATIO * norms[small]:
        notes.append(
            f"warning: norms of the vectors differ by a factor of {norms[large] / norms[small]:.1f} "
            f"('{large}' {norms[large]:.3g}, '{small}' {norms[small]:.3g}): the larger dominate the merge"
        )
    merged = [name for name in bank if bank[name].provenance.format == "merge"]
    if merged:
        notes.append(
            f"warning: {', '.join(map(repr, merged))} among the vectors is itself a merge: "
            "choose the vectors with --vectors"
        )
    return notes
