"""Target against control accuracy after negation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from aniso.report.layouts import KEPT
from aniso.report.results import Results, Row
from aniso.report.rows import results
from aniso.report.tables import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def pareto(records: Iterable[Record], *, kind: Kind = "png") -> bytes:
    """Draw target accuracy against control accuracy after negation, means by method."""
    found = results(records)
    if found.setting != "negation":
        raise unfit("target against control", found.setting, "negation")
    with drawing(kind) as canvas:
        axes = canvas.axes
        canvas.frame(6.4, 4.4, f"{found.name}: mean over {found.count}")
        labels: list[tuple[float, float, str, str]] = []
        for i, (row, x, y) in enumerate(_both(found)):
            ink = GREY if row.fixed else colour(sum(ink != GREY for *_, ink in labels))
            _point(axes, x, y, ink, marker(i))
            labels.append((x.mean, y.mean, row.name, ink))
            if row.fixed:
                _floor(axes, KEPT * y.mean)
        axes.set_xlabel("target accuracy, % (lower is better)")
        axes.set_ylabel("control accuracy, % (higher is better)")
        axes.grid()
        axes.margins(0.16)
        _point_labels(canvas, labels)
    return canvas.content


def _both(found: Results) -> Iterator[tuple[Row, Estimate, Estimate]]:
    target, control = found.columns
    for row in found.rows:
        x, y = found.cell(row, target), found.cell(row, control)
        if x and y and not x.remark:  # means over fewer targets are not comparable
            yield row, x, y


def _point(axes: Axes, x: Estimate, y: Estimate, ink: str, mark: str) -> None:
    axes.errorbar(
        x.mean,
        y.mean,
        xerr=x.error,
        yerr=y.error,
        color=ink,
        marker=mark,
        markersize=8,
        markeredgecolor="white",
        elinewidth=1.1,
        linestyle="none",
        zorder=3,
    )


def _floor(axes: Axes, value: float) -> None:
    """Draw the lowest control accuracy that the keep rule accepts."""
    axes.axhline(value, color=GREY, linestyle=DASHES, linewidth=1)
    axes.annotate(
        f"{KEPT:.0%} of zero-shot",
        xy=(0, value),
        xycoords=("axes fraction", "data"),
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=GREY,
    )


def _point_labels(canvas: Canvas, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names beside their points, on the side that has room, moved apart where they would overlap."""
    left, right = canvas.axes.get_xlim()
    low, high = canvas.axes.get_ylim()
    per_point = (high - low) / (0.8 * canvas.height * POINTS_PER_INCH)
    for on_left in (False, True):
        side = sorted((p for p in points if bool(p[0] > (left + right) / 2) == on_left), key=lambda p: p[1])
        places = spread([y for _, y, _, _ in side], [13 * per_point] * (len(side) - 1))
        for (x, y, name, ink), place in zip(side, places, strict=True):
            canvas.axes.annotate(
                short(name),
                xy=(x, y),
                xytext=(-9 if on_left else 9, (place - y) / per_point + 7),
                textcoords="offset points",
                ha="right" if on_left else "left",
                va="center",
                color=ink,
            )
