"""Accuracy over the number of shots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from aniso.records import Record
from aniso.report.figures.canvas import (
    DASHES,
    GREY,
    POINTS_PER_INCH,
    Canvas,
    Kind,
    colour,
    drawing,
    marker,
    short,
    spread,
    unfit,
)
from aniso.report.results import Column, Results, Row
from aniso.report.rows import results
from aniso.report.tables import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5)}
_End = tuple[float, float | None, str, str]  # height, where the line ends unless at the edge, name, colour


def few_shot_curves(records: Iterable[Record], *, kind: Kind = "png") -> bytes:
    """Draw mean accuracy over the number of shots, or the share of labels, with standard errors over seeds.

    Only means over all tasks are drawn: a point over fewer would not be comparable with its neighbours.
    """
    found = results(records)
    if found.setting not in ("few-shot", "data-fraction"):
        raise unfit("curves", found.setting, "few-shot or data-fraction")
    lines = [(row.name, _points(found, row)) for row in found.rows if not row.fixed]
    lines = [(name, points) for name, points in lines if points]
    with drawing(kind) as canvas:
        axes = canvas.axes
        canvas.frame(6.8, max(4.0, 0.42 * len(lines) + 1), f"{found.name}: mean over {found.count}")
        ends: list[_End] = []
        for i, (name, points) in enumerate(lines):
            _curve(axes, points, colour(i), marker(i))
            ends.append((points[-1][1].mean, points[-1][0].x, name, colour(i)))
        for name, level in _levels(found):
            axes.axhline(level, color=GREY, linestyle=DASHES, linewidth=1.2)
            ends.append((level, None, name, GREY))
        _shots_axis(axes, found)
        axes.set_ylabel("test accuracy, %")
        axes.grid(axis="y")
        axes.margins(y=0.08)
        _end_labels(canvas, ends)
    return canvas.content


def _points(found: Results, row: Row) -> list[tuple[Column, Estimate]]:
    cells = [(column, found.cell(row, column)) for column in found.columns]
    return [(column, cell) for column, cell in cells if cell is not None and not cell.remark]


def _levels(found: Results) -> Iterator[tuple[str, float]]:
    """Yield the rows that do not depend on shots."""
    for row in found.rows:
        cell = found.cell(row, found.columns[0]) if row.fixed else None
        if cell and not cell.remark:
            yield row.name, cell.mean


def _curve(axes: Axes, points: Sequence[tuple[Column, Estimate]], ink: str, mark: str) -> None:
    axes.errorbar(
        [column.x for column, _ in points],
        [cell.mean for _, cell in points],
        yerr=[cell.error or 0.0 for _, cell in points],
        color=ink,
        marker=mark,
        markeredgecolor="white",
        markeredgewidth=0.8,
        elinewidth=1.2,
        capsize=3.5,
    )


def _shots_axis(axes: Axes, found: Results) -> None:
    from matplotlib.ticker import NullLocator

    values = [column.x for column in found.columns]
    if all(x > 0 for x in values):
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(values) / 2**0.25, max(values) * 2**0.12)
    axes.set_xticks(values, [f"{x:g}" for x in values])
    axes.xaxis.set_minor_locator(NullLocator())
    few = found.setting == "few-shot"
    axes.set_xlabel("shots: labelled images per class" if few else "share of the training images, %")


def _end_labels(canvas: Canvas, ends: Sequence[_End]) -> None:
    """Write names to the right of their lines, moved apart where they would overlap."""
    low, high = canvas.axes.get_ylim()
    canvas.axes.set_ylim(low, high)  # labels must not stretch the axis
    texts = [(y, x, short(name, 24), ink) for y, x, name, ink in sorted(ends, key=lambda end: end[0])]
    line = (high - low) * 17 / (canvas.height * POINTS_PER_INCH)
    heights = [line * (text.count("\n") + 1) for _, _, text, _ in texts]
    places = spread([y for y, *_ in texts], [(a + b) / 2 for a, b in pairwise(heights)], low, high)
    for (y, x, text, ink), place in zip(texts, places, strict=True):
        canvas.axes.annotate(
            text,
            xy=(1.0 if x is None else x, y),
            xycoords="data" if x is not None else ("axes fraction", "data"),
            xytext=(1.02, place),
            textcoords=("axes fraction", "data"),
            va="center",
            color=ink,
            annotation_clip=False,
            arrowprops=_LEADER | {"color": ink},
        )
