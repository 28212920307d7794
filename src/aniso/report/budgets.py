"""Accuracy by selection rule and by the number of vectors kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from aniso.records import Record
from aniso.report.results import standard_error
from aniso.report.rows import results
from aniso.report.tables import Cell, Estimate, Table

_ALL = "all"
_NONE = "0"
_Key = tuple[str, int, str]
"""Selection rule, shots, budget."""


def budgets(records: Iterable[Record]) -> Table | None:
    """Return a row per selection rule and number of shots, a column per budget; None without selection.

    Runs of the same experiment with all vectors, or none, are the ends of every row.
    """
    records = [r for r in records if r.ended_well and r.spec.setting in ("few-shot", "data-fraction")]
    chosen = [r for r in records if r.spec.select is not None]
    if not chosen:
        return None
    values: dict[_Key, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        for key in _keys(record, chosen):
            for task in record.measured:
                values[key][record.seed][task] = 100 * record.accuracy(task)
    rows = sorted({(r.spec.shots or 0, str(r.spec.select)) for r in chosen})
    columns = [
        column
        for column in (_NONE, *_sizes(chosen), _ALL)
        if any((rule, shots, column) in values for shots, rule in rows)
    ]
    found = results(records)
    tasks = {task for by_seed in values.values() for by_task in by_seed.values() for task in by_task}
    return Table(
        f"{found.name}: mean test accuracy over {len(tasks)} tasks by budget, %",
        ("shots", "selection rule", *columns),
        tuple(
            (str(shots), rule, *(_cell(values.get((rule, shots, c)), tasks) for c in columns))
            for shots, rule in rows
        ),
        (
            "columns: number of vectors kept, or of cells per block; 0 is zero-shot",
            f"± is the standard error of the mean over {len(found.seeds)} seeds",
        ),
    )


def _keys(record: Record, chosen: list[Record]) -> list[_Key]:
    """Return the cells a run belongs to; a run without selection belongs to the ends of every row."""
    spec = record.spec
    if spec.select is not None:
        return [(spec.select, spec.shots or 0, str(spec.budget))]
    if spec.head is not None or not (spec.unchanged or spec.method == "coefficients"):
        return []
    ends = {(str(r.spec.select), r.spec.shots or 0) for r in chosen}
    if spec.unchanged:
        return [(rule, shots, _NONE) for rule, shots in ends]
    if spec.bank not in {r.spec.bank for r in chosen}:  # a bank of random vectors is not "all vectors"
        return []
    return [(rule, shots, _ALL) for rule, shots in ends if shots == (spec.shots or 0)]


def _sizes(chosen: list[Record]) -> list[str]:
    """Return the budgets: numbers in order, then amounts of memory."""
    budgets = {str(r.spec.budget) for r in chosen}
    return sorted(budgets, key=lambda b: (not b.isdigit(), int(b) if b.isdigit() else 0, b))


def _cell(seeds: Mapping[int, Mapping[str, float]] | None, tasks: set[str]) -> Cell:
    """Return the mean over the seeds that have all tasks."""
    whole = [fmean(by_task.values()) for by_task in (seeds or {}).values() if set(by_task) == tasks]
    return Estimate(fmean(whole), standard_error(whole)) if whole else None
