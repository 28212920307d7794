"""Complementarity: which test images each method classifies correctly, and how far methods agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean

from aniso.errors import UsageError, printable
from aniso.records import Record
from aniso.report.results import Results, standard_error
from aniso.report.rows import results
from aniso.report.tables import Cell, Estimate, Table

TaskRuns = dict[tuple[str, int], Record]
"""Runs by task and seed."""


def complementarity(records: Mapping[str, Record], task: str | None = None) -> dict[frozenset[str], int]:
    """Return, for every set of methods that occurs, how many images exactly these methods get right.

    The empty set counts images that no method gets right. Runs of more than one task need ``task``.
    """
    if not records:
        raise UsageError("RECORD", "there is nothing to compare", fix="give a record for each method")
    task = task or _task(records)
    masks = [_correct_images(label, record, task) for label, record in records.items()]
    total = _same(records, task)
    bits = [f"{right:0{total}b}" for right in masks]
    patterns = Counter(zip(*bits, strict=True))  # one per image, the last image first
    return {
        frozenset(label for label, bit in zip(records, pattern, strict=True) if bit == "1"): count
        for pattern, count in patterns.items()
    }


def _task(records: Mapping[str, Record]) -> str:
    found = {task for record in records.values() for task in record.measured}
    if len(found) != 1:
        raise UsageError(
            "RECORD",
            "the runs are not about one task",
            found=", ".join(map(printable, sorted(found))),
            fix="complementarity(records, task=...)",
        )
    return found.pop()


def _correct_images(label: str, record: Record, task: str) -> int:
    score = record.metrics.accuracy.get(task)
    if score is None or score.right is None:
        raise UsageError(
            "RECORD",
            f"'{printable(label)}' does not record which images of {printable(task)} it got right",
            fix="run it again: current versions record the images",
        )
    return int(score.right, 16)


def _same(records: Mapping[str, Record], task: str) -> int:
    """Return the number of images if all runs were evaluated on the same ones."""
    seen = {(r.inputs.data.get(task), r.metrics.accuracy[task].total) for r in records.values()}
    if len(seen) > 1 or None in {manifest for manifest, _ in seen}:
        raise UsageError(
            "RECORD",
            f"the runs were not evaluated on the same images of {printable(task)}",
            found=", ".join(f"{(manifest or 'unknown')[:12]} ({total:,})" for manifest, total in seen),
            fix="compare runs whose inputs.data agree",
        )
    return next(iter(seen))[1]


def gains(records: Iterable[Record]) -> Table | None:
    """Return, for every two methods, the share of the base's errors that one, both or the other correct.

    In per cent of all test images, means over tasks, at the largest number of shots that two methods have.
    None if no two methods and the base record which images they got right.
    """
    found = results(records)
    base = {record.spec.task: record for row in found.rows if row.fixed for record in row.records}
    sizes = {record.spec.shots or 0 for row in found.rows if not row.fixed for record in row.records}
    for most in sorted(sizes, reverse=True):
        methods = {row.name: runs_by_task(row.records, most) for row in found.rows if not row.fixed}
        pairs = {pair: _pair(base, methods, *pair) for pair in combinations(methods, 2)}
        rows: list[tuple[Cell, ...]] = [(*pair, *shares) for pair, shares in pairs.items() if shares]
        if rows:
            return _table(found, most, rows)
    return None


def _pair(
    base: Mapping[str | None, Record],
    methods: Mapping[str, TaskRuns],
    one: str,
    other: str,
) -> list[Estimate]:
    """Return the shares of two methods over the runs that both have; empty if there are none."""
    shared = [key for key in methods[one] if key in methods[other] and key[0] in base]
    shares = [_shares(base[key[0]], methods[one][key], methods[other][key]) for key in shared]
    return _means(shares, [seed for _, seed in shared])


def _table(found: Results, shots: int, rows: Sequence[tuple[Cell, ...]]) -> Table:
    return Table(
        f"{found.name}: errors of the base corrected by each method, {shots} shot{'' if shots == 1 else 's'}",
        ("first", "second", "only the first", "both", "only the second"),
        tuple(rows),
        (
            "per cent of the test images: the base gets them wrong and the method gets them right",
            f"means over {found.count}; ± is the standard error of the mean over {len(found.seeds)} seeds",
        ),
    )


def runs_by_task(records: Sequence[Record], shots: int) -> TaskRuns:
    """Return the runs with this number of shots by task and seed, if they record which images are right."""
    return {
        (record.spec.task, record.seed): record
        for record in records
        if record.spec.task is not None and record.spec.shots == shots and _records_images(record)
    }


def _records_images(record: Record) -> bool:
    score = record.metrics.accuracy.get(record.spec.task or "")
    return score is not None and score.right is not None


def _shares(base: Record, one: Record, other: Record) -> tuple[float, float, float]:
    """Return the per cent of all images corrected only by the first, by both, only by the second."""
    counts = complementarity({"base": base, "one": one, "other": other})
    total = sum(counts.values())
    kinds = ({"one"}, {"one", "other"}, {"other"})
    only, both, second = (100 * counts.get(frozenset(kind), 0) / total for kind in kinds)
    return only, both, second


def _means(shares: Sequence[tuple[float, float, float]], seeds: Sequence[int]) -> list[Estimate]:
    out = []
    for values in zip(*shares, strict=True):
        by_seed: dict[int, list[float]] = defaultdict(list)
        for value, seed in zip(values, seeds, strict=True):
            by_seed[seed].append(value)
        means = [fmean(found) for found in by_seed.values()]
        out.append(Estimate(fmean(means), standard_error(means)))
    return out
