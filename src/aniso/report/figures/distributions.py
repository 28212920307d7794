"""Feature distributions of tasks, as ellipses around their means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from aniso.report.figures.canvas import (
    COLOURS,
    INK,
    LIGHT,
    LINE,
    POINTS_PER_INCH,
    Kind,
    colour,
    drawing,
    marker,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 7.6, 5.6  # inches
_OFFSETS = [(dx, dy - 4) for dx in (7, 22, 40, 60) for dy in range(-84, 85, 12)]  # points
_TEXT = 10.0  # points, the height of a name


@final
@dataclass(frozen=True)
class FeatureEllipse:
    """A task in the plane; without a covariance only its mean is drawn."""

    name: str
    mean: tuple[float, float]
    covariance: tuple[tuple[float, float], tuple[float, float]] | None = None


def feature_ellipses(
    tasks: Sequence[FeatureEllipse],
    explained: tuple[float, float],
    title: str = "",
    *,
    deviations: float = 1.0,
    kind: Kind = "png",
) -> bytes:
    """Draw the mean of each task, and an ellipse of ``deviations`` standard deviations around it.

    ``explained`` is the share of the means' variance along each axis.
    """
    with drawing(kind) as canvas:
        canvas.frame(_WIDTH, _HEIGHT, title)
        axes = canvas.axes
        axes.grid(color=LINE)
        axes.margins(0.12)
        for i, task in enumerate(tasks):
            if task.covariance is not None:
                _ellipse(axes, task, deviations, colour(i))
            axes.plot(*task.mean, marker(i // len(COLOURS)), color=colour(i), markersize=6, zorder=3)
        axes.set_aspect("equal", adjustable="datalim")
        axes.autoscale_view()
        axes.set_xlabel(f"first principal component ({explained[0]:.0%} of the variance of the means)")
        axes.set_ylabel(f"second principal component ({explained[1]:.0%})")
        canvas.figure.draw_without_rendering()
        _names(axes, tasks)
    return canvas.content


def _ellipse(axes: Axes, task: FeatureEllipse, deviations: float, shade: str) -> None:
    from matplotlib.patches import Ellipse

    assert task.covariance is not None
    (a, b), (_, d) = task.covariance
    middle, half = (a + d) / 2, math.hypot((a - d) / 2, b)
    major, minor = (math.sqrt(max(0.0, x)) for x in (middle + half, middle - half))
    shape = {"width": 2 * deviations * major, "height": 2 * deviations * minor}
    angle = math.degrees(math.atan2(2 * b, a - d) / 2)
    axes.add_patch(Ellipse(task.mean, **shape, angle=angle, facecolor=shade, alpha=0.12, linewidth=0))
    axes.add_patch(Ellipse(task.mean, **shape, angle=angle, fill=False, edgecolor=shade, linewidth=1.2))


def _names(axes: Axes, tasks: Sequence[FeatureEllipse]) -> None:
    """Write names beside the means, where no other name or mean is."""
    scale = POINTS_PER_INCH / axes.figure.dpi
    points = [tuple(scale * x for x in axes.transData.transform(task.mean)) for task in tasks]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    for task, (x, y) in sorted(zip(tasks, points, strict=True), key=lambda own: -own[1][1]):
        name = short(task.name, longest=24)
        width = 5.2 * len(name)
        offsets = [(dx, dy) for dx, dy in _OFFSETS] + [(-dx - width, dy) for dx, dy in _OFFSETS]
        offsets.sort(key=lambda own: math.hypot(own[0] + (width if own[0] < 0 else 0), own[1] + 4))
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + _TEXT) for dx, dy in offsets]
        free = [i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken)]
        best = free[0] if free else 0
        taken.append(boxes[best])
        dx, dy = offsets[best]
        line = (
            {"arrowstyle": "-", "linewidth": 0.5, "color": LIGHT, "shrinkB": 3}
            if dx > 8 or dx < -9 - width or abs(dy) > 10
            else None
        )
        axes.annotate(
            name,
            task.mean,
            (dx, dy),
            textcoords="offset points",
            fontsize=8,
            color=INK,
            arrowprops=line,
            zorder=4,
        )


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
