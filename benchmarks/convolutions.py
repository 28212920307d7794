"""A learning step over a convolutional network against the network's own, and where its time goes.

    python benchmarks/convolutions.py --out results/convolutions.json

21 random vectors over an EfficientNet-Lite0 with random weights (3.4 M), 32 images of 96 pixels. The *floor*
is forward and backward of the network with gradients for all of its weights. Cases take turns within a round;
medians are over rounds; steps with one thread are in CPU seconds. Shares are those of torch's profiler, with
one thread, of operators by name. *Reading* is the time to read all vectors twice at the speed of a sum over
them: a step composes the weights from them, and takes the gradient of every coefficient with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from texts import Step, _dense, _move, _vector, take_turns

ARCHITECTURE = "tf_efficientnet_lite0"
VECTORS, BATCH, SIZE = 21, 32, 96
KINDS = {
    "convolutions, backward": ("convolution_backward",),
    "convolutions, forward": ("mkldnn_convolution", "_convolution", "thnn_conv2d", "slow_conv2d"),
    "batch norms": ("batch_norm",),
    "activations": ("hardtanh", "relu", "clamp"),
    "composition": ("aniso", "Compose", "numba"),
}


def encoder(channels_last: bool = True) -> Any:
    """The network with random weights; convolutions get images in channels_last, as image towers do."""
    import timm
    import torch

    from aniso.models import Encoder
    from aniso.models.classifier import features_before_head
    from aniso.models.encoder import Family
    from aniso.models.image_tower import tower_features
    from aniso.models.transforms import Pixels

    torch.manual_seed(0)
    item = tower_features if channels_last else features_before_head
    network = timm.create_model(ARCHITECTURE, pretrained=False, num_classes=0)
    return Encoder(ARCHITECTURE, network, Family(item), Pixels(SIZE))


def make_banks(root: Path) -> None:
    import torch

    from aniso.vectors import Bank, BlockSource

    blocks = BlockSource(encoder().weight_source())
    g = torch.Generator().manual_seed(1)
    noise = {b.name: torch.randn(b.shape, generator=g) * 1e-4 for b in blocks.layout.blocks}
    cells = {f"v{i:02d}": {n: partial(_dense, t, i) for n, t in noise.items()} for i in range(VECTORS)}
    bank = Bank({name: _vector(name, blocks, own) for name, own in cells.items()})
    for storage in ("fp32", "int8"):
        bank.save(root / storage, storage=storage)


def _images() -> Any:
    import torch

    return torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))


def floor_step(channels_last: bool = True) -> Step:
    model, x = encoder(channels_last), _images()
    for parameter in model.parameters():
        parameter.requires_grad_()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def our_step(bank: Path) -> Step:
    from aniso.compose import Composition, Partition, Runtime
    from aniso.vectors import Bank

    x = _images()
    made = Composition(encoder(), Bank.load(bank), Partition.blocks(), runtime=Runtime(keep_freed=True))

    def step() -> None:
        _move(made.values)
        made.values.grad = None
        made(x).square().mean().backward()

    return step


def shares(step: Step) -> dict[str, float]:
    """Milliseconds of a step by kind of operator, without what operators call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    found: Counter[str] = Counter()
    for event in seen.key_averages():
        kind = next((k for k, names in KINDS.items() if any(n in event.key for n in names)), "other")
        found[kind] += event.self_cpu_time_total / 1000
    return {kind: round(found[kind], 2) for kind in (*KINDS, "other")}


def reading(bank: Path) -> float:
    """CPU seconds to read the numbers of all vectors twice with one thread."""
    import time

    import torch

    from aniso.vectors import Bank

    torch.set_num_threads(1)
    opened = Bank.load(bank)
    names = [block.name for block in encoder().layout.blocks]
    blocks = [opened[vector][name].dense() for vector in opened for name in names]
    times = []
    for _ in range(5):
        start = time.process_time()
        for block in blocks:
            block.sum()
        times.append(time.process_time() - start)
    return 2 * min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "vectors": VECTORS,
        "batch": [BATCH, SIZE],
    }
    with tempfile.TemporaryDirectory(prefix="aniso-convolutions-") as folder:
        root = Path(folder)
        make_banks(root)
        steps = {
            "floor": floor_step(),
            "floor, not channels_last": floor_step(False),
            **{name: our_step(root / name) for name in ("fp32", "int8")},
        }
        result["steps"] = {str(threads): take_turns(steps, given.rounds, threads) for threads in (2, 1)}
        result["reading fp32 vectors twice, seconds"] = reading(root / "fp32")
        result["milliseconds by operator"] = {name: shares(step) for name, step in steps.items()}
    for threads, cases in result["steps"].items():
        floor = cases["floor"]
        print(f"\n{threads} thread(s): floor {1000 * floor['median']:.1f} ms")
        for name, own in cases.items():
            ratios = own["median"] / floor["median"], own["min"] / floor["min"]
            print(f"  {name:10s} {ratios[0]:5.2f} of the floor, {ratios[1]:5.2f} of the fastest steps")
    print(json.dumps(result["milliseconds by operator"], indent=1))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
