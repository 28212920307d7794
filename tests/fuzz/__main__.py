"""``python -m tests.fuzz --cases 1000 --seconds 600 --target safetensors --seed 1 --keep findings/``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from .runner import run
from .targets import targets


def main() -> int:
    """Fuzz the targets that were asked for; exit code 1 if there is a finding."""
    kinds = targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="cases of each target (default 1000)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--target", action="append", choices=list(kinds), help="may be repeated; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat a finding")
    parser.add_argument("--keep", type=Path, help="directory for the input of every finding")
    args = parser.parse_args()
    torch.set_num_threads(1)
    end, findings = time.monotonic() + args.seconds, 0
    for name in args.target or kinds:
        start = time.monotonic()
        left = end - start
        result = run(kinds[name](), args.cases, args.seed, first=args.first, seconds=left, keep=args.keep)
        took = time.monotonic() - start
        print(
            f"{name}: {result.cases} cases in {took:.0f} s, slowest {result.slowest:.2f} s, "
            f"{result.megabytes:.0f} MB, {len(result.findings)} findings; "
            + ", ".join(f"{code} {count}" for code, count in result.outcomes.most_common()),
            flush=True,
        )
        for finding in result.findings:
            print(f"  {finding}", flush=True)
        findings += len(result.findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
