"""The two tables of every experiment: a row per method, and a row per task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aniso.records import Record
from aniso.report.layouts import layout_for
from aniso.report.results import Column, Row
from aniso.report.rows import results
from aniso.report.tables import Table


def table(records: Iterable[Record]) -> Table:
    """Return the table of one experiment, a row per method."""
    found = results(records)
    return layout_for(found.setting).table(found)


def details(records: Iterable[Record]) -> Table:
    """Return the table of one experiment by task, a column per method and number of shots."""
    found = results(records)
    layout = layout_for(found.setting)
    columns = layout.columns_by_task(found.columns)
    pairs = [(row, column) for row in found.rows for column in _shown_columns(row, columns)]
    rows = tuple(
        (task, *(found.cell(row, column, task) for row, column in pairs)) for task in found.all_tasks
    )
    names = tuple(layout.heading(row, column) for row, column in pairs)
    title = f"{found.name}: test accuracy by task, %"
    return Table(title, (layout.first_column, *names), rows, found.caveats())


def _shown_columns(row: Row, columns: Sequence[Column]) -> Sequence[Column]:
    """Return one column for a row that is the same in all, as zero-shot is for every number of shots."""
    repeated = row.fixed and all(row.cells.get(c) == row.cells.get(columns[0]) for c in columns)
    return columns[:1] if repeated else columns
