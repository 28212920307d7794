"""Coefficients: a heat map over vectors and blocks, and boxes by kind of block or depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from aniso.errors import UsageError, printable
from aniso.report.figures.canvas import COLOURS, GREY, Kind, drawing, keep_outer_labels, panel_grid, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike


def heat_map(
    matrix: ArrayLike, vectors: Sequence[str], blocks: Sequence[str], title: str = "", *, kind: Kind = "png"
) -> bytes:
    """Draw the coefficients of vectors (rows) in blocks (columns): red above zero, blue below."""
    width = min(12.0, max(5.0, 0.17 * len(blocks)))
    height = min(10.0, max(1.6, 0.19 * len(vectors)))
    with drawing(kind) as canvas:
        import numpy as np

        values = np.ma.masked_invalid(np.asarray(matrix, dtype=np.float64))
        _require_fit(values.shape, vectors, blocks)
        limit = float(np.abs(values).max()) if values.count() else 0.0
        limit = limit or 1.0  # all zero: white, on a scale that exists
        canvas.frame(width + 2, height + 1.8, title)
        image = canvas.axes.imshow(
            values,
            cmap=diverging_colours(),
            vmin=-limit,
            vmax=limit,
            aspect="auto",
            interpolation=_sampling(values.shape),
        )
        canvas.axes.spines[:].set_visible(False)
        thinned_labels(canvas.axes, "y", vectors, int(height / 0.15))
        thinned_labels(canvas.axes, "x", blocks, int(width / 0.15))
        bar = canvas.figure.colorbar(image, ax=canvas.axes, shrink=min(1.0, 4 / height), aspect=18, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("coefficient")
    return canvas.content


def _require_fit(shape: tuple[int, ...], vectors: Sequence[str], blocks: Sequence[str]) -> None:
    if shape != (len(vectors), len(blocks)) or not math.prod(shape):
        raise UsageError(
            "RECORD",
            "the matrix does not fit its names",
            found=f"shape {shape}, {len(vectors)} vectors, {len(blocks)} blocks",
            expected="a row for each vector and a column for each block",
            fix="heat_map(coefficients, vectors, blocks)",
        )


def diverging_colours() -> Any:
    """Return the colours from blue over white to red; undefined cells are grey."""
    from matplotlib import colormaps

    return colormaps["RdBu_r"].with_extremes(bad="#bdbdbd")


def _sampling(shape: tuple[int, ...]) -> str:
    """Draw sharp cells unless there are more cells than pixels."""
    return "nearest" if max(shape) <= 1200 else "auto"


def thinned_labels(axes: Axes, which: Literal["x", "y"], names: Sequence[str], room: int) -> None:
    """Set tick labels, one in ``step`` of them if there is no room for all."""
    step = max(1, math.ceil(len(names) / max(1, room)))
    ticks = list(range(0, len(names), step))
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(ticks, [short(names[i]) for i in ticks], fontsize=7, rotation=90 if which == "x" else 0)
    axes.tick_params(axis=which, length=2 if step > 1 else 0)
    if step > 1:
        axis.set_label_text(f"1 in {step} of {len(names):,} named", fontsize=7, color=GREY)


def boxes(five_numbers: Mapping[str, Sequence[float]], title: str = "", *, kind: Kind = "png") -> bytes:
    """Draw boxes from minimum, quartiles and maximum; names that are numbers are depths, left to right."""
    return box_panels({"": five_numbers}, title, kind=kind)


def box_panels(
    panels: Mapping[str, Mapping[str, Sequence[float]]], title: str = "", *, kind: Kind = "png"
) -> bytes:
    """Draw the boxes of several groups side by side, on common axes; see ``boxes``."""
    for five_numbers in panels.values():
        _require_five(five_numbers)
    found = dict.fromkeys(name for five_numbers in panels.values() for name in five_numbers)
    depths = all(name.isdecimal() for name in found)
    names = sorted(found, key=int) if depths else list(found)
    with drawing(kind) as canvas:
        if len(panels) == 1:
            (only,) = panels
            canvas.frame(*_box_size(depths, len(names)), ": ".join(filter(None, (title, short(only)))))
            places = [canvas.axes]
        else:
            width, height = _box_size(depths, len(names))
            places = panel_grid(canvas, len(panels), (0.6 * width, 0.8 * height), title)
        for (name, five_numbers), axes in zip(panels.items(), places, strict=True):
            _draw_boxes(axes, names, five_numbers, depths=depths)
            if len(panels) > 1:
                axes.set_title(short(name), fontsize=9)
        if len(panels) > 1:
            keep_outer_labels(places)
    return canvas.content


def _box_size(depths: bool, count: int) -> tuple[float, float]:
    if depths:
        return min(14.0, max(5.0, 0.36 * count + 1)), 3.4
    return 6.0, min(40.0, 0.3 * count + 1.2)


def _draw_boxes(
    axes: Axes, names: Sequence[str], five_numbers: Mapping[str, Sequence[float]], *, depths: bool
) -> None:
    line = {"color": COLOURS[0], "linewidth": 1.1}
    shown = [(place, name) for place, name in enumerate(names, 1) if name in five_numbers]
    axes.bxp(
        [_box(five_numbers[name]) for _, name in shown],
        positions=[place for place, _ in shown],
        showfliers=False,
        orientation="vertical" if depths else "horizontal",
        widths=0.55,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": "#cfe3f1", "edgecolor": COLOURS[0], "linewidth": 1.1},
        medianprops={"color": COLOURS[1], "linewidth": 2},
        whiskerprops=line,
        capprops=line,
    )
    _box_axes(axes, depths, names)


def _box_axes(axes: Axes, depths: bool, names: Sequence[str]) -> None:
    step = max(1, math.ceil(len(names) / 120), math.ceil(len(names) / 36) if depths else 1)
    places, shown = range(1, len(names) + 1, step), [short(name) for name in names[::step]]
    ends = (0.4, len(names) + 0.6)
    if depths:
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        axes.grid(axis="y")
        axes.set_xticks(places, shown)
        axes.set_xlim(*ends)
        axes.set_xlabel("depth")
        axes.set_ylabel("coefficient")
    else:
        axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
        axes.grid(axis="x")
        axes.set_yticks(places, shown)
        axes.set_ylim(*reversed(ends))  # the first name on top
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("coefficient")


def _require_five(summaries: Mapping[str, Sequence[float]]) -> None:
    for name, numbers in summaries.items():
        if len(numbers) != 5 or not all(map(math.isfinite, numbers)) or list(numbers) != sorted(numbers):
            raise UsageError(
                "RECORD",
                f"a box of '{printable(name)}' cannot be drawn",
                found=printable(list(numbers)),
                expected="minimum, first quartile, median, third quartile, maximum",
                fix="give five numbers in order",
            )


def _box(numbers: Sequence[float]) -> dict[str, float]:
    return dict(zip(("whislo", "q1", "med", "q3", "whishi"), numbers, strict=True))
