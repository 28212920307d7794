"""Heads on random features: 16 shots of 100 classes, 512 wide, 300 full-batch steps.

    python benchmarks/heads.py --out benchmarks/results/heads.json

Next to every time stands that of the matrix products alone that such steps cannot do without, from the same
run: medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from aniso.learn.heads import LPP, LinearProbe, TipAdapter
from aniso.models import ClassWeights

SHOTS, CLASSES, WIDTH, STEPS = 16, 100, 512, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--views", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--out", type=Path)
    said = parser.parse_args()
    rows = [row for views in said.views for row in measured(views, said.rounds)]
    for row in rows:
        times = f"{row['seconds']:6.2f} s, products {row['products']:5.2f} s"
        print(f"{row['head']:8} {row['views']:2} views {times}")
    if said.out:
        facts = {"threads": torch.get_num_threads(), "shots": SHOTS, "classes": CLASSES, "width": WIDTH}
        said.out.write_text(json.dumps({**facts, "steps": STEPS, "rows": rows}, indent=1) + "\n")


def measured(views: int, rounds: int) -> list[dict[str, object]]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(SHOTS)
    centres = torch.randn(CLASSES, WIDTH, generator=rng)
    noise = torch.randn(views, SHOTS * CLASSES, WIDTH, generator=rng)
    features = functional.normalize(centres[labels] + 2 * noise, dim=-1)
    text = functional.normalize(centres + torch.randn(CLASSES, WIDTH, generator=rng), dim=-1)
    base = ClassWeights(tuple(map(str, range(CLASSES))), 100 * text)
    heads = {"tip": TipAdapter, "lpp": LPP, "linear": LinearProbe}
    floors: dict[str, Callable[[], None]] = {
        "tip": lambda: products(features[0], features[0], 2),  # against the keys, and their gradient
        "lpp": lambda: products(features.flatten(0, 1), text, 2),
        "linear": lambda: products(features.flatten(0, 1), text, 2),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in heads}
    for _ in range(rounds):
        for name, head in heads.items():
            fitted = seconds(lambda head=head: head(base, steps=STEPS).fit(features, labels))  # type: ignore[misc]
            times[name].append((fitted, seconds(floors[name])))
    return [
        {
            "head": name,
            "views": views,
            "seconds": statistics.median(t for t, _ in found),
            "products": statistics.median(t for _, t in found),
        }
        for name, found in times.items()
    ]


def products(rows: torch.Tensor, others: torch.Tensor, often: int) -> None:
    for _ in range(STEPS * often):
        rows @ others.T


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
