"""Accuracy on other data with the same classes, as bars relative to zero-shot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aniso.records import Record
from aniso.report.figures.canvas import (
    GREY,
    Canvas,
    Kind,
    Plot,
    colour,
    drawing,
    footnote,
    legend_below,
    panel_grid,
    short,
)
from aniso.report.out_of_domain import DomainAccuracies, domain_accuracies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


_LETTER = 0.078  # inches, the width of a letter


def plan_domain_bars(records: Sequence[Record]) -> Plot | None:
    """Plan bars by data set and method, a panel per number of shots; None without other data."""
    found = domain_accuracies(records)
    if found is None:
        return None
    what = "Difference to zero-shot" if found.zero_shot else "Accuracy"
    return Plot(f"{what} on each data set after learning on one", lambda kind: _draw(found, kind))


def _draw(found: DomainAccuracies, kind: Kind) -> bytes:
    rows = [name for name in found.methods if name not in found.zero_shot]
    with drawing(kind) as canvas:
        width = min(9.0, max(3.4, 0.2 * len(found.data_sets) * (len(rows) + 1)))
        places = _panels(canvas, found, width)
        handles: dict[str, BarContainer] = {}
        for shots, axes in zip(found.shots, places, strict=True):
            _group(axes, found, shots, rows, handles)
            _turn_long_names(axes, found.data_sets, width)
            if len(places) > 1:
                axes.set_title(_shots(shots), fontsize=9)
        label = "difference to zero-shot, points" if found.zero_shot else "test accuracy, %"
        places[0].set_ylabel(label)
        legend_below(canvas, list(handles.values()), list(handles))
        footnote(canvas, found.interval_note)
    return canvas.content


def _panels(canvas: Canvas, found: DomainAccuracies, width: float) -> list[Axes]:
    title = f"{found.name}: learned on {', '.join(found.learned)}"
    if len(found.shots) > 1:
        return panel_grid(canvas, len(found.shots), (width, 3.4), title)
    canvas.frame(max(5.4, width), 3.8, f"{title}, {_shots(found.shots[0])}")
    return [canvas.axes]


def _shots(count: int) -> str:
    return f"{count} shot{'' if count == 1 else 's'}"


def _turn_long_names(axes: Axes, names: Sequence[str], width: float) -> None:
    """Turn the names below the bars if they would overlap."""
    if _LETTER * max(len(short(name, longest=24)) for name in names) > 0.9 * width / len(names):
        for label in axes.get_xticklabels():
            label.set(rotation=20, ha="right", rotation_mode="anchor")


def _group(
    axes: Axes,
    found: DomainAccuracies,
    shots: int,
    rows: Sequence[str],
    handles: dict[str, BarContainer],
) -> None:
    bar = 0.84 / max(1, len(rows))
    for i, method in enumerate(rows):
        cells = [
            (x, cell)
            for x, data_set in enumerate(found.data_sets)
            if (cell := found.difference(method, shots, data_set)) is not None
        ]
        errors = [cell.error or 0.0 for _, cell in cells]
        drawn = axes.bar(
            [x + (i - (len(rows) - 1) / 2) * bar for x, _ in cells],
            [cell.mean for _, cell in cells],
            bar * 0.9,
            yerr=errors if any(errors) else None,
            color=colour(i),
            error_kw={"elinewidth": 0.9, "ecolor": GREY},
        )
        handles.setdefault(method, drawn)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(found.data_sets)), [short(name, longest=24) for name in found.data_sets])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
