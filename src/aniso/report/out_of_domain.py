"""Out-of-domain accuracy: learned on one task, evaluated on other data with the same classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import final

from aniso.records import Record
from aniso.report.results import standard_error
from aniso.report.rows import results
from aniso.report.tables import Estimate, Table

_Column = tuple[int, str]  # shots, evaluated on
_Seeds = dict[int, dict[str, float]]  # seed, learned on: per cent


@final
@dataclass(frozen=True)
class DomainAccuracies:
    """Accuracy by method, number of shots and data set; the task itself is the first data set."""

    name: str
    """The experiment."""
    learned: tuple[str, ...]
    """The tasks that were learned."""
    shots: tuple[int, ...]
    data_sets: tuple[str, ...]
    cells: Mapping[str, Mapping[_Column, Estimate]]
    """By method, then by number of shots and data set."""
    zero_shot: tuple[str, ...]
    """The methods that do not change the base."""
    seeds: int

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.cells)

    @property
    def interval_note(self) -> str:
        """What bars of estimates mean, or that there are none."""
        some = any(cell.error is not None for row in self.cells.values() for cell in row.values())
        return f"bars: standard error over {self.seeds} seeds" if some else "1 seed, no interval"

    def difference(self, method: str, shots: int, data_set: str) -> Estimate | None:
        """Return the points above zero-shot; the accuracy itself if there is no zero-shot run."""
        cell = self.cells[method].get((shots, data_set))
        if cell is None or not self.zero_shot:
            return cell
        base = self.cells[self.zero_shot[0]].get((shots, data_set))
        return None if base is None else Estimate(cell.mean - base.mean, cell.error)


def domain_accuracies(records: Iterable[Record]) -> DomainAccuracies | None:
    """Collect the accuracies on other data; None if no run was evaluated on any."""
    records = [record for record in records if record.ended_well]
    evaluated = {(r.spec.shots or 0, name) for r in records for name in r.metrics.out_of_domain}
    if not evaluated:
        return None
    found = results(records)
    learned = sorted({task for r in records for task in r.measured})
    own = learned[0] if len(learned) == 1 else "itself"
    shots = sorted({n for n, _ in evaluated})
    data_sets = (own, *sorted({name for _, name in evaluated}))
    columns = [(n, name) for n in shots for name in data_sets]
    rows = {row.name: _cells(row.records, columns, own) for row in found.rows if row.records}
    fixed = tuple(row.name for row in found.rows if row.fixed and row.name in rows)
    return DomainAccuracies(
        found.name, tuple(learned), tuple(shots), data_sets, rows, fixed, len(found.seeds)
    )


def out_of_domain(records: Iterable[Record]) -> Table | None:
    """Return a row per method and, for every number of shots, a column per data set.

    None if no run was evaluated on other data.
    """
    found = domain_accuracies(records)
    if found is None:
        return None
    columns = [(n, name) for n in found.shots for name in found.data_sets]
    learned = ", ".join(found.learned)
    return Table(
        f"{found.name}: on other data with the same classes",
        ("method", *(f"{name}, {n}" for n, name in columns)),
        tuple((method, *(row.get(column) for column in columns)) for method, row in found.cells.items()),
        (
            f"test accuracy, %; headings are data set, number of shots; learned on {learned}",
            f"± is the standard error of the mean over {found.seeds} seeds",
        ),
    )


def _cells(records: Iterable[Record], columns: Iterable[_Column], own: str) -> dict[_Column, Estimate]:
    values: dict[_Column, _Seeds] = defaultdict(lambda: defaultdict(dict))
    everywhere: dict[str, _Seeds] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        measured = {name: score.accuracy for name, score in record.metrics.out_of_domain.items()}
        for task in record.measured:
            for name, share in {own: record.accuracy(task), **measured}.items():
                values[record.spec.shots or 0, name][record.seed][task] = 100 * share
                if record.spec.unchanged:  # the same whatever the number of shots
                    everywhere[name][record.seed][task] = 100 * share
    found = {c: values.get(c) or everywhere.get(c[1]) for c in columns}
    return {column: _estimate(seeds) for column, seeds in found.items() if seeds}


def _estimate(seeds: _Seeds) -> Estimate:
    means = [fmean(by_task.values()) for by_task in seeds.values()]
    return Estimate(fmean(means), standard_error(means))
