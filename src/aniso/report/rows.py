"""Rows of results: records grouped by label, named by what tells them apart, with zero-shot beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean

from aniso.errors import InputError, printable
from aniso.records import Record
from aniso.registry import MERGE_RULES
from aniso.report.groups import experiments, mixed, require_one_experiment
from aniso.report.layouts import Layout, field_text, layout_for
from aniso.report.results import Column, Results, Row, Seeds

_ORDER = (
    "none",
    "vector",
    "search",
    *MERGE_RULES.names,
    "weights",
    "gradient-free",
    "setfit",
    "layernorm",
    "coefficients",
)
_IDENTITY = (
    "model",
    "linearised",
    "method",
    "partition",
    "control",
    "head",
    "joint",
    "objective",
    "match",
    "choose_by",
    "inputs_from",
    "calibrate",
    "calibrate_items",
    "rounds",
    "train",
    "online",
    "select",
    "budget",
    "lora",
    "bank",
    "evaluations",
    "factors",
    "length",
)
_Shares = Mapping[tuple[str | None, str], float]  # by the model's hash and the task


def results(records: Iterable[Record]) -> Results:
    """Arrange the runs of one experiment in rows and columns."""
    records = require_one_experiment(records)
    layout = layout_for(records[0].spec.setting)
    good = _completed([record for record in records if record.ended_well])
    columns = layout.columns(good)
    rows = tuple(_row(layout, name, group, columns) for name, group in _named(layout, good).items())
    zero, notes = _zero_shot_rows(layout, good, columns)
    if not any(row.fixed for row in rows):
        rows = (*zero, *rows)
    return Results(
        name=next(iter(experiments(records))),
        setting=records[0].spec.setting,
        rows=rows,
        columns=columns,
        tasks=_expected(layout, rows, columns),
        notes=(*mixed(records), *_failed(records), *notes),
    )


def _completed(records: Sequence[Record]) -> list[Record]:
    """Fill in zero-shot and reference accuracies that another record of the experiment states."""
    zero: dict[tuple[str | None, str], float] = {}
    reference: dict[tuple[str | None, str], float] = {}
    for record in records:
        model, metrics = record.inputs.model, record.metrics
        zero |= {(model, task): share for task, share in metrics.zero_shot.items()}
        if record.spec.unchanged:
            zero |= {(model, task): record.accuracy(task) for task in record.measured}
        if not record.spec.linearised:  # linearised vectors are another reference
            reference |= {(model, task): share for task, share in (metrics.reference or {}).items()}
    return [_filled(record, zero, reference) for record in records]


def _filled(record: Record, zero: _Shares, reference: _Shares) -> Record:
    model, tasks = record.inputs.model, record.measured
    known = {task: zero[model, task] for task in tasks if (model, task) in zero}
    zero_shot = {**known, **record.metrics.zero_shot}
    stated = record.metrics.reference
    if not stated and not record.spec.linearised:
        stated = {task: reference[model, task] for task in tasks if (model, task) in reference}
    metrics = record.metrics.model_copy(update={"zero_shot": zero_shot, "reference": stated})
    return record.model_copy(update={"metrics": metrics})


def _expected(
    layout: Layout, rows: Sequence[Row], columns: Sequence[Column]
) -> dict[Column, tuple[str, ...]]:
    """Return every task that any row has in a column; for curves, in any column."""
    found: dict[Column, set[str]] = {column: set() for column in columns}
    for row in rows:
        for column, seeds in row.cells.items():
            found[column].update(task for values in seeds.values() for task in values)
    if layout.same_tasks:
        everywhere = set().union(*found.values())
        found = dict.fromkeys(columns, everywhere)
    return {column: tuple(sorted(tasks)) for column, tasks in found.items()}


# Names


def _named(layout: Layout, records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records by label; where one label covers different runs, what differs joins the name."""
    labels: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        labels[_label(record)].append(record)
    rows: dict[str, list[Record]] = defaultdict(list)
    for label, group in labels.items():
        keys = _distinguishing(layout, group)
        for record in group:
            suffix = ", ".join(f"{key}: {field_text(record, key)}" for key in keys)
            rows[f"{label} ({suffix})" if suffix else label].append(record)
    for name, group in rows.items():
        _require_no_clash(layout, name, group)
    return dict(sorted(rows.items(), key=lambda item: (_rank(item[1]), _numbers_in_order(item[0]))))


def _label(record: Record) -> str:
    """Return the label; of a run that was given none, method "none" is the base, or its head alone."""
    if record.label != "none" or record.spec.method != "none":
        return record.label
    return "zero-shot" if record.spec.head is None else f"{record.spec.head} on the base"


def _numbers_in_order(name: str) -> list[tuple[int, str]]:
    """Split a name into words and numbers, so that 2 is sorted before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _rank(records: Sequence[Record]) -> tuple[int, bool]:
    """Sort by method, methods of other packages last, and runs with a head after those without."""
    return min((_method_rank(record.spec.method), record.spec.head is not None) for record in records)


def _method_rank(method: str) -> int:
    return _ORDER.index(method) if method in _ORDER else len(_ORDER)


def _distinguishing(layout: Layout, records: Sequence[Record]) -> list[str]:
    differ = {key for key in _IDENTITY if len({field_text(record, key) for record in records}) > 1}
    for clash in _clashes(layout, records):
        for a, b in combinations(clash, 2):
            keys = set(a.spec.model_dump()) | set(b.spec.model_dump())
            differ |= {
                key for key in keys if key not in layout.axes and field_text(a, key) != field_text(b, key)
            }
    return sorted(differ)


def _clashes(layout: Layout, records: Sequence[Record]) -> Iterator[list[Record]]:
    """Yield groups of runs that would fall into the same cell."""
    cells: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        for cell in layout.cells(record):
            cells[cell].append(record)
    yield from (group for group in cells.values() if len(group) > 1)


def _require_no_clash(layout: Layout, name: str, records: Sequence[Record]) -> None:
    for clash in _clashes(layout, records):
        raise InputError(
            "RECORD",
            f"{len(clash)} different runs claim the same cell of '{printable(name)}'",
            found=[record.id for record in clash],
            likely="the model, the bank or the data changed between them",
            fix="report on one of them, or give them different labels",
        )


# Values


def _row(layout: Layout, name: str, records: Sequence[Record], columns: Sequence[Column]) -> Row:
    cells: dict[Column, Seeds] = {column: defaultdict(dict) for column in columns}
    for record in records:
        shares = {task: record.accuracy(task) for task in record.measured}
        for column in columns:
            if layout.belongs(record, column):
                cells[column][record.seed].update(layout.values(record, column, shares))
    fixed = all(record.spec.unchanged for record in records)
    filled = {column: {seed: v for seed, v in seeds.items() if v} for column, seeds in cells.items()}
    if fixed:
        filled = {column: _without_seeds(list(seeds.values())) for column, seeds in filled.items()}
    return Row(name, filled, tuple(records), fixed)


def _without_seeds(stated: Sequence[Mapping[str, float]]) -> Seeds:
    """Average values that do not depend on seeds; they are listed under seed 0."""
    values: dict[str, list[float]] = defaultdict(list)
    for by_task in stated:
        for task, value in by_task.items():
            values[task].append(value)
    return {0: {task: fmean(found) for task, found in values.items()}} if values else {}


def _zero_shot_rows(
    layout: Layout, records: Sequence[Record], columns: Sequence[Column]
) -> tuple[list[Row], list[str]]:
    """Return a row per model with the zero-shot accuracies that records of other methods state."""
    models: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        models[record.spec.model].append(record)
    rows, notes = [], []
    for model, group in sorted(models.items()):
        name = "zero-shot" if len(models) == 1 else f"zero-shot (model: {model})"
        stated = {column: [_zero_shot(layout, record, column) for record in group] for column in columns}
        rows.append(Row(name, {c: _without_seeds(values) for c, values in stated.items()}, fixed=True))
        notes += [f"{name}: records disagree on {task}, their mean is shown" for task in _disputed(stated)]
    return [row for row in rows if any(row.cells.values())], notes


def _zero_shot(layout: Layout, record: Record, column: Column) -> dict[str, float]:
    zero = {t: share for t, share in record.metrics.zero_shot.items() if t in record.measured}
    return layout.values(record, column, zero)


def _disputed(stated: Mapping[Column, Sequence[Mapping[str, float]]]) -> list[str]:
    values: dict[tuple[Column, str], set[float]] = defaultdict(set)
    for column, rows in stated.items():
        for row in rows:
            for task, value in row.items():
                values[column, task].add(round(value, 9))
    return sorted({task for (_, task), found in values.items() if len(found) > 1})


def _failed(records: Sequence[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        if not record.ended_well:
            groups[record.label, record.status] += 1
    for (label, status), count in sorted(groups.items()):
        yield f"left out: {count} run{'' if count == 1 else 's'} of {label} that ended as '{status}'"
