"""Task addition: the accuracy of one model on every task, absolute and relative to fine-tuned models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from aniso.records import Record
from aniso.report.layouts.layout import ACCURACY, Layout
from aniso.report.results import Column, Results, listed
from aniso.report.tables import Estimate, Table

_RELATIVE = Column("relative")
_MEANING = "relative: accuracy as a share of that of the task's own fine-tuned vector, mean over tasks"


@final
class Addition(Layout):
    """Columns are the accuracy and its ratio to the reference."""

    axes = ("seed",)

    def columns(self, records: Sequence[Record]) -> tuple[Column, ...]:
        return ACCURACY, _RELATIVE

    def values(self, record: Record, column: Column, shares: Mapping[str, float]) -> dict[str, float]:
        if column == _RELATIVE:
            reference = record.metrics.reference or {}
            return {
                task: 100 * share / reference[task] for task, share in shares.items() if reference.get(task)
            }
        return super().values(record, column, shares)

    def columns_by_task(self, columns: Sequence[Column]) -> Sequence[Column]:
        return (ACCURACY,)

    def bars(self, columns: Sequence[Column]) -> tuple[Column, str] | None:
        return ACCURACY, ""

    def table(self, found: Results) -> Table:
        rows = (
            (
                row.name,
                *(_without_error(found.cell(row, ACCURACY, task)) for task in found.tasks[ACCURACY]),
                found.cell(row, ACCURACY),
                found.cell(row, _RELATIVE),
            )
            for row in found.rows
        )
        columns = ("method", *found.tasks[ACCURACY], "mean", "relative")
        title = f"{found.name}: test accuracy of one model on {found.count}, %"
        return Table(title, columns, tuple(rows), (_MEANING, *_without_reference(found), *found.caveats()))


def _without_error(estimate: Estimate | None) -> Estimate | None:
    return estimate and Estimate(estimate.mean)


def _without_reference(found: Results) -> list[str]:
    lost = [task for task in found.tasks[ACCURACY] if task not in found.tasks[_RELATIVE]]
    return [f"relative is without {listed(lost)}: no fine-tuned reference"] if lost else []
