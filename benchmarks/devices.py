"""One learning step shared by several processes: seconds, and memory of each process for the bank.

    python benchmarks/devices.py --out results/devices.json [--vectors 8] [--rounds 5]

Random vectors in fp32 over a ViT-B/32 with random weights (87.8 M), 32 images, one thread per process. Cases
are 1, 2 and 4 processes on this machine, which take turns: each round starts each of them once, and a number
is the median over rounds of the slowest process. *bank* is what resident memory grows by when vectors are
read and weights composed; the base model is not counted. With more processes than cores steps cannot become
faster.

    python benchmarks/devices.py --base --vectors 2 --rounds 1 --out results/devices_base.json

measures memory alone: what a process grows by with the base model, vectors and a step without a backward
pass, where each has the whole base and where they share it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from texts import _dense, _vector

WORLDS = (1, 2, 4)
BATCH, STEPS = 32, 3


def network() -> Any:
    import open_clip
    import torch

    torch.manual_seed(0)
    return open_clip.create_model("ViT-B-32", pretrained=None).visual


def make_bank(path: Path, vectors: int) -> None:
    import torch

    from aniso.vectors import Bank, BlockSource
    from aniso.weights import TensorMap

    blocks = BlockSource(TensorMap(network().state_dict()))
    g = torch.Generator().manual_seed(1)
    noise = {b.name: torch.randn(b.shape, generator=g) * 1e-4 for b in blocks.layout.blocks}
    cells = {f"v{i:02d}": {n: partial(_dense, t, i) for n, t in noise.items()} for i in range(vectors)}
    Bank({name: _vector(name, blocks, own) for name, own in cells.items()}).save(path, storage="fp32")


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) / 1024


def work(bank: str) -> None:
    """Take steps as one of the processes, and print what they took."""
    import contextlib

    import torch

    from aniso import Bank, Composition
    from aniso.compose import batch_runner
    from aniso.experiments.processes import Processes

    torch.set_num_threads(1)
    model = network()
    images = torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    processes = Processes.from_environment()
    joined = contextlib.nullcontext() if processes is None else processes.joined("cpu")
    with joined as mesh:
        before = resident()
        composition = Composition(model, Bank.load(bank), mesh=mesh).prepare()
        grown = resident() - before
        seconds = []
        for _ in range(STEPS + 1):
            with torch.no_grad():
                composition.values.add_(1e-3)
            begun = time.perf_counter()
            batch_runner(composition)(images).square().mean().backward()  # type: ignore[no-untyped-call]
            seconds.append(time.perf_counter() - begun)
    found = {"bank": grown, "step": statistics.median(seconds[1:])}  # the first one warms up
    os.write(3, (json.dumps(found) + "\n").encode())


def remember(bank: str, *, shard_base: bool) -> None:
    """Print what a process holds once it has composed: base, vectors and composed weights."""
    import contextlib
    import ctypes

    import torch

    from aniso import Bank, Composition, Runtime
    from aniso.compose import batch_runner
    from aniso.experiments.processes import Processes

    torch.set_num_threads(1)
    images = torch.zeros(2, 3, 224, 224)
    network()(images)  # libraries and their buffers are loaded
    processes = Processes.from_environment()
    joined = contextlib.nullcontext() if processes is None else processes.joined("cpu")
    with joined as mesh, torch.no_grad():
        ctypes.CDLL(None).malloc_trim(0)
        before = resident()
        runtime = Runtime(shard_base=shard_base)
        composition = Composition(network(), Bank.load(bank), runtime=runtime, mesh=mesh)
        composition.values.fill_(0.1)
        batch_runner(composition)(images)
        ctypes.CDLL(None).malloc_trim(0)
        grown = resident() - before
    os.write(3, (json.dumps({"all": grown}) + "\n").encode())


def measure_base(root: Path, bank: Path, rounds: int) -> list[dict[str, object]]:
    """Return the memory of one process and of two, with the whole base and with shares of it."""
    rows: list[dict[str, object]] = []
    for world, shares in ((1, False), (2, False), (2, True), (4, True)):
        option = "--share" if shares else "--whole"
        found = [run(world, bank, root / f"{world}{option}{i}", option)["all"] for i in range(rounds)]
        rows.append({"processes": world, "shares_base": shares, "mib": round(statistics.median(found))})
        print(rows[-1], flush=True)
    return rows


def run(world: int, bank: Path, place: Path, option: str = "") -> dict[str, float]:
    """Run one case; returns the largest numbers of its processes."""
    place.mkdir()
    shared = {"ANISO_PROCESS_STORE": f"{place}/store", "WORLD_SIZE": str(world)}
    shared |= {"LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = []
    for rank in range(world):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = f"exec {sys.executable} {__file__} --work {bank} {option} 3> {place}/said{rank}"
        workers.append(subprocess.Popen(["sh", "-c", command], env=own))
    if any(worker.wait() for worker in workers):
        raise SystemExit("a process failed")
    said = [json.loads((place / f"said{rank}").read_text()) for rank in range(world)]
    return {name: max(one[name] for one in said) for name in said[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vectors", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", action="store_true", help="measure memory with and without shares")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--share", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        if args.share or args.whole:
            remember(args.work, shard_base=args.share)
        else:
            work(args.work)
        return
    with tempfile.TemporaryDirectory() as root:
        bank = Path(root) / "bank"
        make_bank(bank, args.vectors)
        if args.base:
            base = {"vectors": args.vectors, "rows": measure_base(Path(root), bank, args.rounds)}
            if args.out:
                args.out.write_text(json.dumps(base, indent=1) + "\n")
            return
        found: dict[int, list[dict[str, float]]] = {world: [] for world in WORLDS}
        for number in range(args.rounds):
            for world in WORLDS:
                found[world].append(run(world, bank, Path(root) / f"{world}-{number}"))
                print(world, found[world][-1], flush=True)
    rows = [
        {
            "processes": world,
            "step_seconds": round(statistics.median(one["step"] for one in own), 3),
            "bank_mib": round(statistics.median(one["bank"] for one in own)),
        }
        for world, own in found.items()
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    made = {"machine": machine, "vectors": args.vectors, "batch": BATCH, "rounds": args.rounds, "rows": rows}
    text = json.dumps(made, indent=1) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
