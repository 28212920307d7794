"""Few-shot learning and fine-tuning: accuracy by the number of shots, by the share of labels, or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from aniso.records import Record
from aniso.report.layouts.layout import Layout, mean_accuracy
from aniso.report.results import Column, Results, Row
from aniso.report.tables import Table


class _Curves(Layout):
    """One column per amount of labelled data."""

    same_tasks = True

    def heading(self, row: Row, column: Column) -> str:
        return row.name if row.fixed else f"{row.name}, {column.name}"

    def table(self, found: Results) -> Table:
        return mean_accuracy(found)


@final
class FewShot(_Curves):
    """Columns are shots: labelled images per class."""

    axes = ("task", "shots", "seed")

    def columns(self, records: Sequence[Record]) -> tuple[Column, ...]:
        shots = sorted({r.spec.shots for r in records if r.spec.shots})
        found = tuple(Column(f"{n} shot{'' if n == 1 else 's'}", n) for n in shots)
        return found or (Column("zero-shot"),)

    def belongs(self, record: Record, column: Column) -> bool:
        return record.spec.unchanged or record.spec.shots == column.x


@final
class Fractions(_Curves):
    """Columns are shares of the training images."""

    axes = ("task", "fraction", "seed")

    def columns(self, records: Sequence[Record]) -> tuple[Column, ...]:
        fractions = sorted({r.spec.fraction for r in records if r.spec.fraction})
        return tuple(Column(f"{100 * share:g} %", 100 * share) for share in fractions) or (
            Column("zero-shot"),
        )

    def belongs(self, record: Record, column: Column) -> bool:
        return record.spec.unchanged or 100 * (record.spec.fraction or 0) == column.x


@final
class FineTuning(Layout):
    """One column, the mean accuracy over tasks."""

    def table(self, found: Results) -> Table:
        return mean_accuracy(found)
