"""The estimate for GPUs in the benchmarks' page follows from the formula and the figures beside it."""

from __future__ import annotations

import re
from pathlib import Path

from aniso.vectors.packing import GROUP

PAGE = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()
PARAMETERS = {"ViT-B/32": 87.8e6, "ViT-L/14": 304e6}


def test_the_estimate_for_gpus_follows_from_its_formula():
    section = PAGE.partition("## GPUs, on paper")[2].partition("\n## ")[0]
    vectors, images = map(int, re.search(r"With (\d+) vectors and (\d+) images", section).groups())
    tokens = dict(
        zip(PARAMETERS, map(int, re.findall(r"(\d+)(?: tokens each)? for ViT", section)), strict=True)
    )
    speeds = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) TB/s and (\d+) TFLOP/s", section)]
    gpus = dict(zip(("A100, 80 GB", "H100, SXM"), speeds, strict=True))
    sizes = (4, 2, 1 + 2 / GROUP, 0.5 + 2 / GROUP)
    for model, count in PARAMETERS.items():
        for gpu, (bandwidth, peak) in gpus.items():
            floor = 6 * count * tokens[model] * images / (0.4 * peak * 1e12)
            reads = [(2 * vectors * count * size + 8 * count) / (bandwidth * 1e12) for size in sizes]
            cells = [f"{1e3 * floor:.0f} ms", *(f"{1 + read / floor:.2f}" for read in reads)]
            assert f"| {model} | {gpu} | {' | '.join(cells)} |" in section
