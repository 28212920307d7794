"""Any setting that has no layout of its own: the accuracy of every label on every task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from aniso.records import Record
from aniso.report.layouts.layout import ACCURACY, Layout
from aniso.report.results import Results
from aniso.report.tables import Table


@final
class Generic(Layout):
    """Columns are tasks; every cell is a mean over seeds with its standard error."""

    def cells(self, record: Record) -> Iterator[tuple[str, ...]]:
        for task in record.measured:
            yield task, str(record.seed)

    def table(self, found: Results) -> Table:
        tasks = found.tasks[ACCURACY]
        several = len(tasks) > 1
        rows = (
            (
                row.name,
                *(found.cell(row, ACCURACY, task) for task in tasks),
                *((found.cell(row, ACCURACY),) if several else ()),
            )
            for row in found.rows
        )
        title = f"{found.name}: test accuracy on {found.count}, %"
        return Table(title, ("method", *tasks, *(("mean",) if several else ())), tuple(rows), found.caveats())
