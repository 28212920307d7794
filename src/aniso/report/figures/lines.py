"""Lines with standard errors over an axis of amounts, in one panel or several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, final

from aniso.report.figures.canvas import (
    DASHES,
    GREY,
    POINTS_PER_INCH,
    Canvas,
    Kind,
    colour,
    drawing,
    footnote,
    keep_outer_labels,
    legend_below,
    marker,
    panel_grid,
    short,
    spread,
)
from aniso.report.tables import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer

_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5)}
_End = tuple[float, float | None, str, str]  # height, where the line ends unless at the edge, name, colour


@final
@dataclass(frozen=True)
class Line:
    """A named line: places on the axis and the estimate at each."""

    name: str
    points: tuple[tuple[float, Estimate], ...]


@final
@dataclass(frozen=True)
class LinePanel:
    """Lines that share a plot, and levels that do not depend on the axis."""

    lines: tuple[Line, ...]
    levels: Mapping[str, float] = field(default_factory=dict)
    title: str = ""


@final
@dataclass(frozen=True)
class Axis:
    """The axis of amounts: its label, the text at each place, and whether places are drawn as powers."""

    label: str
    ticks: Mapping[float, str]
    logarithmic: bool = False


def interval_note(panels: Iterable[LinePanel], seeds: int) -> str:
    """Return what the bars of estimates mean, or that there are none."""
    cells = [cell for panel in panels for line in panel.lines for _, cell in line.points]
    if any(cell.error is not None for cell in cells):
        return f"bars: standard error over {seeds} seeds"
    return "1 seed, no interval"


def draw_lines(
    panels: Sequence[LinePanel], axis: Axis, y_label: str, title: str, note: str = "", *, kind: Kind = "png"
) -> bytes:
    """Draw one panel with names at the ends of lines, or several with one legend."""
    with drawing(kind) as canvas:
        if len(panels) == 1:
            _single(canvas, panels[0], axis, y_label, title)
        else:
            _several(canvas, panels, axis, y_label, title)
        footnote(canvas, note)
    return canvas.content


def _single(canvas: Canvas, panel: LinePanel, axis: Axis, y_label: str, title: str) -> None:
    heading = f"{title}: {panel.title}" if panel.title else title
    canvas.frame(6.8, max(4.0, 0.42 * len(panel.lines) + 1), heading)
    axes = canvas.axes
    ends: list[_End] = []
    right = max((line.points[-1][0] for line in panel.lines), default=0.0)
    for i, line in enumerate(panel.lines):
        _curve(axes, line, i)
        place, last = line.points[-1]
        if place == right:
            ends.append((last.mean, place, line.name, colour(i)))
        else:  # a line from here to the edge would look like part of the curve
            _name_at_point(axes, line, colour(i))
    for name, level in panel.levels.items():
        axes.axhline(level, color=GREY, linestyle=DASHES, linewidth=1.2)
        ends.append((level, None, name, GREY))
    _set_axes(axes, axis)
    axes.set_ylabel(y_label)
    _end_labels(canvas, ends)


def _several(canvas: Canvas, panels: Sequence[LinePanel], axis: Axis, y_label: str, title: str) -> None:
    places = panel_grid(canvas, len(panels), (3.3, 3.0), title)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    handles: dict[str, object] = {}
    for panel, axes in zip(panels, places, strict=True):
        for line in panel.lines:
            handles[line.name] = _curve(axes, line, names.index(line.name))
        for name, level in panel.levels.items():
            handles[name] = axes.axhline(level, color=GREY, linestyle=DASHES, linewidth=1.2)
        axes.set_title(short(panel.title, longest=60), fontsize=9)
        _set_axes(axes, axis)
        axes.set_ylabel(y_label)
    keep_outer_labels(places)
    legend_below(canvas, list(handles.values()), list(handles))


def _curve(axes: Axes, line: Line, number: int) -> ErrorbarContainer:
    errors = [cell.error for _, cell in line.points]
    return axes.errorbar(
        [place for place, _ in line.points],
        [cell.mean for _, cell in line.points],
        yerr=None if all(error is None for error in errors) else [error or math.nan for error in errors],
        color=colour(number),
        marker=marker(number),
        markeredgecolor="white",
        markeredgewidth=0.8,
        elinewidth=1.2,
        capsize=3.5,
    )


def _set_axes(axes: Axes, axis: Axis) -> None:
    from matplotlib.ticker import NullLocator

    places = sorted(axis.ticks)
    if axis.logarithmic and places[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xlim(places[0] / 2**0.25, places[-1] * 2**0.12)
    axes.set_xticks(places, [axis.ticks[place] for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(axis.label)
    axes.grid(axis="y")
    axes.margins(y=0.08)


def _name_at_point(axes: Axes, line: Line, ink: str) -> None:
    """Write the name of a line that ends early above its last point."""
    place, last = line.points[-1]
    above = (place, last.mean + (last.error or 0.0))
    axes.annotate(short(line.name, 24), above, (0, 5), textcoords="offset points", color=ink, va="bottom")


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
