"""Test-time adaptation: the accuracy, that of online predictions, and how many predictions changed."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import final

from aniso.report.layouts.layout import ACCURACY, Layout
from aniso.report.results import Results, Row, standard_error
from aniso.report.tables import Cell, Estimate, Table


@final
class TestTime(Layout):
    """One column of accuracies; the table adds what was recorded about unlabelled predictions."""

    def table(self, found: Results) -> Table:
        online = any(record.metrics.online for row in found.rows for record in row.records)
        rows = (
            (row.name, found.cell(row, ACCURACY), *((_online(row),) if online else ()), _agreement(row))
            for row in found.rows
        )
        columns = ("method", "accuracy", *(("online accuracy",) if online else ()), "same as zero-shot")
        meaning = ["same as zero-shot: predictions that equal the zero-shot prediction, %"]
        if online:
            meaning.append("online accuracy: predictions made before the image was used for learning")
        title = f"{found.name}: mean test accuracy over {found.count}, %"
        return Table(title, columns, tuple(rows), (*meaning, *found.caveats()))


def _online(row: Row) -> Cell:
    """The mean over tasks, then over seeds."""
    seeds: dict[int, list[float]] = defaultdict(list)
    for record in row.records:
        for scored in record.metrics.online.values():
            if scored.accuracy is not None:
                seeds[record.seed].append(100 * scored.accuracy)
    means = [fmean(shares) for shares in seeds.values()]
    return Estimate(fmean(means), standard_error(means)) if means else None


def _agreement(row: Row) -> Cell:
    known = [record.metrics.answers for record in row.records]
    shares = [summary.agreement for summary in known if summary is not None]
    return Estimate(100 * fmean(shares)) if shares and not row.fixed else None
