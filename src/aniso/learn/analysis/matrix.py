"""A matrix of numbers with named rows and columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

Value = float | None
"""A cell of a matrix; None where the number is not defined."""


@final
@dataclass(frozen=True)
class LabelledMatrix:
    """Numbers by row and column; None where a number is not defined."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError("a matrix needs a value for each row and column")

    def of(self, row: str, column: str) -> Value:
        """Return the value in a row and a column."""
        return self.values[self.rows.index(row)][self.columns.index(column)]

    @property
    def mean_off_diagonal(self) -> Value:
        """The mean of the defined values whose row and column have different names."""
        return mean(self._off_diagonal)

    @property
    def largest_off_diagonal(self) -> float:
        """The largest absolute value whose row and column have different names; 0 if there is none."""
        return max((abs(value) for value in self._off_diagonal if value is not None), default=0.0)

    @property
    def _off_diagonal(self) -> list[Value]:
        return [
            value
            for row, values in zip(self.rows, self.values, strict=True)
            for column, value in zip(self.columns, values, strict=True)
            if row != column
        ]

    @property
    def column_means(self) -> tuple[Value, ...]:
        """The mean of the defined values of each column."""
        return tuple(mean(values) for values in zip(*self.values, strict=True))


def mean(values: Iterable[Value]) -> Value:
    """Return the mean of the defined values, or None if there are none."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
