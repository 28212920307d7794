"""Matrices with named rows and columns, as heat maps with a number in each cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from aniso.errors import UsageError
from aniso.report.figures.canvas import INK, Canvas, Kind, drawing, short
from aniso.report.figures.coefficients import diverging_colours, thinned_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUMBERED = 32  # columns; cells of wider matrices are too small for a number
_NUMBERED_PANELS = 8  # columns, where matrices share a figure
_CELL = 0.36  # inches, of a cell with a number
_SMALL = 0.17  # inches, of a cell without
_DARK = 0.62  # share of the scale beyond which cells are too dark for black numbers
_ACROSS = 3  # panels side by side


@final
@dataclass(frozen=True)
class MatrixPanel:
    """One matrix of a figure; None where a number is not defined."""

    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""
    has_mean: bool = False
    """The last row is the mean of the others, and is set apart by a line."""

    def __post_init__(self) -> None:
        fits = len(self.values) == len(self.rows) and all(len(v) == len(self.columns) for v in self.values)
        if not fits or not self.rows or not self.columns:
            raise UsageError(
                "RECORD",
                "the matrix does not fit its names",
                found=f"{len(self.rows)} row names, {len(self.columns)} column names",
                expected="a name for each row and each column",
                fix="MatrixPanel(values, rows, columns)",
            )


@final
@dataclass(frozen=True)
class MatrixStyle:
    """The meaning of a matrix: labels of the colour bar and the axes, and the ends of the colour scale.

    A scale that begins below zero is diverging: red above zero, blue below.
    """

    label: str
    low: float
    high: float
    row_label: str = ""
    column_label: str = ""
    percent: bool = False

    def text(self, value: float) -> str:
        """Return the number in a cell."""
        shown = f"{100 * value:.0f}" if self.percent else f"{value:.2f}"
        return shown.replace("-0.00", "0.00") if shown != "-0" else "0"


def matrix_map(
    panels: Sequence[MatrixPanel], style: MatrixStyle, title: str = "", *, kind: Kind = "png"
) -> bytes:
    """Draw matrices with a common colour scale, side by side; grey cells are undefined."""
    across = min(_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    columns, rows = (max(len(names) for names in sizes) for sizes in _names(panels))
    numbered = columns <= (_NUMBERED if len(panels) == 1 else _NUMBERED_PANELS)
    cell = _CELL if numbered else _SMALL
    width, height = (max(1.4, min(14.0, cell * count)) for count in (columns, rows))
    names = 0.062 * max(len(short(name, longest=24)) for panel in panels for name in panel.columns)
    with drawing(kind) as canvas:
        canvas.axes.remove()
        canvas.frame(across * (width + 1.3) + 1.2, down * (height + names + 0.7) + 0.4)
        grid = canvas.figure.subplots(down, across, squeeze=False)
        places = list(grid.flat)
        for panel, axes in zip(panels, places, strict=False):
            image = _draw(axes, panel, style, numbered=numbered)
            if heading := panel.title or (title if len(panels) == 1 else ""):
                axes.set_title(short(heading, longest=100), fontsize=9)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        _colour_bar(canvas, image, places, style, _beyond(panels, style))
        if title and len(panels) > 1:
            canvas.figure.suptitle(short(title, longest=100), x=0.01, ha="left", fontsize=10)
    return canvas.content


def _beyond(panels: Sequence[MatrixPanel], style: MatrixStyle) -> str:
    """Return the ends of the colour scale that values lie beyond, as matplotlib names them."""
    values = [v for panel in panels for row in panel.values for v in row if v is not None]
    below, above = any(v < style.low for v in values), any(v > style.high for v in values)
    return {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")


def _names(panels: Sequence[MatrixPanel]) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
    return [panel.columns for panel in panels], [panel.rows for panel in panels]


def _draw(axes: Axes, panel: MatrixPanel, style: MatrixStyle, *, numbered: bool) -> Any:
    import numpy as np

    values = np.array([[math.nan if v is None else v for v in row] for row in panel.values], np.float64)
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=_colours(style),
        vmin=style.low,
        vmax=style.high,
        aspect="equal",
        interpolation="nearest",
    )
    axes.spines[:].set_visible(False)
    room = 200 if numbered else 80
    thinned_labels(axes, "x", [short(name, longest=24) for name in panel.columns], room)
    thinned_labels(axes, "y", [short(name, longest=24) for name in panel.rows], room)
    if style.column_label:
        axes.set_xlabel(style.column_label, fontsize=8)
    if style.row_label:
        axes.set_ylabel(style.row_label, fontsize=8)
    if panel.has_mean:
        axes.axhline(len(panel.rows) - 1.5, color=INK, linewidth=1.2)
    if numbered:
        for i, row in enumerate(panel.values):
            for j, value in enumerate(row):
                if value is not None:
                    colour = "white" if _is_dark(value, style) else INK
                    axes.text(j, i, style.text(value), ha="center", va="center", fontsize=6.5, color=colour)
    return image


def _is_dark(value: float, style: MatrixStyle) -> bool:
    if style.low < 0:
        return abs(value) > _DARK * style.high
    return value - style.low > _DARK * (style.high - style.low)


def _colours(style: MatrixStyle) -> Any:
    from matplotlib import colormaps

    return diverging_colours() if style.low < 0 else colormaps["Blues"].with_extremes(bad="#e3e3e3")


def _colour_bar(canvas: Canvas, image: Any, places: Sequence[Axes], style: MatrixStyle, beyond: str) -> None:
    from matplotlib.ticker import FuncFormatter

    shrink = min(1.0, max(0.5, 3 / canvas.height)) if canvas.height > 5 else 1.0
    bar = canvas.figure.colorbar(
        image, ax=list(places), shrink=shrink, aspect=18, pad=0.02, fraction=0.05, extend=beyond
    )
    bar.outline.set_visible(False)
    bar.set_label(style.label)
    if style.percent:
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
