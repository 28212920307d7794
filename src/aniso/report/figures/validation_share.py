"""Accuracy of addition over the share of the validation data that was learned from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from statistics import fmean

from aniso.records import Record
from aniso.report.figures.canvas import Plot
from aniso.report.figures.lines import Axis, Line, LinePanel, draw_lines, interval_note
from aniso.report.layouts import field_text
from aniso.report.results import standard_error
from aniso.report.tables import Estimate

_IDENTITY = ("method", "partition", "linearised", "lora", "bank", "objective", "match", "rounds", "norm")
_FIXED = ("none", "vector")  # methods that learn nothing from the validation data
_Runs = dict[float, list[Record]]  # by share


def plan_validation_share(records: Sequence[Record]) -> Plot | None:
    """Plan a line per method over the share of validation data; None unless there are several shares."""
    good = [r for r in records if r.ended_well and r.spec.setting == "addition"]
    tasks = {task for record in good for task in record.measured}
    good = [record for record in good if set(record.measured) == tasks]
    learned = [record for record in good if record.spec.method not in _FIXED]
    if len({record.spec.fraction for record in learned}) < 2:
        return None
    lines = tuple(Line(name, _points(runs)) for name, runs in _lines(learned).items())
    levels = {r.label: _mean(r) for r in good if r.spec.method in _FIXED}
    panel = LinePanel(lines, levels)
    shares = sorted({place for line in lines for place, _ in line.points})
    axis = Axis("validation images learned from, %", {x: f"{x:g}" for x in shares}, logarithmic=True)
    note = interval_note([panel], len({record.seed for record in learned}))
    title = f"{learned[0].experiment}: mean over {len(tasks)} task{'' if len(tasks) == 1 else 's'}"
    return Plot(
        "Mean accuracy of one model on all tasks by the share of the validation images used",
        lambda kind: draw_lines([panel], axis, "test accuracy, %", title, note, kind=kind),
    )


def _lines(records: Sequence[Record]) -> dict[str, _Runs]:
    """Group runs that differ in the share and the seed alone, named by the common start of their labels."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(field_text(record, name) for name in _IDENTITY)].append(record)
    out: dict[str, _Runs] = {}
    for group in groups.values():
        labels = {record.label for record in group}
        name = min(labels) if len(labels) == 1 else _common_start(labels) or min(labels)
        runs: _Runs = defaultdict(list)
        for record in group:
            runs[100 * (record.spec.fraction or 1.0)].append(record)
        out[name if name not in out else f"{name} ({group[0].spec.method})"] = runs
    return out


def _common_start(labels: Iterable[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    return "".join(letters[0] for letters in same).rstrip(" ,:;(0123456789.%")


def _points(runs: _Runs) -> tuple[tuple[float, Estimate], ...]:
    means = {share: [_mean(record) for record in found] for share, found in sorted(runs.items())}
    return tuple((share, Estimate(fmean(own), standard_error(own))) for share, own in means.items())


def _mean(record: Record) -> float:
    return fmean(100 * record.accuracy(task) for task in record.measured)
