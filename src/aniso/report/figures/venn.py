"""Images that the base gets wrong and methods get right, as a Venn diagram of two or three methods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from itertools import combinations
from statistics import fmean

from aniso.records import Record
from aniso.report.complementarity import complementarity, runs_by_task
from aniso.report.figures.canvas import INK, Kind, Plot, colour, drawing, footnote, short
from aniso.report.results import Results, Row
from aniso.report.rows import results

_CENTRES = {2: ((-0.55, 0.0), (0.55, 0.0)), 3: ((-0.55, 0.36), (0.55, 0.36), (0.0, -0.55))}
_NAMES = {2: ((-1.6, 0.85), (1.6, 0.85)), 3: ((-1.62, 1.05), (1.62, 1.05), (1.05, -1.3))}
_RADIUS = 1.0
_MOST = 3
_Shares = Mapping[frozenset[str], float]


def plan_venn(records: Sequence[Record]) -> Plot | None:
    """Plan the diagram of up to three methods at the largest number of shots that all of them have.

    Coefficients alone and heads alone come first, as in the paper; None if fewer than two methods, or the
    base, record which images they got right.
    """
    if not records or records[0].spec.setting != "few-shot":
        return None
    found = results(records)
    base = {record.spec.task: record for row in found.rows if row.fixed for record in row.records}
    rows = sorted((row for row in found.rows if not row.fixed), key=_preference)
    sizes = {record.spec.shots or 0 for row in rows for record in row.records}
    for shots in sorted(sizes, reverse=True):
        methods = {row.name: runs_by_task(row.records, shots) for row in rows}
        chosen = [name for name, runs in methods.items() if runs][:_MOST]
        shared = set.intersection(*(set(methods[name]) for name in chosen)) if chosen else set()
        keys = sorted(key for key in shared if key[0] in base)
        if len(chosen) > 1 and keys:
            runs = {name: [methods[name][key] for key in keys] for name in chosen}
            shares = _shares([base[task] for task, _ in keys], runs)
            counts = f"{_count({t for t, _ in keys}, 'task')}, {_count({s for _, s in keys}, 'seed')}"
            return _plot(found, chosen, shares, shots, counts)
    return None


def _count(found: Sized, noun: str) -> str:
    return f"{len(found)} {noun}{'' if len(found) == 1 else 's'}"


def _preference(row: Row) -> tuple[bool, bool]:
    """Sort methods alone before pairs of coefficients and a head, and coefficients first."""
    spec = row.records[0].spec
    trained = spec.method != "none"
    return trained and spec.head is not None, not trained


def _shares(base: Sequence[Record], runs: Mapping[str, Sequence[Record]]) -> _Shares:
    """Return, for every set of methods, the per cent of images that exactly these correct, over all runs."""
    found: dict[frozenset[str], list[float]] = defaultdict(list)
    names = list(runs)
    subsets = [frozenset(s) for n in range(1, len(names) + 1) for s in combinations(range(len(names)), n)]
    for i, reference in enumerate(base):
        own = {str(n): runs[name][i] for n, name in enumerate(names)}
        counts = complementarity({"base": reference, **own})
        total = sum(counts.values())
        for subset in subsets:
            found[frozenset(names[n] for n in subset)].append(
                100 * counts.get(frozenset(map(str, subset)), 0) / total
            )
    return {subset: fmean(values) for subset, values in found.items()}


def _plot(found: Results, names: Sequence[str], shares: _Shares, shots: int, counts: str) -> Plot:
    title = f"{found.name}, {shots} shot{'' if shots == 1 else 's'}: images newly classified correctly"
    note = f"per cent of test images, mean over {counts}; circles are not to scale"
    return Plot(
        "Test images that the base gets wrong and methods get right",
        lambda kind: _draw(names, shares, title, note, kind),
    )


def _draw(names: Sequence[str], shares: _Shares, title: str, note: str, kind: Kind) -> bytes:
    from matplotlib.patches import Circle

    centres = _CENTRES[len(names)]
    with drawing(kind) as canvas:
        canvas.frame(6.0, 4.4, title)
        axes = canvas.axes
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set_xlim(-2.6, 2.6)
        axes.set_ylim(-1.75, 1.6)
        for i, (name, centre) in enumerate(zip(names, centres, strict=True)):
            axes.add_patch(Circle(centre, _RADIUS, facecolor=colour(i), alpha=0.18, linewidth=0))
            axes.add_patch(Circle(centre, _RADIUS, fill=False, edgecolor=colour(i), linewidth=1.6))
            total = sum(share for subset, share in shares.items() if name in subset)
            x, y = _NAMES[len(names)][i]
            side = "left" if x > 0 else "right"
            text = f"{short(name, 18)}\n{total:.1f} in all"
            axes.text(x, y, text, ha="right" if side == "right" else "left", va="center", color=colour(i))
        for subset, share in shares.items():
            own = [centre for name, centre in zip(names, centres, strict=True) if name in subset]
            others = [centre for name, centre in zip(names, centres, strict=True) if name not in subset]
            axes.text(*_region(own, others), f"{share:.1f}", ha="center", va="center", color=INK, fontsize=11)
        footnote(canvas, note)
    return canvas.content


def _region(own: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a place inside of these circles and outside of the others."""
    x, y = (fmean(centre[i] for centre in own) for i in (0, 1))
    if not others:
        return x, y
    away_x, away_y = (fmean(centre[i] for centre in others) for i in (0, 1))
    step = 0.45 if len(own) == 1 else 0.32
    return x + step * (x - away_x), y + step * (y - away_y)
