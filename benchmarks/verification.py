"""What verifying a bank costs: the first read of every block with and without checksums, against an epoch.

    python benchmarks/verification.py --out benchmarks/results/verification.json

21 random vectors of ViT-B/32's image encoder, two threads. *Load and first step* makes a composition that
keeps all vectors in memory and reads them, from the page cache where they are in it. *Stream* is a learning
step that reads vectors as it goes: the first one verifies, later ones do not. With and without take turns,
in alternating order; medians are over rounds. *Comparing checksums* is the time spent in the comparisons
themselves: the difference of two loads is mostly that of the page faults of fresh memory. The epoch is the
shortest that a run has: ten steps, here of 16 images.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from engine import encoder, images, make_banks

STORAGES = ("fp32", "int8", "lora16")
STEPS = 10


@contextlib.contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Add the seconds of every comparison with a checksum to ``spent``."""
    from aniso.vectors._files.checksums import VerifiedFile

    verify = VerifiedFile._verify

    def timed_verify(*arguments: Any) -> None:
        begun = time.perf_counter()
        verify(*arguments)
        spent.append(time.perf_counter() - begun)

    with mock.patch.object(VerifiedFile, "_verify", timed_verify):
        yield


@contextlib.contextmanager
def unverified() -> Iterator[None]:
    """The same code without the hashing."""
    from aniso.vectors._files.checksums import VerifiedFile

    with mock.patch.object(VerifiedFile, "_verify", lambda *_: None):
        yield


def loaded(root: Path, storage: str, **runtime: Any) -> tuple[float, Any]:
    """Seconds to open a bank and compose a model with it, and the composition."""
    from aniso.compose import Composition, Partition, Runtime
    from aniso.vectors import Bank

    model = encoder()
    begun = time.perf_counter()
    composition = Composition(
        model, Bank.load(root / storage), Partition.blocks(), runtime=Runtime(**runtime, keep_freed=True)
    )
    return time.perf_counter() - begun, composition


def step(composition: Any, x: Any) -> float:
    """Seconds of one learning step without the optimiser."""
    import torch

    begun = time.perf_counter()
    with torch.no_grad():
        composition.values.add_(1e-3)
    composition.values.grad = None
    composition(x).square().mean().backward()
    return time.perf_counter() - begun


def measured(root: Path, storage: str, rounds: int) -> dict[str, float]:
    x = images()
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    for number in range(rounds + 1):  # the first round fills the page cache and compiles kernels
        # whoever comes first may find less in the page cache
        for verified in (True, False) if number % 2 else (False, True):
            word = "verified" if verified else "unverified"
            spent: list[float] = []
            with timed(spent) if verified else unverified():
                seconds, composition = loaded(root, storage, memory="14GB")
                first = seconds + step(composition, x)  # blocks are read when the first step needs them
                if number:
                    note(f"load and first step, {word}", first)
                    if verified:
                        note("comparing checksums", sum(spent))
                    note("step", step(composition, x))
                del composition
                _, composition = loaded(root, storage, stream=True)
                first, second = step(composition, x), step(composition, x)
                if number:
                    note(f"first streamed step, {word}", first)
                    note(f"second streamed step, {word}", second)
                del composition
    found = {name: statistics.median(values) for name, values in times.items()}
    epoch = found["load and first step, unverified"] + (STEPS - 1) * found["step"]
    streamed = found["first streamed step, verified"] - found["first streamed step, unverified"]
    found["share of the shortest epoch"] = found["comparing checksums"] / epoch
    found["share of the shortest streamed epoch"] = streamed / (
        STEPS * found["second streamed step, unverified"]
    )
    return found


def hash_speeds() -> dict[str, float]:
    """GB/s of the hashes that could have been used, over 64 MB on one core."""
    import hashlib
    import zlib

    import xxhash

    data = os.urandom(64 << 20)
    hashes: dict[str, Any] = {
        "xxh3": xxhash.xxh3_64_digest,
        "crc32": zlib.crc32,
        "sha256": lambda d: hashlib.sha256(d).digest(),
    }
    speeds = {}
    for name, function in hashes.items():
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            function(data)
            times.append(time.perf_counter() - begun)
        speeds[name] = len(data) / statistics.median(times) / 1e9
    return speeds


def described(found: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The results and what they were measured with."""
    import torch

    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return {
        "machine": machine,
        "torch": torch.__version__,
        "rounds": rounds,
        "GB/s": hash_speeds(),
        "seconds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--storages", nargs="*", default=STORAGES)
    parser.add_argument("--banks", type=Path, help="Keep the banks here and use them again.")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.banks or Path(temporary)
        if not (root / "lora16").exists():
            make_banks(root, ("fp32", "int8"), (16,))
        found = {}
        for storage in options.storages:
            found[storage] = measured(root, storage, options.rounds)
            print(storage, json.dumps(found[storage]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(described(found, options.rounds), indent=1) + "\n")


if __name__ == "__main__":
    main()
