"""What an experiment measured: means over the same tasks, standard errors over seeds, and every gap named."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from aniso.errors import InputError, printable
from aniso.records import Record, Setting
from aniso.report.groups import experiments, mixed, require_one_experiment
from aniso.report.tables import Cell, Estimate, Table

Seeds = dict[int, dict[str, float]]  # seed, task: per cent

KEPT = 0.95  # negation may cost the control task a twentieth of its zero-shot accuracy
_ORDER = ("none", "vector", "search", "weights", "gradient-free", "coefficients")
_IDENTITY = (
    "model",
    "linearised",
    "method",
    "partition",
    "control",
    "head",
    "joint",
    "objective",
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
_AXES = {
    "few-shot": ("task", "shots", "seed"),
    "peft": ("task", "fraction", "seed"),
    "addition": ("seed",),
    "negation": ("target", "seed"),
    "finetune": ("task", "seed"),
    "test-time": ("task", "seed"),
    "lm": ("train", "test", "seed"),
}
_MANY = 8


@dataclass(frozen=True)
class Column:
    name: str
    x: float = 0.0


@dataclass(frozen=True)
class Row:
    """The runs of one label. What is fixed, as zero-shot is, has no seeds to average over."""

    name: str
    cells: Mapping[Column, Seeds]
    records: tuple[Record, ...] = ()
    fixed: bool = False

    @property
    def seedless(self) -> bool:
        """Whether another seed would change nothing: what is not drawn at random is run once."""
        methods = {record.spec.method for record in self.records}
        once = len({record.seed for record in self.records}) == 1
        return self.fixed or (once and methods <= {"vector", "search"})


@dataclass(frozen=True)
class Results:
    """All rows of one experiment, and the tasks and seeds that each of them should have."""

    name: str
    setting: Setting
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    tasks: Mapping[Column, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = {seed for row in self.rows if not row.fixed for cell in row.cells.values() for seed in cell}
        object.__setattr__(self, "seeds", tuple(sorted(found)))

    @property
    def all_tasks(self) -> tuple[str, ...]:
        return tuple(sorted({task for tasks in self.tasks.values() for task in tasks}))

    @property
    def count(self) -> str:
        """How many tasks, in words."""
        return f"{len(self.all_tasks)} task{'' if len(self.all_tasks) == 1 else 's'}"

    def cell(self, row: Row, column: Column, task: str | None = None) -> Estimate | None:
        """The mean over all tasks, or of one; remarks on it if some are missing."""
        wanted = self.tasks[column] if task is None else (task,)
        means, tasks = _means(row.cells.get(column, {}), wanted)
        if not means:
            return None
        few = "" if len(tasks) == len(wanted) else f"{len(tasks)} of {len(wanted)} tasks"
        return Estimate(fmean(means.values()), standard_error(means.values()), few)

    def caveats(self) -> tuple[str, ...]:
        """Notes on seeds, on everything missing and on everything mixed."""
        gaps: dict[tuple[str, str], list[str]] = defaultdict(list)
        for row in self.rows:
            for column in self.columns:
                gap = self._gap(row, column)
                if gap:
                    gaps[row.name, gap].append(column.name)
        named = [f"{row} ({', '.join(columns)}): {gap}" for (row, gap), columns in gaps.items()]
        return (self._spread(), *self.notes, *named)

    def _spread(self) -> str:
        if not self.seeds:
            return "no seeds, no interval"
        if not self._intervals():
            return "1 seed, no interval"
        return f"± is the standard error of the mean over {len(self.seeds)} seeds"

    def _intervals(self) -> bool:
        """Whether any mean is over more than one seed."""
        cells = (_means(row.cells.get(c, {}), self.tasks[c])[0] for row in self.rows for c in self.columns)
        return any(len(means) > 1 for means in cells)

    def _gap(self, row: Row, column: Column) -> str:
        seeds = row.cells.get(column, {})
        means, tasks = _means(seeds, self.tasks[column])
        if not means:
            return "no task that every seed has" if seeds else "no run"
        missing = []
        if lost := [task for task in self.tasks[column] if task not in tasks]:
            missing.append(f"without {_listed(lost)}")
        if not row.seedless:
            missing += [self._lost_seed(seed, seeds, tasks) for seed in self.seeds if seed not in means]
            if len(means) == 1 and self._intervals():
                missing.append("1 seed, no interval")
        return "; ".join(missing)

    def _lost_seed(self, seed: int, seeds: Seeds, tasks: Sequence[str]) -> str:
        if seed not in seeds:
            return f"without seed {seed}"
        return f"without seed {seed}, which lacks {_listed([t for t in tasks if t not in seeds[seed]])}"


def standard_error(values: Iterable[float]) -> float | None:
    """Of the mean; one value says nothing about its spread."""
    values = list(values)
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _means(seeds: Seeds, tasks: Sequence[str]) -> tuple[dict[int, float], list[str]]:
    """A mean for each seed, always over the same tasks: all of them if any seed has all of them."""
    complete = {seed: values for seed, values in seeds.items() if values.keys() >= set(tasks)}
    used = complete or seeds
    shared = [task for task in tasks if all(task in values for values in used.values())]
    if not shared or not used:
        return {}, []
    return {seed: fmean(values[task] for task in shared) for seed, values in sorted(used.items())}, shared


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more


# From records to rows


def results(records: Iterable[Record]) -> Results:
    """The runs of one experiment, in rows and columns."""
    records = require_one_experiment(records)
    setting = records[0].spec.setting
    good = _completed([record for record in records if record.ended_well])
    columns = _columns(setting, good)
    named = _rows(good)
    rows = tuple(_row(name, group, columns) for name, group in named.items())
    zero, notes = _zero_rows(good, columns)
    if not any(row.fixed for row in rows):
        rows = (*zero, *rows)
    return Results(
        name=next(iter(experiments(records))),
        setting=setting,
        rows=rows,
        columns=columns,
        tasks=_expected(setting, rows, columns),
        notes=(*mixed(records), *_failed(records), *notes),
    )


def _completed(records: Sequence[Record]) -> list[Record]:
    """Zero-shot accuracies and references, where a record of the same experiment states them for all."""
    zero: dict[tuple[str | None, str], float] = {}
    reference: dict[tuple[str | None, str], float] = {}
    for record in records:
        model, metrics = record.inputs.model, record.metrics
        found = {task: record.accuracy(task) for task in record.spec.measured}
        zero |= {(model, task): share for task, share in metrics.zero_shot.items()}
        if record.spec.unchanged:
            zero |= {(model, task): share for task, share in found.items()}
        if not record.spec.linearised:  # linearised vectors are another reference
            reference |= {(model, task): share for task, share in (metrics.reference or {}).items()}
    return [_filled(record, zero, reference) for record in records]


def _filled(
    record: Record,
    zero: Mapping[tuple[str | None, str], float],
    reference: Mapping[tuple[str | None, str], float],
) -> Record:
    model, tasks = record.inputs.model, record.spec.measured
    known = {task: zero[model, task] for task in tasks if (model, task) in zero}
    metrics: dict[str, Any] = {"zero_shot": {**known, **record.metrics.zero_shot}}
    if not record.metrics.reference and not record.spec.linearised:
        metrics["reference"] = {task: reference[model, task] for task in tasks if (model, task) in reference}
    return record.model_copy(update={"metrics": record.metrics.model_copy(update=metrics)})


def _columns(setting: Setting, records: Sequence[Record]) -> tuple[Column, ...]:
    if setting == "addition":
        return Column("accuracy"), Column("relative")
    if setting == "negation":
        return Column("target"), Column("control")
    if setting in ("finetune", "test-time", "lm"):
        return (Column("accuracy"),)
    if setting == "few-shot":
        shots = sorted({r.spec.shots for r in records if r.spec.shots})
        found = [Column(f"{n} shot{'' if n == 1 else 's'}", n) for n in shots]
    else:
        fractions = sorted({r.spec.fraction for r in records if r.spec.fraction})
        found = [Column(f"{100 * share:g} %", 100 * share) for share in fractions]
    return tuple(found) or (Column("zero-shot"),)


def _expected(
    setting: Setting, rows: Sequence[Row], columns: Sequence[Column]
) -> dict[Column, tuple[str, ...]]:
    """Every task that any row has in this column; for curves, in any column."""
    found: dict[Column, set[str]] = {column: set() for column in columns}
    for row in rows:
        for column, seeds in row.cells.items():
            found[column].update(task for values in seeds.values() for task in values)
    if setting in ("few-shot", "peft"):
        everywhere = set().union(*found.values())
        found = dict.fromkeys(columns, everywhere)
    return {column: tuple(sorted(tasks)) for column, tasks in found.items()}


def _rows(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by label; where one label covers different things, what differs becomes part of the name."""
    labels: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        labels[record.label].append(record)
    rows: dict[str, list[Record]] = defaultdict(list)
    for label, group in labels.items():
        keys = _distinguishing(group)
        for record in group:
            said = ", ".join(f"{key}: {_said(record, key)}" for key in keys)
            rows[f"{label} ({said})" if said else label].append(record)
    for name, group in rows.items():
        _require_no_clash(name, group)
    return dict(sorted(rows.items(), key=lambda item: (_rank(item[1]), _counted(item[0]))))


def _counted(name: str) -> list[tuple[int, str]]:
    """A name's words and numbers, so that 2 comes before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _rank(records: Sequence[Record]) -> tuple[int, bool]:
    """By method, and what has a head after what has none."""
    return min((_ORDER.index(record.spec.method), record.spec.head is not None) for record in records)


def _distinguishing(records: Sequence[Record]) -> list[str]:
    differ = {key for key in _IDENTITY if len({_said(record, key) for record in records}) > 1}
    for clash in _clashes(records):
        for a, b in combinations(clash, 2):
            axes = _AXES[a.spec.setting]
            keys = set(a.spec.model_dump()) | set(b.spec.model_dump())
            differ |= {key for key in keys if key not in axes and _said(a, key) != _said(b, key)}
    return sorted(differ)


def _said(record: Record, key: str) -> str:
    value: Any = record.seed if key == "seed" else record.spec.model_dump().get(key)
    if isinstance(value, tuple | list):
        return " + ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _clashes(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Runs that would fall into the same cell."""
    cells: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        cells[tuple(_said(record, axis) for axis in _AXES[record.spec.setting])].append(record)
    yield from (group for group in cells.values() if len(group) > 1)


def _require_no_clash(name: str, records: Sequence[Record]) -> None:
    for clash in _clashes(records):
        raise InputError(
            "RECORD",
            f"{len(clash)} different runs claim the same cell of '{printable(name)}'",
            found=[record.id for record in clash],
            likely="the model, the bank or the data changed between them",
            fix="report on one of them, or give them different labels",
        )


def _row(name: str, records: Sequence[Record], columns: Sequence[Column]) -> Row:
    cells: dict[Column, Seeds] = {column: defaultdict(dict) for column in columns}
    for record in records:
        for column in columns:
            cells[column][record.seed].update(_values(record, column))
    fixed = all(record.spec.unchanged for record in records)
    kept = {column: {seed: v for seed, v in seeds.items() if v} for column, seeds in cells.items()}
    if fixed:
        kept = {column: _without_seeds(seeds) for column, seeds in kept.items()}
    return Row(name, kept, tuple(records), fixed)


def _without_seeds(seeds: Seeds) -> Seeds:
    values: dict[str, list[float]] = defaultdict(list)
    for by_task in seeds.values():
        for task, value in by_task.items():
            values[task].append(value)
    return {0: {task: fmean(found) for task, found in values.items()}} if values else {}


def _values(record: Record, column: Column) -> dict[str, float]:
    """What a run says about a column: per cent by task, by target for negation."""
    shares = {task: record.accuracy(task) for task in record.spec.measured}
    if record.spec.setting not in ("few-shot", "peft"):
        return _shaped(record, column, shares)
    x = record.spec.shots if record.spec.setting == "few-shot" else 100 * (record.spec.fraction or 0)
    return _shaped(record, column, shares) if record.spec.unchanged or x == column.x else {}


def _shaped(record: Record, column: Column, shares: Mapping[str, float]) -> dict[str, float]:
    """These shares as the column counts them."""
    spec = record.spec
    if spec.setting == "negation" and spec.target is not None and spec.control is not None:
        measured = spec.target if column.name == "target" else spec.control
        return {spec.target: 100 * shares[measured]} if measured in shares else {}
    if column.name == "relative":
        reference = record.metrics.reference or {}
        return {task: 100 * share / reference[task] for task, share in shares.items() if reference.get(task)}
    return {task: 100 * share for task, share in shares.items()}


def _zero_rows(records: Sequence[Record], columns: Sequence[Column]) -> tuple[list[Row], list[str]]:
    """Zero-shot accuracies as the records of other methods state them, for every model."""
    models: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        models[record.spec.model].append(record)
    rows, notes = [], []
    for model, group in sorted(models.items()):
        name = "zero-shot" if len(models) == 1 else f"zero-shot (model: {model})"
        found = _stated(group, columns)
        rows.append(Row(name, {c: _without_seeds(dict(enumerate(v))) for c, v in found.items()}, fixed=True))
        notes += [f"{name}: records disagree on {task}, their mean is shown" for task in _disputed(found)]
    return [row for row in rows if any(row.cells.values())], notes


def _stated(records: Sequence[Record], columns: Sequence[Column]) -> dict[Column, list[dict[str, float]]]:
    """What each record says about zero-shot, as the columns count it."""
    found: dict[Column, list[dict[str, float]]] = {column: [] for column in columns}
    for record in records:
        zero = {t: share for t, share in record.metrics.zero_shot.items() if t in record.spec.measured}
        for column in columns:
            found[column].append(_shaped(record, column, zero))
    return found


def _disputed(found: Mapping[Column, Sequence[Mapping[str, float]]]) -> list[str]:
    said: dict[tuple[Column, str], set[float]] = defaultdict(set)
    for column, stated in found.items():
        for values in stated:
            for task, value in values.items():
                said[column, task].add(round(value, 9))
    return sorted({task for (_, task), values in said.items() if len(values) > 1})


def _failed(records: Sequence[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        if not record.ended_well:
            groups[record.label, record.status] += 1
    for (label, status), count in sorted(groups.items()):
        yield f"left out: {count} run{'' if count == 1 else 's'} of {label} that ended as '{status}'"


# From rows to tables


def table(records: Iterable[Record]) -> Table:
    """One experiment at a glance: a row for each method."""
    found = results(records)
    if found.setting == "addition":
        return _addition(found)
    if found.setting == "negation":
        return _negation(found)
    if found.setting == "test-time":
        return _test_time(found)
    if found.setting == "lm":
        return _texts(found)
    rows = ((row.name, *(found.cell(row, column) for column in found.columns)) for row in found.rows)
    title = f"{found.name}: mean test accuracy over {found.count}, %"
    return Table(title, ("method", *(c.name for c in found.columns)), tuple(rows), found.caveats())


def _addition(found: Results) -> Table:
    accuracy, relative = found.columns
    rows = (
        (
            row.name,
            *(_without_error(found.cell(row, accuracy, task)) for task in found.tasks[accuracy]),
            found.cell(row, accuracy),
            found.cell(row, relative),
        )
        for row in found.rows
    )
    columns = ("method", *found.tasks[accuracy], "mean", "relative")
    title = f"{found.name}: test accuracy of one model on {found.count}, %"
    meaning = "relative: accuracy as a share of that of the task's own fine-tuned vector, mean over tasks"
    return Table(title, columns, tuple(rows), (meaning, *_references(found), *found.caveats()))


def _without_error(estimate: Estimate | None) -> Estimate | None:
    return estimate and Estimate(estimate.mean)


def _references(found: Results) -> list[str]:
    accuracy, relative = found.columns
    lost = [task for task in found.tasks[accuracy] if task not in found.tasks[relative]]
    return [f"relative is without {_listed(lost)}: no fine-tuned reference"] if lost else []


def _texts(found: Results) -> Table:
    (accuracy,) = found.columns
    base = [value for row in found.rows for r in row.records for value in r.metrics.base_perplexity.values()]
    rows = []
    for row in found.rows:
        seeds: Seeds = defaultdict(dict)
        for r in row.records:
            seeds[r.seed].update(r.metrics.perplexity)
        own = list(_means(seeds, found.tasks[accuracy])[0].values())
        measured = own or (base if row.fixed else [])
        spread = None if row.fixed else standard_error(own)
        mean = Estimate(fmean(measured), spread, digits=2) if measured else None
        rows.append((row.name, mean, found.cell(row, accuracy)))
    title = f"{found.name}: how well tokens of {found.count.replace('task', 'text')} are guessed"
    columns = ("method", "perplexity", "thought likeliest, %")
    return Table(title, columns, tuple(rows), found.caveats())


def _negation(found: Results) -> Table:
    target, control = found.columns
    rows = ((row.name, found.cell(row, target), found.cell(row, control), _kept(row)) for row in found.rows)
    lost = sum(_keeps(record) is None for row in found.rows for record in row.records)
    unknown = (
        [f"{lost} runs do not state the control's zero-shot accuracy and are not counted"] if lost else []
    )
    title = f"{found.name}: negation of {found.count}, test accuracy in %"
    columns = ("method", "target (lower is better)", "control", f"control at {KEPT:.0%} or more")
    meaning = f"last column: runs that kept the control task at {KEPT:.0%} of its zero-shot accuracy, on test"
    return Table(title, columns, tuple(rows), (meaning, *unknown, *found.caveats()))


def _test_time(found: Results) -> Table:
    (accuracy,) = found.columns
    online = any(record.metrics.online for row in found.rows for record in row.records)
    rows = (
        (row.name, found.cell(row, accuracy), *((_on_the_way(row),) if online else ()), _agreement(row))
        for row in found.rows
    )
    columns = ("method", "accuracy", *(("answered on the way",) if online else ()), "same as zero-shot")
    meaning = ["same as zero-shot: answers that did not change, per cent"]
    if online:
        meaning.append("answered on the way: by online runs, before anything was learned from a picture")
    title = f"{found.name}: mean test accuracy over {found.count}, %"
    return Table(title, columns, tuple(rows), (*meaning, *found.caveats()))


def _on_the_way(row: Row) -> Cell:
    """Mean over tasks, then over seeds."""
    seeds: dict[int, list[float]] = defaultdict(list)
    for record in row.records:
        for scored in record.metrics.online.values():
            if isinstance(scored.get("accuracy"), float):
                seeds[record.seed].append(100 * scored["accuracy"])
    means = [fmean(shares) for shares in seeds.values()]
    return Estimate(fmean(means), standard_error(means)) if means else None


def _agreement(row: Row) -> Cell:
    known = [record.metrics.answers.get("agreement") for record in row.records]
    shares = [share for share in known if isinstance(share, float)]
    return Estimate(100 * fmean(shares)) if shares and not row.fixed else None


def _keeps(record: Record) -> bool | None:
    control = record.spec.control or ""
    zero = record.metrics.zero_shot.get(control)
    # both are counts divided by the same total: only rounding lies within the tolerance
    return None if zero is None else record.accuracy(control) >= KEPT * zero - 1e-9


def _kept(row: Row) -> Cell:
    known = [kept for kept in map(_keeps, row.records) if kept is not None]
    return f"{sum(known)} of {len(known)}" if known else None


def details(records: Iterable[Record]) -> Table:
    """One experiment task by task: a column for each method and number of shots."""
    found = results(records)
    columns = [c for c in found.columns if c.name != "relative"]
    pairs = [(row, column) for row in found.rows for column in _shown_columns(row, columns)]
    rows = tuple(
        (task, *(found.cell(row, column, task) for row, column in pairs)) for task in found.all_tasks
    )
    names = tuple(_pair_name(row, column, found) for row, column in pairs)
    first = "target" if found.setting == "negation" else "task"
    return Table(f"{found.name}: test accuracy by task, %", (first, *names), rows, found.caveats())


def _shown_columns(row: Row, columns: Sequence[Column]) -> Sequence[Column]:
    """Zero-shot does not depend on shots: one column says it all."""
    repeated = row.fixed and all(row.cells.get(c) == row.cells.get(columns[0]) for c in columns)
    return columns[:1] if repeated else columns


def _pair_name(row: Row, column: Column, found: Results) -> str:
    if found.setting in ("addition", "finetune", "test-time", "lm") or (
        row.fixed and found.setting != "negation"
    ):
        return row.name
    return f"{row.name}, {column.name}"
