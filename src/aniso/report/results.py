"""Results of one experiment: means over the same tasks, standard errors over seeds, and every gap named."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from aniso.records import Record
from aniso.registry import MERGE_RULES
from aniso.report.tables import Estimate

Seeds = dict[int, dict[str, float]]  # seed, task: per cent

_MANY = 8  # names listed in a note


@dataclass(frozen=True)
class Column:
    """A column of the results: a number of shots (``x``), a share of the labels, or a measure."""

    name: str
    x: float = 0.0


@dataclass(frozen=True)
class Row:
    """The runs of one label; a fixed row, such as zero-shot, has no seeds to average over."""

    name: str
    cells: Mapping[Column, Seeds]
    records: tuple[Record, ...] = ()
    fixed: bool = False

    @property
    def seedless(self) -> bool:
        """True if another seed would change nothing: deterministic methods are run once."""
        methods = {record.spec.method for record in self.records}
        once = len({record.seed for record in self.records}) == 1
        return self.fixed or (once and methods <= {"vector", "search", *MERGE_RULES.names})


@dataclass(frozen=True)
class Results:
    """All rows of one experiment, with the tasks and seeds that every row should have."""

    name: str
    setting: str
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
        """The number of tasks with its noun, such as "1 task" or "8 tasks"."""
        return f"{len(self.all_tasks)} task{'' if len(self.all_tasks) == 1 else 's'}"

    def cell(self, row: Row, column: Column, task: str | None = None) -> Estimate | None:
        """Return the mean over all tasks, or of one task; a remark says if some tasks are missing."""
        wanted = self.tasks[column] if task is None else (task,)
        means, tasks = means_by_seed(row.cells.get(column, {}), wanted)
        if not means:
            return None
        few = "" if len(tasks) == len(wanted) else f"{len(tasks)} of {len(wanted)} tasks"
        return Estimate(fmean(means.values()), standard_error(means.values()), few)

    def caveats(self) -> tuple[str, ...]:
        """Return notes on seeds, on missing runs and on mixed inputs."""
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
        """True if any mean is over more than one seed."""
        cells = (
            means_by_seed(row.cells.get(c, {}), self.tasks[c])[0] for row in self.rows for c in self.columns
        )
        return any(len(means) > 1 for means in cells)

    def _gap(self, row: Row, column: Column) -> str:
        seeds = row.cells.get(column, {})
        means, tasks = means_by_seed(seeds, self.tasks[column])
        if not means:
            if seeds:
                return "no task that every seed has"
            return "no run" if any(row.cells.values()) or not row.records else "no accuracy"
        missing = []
        if lost := [task for task in self.tasks[column] if task not in tasks]:
            missing.append(f"without {listed(lost)}")
        if not row.seedless:
            missing += [self._lost_seed(seed, seeds, tasks) for seed in self.seeds if seed not in means]
            if len(means) == 1 and self._intervals():
                missing.append("1 seed, no interval")
        return "; ".join(missing)

    def _lost_seed(self, seed: int, seeds: Seeds, tasks: Sequence[str]) -> str:
        if seed not in seeds:
            return f"without seed {seed}"
        return f"without seed {seed}, which lacks {listed([t for t in tasks if t not in seeds[seed]])}"


def standard_error(values: Iterable[float]) -> float | None:
    """Return the standard error of the mean, or None for a single value."""
    values = list(values)
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def means_by_seed(seeds: Seeds, tasks: Sequence[str]) -> tuple[dict[int, float], list[str]]:
    """Return a mean per seed and the tasks it is taken over: all tasks if any seed has all of them."""
    complete = {seed: values for seed, values in seeds.items() if values.keys() >= set(tasks)}
    used = complete or seeds
    shared = [task for task in tasks if all(task in values for values in used.values())]
    if not shared or not used:
        return {}, []
    return {seed: fmean(values[task] for task in shared) for seed, values in sorted(used.items())}, shared


def listed(names: Sequence[str]) -> str:
    """Return the names as one text, the first eight of them."""
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more
