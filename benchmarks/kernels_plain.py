"""The hand-written vector code of the compiled kernels against plain numba, in one run.

    python benchmarks/kernels_plain.py --out benchmarks/results/kernels_plain.json

The passes are those of ``kernels.py``, four blocks of them. Both versions take turns within a round, so that
other load on the machine meets both; the record has the median over rounds of the time of plain numba divided
by that of the hand-written code. Above 1.1 the hand-written code is worth keeping.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import kernels
import plain_numba
from aniso.compose._kernels import dispatch, numba_cpu

VERSIONS = {"vector": numba_cpu, "plain": plain_numba}
THREADS = tuple(range(1, min(2, os.cpu_count() or 1) + 1))


def ratios(form: torch.dtype | int, n: int, rounds: int) -> dict[str, float]:
    """Time of plain numba over that of the vector code, for each pass over the vectors."""
    _, steps = kernels.passes(form, n)
    times: dict[str, dict[str, list[float]]] = {name: {v: [] for v in VERSIONS} for name in steps}
    for turn in range(rounds + 1):  # the first one compiles
        for name, step in steps.items():
            if name == "reading":
                continue
            for version in VERSIONS if turn % 2 else reversed(VERSIONS):
                dispatch._kernels = lambda version=version: VERSIONS[version]  # type: ignore[assignment]
                start = time.perf_counter()
                step()
                times[name][version].append(time.perf_counter() - start)
    return {
        name: statistics.median(p / v for p, v in zip(by["plain"][1:], by["vector"][1:], strict=True))
        for name, by in times.items()
        if by["plain"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=2, help="Repetitions of the whole measurement.")
    options = parser.parse_args()
    kernels.BLOCKS = 4
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "plain_over_vector": {},
    }
    for threads in THREADS:
        torch.set_num_threads(threads)
        for n in (8, 21):
            for name, form in kernels.FORMS.items():
                runs = [ratios(form, n, options.rounds) for _ in range(options.runs)]
                result["plain_over_vector"][f"{name}, n = {n}, {threads} thread(s)"] = {
                    what: [round(run[what], 2) for run in runs] for what in runs[0]
                }
                shown = "  ".join(f"{what} {[round(run[what], 2) for run in runs]}" for what in runs[0])
                print(f"{threads} thread(s), n = {n:2d}, {name}: {shown}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
