"""The layout of a setting: which columns its results have, and which table shows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from aniso.records import Record
from aniso.report.results import Column, Results, Row
from aniso.report.tables import Table

ACCURACY = Column("accuracy")


class Layout(ABC):
    """How records of one setting are arranged. The defaults fit a setting with one accuracy per task."""

    axes: ClassVar[tuple[str, ...]] = ("task", "seed")
    """The fields of a spec that decide which cell of its row a run belongs to."""
    first_column: ClassVar[str] = "task"
    """The heading of the tasks in the table by task."""
    same_tasks: ClassVar[bool] = False
    """Whether every column should have the tasks of all columns, as the points of a curve should."""
    figure: ClassVar[Literal["target-control", ""]] = ""
    """A figure of this setting alone that shows the whole experiment, if there is one."""

    def cells(self, record: Record) -> Iterator[tuple[str, ...]]:
        """Yield the cells that a run fills; two runs of one row must not fill the same cell."""
        yield tuple(field_text(record, axis) for axis in self.axes)

    def columns(self, records: Sequence[Record]) -> tuple[Column, ...]:
        """Return the columns that these records fill."""
        return (ACCURACY,)

    def belongs(self, record: Record, column: Column) -> bool:
        """Return True if a run has a value in this column."""
        return True

    def values(self, record: Record, column: Column, shares: Mapping[str, float]) -> dict[str, float]:
        """Convert accuracies between 0 and 1, the run's own or zero-shot, to per cent by task."""
        return {task: 100 * share for task, share in shares.items()}

    @abstractmethod
    def table(self, found: Results) -> Table:
        """Return the table of the experiment, a row per label."""

    def columns_by_task(self, columns: Sequence[Column]) -> Sequence[Column]:
        """Return the columns shown in the table by task."""
        return columns

    def heading(self, row: Row, column: Column) -> str:
        """Return the heading of a row's column in the table by task."""
        return row.name

    def bars(self, columns: Sequence[Column]) -> tuple[Column, str] | None:
        """Return the column that a bar chart by task shows and its name in titles; None for no chart."""
        return (columns[-1], columns[-1].name) if columns else None


def mean_accuracy(found: Results) -> Table:
    """Return a table with the mean over all tasks in every column."""
    rows = ((row.name, *(found.cell(row, column) for column in found.columns)) for row in found.rows)
    title = f"{found.name}: mean test accuracy over {found.count}, %"
    return Table(title, ("method", *(c.name for c in found.columns)), tuple(rows), found.caveats())


_EARLIER = {("addition", "objective"): "cross-entropy"}
"""Values of options that a setting did not have, by setting and option."""


def field_text(record: Record, name: str) -> str:
    """Return a field of a record's spec as text."""
    value: Any = record.seed if name == "seed" else record.spec.model_dump().get(name)
    if value is None:  # in records from before the option
        value = _EARLIER.get((record.spec.setting, name))
    if isinstance(value, tuple | list):
        return " + ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
