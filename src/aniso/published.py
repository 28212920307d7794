"""Numbers that a paper printed, in the form in which records are compared with them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Axis = Literal["measure", "task", "shots", "fraction", "budget", "bases"]
"""What the columns of a table differ by. ``bases``: the budget, or N of a bank ``random:N``."""
Measure = Literal["accuracy", "relative", "target", "control", "error"]
"""``relative``: to the task's own fine-tuned vector; ``error``: mean disentanglement error."""
Value = str | int | float
MEAN = "mean"
"""The column of a table by task with the mean over its tasks."""


class PublishedTable(BaseModel):
    """A table as printed, in per cent: rows are labels of an experiment, columns the values of one axis."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    backbone: str
    axis: Axis
    columns: tuple[Value, ...]
    rows: dict[str, tuple[float | None, ...]]
    errors: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """Printed standard errors."""
    measure: Measure = "accuracy"
    at: dict[str, Value] = Field(default_factory=dict)
    """Options that all runs of the table have, such as ``shots: 4``."""
    title: str = ""

    @model_validator(mode="after")
    def _fits(self) -> PublishedTable:
        if not self.columns or not self.rows:
            raise ValueError("a table needs columns and rows")
        for name, values in (*self.rows.items(), *self.errors.items()):
            if len(values) != len(self.columns):
                raise ValueError(f"row '{name}' has {len(values)} values for {len(self.columns)} columns")
        if unknown := [name for name in self.errors if name not in self.rows]:
            raise ValueError(f"errors of '{unknown[0]}', which is no row")
        return self

    @property
    def heading(self) -> str:
        """What the table shows, in a few words."""
        words = [self.backbone, *(f"{key} {value}" for key, value in self.at.items()), self.title]
        if self.axis != "measure":
            words.append(self.measure)
        return ", ".join(word for word in words if word)

    def measure_of(self, column: Value) -> str:
        """Return the measure of a column."""
        return str(column) if self.axis == "measure" else self.measure
