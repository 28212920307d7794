"""Task addition: the accuracy of one model on every task, absolute and relative to fine-tuned models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from aniso.records import Record
from aniso.registry import MERGE_RULES
from aniso.report.layouts.layout import ACCURACY, Layout
from aniso.report.results import Column, Results, Row, listed
from aniso.report.tables import Estimate, Table

_RELATIVE = Column("relative")
_DATA = "data"
_DATA_MEANING = "data: what the method needs beside the vectors, also to choose a scale or an epoch"
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
        merges = any(record.spec.method in MERGE_RULES for row in found.rows for record in row.records)
        with_data = merges or any(data_needed(row) == "unlabelled" for row in found.rows)
        rows = (
            (
                row.name,
                *((data_needed(row),) if with_data else ()),
                *(_without_error(found.cell(row, ACCURACY, task)) for task in found.tasks[ACCURACY]),
                found.cell(row, ACCURACY),
                found.cell(row, _RELATIVE),
            )
            for row in found.rows
        )
        columns = ("method", *((_DATA,) if with_data else ()), *found.tasks[ACCURACY], "mean", "relative")
        compared = "merging methods, test accuracy" if merges else "test accuracy"
        title = f"{found.name}: {compared} of one model on {found.count}, %"
        notes = (_MEANING, *((_DATA_MEANING,) if with_data else ()))
        return Table(title, columns, tuple(rows), (*notes, *_without_reference(found), *found.caveats()))


def data_needed(row: Row) -> str:
    """Return which data a row's runs need beside the vectors: none, unlabelled or labelled.

    Records of earlier versions do not say; all methods of theirs that choose anything took labels.
    """
    chosen = [record for record in row.records if record.spec.method not in ("none", "vector")]
    found = {record.metrics.supervision or "labelled" for record in chosen}
    return next((data for data in ("labelled", "unlabelled") if data in found), "none")


def _without_error(estimate: Estimate | None) -> Estimate | None:
    return estimate and Estimate(estimate.mean)


def _without_reference(found: Results) -> list[str]:
    lost = [task for task in found.tasks[ACCURACY] if task not in found.tasks[_RELATIVE]]
    return [f"relative is without {listed(lost)}: no fine-tuned reference"] if lost else []
