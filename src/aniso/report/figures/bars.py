"""Accuracy by task, as bars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from aniso.report.figures.canvas import (
    COLOURS,
    GREY,
    LIGHT,
    Canvas,
    Kind,
    colour,
    drawing,
    legend_below,
    short,
)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    title: str = "",
    *,
    baselines: Collection[str] = ("zero-shot",),
    kind: Kind = "png",
) -> bytes:
    """Draw accuracies between 0 and 1: a group per task, a bar per method, grey for baselines."""
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
        legend_below(canvas, handles, methods)
    return canvas.content


def _task_axis(canvas: Canvas, names: Sequence[str]) -> None:
    axes = canvas.axes
    shown = [short(name, longest=24) for name in names]
    crowded = sum(len(name) + 3 for name in shown) > 13 * canvas.width
    axes.set_xticks(range(len(names)), shown)
    if crowded:
        for label in axes.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, max(0.6, len(names) - 0.4))
    axes.set_ylabel("test accuracy, %")
    axes.grid(axis="y")
    axes.tick_params(axis="x", length=0)
