"""What an engine adds to a cell of a grid: seconds per cell beyond the cell's own work, and once per run.

    python benchmarks/engines.py --out benchmarks/results/engines.json [--cells 12] [--rounds 3]

Cells evaluate a tiny model on a few images, one at a time, in ``aniso run`` with every engine: processes of
this machine, the same by claims, Ray started here, and submitit with processes in place of SLURM's jobs. Each
engine runs grids of two sizes; the slope between them is the cost of a cell, the rest is paid once. A cell's
own work is what its record says it took.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

ENGINES = {
    "local": ("--jobs", "1"),
    "claims": ("--claim", "--jobs", "1"),
    "ray": ("--engine", "ray", "--engine-option", f"cpus={os.cpu_count() or 1}"),
    "slurm, local executor": ("--engine", "slurm", "--engine-option", "cluster=local", "--jobs", "1"),
}
NEEDS = {"ray": "ray", "slurm, local executor": "submitit"}
FEW = 2  # cells of the smaller grid
SPEC = """
schema: 1
name: engines
base: {{ setting: few-shot, method: none, model: {model}, bank: {bank}, task: ./photos,
        shots: 2, compare: false }}
grid: {{ seed: [{seeds}] }}
variants: [{{ label: base }}]
"""


def run(place: Path, shelf: Any, engine: str, cells: int) -> tuple[float, float]:
    """Run a grid; returns its wall seconds and the mean of what its records say they took."""
    from aniso.record_files import RecordStore

    place.mkdir()
    spec = place / "spec.yaml"
    seeds = ", ".join(map(str, range(cells)))
    spec.write_text(SPEC.format(model=shelf.model, bank=shelf.bank, seeds=seeds))
    command = [sys.executable, "-m", "aniso", "run", str(spec), "--data", str(shelf.data), *ENGINES[engine]]
    begun = time.perf_counter()
    subprocess.run(
        [*command, "-o", str(place / "out")], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    wall = time.perf_counter() - begun
    records = RecordStore(place / "out").finished().values()
    assert len(records) == cells
    return wall, statistics.mean(record.seconds or 0.0 for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    import runs

    names = [n for n in ENGINES if n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None]
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as root:
        shelf = runs.shelf(Path(root) / "shelf")
        for number in range(args.rounds):
            for i, name in enumerate(names):
                few, _ = run(Path(root) / f"{number}-{i}-few", shelf, name, FEW)
                many, work = run(Path(root) / f"{number}-{i}-many", shelf, name, args.cells)
                each = (many - few) / (args.cells - FEW)
                measured[name].append((each - work, many - args.cells * each, work))
                print(name, measured[name][-1], flush=True)
    rows = [
        {
            "engine": name,
            "seconds_per_cell": round(statistics.median(one[0] for one in own), 2),
            "seconds_once": round(statistics.median(one[1] for one in own), 1),
            "work_of_a_cell": round(statistics.median(one[2] for one in own), 2),
        }
        for name, own in measured.items()
    ]
    made = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[2], 1),
        "cells": args.cells,
        "rounds": args.rounds,
        "rows": rows,
    }
    text = json.dumps(made, indent=1) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
