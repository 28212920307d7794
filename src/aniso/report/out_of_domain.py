"""Out-of-domain accuracy: learned on one task, evaluated on other data with the same classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from aniso.records import Record
from aniso.report.results import standard_error
from aniso.report.rows import results
from aniso.report.tables import Cell, Estimate, Table

_Column = tuple[int, str]  # shots, evaluated on
_Seeds = dict[int, dict[str, float]]  # seed, learned on: per cent


def out_of_domain(records: Iterable[Record]) -> Table | None:
    """Return a row per method and, for every number of shots, a column per data set.

    None if no run was evaluated on other data.
    """
    records = list(records)
    evaluated = sorted({(r.spec.shots or 0, name) for r in records for name in r.metrics.out_of_domain})
    if not evaluated:
        return None
    found = results(records)
    shots = sorted({n for n, _ in evaluated})
    others = sorted({name for _, name in evaluated})
    columns = [(n, name) for n in shots for name in ("", *others)]
    rows = [(row.name, *_cells(row.records, columns)) for row in found.rows if row.records]
    learned = sorted({task for r in records for task in r.measured})
    return Table(
        f"{found.name}: on other data with the same classes",
        ("method", *(f"{name or _own(learned)}, {n}" for n, name in columns)),
        tuple(rows),
        (
            f"test accuracy, %; headings are data set, number of shots; learned on {', '.join(learned)}",
            f"± is the standard error of the mean over {len(found.seeds)} seeds",
        ),
    )


def _own(learned: list[str]) -> str:
    return learned[0] if len(learned) == 1 else "itself"


def _cells(records: Iterable[Record], columns: Iterable[_Column]) -> list[Cell]:
    values: dict[_Column, _Seeds] = defaultdict(lambda: defaultdict(dict))
    everywhere: dict[str, _Seeds] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        measured = {name: score.accuracy for name, score in record.metrics.out_of_domain.items()}
        for task in record.measured:
            for name, share in {"": record.accuracy(task), **measured}.items():
                values[record.spec.shots or 0, name][record.seed][task] = 100 * share
                if record.spec.unchanged:  # the same whatever the number of shots
                    everywhere[name][record.seed][task] = 100 * share
    return [_estimate(values.get(column) or everywhere.get(column[1])) for column in columns]


def _estimate(seeds: _Seeds | None) -> Estimate | None:
    if not seeds:
        return None
    means = [fmean(by_task.values()) for by_task in seeds.values()]
    return Estimate(fmean(means), standard_error(means))
