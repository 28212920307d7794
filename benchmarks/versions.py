"""Whether a change of aniso made learning steps slower: two checkouts take turns, each over its own banks.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before . --out benchmarks/results/versions.json

Every checkout runs its own ``benchmarks/engine.py``, in a process of its own, with the same model, batch and
vectors (21 of ViT-B/32's size, about 15 GB of banks for each). Step / floor is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GROUPS = ((21, 5, ("floor", "fp32", "int8")), (8, 3, ("floor", "x20", "linearised")))
"""Vectors, rounds and cases that are measured in one process."""


def run(checkout: Path, *arguments: object) -> Any:
    """Run a part of a checkout's engine benchmark with that checkout's aniso."""
    script = checkout.resolve() / "benchmarks" / "engine.py"
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    command = [sys.executable, str(script), "--inside", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def ratios(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return step / floor of every case, by number of threads."""
    return {
        threads: {
            case: round(times["median"] / cases["floor"]["median"], 3)
            for case, times in cases.items()
            if case != "floor"
        }
        for threads, cases in found.items()
    }


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, abbreviated."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="aniso-versions-") as folder:
        banks = {checkout: Path(folder) / str(i) for i, checkout in enumerate(given.checkouts)}
        for checkout, root in banks.items():
            root.mkdir()
            run(checkout, "banks", root)
        for n, rounds, cases in GROUPS:
            for turn in range(given.turns):
                for checkout, root in banks.items():
                    found = ratios(run(checkout, "timed", root, n, rounds, *cases))
                    row = {"commit": commit(checkout), "turn": turn, "n": n, "step / floor by threads": found}
                    print(json.dumps(row), flush=True)
                    result.append(row)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
