"""Figures of experiments and of coefficients, as the bytes of a PNG or SVG file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from aniso.errors import UsageError, printable
from aniso.records import Record
from aniso.report.drawing import (
    COLOURS,
    DASHES,
    GREY,
    LIGHT,
    Canvas,
    Kind,
    colour,
    drawing,
    marker,
    short,
    spread,
)
from aniso.report.results import KEPT, Column, Results, Row, results
from aniso.report.tables import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

_POINTS = 72  # to an inch
_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5)}
_End = tuple[float, float | None, str, str]  # height, where the line ends unless at the edge, name, colour


# Accuracy over shots


def few_shot_curves(records: Iterable[Record], *, kind: Kind = "png") -> bytes:
    """Mean accuracy over the number of shots, or the share of labels, with standard errors over seeds.

    Only means over all tasks are drawn: a point over fewer would not be comparable with its neighbours.
    """
    found = results(records)
    if found.setting not in ("few-shot", "peft"):
        raise _unfit("curves", found.setting, "few-shot or peft")
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
    """What does not depend on shots."""
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
    axes.set_xlabel("shots: labelled pictures per class" if few else "share of the training pictures, %")


def _end_labels(canvas: Canvas, ends: Sequence[_End]) -> None:
    """Names to the right of their lines, moved apart where they would cover each other."""
    low, high = canvas.axes.get_ylim()
    canvas.axes.set_ylim(low, high)  # labels must not stretch the axis
    texts = [(y, x, short(name, 24), ink) for y, x, name, ink in sorted(ends, key=lambda end: end[0])]
    line = (high - low) * 17 / (canvas.height * _POINTS)
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


# Accuracy by task


def bars(
    groups: Mapping[str, Mapping[str, float]],
    title: str = "",
    *,
    baselines: Collection[str] = ("zero-shot",),
    kind: Kind = "png",
) -> bytes:
    """Accuracies between 0 and 1: a group for each task, a bar for each method, grey for baselines."""
    found = dict.fromkeys(method for group in groups.values() for method in group)
    methods = sorted(found, key=lambda method: method not in baselines)
    grey = sum(method in baselines for method in methods)
    count = len(groups) * (len(methods) + 1)
    width = 0.84 / max(1, len(methods))
    with drawing(kind) as canvas:
        canvas.frame(min(16.0, max(6.4, 0.16 * count)), 4.0, title)
        handles = []
        for i, method in enumerate(methods):
            places = [(x, group[method]) for x, group in enumerate(groups.values()) if method in group]
            drawn = canvas.axes.bar(
                [x + (i - (len(methods) - 1) / 2) * width for x, _ in places],
                [100 * share for _, share in places],
                width * 0.92,
                color=LIGHT if i < grey else colour(i - grey),
                hatch="///" if i - grey >= len(COLOURS) else None,
                edgecolor="white",
                linewidth=0,
            )
            handles.append(drawn)
            if count <= 24:
                canvas.axes.bar_label(drawn, fmt="%.0f", padding=1.5, fontsize=7.5, color=GREY)
        _task_axis(canvas, list(groups))
        _legend(canvas, handles, methods)
    return canvas.content


def _task_axis(canvas: Canvas, names: Sequence[str]) -> None:
    axes = canvas.axes
    shown = [short(name, longest=24) for name in names]
    crowded = sum(len(name) + 3 for name in shown) > 13 * canvas.width
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(names)), shown, **turned)
    axes.set_xlim(-0.6, max(0.6, len(names) - 0.4))
    axes.set_ylabel("test accuracy, %")
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)


def _legend(canvas: Canvas, handles: Sequence[Any], names: Sequence[str]) -> None:
    if not names:
        return
    longest = max(len(short(name)) for name in names)
    columns = max(1, min(len(names), int(canvas.width * 12 / (longest + 6))))
    canvas.frame(canvas.width, canvas.height + 0.2 * (math.ceil(len(names) / columns) - 1))
    legend = canvas.figure.legend(
        handles,
        [str(i) * longest for i in range(len(names))],
        loc="outside lower left",
        ncols=columns,
        frameon=False,
    )
    # set afterwards: matplotlib leaves out names that begin with an underscore
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(short(name))


# Coefficients


def heat_map(
    matrix: ArrayLike, vectors: Sequence[str], blocks: Sequence[str], title: str = "", *, kind: Kind = "png"
) -> bytes:
    """Coefficients of vectors (rows) in blocks (columns): red above zero, blue below, white at zero."""
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
            cmap=_diverging(),
            vmin=-limit,
            vmax=limit,
            aspect="auto",
            interpolation=_sampling(values.shape),
        )
        canvas.axes.spines[:].set_visible(False)
        _thinned(canvas.axes, "y", vectors, int(height / 0.15))
        _thinned(canvas.axes, "x", blocks, int(width / 0.15))
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


def _diverging() -> Any:
    from matplotlib import colormaps

    return colormaps["RdBu_r"].with_extremes(bad="#bdbdbd")


def _sampling(shape: tuple[int, ...]) -> str:
    """Every cell sharp, unless there are more cells than pixels to show them."""
    return "nearest" if max(shape) <= 1200 else "auto"


def _thinned(axes: Axes, which: Literal["x", "y"], names: Sequence[str], room: int) -> None:
    """Tick labels, every so many of them if there is no room for all."""
    step = max(1, math.ceil(len(names) / max(1, room)))
    ticks = list(range(0, len(names), step))
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(ticks, [short(names[i]) for i in ticks], fontsize=7, rotation=90 if which == "x" else 0)
    axes.tick_params(axis=which, length=2 if step > 1 else 0)
    if step > 1:
        axis.set_label_text(f"1 in {step} of {len(names):,} named", fontsize=7, color=GREY)


def boxes(five_numbers: Mapping[str, Sequence[float]], title: str = "", *, kind: Kind = "png") -> bytes:
    """Boxes from least, quartiles and greatest; names that are numbers are depths, from left to right."""
    _require_five(five_numbers)
    depths = all(name.isdecimal() for name in five_numbers)
    names = sorted(five_numbers, key=int) if depths else list(five_numbers)
    with drawing(kind) as canvas:
        if depths:
            canvas.frame(min(14.0, max(5.0, 0.36 * len(names) + 1)), 3.4, title)
        else:
            canvas.frame(6.0, min(40.0, 0.3 * len(names) + 1.2), title)
        line = {"color": COLOURS[0], "linewidth": 1.1}
        canvas.axes.bxp(
            [_box(five_numbers[name]) for name in names],
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
        _box_axes(canvas.axes, depths, names)
    return canvas.content


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
                expected="least, first quartile, median, third quartile, greatest",
                fix="give five numbers in order",
            )


def _box(numbers: Sequence[float]) -> dict[str, float]:
    return dict(zip(("whislo", "q1", "med", "q3", "whishi"), numbers, strict=True))


# Negation


def pareto(records: Iterable[Record], *, kind: Kind = "png") -> bytes:
    """Negation: what is left of the target against what is left of the control task, means by method."""
    found = results(records)
    if found.setting != "negation":
        raise _unfit("target against control", found.setting, "negation")
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
    """How far the control task may fall."""
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
    """Names beside their points, on the side that has room, those of close points one above the other."""
    left, right = canvas.axes.get_xlim()
    low, high = canvas.axes.get_ylim()
    per_point = (high - low) / (0.8 * canvas.height * _POINTS)
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


def _unfit(what: str, found: str, expected: str) -> UsageError:
    return UsageError(
        "RECORD",
        f"{what} cannot be drawn from these records",
        found=found,
        expected=expected,
        fix="choose the records by their setting",
    )
