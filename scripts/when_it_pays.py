"""Draw when composition pays: interference of a bank's vectors against what learned coefficients gain.

    python scripts/when_it_pays.py

One point per base and task of its addition experiment, from committed records and measurements. Across: the
mean change of the task's validation accuracy by each single vector of another task (disentanglement.json).
Up: the gain of learned anisotropic coefficients over zero-shot, as a share of the own vector's gain, on test.
Tasks whose own vector gains less than five points are left out. Writes experiments/when-it-pays.png.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from aniso.record_files import RecordStore

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
OUT = EXPERIMENTS / "when-it-pays.png"
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Base:
    name: str
    addition: str
    """The folder of its addition experiment, which also has the measurements."""


@dataclass(frozen=True)
class Point:
    base: str
    task: str
    change: float
    """Mean change by vectors of other tasks, in points."""
    kept: float
    """Share of the own gain, in per cent."""


BASES = (
    Base("MiniLM", "minilm-addition"),
    Base("lite0", "lite0-addition"),
    Base("mini", "addition"),
)


def points(base: Base) -> Iterator[Point]:
    """Yield the points of a base."""
    folder = EXPERIMENTS / base.addition
    measured = json.loads((folder / "disentanglement.json").read_text())
    found: dict[str, dict[str, list[float]]] = {}
    for record in RecordStore(folder / "records").finished().values():
        for task, score in record.metrics.accuracy.items():
            found.setdefault(record.label, {}).setdefault(task, []).append(score.accuracy)
    for task, zero_shot in found["zero-shot"].items():
        own = mean(found["own vector for each task"][task]) - mean(zero_shot)
        learned = mean(found["learned anisotropic"][task]) - mean(zero_shot)
        others = [row[task] for name, row in measured["alone"].items() if name != task and task in row]
        if own >= LEAST_GAIN:
            yield Point(base.name, task, 100 * (mean(others) - measured["base"][task]), 100 * learned / own)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    labelled: list[tuple[float, float]] = []
    for base, marker in zip(BASES, "osD", strict=True):
        own = list(points(base))
        axes.scatter([p.change for p in own], [p.kept for p in own], marker=marker, s=45, label=base.name)
        for point in own:
            place = (point.change, point.kept)
            if any(abs(place[0] - x) < 4 and abs(place[1] - y) < 5 for x, y in labelled):
                continue  # its label would cover another one
            labelled.append(place)
            axes.annotate(point.task, place, xytext=(5, 4), textcoords="offset points", fontsize=7)
    axes.axhline(0, color="0.7", linewidth=1)
    axes.axhline(100, color="0.7", linewidth=1)
    axes.set_xlabel("mean change by a vector of another task, points")
    axes.set_ylabel("gain of learned coefficients,\n% of the own vector's gain")
    axes.set_title("When does composition pay? Addition, one point per base and task")
    axes.legend(frameon=False)
    figure.savefig(OUT, dpi=130)
    print(OUT)


if __name__ == "__main__":
    main()
