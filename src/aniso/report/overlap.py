"""Which test pictures which methods get right: do they know the same things?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from aniso.errors import UsageError, printable
from aniso.report.record import Record


def complementarity(records: Mapping[str, Record], task: str | None = None) -> dict[frozenset[str], int]:
    """How many pictures exactly these methods get right, for every set of methods that occurs.

    The empty set stands for pictures that nobody gets right. Runs of more than one task need ``task``.
    """
    if not records:
        raise UsageError("RECORD", "there is nothing to compare", fix="give a record for each method")
    task = task or _task(records)
    answers = [_answers(label, record, task) for label, record in records.items()]
    total = _same(records, task)
    bits = [f"{right:0{total}b}" for right in answers]
    patterns = Counter(zip(*bits, strict=True))  # of every picture, the last one first
    return {
        frozenset(label for label, bit in zip(records, pattern, strict=True) if bit == "1"): count
        for pattern, count in patterns.items()
    }


def _task(records: Mapping[str, Record]) -> str:
    found = {task for record in records.values() for task in record.spec.measured}
    if len(found) != 1:
        raise UsageError(
            "RECORD",
            "the runs are not about one and the same task",
            found=", ".join(map(printable, sorted(found))),
            fix="complementarity(records, task=...)",
        )
    return found.pop()


def _answers(label: str, record: Record, task: str) -> int:
    score = record.metrics.accuracy.get(task)
    if score is None or score.right is None:
        raise UsageError(
            "RECORD",
            f"'{printable(label)}' does not say which pictures of {printable(task)} it got right",
            fix="run it again with the answers kept",
        )
    return int(score.right, 16)


def _same(records: Mapping[str, Record], task: str) -> int:
    """The number of pictures, if all runs saw the same ones."""
    seen = {(r.inputs.data.get(task), r.metrics.accuracy[task].total) for r in records.values()}
    if len(seen) > 1 or None in {manifest for manifest, _ in seen}:
        raise UsageError(
            "RECORD",
            f"the runs were not measured on the same pictures of {printable(task)}",
            found=", ".join(f"{(manifest or 'unknown')[:12]} ({total:,})" for manifest, total in seen),
            fix="compare runs whose inputs.data agree",
        )
    return next(iter(seen))[1]
