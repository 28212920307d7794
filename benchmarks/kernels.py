"""How fast compiled code goes through task vectors, against plainly reading them.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json

Twelve blocks of 3072 x 768, together far larger than any cache, of 8 or 21 vectors. *Reading* is a sum over
all that is stored, by torch, and nothing else. *Adding* composes a weight, *multiplying* gives the gradient
of its coefficients, *both* does so in one pass. All take turns within a round; numbers are medians over
rounds, in GB of stored vectors a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aniso.compose._kernels import dispatch
from aniso.vectors import Packing

BLOCKS, NUMEL = 12, 3072 * 768
FORMS: dict[str, torch.dtype | int] = {"fp32": torch.float32, "fp16": torch.float16, "int8": 8, "int4": 4}


def stored(form: torch.dtype | int, n: int) -> tuple[Tensor, Packing | None, Tensor | None]:
    """The vectors of a block, as they are in memory."""
    if not isinstance(form, int):
        return torch.randn(n, NUMEL).to(form), None, None
    packing = Packing(form)
    codes = torch.randint(0, 256, (n, packing.code_bytes(NUMEL)), dtype=torch.uint8)
    return codes, packing, torch.rand(n, packing.groups(NUMEL)).to(torch.bfloat16)


def passes(form: torch.dtype | int, n: int) -> tuple[float, dict[str, Callable[[], None]]]:
    """GB that are stored, and what goes through them."""
    blocks = [stored(form, n) for _ in range(BLOCKS)]
    bases, outs, gradients = (torch.randn(BLOCKS, NUMEL) for _ in range(3))
    coefficients = torch.rand(n)

    def read() -> None:
        for numbers, _, _ in blocks:
            numbers.view(torch.int64 if numbers.dtype == torch.uint8 else numbers.dtype).sum()

    def add() -> None:
        for out, base, (numbers, packing, scales) in zip(outs, bases, blocks, strict=True):
            dispatch.add(out, base, numbers, coefficients, packing, scales)

    def multiply() -> None:
        for gradient, (numbers, packing, scales) in zip(gradients, blocks, strict=True):
            dispatch.dots(numbers, gradient, packing, scales)

    def both() -> None:
        for out, base, gradient, block in zip(outs, bases, gradients, blocks, strict=True):
            numbers, packing, scales = block
            dispatch.add_and_dots(out, base, numbers, coefficients, gradient, packing, scales)

    size = sum(t.numel() * t.element_size() for block in blocks for t in block if isinstance(t, Tensor))
    return size / 1e9, {"reading": read, "adding": add, "multiplying": multiply, "both": both}


def measured(form: torch.dtype | int, n: int, rounds: int) -> dict[str, float]:
    size, steps = passes(form, n)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: size / statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "gb_per_second": {}}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for n in (8, 21):
            for name, form in FORMS.items():
                found = measured(form, n, options.rounds)
                result["gb_per_second"][f"{name}, n = {n}, {threads} thread(s)"] = found
                said = "  ".join(f"{what} {speed:5.1f}" for what, speed in found.items())
                print(f"{threads} thread(s), n = {n:2d}, {name}: {said} GB/s")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
