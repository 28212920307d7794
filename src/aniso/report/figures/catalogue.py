"""The figures that can be drawn from records, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from aniso.errors import UsageError, printable
from aniso.records import Record
from aniso.report.figures.budget_curves import plan_budget_curves
from aniso.report.figures.canvas import Kind, Plot
from aniso.report.figures.coefficient_figures import plan_boxes_by_depth, plan_boxes_by_kind, plan_heat_map
from aniso.report.figures.curves import plan_data_share, plan_few_shot
from aniso.report.figures.domain_bars import plan_domain_bars
from aniso.report.figures.random_bases import plan_random_bases
from aniso.report.figures.validation_share import plan_validation_share
from aniso.report.figures.venn import plan_venn
from aniso.report.groups import experiments


@final
@dataclass(frozen=True)
class Figure:
    """A figure that can be drawn from records of one experiment."""

    description: str
    needs: str
    """The records that it needs, for messages."""
    plan: Callable[[Sequence[Record]], Plot | None]
    """Return the plot, or None if these records do not allow it."""
    by_method: bool = False
    """True if a report draws it for every method that has what it needs."""


_COEFFICIENTS = "runs that learned coefficients"
_FIGURES: Final[Mapping[str, Figure]] = {
    "coefficient-heatmap": Figure(
        "Coefficients, vectors by blocks, of one run or as the mean of several",
        f"{_COEFFICIENTS}, with all coefficients in their records",
        plan_heat_map,
        by_method=True,
    ),
    "coefficient-boxes-kind": Figure(
        "Coefficients by type of block, of all data sets and of each",
        _COEFFICIENTS,
        plan_boxes_by_kind,
        by_method=True,
    ),
    "coefficient-boxes-depth": Figure(
        "Coefficients by layer, of all data sets and of each",
        _COEFFICIENTS,
        plan_boxes_by_depth,
        by_method=True,
    ),
    "few-shot-curves": Figure(
        "Accuracy against the number of labelled images per class", "few-shot runs", plan_few_shot
    ),
    "venn": Figure(
        "Images that the base gets wrong and up to three methods get right",
        "few-shot and zero-shot runs that record which images are right, of at least two methods",
        plan_venn,
    ),
    "out-of-domain-bars": Figure(
        "Difference to zero-shot on other data with the same classes",
        "runs with --out-of-domain",
        plan_domain_bars,
    ),
    "budget-curves": Figure(
        "Accuracy against the number of vectors that a selection rule keeps",
        "few-shot or data-fraction runs with --select",
        plan_budget_curves,
    ),
    "data-share-curves": Figure(
        "Accuracy against the share of the training images", "data-fraction runs", plan_data_share
    ),
    "random-bases": Figure(
        "Accuracy against the number of bases, random ones and task vectors",
        "runs with --bank random:N",
        plan_random_bases,
    ),
    "validation-share-curves": Figure(
        "Accuracy of addition against the share of the validation images",
        "addition runs with several values of --fraction",
        plan_validation_share,
    ),
}
FIGURES: Final[Mapping[str, str]] = {name: figure.description for name, figure in _FIGURES.items()}
"""The names that ``draw_figure`` takes, with a description of each."""


def find_figure(name: str) -> Figure:
    """Return a figure by name; an unknown name is an error that suggests similar ones."""
    if name not in _FIGURES:
        near = difflib.get_close_matches(name, _FIGURES, 2)
        raise UsageError(
            "RECORD",
            f"there is no figure '{printable(name)}'",
            expected=", ".join(_FIGURES),
            likely=f"you meant {' or '.join(near)}" if near else "",
            fix=f"choose a name such as {near[0] if near else 'few-shot-curves'}",
        )
    return _FIGURES[name]


def draw_figure(name: str, records: Sequence[Record], *, kind: Kind = "png") -> bytes:
    """Draw a figure of ``FIGURES`` from the records of one experiment::

        draw_figure("few-shot-curves", read_records([Path("records")]))

    Experiments that do not allow the figure are ignored; two experiments that do are an error.
    """
    plots = plan_figure(name, records)
    if len(plots) > 1:
        raise UsageError(
            "RECORD",
            f"{name} shows one experiment",
            found=", ".join(map(printable, plots)),
            fix="give the records of one of them",
        )
    (plot,) = plots.values()
    return plot.draw(kind)


def plan_figure(name: str, records: Sequence[Record]) -> dict[str, Plot]:
    """Return the plot of every experiment that allows a figure; an error if none does."""
    wanted = find_figure(name)
    groups = experiments(records)
    plots = {experiment: wanted.plan(group) for experiment, group in groups.items()}
    found = {experiment: plot for experiment, plot in plots.items() if plot is not None}
    if not found:
        settings = sorted({record.spec.setting for record in records})
        raise UsageError(
            "RECORD",
            f"{name} cannot be drawn from these records",
            found=f"{len(records)} records of {', '.join(map(printable, settings)) or 'no setting'}",
            expected=wanted.needs,
            fix="choose other records",
        )
    return found
