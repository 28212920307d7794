"""Selection among adapters behind a server: seconds, requests and bytes, against downloading all of them.

    python benchmarks/object_store.py --out benchmarks/results/object_store.json

A server on loopback, in a process of its own, answers as the Hugging Face Hub does, at once or after 20 ms,
which is what an object store takes. Adapters are of rank 4 in 16 bits, on 8 matrices; one in five was trained
on another base. Every stage is measured in one process with 8 connections: the first selection (list,
headers, tensors), one for another task with the catalogue, one with another budget by the scores on disk, a
refresh after one adapter in a hundred has changed, and a download of both files of every adapter.

Other programs may slow the machine down, so every stage has the CPU seconds of its process, too.
`costs` are CPU seconds for one adapter, and those in which a worker starts: `scripts/simulate_scale.py` is
made of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

WIDTH, LAYERS, RANK, CONNECTIONS = 256, 4, 4, 8
UNFIT, CHANGED = 5, 100  # one adapter in so many
CASES = ((200, 0.0), (200, 0.02), (2000, 0.02))
"""Numbers of adapters, and seconds until the server answers."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
SAMPLE = 100
"""Adapters from which costs are measured."""


# the server


def adapters(count: int, first: int = 0) -> dict[str, bytes]:
    """Files of adapters by path; every fifth adapter does not fit the base."""
    import torch
    from safetensors.torch import save

    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q", "fc1"]}
    files = {}
    for i in range(first, first + count):
        width = WIDTH if i % UNFIT else WIDTH + 32
        g, tensors = torch.Generator().manual_seed(i), {}
        for layer in range(LAYERS):
            for name, rows in (("q", width), ("fc1", 4 * width)):
                key = f"base_model.model.layers.{layer}.{name}"
                for part, shape in (("lora_A", (RANK, width)), ("lora_B", (rows, RANK))):
                    tensors[f"{key}.{part}.weight"] = (torch.randn(shape, generator=g) * 0.02).bfloat16()
        place = f"many/a{i - first if first else i:05d}"
        files[f"{place}/{FILES[0]}"] = json.dumps(config).encode()
        files[f"{place}/{FILES[1]}"] = save(tensors)
    return files


def serve(count: int, latency: float) -> None:
    """Answer requests until standard input is closed; a line on it changes one adapter in a hundred."""
    from loopback import serving

    def wait(path: str, times: int) -> None:
        time.sleep(latency)

    with serving(adapters(count)) as server:
        server.faults = wait
        print(server.address, sum(map(len, server.files.values())), flush=True)
        for _ in sys.stdin:
            server.files.update(adapters(count // CHANGED, first=5 * count))
            print("changed", flush=True)


class Server:
    """The process of the server."""

    def __init__(self, count: int, latency: float) -> None:
        command = [sys.executable, __file__, "--serve", str(count), str(latency)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address, size = self._process.stdout.readline().split()
        self.address, self.nbytes = address, int(size)

    def change(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("change\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# the stages


@dataclass(frozen=True)
class Stage:
    """Seconds of a stage, and what was read in it."""

    seconds: float
    cpu_seconds: float
    requests: int
    bytes: int


@dataclass
class Bench:
    """The base, a gradient, and the address of the adapters."""

    base: Any
    gradient: Any
    root: str

    def stores(self, connections: int = CONNECTIONS) -> Any:
        from aniso.vectors import AdapterStores

        return AdapterStores([self.root], connections=connections)


def bench() -> Bench:
    import torch
    from loopback import REPOSITORY

    from aniso.learn.selection import BlockGradient
    from aniso.vectors import BlockSource

    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    shapes = {"q": (WIDTH, WIDTH), "fc1": (4 * WIDTH, WIDTH)}
    state = {
        f"layers.{i}.{n}.weight": torch.randn(s, generator=g)
        for i in range(LAYERS)
        for n, s in shapes.items()
    }
    base = BlockSource.of(state)
    blocks = {b.name: torch.randn(b.shape, generator=g) for b in base.layout.blocks}
    gradient = BlockGradient(blocks, {"base": base.identity().content})
    return Bench(base, gradient, f"hf://{REPOSITORY}/many")


def timed(stores: Any, work: Callable[[], Any]) -> tuple[Stage, Any]:
    before = (stores.traffic.requests, stores.traffic.nbytes)
    begun, cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    requests, nbytes = stores.traffic.requests - before[0], stores.traffic.nbytes - before[1]
    return Stage(seconds, cpu, requests, nbytes), result


def stages(one: Bench, server: Server, count: int) -> dict[str, Stage]:
    from aniso.learn.selection import AdapterScoring, ScoreFiles
    from aniso.vectors import refresh_catalogue

    found: dict[str, Stage] = {}
    stores = one.stores()
    found["catalogue"], catalogue = timed(stores, lambda: refresh_catalogue(one.base, stores))
    assert (len(catalogue.rows), len(catalogue.usable)) == (count, count - count // UNFIT)
    with tempfile.TemporaryDirectory() as place:
        files = ScoreFiles(Path(place))

        def score() -> Any:
            return (
                AdapterScoring(one.base, catalogue, one.gradient, stores=stores, files=files).run().choose(20)
            )

        found["scores"], first = timed(stores, score)
        found["another budget"], again = timed(stores, score)
        assert first == again

    def another_task() -> Any:
        known = refresh_catalogue(one.base, stores, catalogue)
        return AdapterScoring(one.base, known, one.gradient, stores=stores).run().choose(20)

    found["another task"], other = timed(stores, another_task)
    assert other == first
    server.change()
    found["refresh"], changed = timed(stores, lambda: refresh_catalogue(one.base, stores, catalogue))
    assert sum(a != b for a, b in zip(changed.rows, catalogue.rows, strict=True)) == count // CHANGED
    with tempfile.TemporaryDirectory() as place:
        found["download"], _ = timed(stores, lambda: download(stores, Path(place)))
    return found


def download(stores: Any, place: Path) -> None:
    """Write both files of every adapter to disk, with as many connections."""
    from concurrent.futures import ThreadPoolExecutor

    (store,) = stores
    with ThreadPoolExecutor(CONNECTIONS) as pool:

        def copy(item: Any) -> None:
            target = place / item.uri.removeprefix(store.root).strip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(store.file(item).read(0, item.size))

        list(pool.map(copy, list(store.objects(FILES))))


def costs(one: Bench, count: int) -> dict[str, float]:
    """CPU seconds of one adapter: medians of a sample."""
    from aniso.learn.selection import AdapterScores, AdapterScoring
    from aniso.vectors import Catalogue, refresh_catalogue
    from aniso.vectors.catalogue import read_contents

    stores = one.stores(1)
    (store,) = stores
    begun = time.process_time()
    listed = list(store.objects(FILES))
    listing = (time.process_time() - begun) / count
    catalogue = refresh_catalogue(one.base, stores)
    by_uri = {item.uri: item for item in listed}
    scoring = AdapterScoring(one.base, catalogue, one.gradient, stores=stores)
    samples: dict[str, list[float]] = {"header": [], "compare": [], "read": [], "score": []}
    for row in catalogue.usable[:SAMPLE]:
        pair = [store.file(by_uri[f"{row.uri}/{name}"]) for name in FILES]
        samples["header"].append(_seconds(partial(read_contents, *pair)))
        samples["compare"].append(_seconds(partial(row.compared_with, one.base, "another")))
        adapter = stores.adapter(row)
        samples["read"].append(_seconds(partial(adapter.prefetch, adapter.tensors)))
        result = AdapterScores(row.uri, row.etag)
        samples["score"].append(_seconds(partial(scoring._score, result, adapter)))
    command = [sys.executable, "-c", "import aniso.learn.selection"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = sum(after[:2]) - sum(before[:2])
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "catalogue.parquet"
        catalogue.save(path)
        load = _seconds(partial(Catalogue.load, path)) / count
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {"start": start, "list": listing, "load": load, **medians}


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measured(one: Bench, count: int, latency: float) -> dict[str, Any]:
    import fsspec

    server = Server(count, latency)
    try:
        fsspec.config.conf["hf"] = {"endpoint": server.address, "token": False}
        fsspec.filesystem("hf").clear_instance_cache()
        found = stages(one, server, count)
        cost = costs(one, count) if (count, latency) == CASES[0] else None
    finally:
        server.close()
    for name, stage in found.items():
        words = f"{stage.requests} requests, {stage.bytes / 1e6:.2f} MB"
        times = f"{stage.seconds:.2f} s, {stage.cpu_seconds:.2f} s of CPU"
        print(f"{count} adapters, {1000 * latency:.0f} ms, {name}: {times}, {words}", flush=True)
    row = {"adapters": count, "latency": latency, "stored_bytes": server.nbytes}
    return {**row, "stages": {name: asdict(stage) for name, stage in found.items()}, "costs": cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(int(given.serve[0]), float(given.serve[1]))
        return
    for name in ("HF_HUB_OFFLINE", "ANISO_OFFLINE"):
        os.environ.pop(name, None)
    one = bench()
    rows = [measured(one, count, latency) for count, latency in CASES]
    if given.out:
        facts = {"rank": RANK, "matrices": 2 * LAYERS, "width": WIDTH, "connections": CONNECTIONS}
        facts |= {"cores": os.cpu_count() or 0}
        load = round(os.getloadavg()[2], 1)
        record = {
            **facts,
            "load_average": load,
            "unfit_share": 1 / UNFIT,
            "changed_share": 1 / CHANGED,
            "rows": rows,
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
