"""Accuracy over the number of shots, or over the share of the training images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aniso.records import Record
from aniso.report.figures.canvas import Kind, Plot, unfit
from aniso.report.figures.lines import Axis, Line, LinePanel, draw_lines, interval_note
from aniso.report.results import Results, Row
from aniso.report.rows import results

_LABELS = {
    "few-shot": "shots: labelled images per class",
    "data-fraction": "share of the training images, %",
}


def few_shot_curves(records: Iterable[Record], *, kind: Kind = "png") -> bytes:
    """Draw mean accuracy over the number of shots, or the share of labels, with standard errors over seeds.

    Only means over all tasks are drawn: a point over fewer would not be comparable with its neighbours.
    """
    found = results(records)
    if found.setting not in _LABELS:
        raise unfit("curves", found.setting, "few-shot or data-fraction")
    return _draw(found, kind)


def plan_few_shot(records: Sequence[Record]) -> Plot | None:
    """Plan accuracy over the number of shots."""
    return _plan(records, "few-shot")


def plan_data_share(records: Sequence[Record]) -> Plot | None:
    """Plan accuracy over the share of the training images, unless records are about numbers of vectors."""
    shares = {record.spec.fraction for record in records}
    counted = any(r.spec.select or (r.spec.bank or "").startswith("random:") for r in records)
    return None if counted and len(shares) == 1 else _plan(records, "data-fraction")


def _plan(records: Sequence[Record], setting: str) -> Plot | None:
    found = results(records)
    if found.setting != setting or not found.rows:
        return None
    caption = "Means over all tasks (points that lack a task are left out), standard errors over seeds"
    return Plot(caption, lambda kind: _draw(found, kind))


def _draw(found: Results, kind: Kind) -> bytes:
    lines = tuple(line for row in found.rows if not row.fixed if (line := _line(found, row)).points)
    panel = LinePanel(lines, _levels(found))
    axis = Axis(_LABELS[found.setting], {c.x: f"{c.x:g}" for c in found.columns}, logarithmic=True)
    note = interval_note([panel], len(found.seeds)) if lines else ""
    tasks = found.all_tasks
    title = f"{found.name}: {tasks[0] if len(tasks) == 1 else f'mean over {found.count}'}"
    return draw_lines([panel], axis, "test accuracy, %", title, note, kind=kind)


def _line(found: Results, row: Row) -> Line:
    cells = [(column.x, found.cell(row, column)) for column in found.columns]
    return Line(row.name, tuple((x, cell) for x, cell in cells if cell is not None and not cell.remark))


def _levels(found: Results) -> dict[str, float]:
    """Return the rows that do not depend on shots."""
    cells = {row.name: found.cell(row, found.columns[0]) for row in found.rows if row.fixed}
    return {name: cell.mean for name, cell in cells.items() if cell and not cell.remark}
