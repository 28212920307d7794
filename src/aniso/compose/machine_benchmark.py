"""What compositions cost on this machine: a learning step against the model's own, for every storage."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose._kernels import dispatch
from aniso.compose.composition import Composition
from aniso.progress import ProgressCallback
from aniso.vectors import Bank, BlockSource, Dense, Provenance, TaskVector
from aniso.weights import TensorMap

STORAGES = ("fp32", "bf16", "int8", "int4")
_ROWS = 512  # of inputs, such as ten images of fifty patches


@final
@dataclass(frozen=True)
class StorageCost:
    """A learning step over a bank of one storage."""

    storage: str
    step: float
    """Seconds, the median over rounds."""
    ratio: float
    """Of the step to the floor, the median of the ratios within rounds."""
    bytes_per_step: int
    """What vectors take in memory; a step reads them twice."""


@final
@dataclass(frozen=True)
class MachineBenchmark:
    """Measurements of one machine, on one device."""

    device: str
    threads: int
    parameters: int
    vectors: int
    floor: float
    """Seconds of forward and backward of the model with gradients for all of its weights."""
    read_bandwidth: float
    """Bytes per second of a sum over a tensor that no cache holds."""
    path: str
    """How vectors are added: compiled code, or torch."""
    storages: tuple[StorageCost, ...]


def benchmark_machine(
    device: torch.device, progress: ProgressCallback, *, width: int = 768, vectors: int = 8, rounds: int = 7
) -> MachineBenchmark:
    """Measure a stack of linear layers with random weights and random vectors; takes about a minute.

    All cases take turns within a round, so that a machine that is busy slows all of them.
    """
    model = _layers(width).to(device)
    inputs = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(1)).to(device)
    with tempfile.TemporaryDirectory(prefix="aniso-bench-") as place:
        compositions: dict[str, Composition] = {}
        bank = _random_bank(model, vectors, width)
        for storage in STORAGES:
            progress("random vectors", len(compositions), len(STORAGES))
            saved = bank.save(Path(place) / storage, storage=storage)
            compositions[storage] = Composition(model, saved).prepare()
        steps = {name: partial(_step, one, inputs) for name, one in {"floor": model, **compositions}.items()}
        times = _take_turns(steps, rounds, device, progress)
        resident = {name: _resident_bytes(c) for name, c in compositions.items()}
    floor = times["floor"]
    costs = tuple(
        StorageCost(
            name,
            statistics.median(times[name]),
            statistics.median(own / base for own, base in zip(times[name], floor, strict=True)),
            resident[name],
        )
        for name in STORAGES
    )
    compiler = dispatch.compiler(device)
    return MachineBenchmark(
        str(device),
        torch.get_num_threads(),
        sum(p.numel() for p in model.parameters()),
        vectors,
        statistics.median(floor),
        _read_bandwidth(device, rounds),
        "torch" if compiler is None else f"compiled ({compiler})",
        costs,
    )


def _layers(width: int) -> nn.Sequential:
    """The linear layers of four transformer layers, with their norms."""
    torch.manual_seed(0)
    pair = [(width, 4 * width), (4 * width, width)]
    layers = [nn.Sequential(nn.LayerNorm(a), nn.Linear(a, b), nn.GELU()) for _ in range(4) for a, b in pair]
    return nn.Sequential(*layers)


def _random_bank(model: nn.Module, count: int, width: int) -> Bank:
    """Return vectors of the same random numbers, each rolled by another distance."""
    blocks = BlockSource(TensorMap({name: t.detach().cpu() for name, t in model.state_dict().items()}))
    identity, g = blocks.identity(), torch.Generator().manual_seed(2)
    noise = {block.name: torch.randn(block.shape, generator=g) / width for block in blocks.layout.blocks}

    def delta(block: str, distance: int) -> Dense:
        return Dense(noise[block].flatten().roll(distance).view_as(noise[block]))

    found = {}
    for i in range(count):
        name, cells = f"v{i}", {block: partial(delta, block, 7919 * i) for block in noise}
        found[name] = TaskVector(name, blocks.layout, lambda: identity, cells, Provenance(name, "random"))
    return Bank(found)


def _step(model: nn.Module, inputs: Tensor) -> None:
    """Forward and backward, at coefficients that are new in every step."""
    model.zero_grad(set_to_none=True)
    if isinstance(model, Composition):
        with torch.no_grad():
            model.values.add_(1e-4)
    model(inputs).square().mean().backward()


def _take_turns(
    steps: Mapping[str, Callable[[], None]], rounds: int, device: torch.device, progress: ProgressCallback
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            _wait_for(device)
            if number:  # the first round compiles and allocates
                times[name].append(time.perf_counter() - begun)
        progress("rounds", number + 1, rounds + 1)
    return times


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _resident_bytes(composition: Composition) -> int:
    return sum(block.nbytes for block in composition.plan.blocks)


def _read_bandwidth(device: torch.device, rounds: int) -> float:
    numbers = torch.ones(1 << 26, device=device)
    numbers.sum()
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        numbers.sum()
        _wait_for(device)
        seconds.append(time.perf_counter() - begun)
    return numbers.nbytes / min(seconds)
