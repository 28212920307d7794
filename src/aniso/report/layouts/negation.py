"""Task negation: the accuracy left on the target and on the control task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from aniso.records import Record
from aniso.report.layouts.layout import Layout
from aniso.report.results import Column, Results, Row
from aniso.report.tables import Cell, Table

KEPT = 0.95  # share of its zero-shot accuracy that the control task must keep
_TARGET, _CONTROL = Column("target"), Column("control")


@final
class Negation(Layout):
    """Columns are the target and the control; values are by target."""

    axes = ("target", "seed")
    first_column = "target"
    figure = "target-control"

    def columns(self, records: Sequence[Record]) -> tuple[Column, ...]:
        return _TARGET, _CONTROL

    def values(self, record: Record, column: Column, shares: Mapping[str, float]) -> dict[str, float]:
        target, control = record.spec.target or "", record.spec.control or ""
        measured = target if column == _TARGET else control
        return {target: 100 * shares[measured]} if measured in shares else {}

    def heading(self, row: Row, column: Column) -> str:
        return f"{row.name}, {column.name}"

    def bars(self, columns: Sequence[Column]) -> tuple[Column, str] | None:
        return None

    def table(self, found: Results) -> Table:
        rows = (
            (row.name, found.cell(row, _TARGET), found.cell(row, _CONTROL), _kept(row)) for row in found.rows
        )
        lost = sum(_keeps(record) is None for row in found.rows for record in row.records)
        unknown = (
            [f"{lost} runs do not state the control's zero-shot accuracy and are not counted"] if lost else []
        )
        title = f"{found.name}: negation of {found.count}, test accuracy in %"
        columns = ("method", "target (lower is better)", "control", f"control at {KEPT:.0%} or more")
        meaning = (
            f"last column: runs that kept the control task at {KEPT:.0%} of its zero-shot accuracy, on test"
        )
        return Table(title, columns, tuple(rows), (meaning, *unknown, *found.caveats()))


def _keeps(record: Record) -> bool | None:
    control = record.spec.control or ""
    zero = record.metrics.zero_shot.get(control)
    # both are counts divided by the same total: only rounding lies within the tolerance
    return None if zero is None else record.accuracy(control) >= KEPT * zero - 1e-9


def _kept(row: Row) -> Cell:
    known = [kept for kept in map(_keeps, row.records) if kept is not None]
    return f"{sum(known)} of {len(known)}" if known else None
