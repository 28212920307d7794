"""Accuracy over the number of bases: random directions against task vectors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from aniso.records import Record
from aniso.report.figures.canvas import Plot
from aniso.report.figures.lines import Axis, Line, LinePanel, draw_lines, interval_note
from aniso.report.results import standard_error
from aniso.report.rows import results
from aniso.report.tables import Estimate

_RANDOM = re.compile(r"random:([0-9]+)")
_BASES, _VECTORS = "random bases", "task vectors"
_MOST = 5  # tasks with a panel of their own
_Values = dict[str, dict[int, dict[str, dict[int, float]]]]  # line, bases, task, seed


def plan_random_bases(records: Sequence[Record]) -> Plot | None:
    """Plan a panel per task, of accuracy relative to full fine-tuning if there are runs of it.

    None unless there are runs with random bases. Task vectors are those that a selection rule kept.
    """
    records = [record for record in records if record.ended_well]
    if not any(_RANDOM.match(record.spec.bank or "") for record in records):
        return None
    found = results(records)
    values = _values(records)
    tasks = sorted({task for by_count in values.values() for own in by_count.values() for task in own})
    full = _fine_tuned(records)
    relative = all(full.get(task) for task in tasks)
    scale = {task: 100 / full[task] if relative else 1.0 for task in tasks}
    counts = sorted({count for by_count in values.values() for count in by_count})
    groups = [[task] for task in tasks] if len(tasks) <= _MOST else [tasks]
    panels = [_panel(values, group, scale) for group in groups]
    axis = Axis("number of bases", {float(count): str(count) for count in counts})
    label = "accuracy relative to full fine-tuning, %" if relative else "test accuracy, %"
    note = interval_note(panels, len(found.seeds))
    if not relative:
        note += "; no runs of full fine-tuning, so accuracies are absolute"
    return Plot(
        "Accuracy by the number of random directions, or of task vectors kept; 0 is zero-shot",
        lambda kind: draw_lines(panels, axis, label, found.name, note, kind=kind),
    )


def _values(records: Sequence[Record]) -> _Values:
    values: _Values = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for record in records:
        for line, count in _places(record):
            for task in record.measured:
                values[line][count][task][record.seed] = 100 * record.accuracy(task)
    return values


def _places(record: Record) -> list[tuple[str, int]]:
    """Return the line and the number of bases of a run; zero-shot is the start of both."""
    spec = record.spec
    if spec.unchanged:
        return [(_BASES, 0), (_VECTORS, 0)]
    if spec.method != "coefficients" or spec.head is not None:
        return []
    drawn = _RANDOM.match(spec.bank or "")
    if drawn:
        return [(_BASES, int(drawn[1]))]
    if spec.select is None:
        return [(_VECTORS, len(record.inputs.vectors))] if record.inputs.vectors else []
    budget = str(spec.budget)
    return [(_VECTORS, int(budget))] if budget.isdigit() else []


def _fine_tuned(records: Sequence[Record]) -> dict[str, float]:
    """Return the per cent of full fine-tuning by task, from runs of all weights or stated references."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.spec.method == "weights" and not record.spec.model_dump().get("lora"):
            for task in record.measured:
                found[task].append(100 * record.accuracy(task))
    stated = {
        task: 100 * share for record in records for task, share in (record.metrics.reference or {}).items()
    }
    return {**stated, **{task: fmean(values) for task, values in found.items()}}


def _panel(values: _Values, tasks: Sequence[str], scale: Mapping[str, float]) -> LinePanel:
    lines = []
    for name, by_count in values.items():
        cells = [(float(n), _estimate(by_count[n], tasks, scale)) for n in sorted(by_count)]
        points = tuple((place, cell) for place, cell in cells if cell is not None)
        if points:
            lines.append(Line(name, points))
    title = tasks[0] if len(tasks) == 1 else f"mean over {len(tasks)} tasks"
    return LinePanel(tuple(sorted(lines, key=lambda line: line.name)), title=title)


def _estimate(
    found: Mapping[str, Mapping[int, float]], tasks: Sequence[str], scale: Mapping[str, float]
) -> Estimate | None:
    """Return the mean over tasks, with its error over the seeds that have all of them."""
    if any(task not in found for task in tasks):
        return None
    seeds = set.intersection(*(set(found[task]) for task in tasks))
    means = [fmean(scale[task] * found[task][seed] for task in tasks) for seed in sorted(seeds)]
    return Estimate(fmean(means), standard_error(means)) if means else None
