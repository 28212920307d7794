"""Language modelling: perplexity and next-token accuracy on texts."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import final

from aniso.report.layouts.layout import ACCURACY, Layout
from aniso.report.results import Results, Row, Seeds, means_by_seed, standard_error
from aniso.report.tables import Cell, Estimate, Table


@final
class LanguageModelling(Layout):
    """One column of next-token accuracies; the table adds perplexities."""

    axes = ("train", "test", "seed")

    def table(self, found: Results) -> Table:
        base = [
            value for row in found.rows for r in row.records for value in r.metrics.base_perplexity.values()
        ]
        rows = [(row.name, _perplexity(found, row, base), found.cell(row, ACCURACY)) for row in found.rows]
        title = f"{found.name}: next-token prediction on {found.count.replace('task', 'text')}"
        columns = ("method", "perplexity", "next-token accuracy, %")
        return Table(title, columns, tuple(rows), found.caveats())


def _perplexity(found: Results, row: Row, base: list[float]) -> Cell:
    seeds: Seeds = defaultdict(dict)
    for record in row.records:
        seeds[record.seed].update(record.metrics.perplexity)
    means = list(means_by_seed(seeds, found.tasks[ACCURACY])[0].values())
    measured = means or (base if row.fixed else [])
    error = None if row.fixed else standard_error(means)
    return Estimate(fmean(measured), error, digits=2) if measured else None
