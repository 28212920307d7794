"""Measured accuracies beside published ones: a table by cell, and one row per number for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from aniso.analysis_records import AnalysisRecord
from aniso.published import MEAN, PublishedTable, Value
from aniso.records import Record
from aniso.report.results import means_by_seed, standard_error
from aniso.report.tables import Cell, Estimate, Table

_TOLERANCE = 1e-9  # of fractions that were written with few digits


@final
@dataclass(frozen=True)
class ComparedNumber:
    """One published number with what was measured for it, in per cent."""

    row: str
    column: str
    published: float | None
    published_error: float | None = None
    measured: Estimate | None = None

    @property
    def difference(self) -> float | None:
        """Measured minus published."""
        if self.measured is None or self.published is None:
            return None
        return self.measured.mean - self.published

    def __str__(self) -> str:
        measured = "not run" if self.measured is None else str(self.measured)
        if self.published is None:
            return measured
        difference = "" if self.difference is None else f", {self.difference:+.1f}"
        return f"{measured} (paper {self.published:g}{difference})"


@final
@dataclass(frozen=True)
class RecordedRuns:
    """The records and the analysis that published numbers are compared with."""

    records: Sequence[Record]
    analysis: AnalysisRecord | None = None
    tasks: Sequence[str] = ()
    """Tasks that a mean is over in the paper."""

    def compare(self, table: PublishedTable) -> list[ComparedNumber]:
        """Return every number of a published table with the measured one."""
        out = []
        for row, values in table.rows.items():
            errors = table.errors.get(row, (None,) * len(values))
            for column, value, error in zip(table.columns, values, errors, strict=True):
                measured = self._measured(table, row, column)
                out.append(ComparedNumber(row, str(column), value, error, measured))
        return out

    def _measured(self, table: PublishedTable, row: str, column: Value) -> Estimate | None:
        measure = table.measure_of(column)
        if measure == "error":
            return self._error(row)
        conditions = dict(table.at)
        task = str(column) if table.axis == "task" and column != MEAN else None
        task = str(conditions.pop("task")) if "task" in conditions else task
        if table.axis not in ("measure", "task"):
            conditions[table.axis] = column
        seeds: dict[int, dict[str, float]] = defaultdict(dict)
        for record in self.records:
            if record.label == row and record.ended_well and _has(record, conditions):
                found = self._values(record, measure, task)
                seeds[0 if record.spec.unchanged else record.seed].update(found)
        return self._estimate(seeds, task)

    def _error(self, row: str) -> Estimate | None:
        found = self.analysis.matrices if self.analysis is not None else ()
        means = [matrix.mean for matrix in found if matrix.title == row]
        return Estimate(100 * means[0], digits=2) if means and means[0] is not None else None

    def _values(self, record: Record, measure: str, task: str | None) -> dict[str, float]:
        """Return shares by task: of all tasks that the run is about, or of one."""
        metrics = record.metrics
        if measure in ("target", "control"):
            target = record.spec.target or ""
            name = target if measure == "target" else record.spec.control or ""
            found = {target: metrics.accuracy[name].accuracy}
        else:
            scores = metrics.accuracy | (metrics.out_of_domain if task is not None else {})
            found = {name: score.accuracy for name, score in scores.items()}
        if measure == "relative":
            own = metrics.reference or self._fine_tuned
            found = {name: value / own[name] for name, value in found.items() if own.get(name)}
        return {name: value for name, value in found.items() if task in (None, name)}

    @property
    def _fine_tuned(self) -> dict[str, float]:
        """Accuracies of runs with the task's own vector."""
        own = [record for record in self.records if record.spec.method == "vector"]
        return {task: record.accuracy(task) for record in own for task in record.measured}

    def _estimate(self, seeds: dict[int, dict[str, float]], task: str | None) -> Estimate | None:
        covered = sorted({name for values in seeds.values() for name in values})
        means, used = means_by_seed(dict(seeds), covered)
        if not means:
            return None
        shares = [100 * value for value in means.values()]
        complete = task is not None or len(used) >= len(self.tasks)
        remark = "" if complete else f"{len(used)} of {len(self.tasks)} tasks"
        return Estimate(fmean(shares), standard_error(shares), remark)


def comparison_table(title: str, numbers: Sequence[ComparedNumber]) -> Table:
    """Return a table in which every cell holds the measured value, the published one and the difference."""
    columns = tuple(dict.fromkeys(number.column for number in numbers))
    rows: dict[str, dict[str, Cell]] = defaultdict(dict)
    for number in numbers:
        rows[number.row][number.column] = str(number)
    body = tuple((name, *(cells.get(column) for column in columns)) for name, cells in rows.items())
    return Table(title, ("", *columns), body)


def comparison_rows(tables: Iterable[tuple[str, Sequence[ComparedNumber]]]) -> Table:
    """Return a table with a row per number, for CSV."""
    body = tuple(
        (
            title,
            number.row,
            number.column,
            number.measured,
            None if number.published is None else Estimate(number.published, number.published_error),
            None if number.difference is None else Estimate(number.difference),
        )
        for title, numbers in tables
        for number in numbers
    )
    return Table("", ("table", "row", "column", "measured", "published", "difference"), body)


def _has(record: Record, conditions: dict[str, Value]) -> bool:
    """True if a run has these options; the base's accuracy depends on neither shots nor shares."""
    free = ("shots", "fraction", "budget", "bases") if record.spec.unchanged else ()
    return all(key in free or _same(_option(record, key), value) for key, value in conditions.items())


def _option(record: Record, name: str) -> object:
    if name != "bases":
        return getattr(record.spec, name, None)
    bank = str(record.spec.bank)
    return int(bank.split(":")[1]) if bank.startswith("random:") else record.spec.budget


def _same(found: object, wanted: Value) -> bool:
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return abs(found - wanted) <= _TOLERANCE
    return str(found) == str(wanted)
