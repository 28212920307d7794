"""Accuracy over the number of vectors kept, a line per selection rule."""

from __future__ import annotations

from collections.abc import Sequence

from aniso.records import Record
from aniso.report.budgets import budgets
from aniso.report.figures.canvas import Plot
from aniso.report.figures.lines import Axis, Line, LinePanel, draw_lines, interval_note
from aniso.report.tables import Estimate, Table


def plan_budget_curves(records: Sequence[Record]) -> Plot | None:
    """Plan lines by selection rule, a panel per number of shots; None without selection."""
    table = budgets(records)
    if table is None:
        return None
    names = table.columns[2:]
    panels = _panels(table)
    seeds = len({record.seed for record in records})
    axis = Axis("vectors kept, or cells per block", dict(enumerate(names)))
    title = table.title.removesuffix(" by budget, %")
    note = interval_note(panels, seeds)
    return Plot(
        "Mean accuracy by the number of vectors kept; 0 is zero-shot",
        lambda kind: draw_lines(panels, axis, "test accuracy, %", title, note, kind=kind),
    )


def _panels(table: Table) -> list[LinePanel]:
    lines: dict[str, list[Line]] = {}
    for shots, rule, *cells in table.rows:
        points = tuple((float(x), cell) for x, cell in enumerate(cells) if isinstance(cell, Estimate))
        if points:
            lines.setdefault(str(shots), []).append(Line(str(rule), points))
    several = {shots: f"{shots} shot{'' if shots == '1' else 's'}" for shots in lines if shots != "0"}
    return [LinePanel(tuple(own), title=several.get(shots, "")) for shots, own in lines.items()]
