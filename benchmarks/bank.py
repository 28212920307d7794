"""What a bank costs: bytes, time and memory for 21 vectors of ViT-B/32's image encoder (random values).

    python benchmarks/bank.py --out benchmarks/results/bank.json

Every storage is built from the same files in a process of its own, so that the peak of its memory is its
own; reading one block of all vectors is timed in rounds that alternate between the storages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STORAGES = ("fp32", "bf16", "int8", "int4", "residual4", "residual2")
BLOCK = "visual.transformer.resblocks.5.mlp.c_fc.weight"
WIDTH, LAYERS = 768, 12


def shapes() -> dict[str, tuple[int, ...]]:
    """The 152 blocks of ViT-B/32 under open_clip's names."""
    out: dict[str, tuple[int, ...]] = {
        "class_embedding": (WIDTH,),
        "positional_embedding": (50, WIDTH),
        "proj": (WIDTH, 512),
        "conv1.weight": (WIDTH, 3, 32, 32),
    }
    norms = ["ln_pre", "ln_post"] + [
        f"transformer.resblocks.{i}.ln_{j}" for i in range(LAYERS) for j in (1, 2)
    ]
    for norm in norms:
        out |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    for i in range(LAYERS):
        at = f"transformer.resblocks.{i}"
        out |= {
            f"{at}.attn.in_proj_weight": (3 * WIDTH, WIDTH),
            f"{at}.attn.in_proj_bias": (3 * WIDTH,),
            f"{at}.attn.out_proj.weight": (WIDTH, WIDTH),
            f"{at}.attn.out_proj.bias": (WIDTH,),
            f"{at}.mlp.c_fc.weight": (4 * WIDTH, WIDTH),
            f"{at}.mlp.c_fc.bias": (4 * WIDTH,),
            f"{at}.mlp.c_proj.weight": (WIDTH, 4 * WIDTH),
            f"{at}.mlp.c_proj.bias": (WIDTH,),
        }
    return {f"visual.{name}": shape for name, shape in out.items()}


def make_models(root: Path, vectors: int) -> None:
    """A base, and models that moved by two per cent; a fifth of the moves' variance is shared by all."""
    import torch

    from aniso.weights import save_safetensors

    g = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=g) * 0.02 for name, shape in shapes().items()}
    shared = {name: torch.randn(shape, generator=g) * 0.0002 for name, shape in shapes().items()}
    save_safetensors(root / "base.safetensors", base)
    for i in range(vectors):
        tuned = {
            name: value + shared[name] + torch.randn(value.shape, generator=g) * 0.0004
            for name, value in base.items()
        }
        save_safetensors(root / f"v{i:02d}.safetensors", tuned)


def build_one(root: Path, vectors: int, storage: str) -> dict[str, float]:
    """Runs in a process of its own: build a bank, tell time and memory."""
    import torch

    from aniso.vectors import Bank, BlockSource
    from aniso.weights import open_weights

    torch.set_num_threads(2)
    torch.randn(1000).square().sum()  # what torch sets up on first use is not the bank's
    blocks = BlockSource(open_weights(root / "base.safetensors"))
    sources = {f"v{i:02d}": open_weights(root / f"v{i:02d}.safetensors") for i in range(vectors)}
    _reset_peak()
    before = _peak()
    start = time.perf_counter()
    bank = Bank.build(blocks, sources, to=root / f"bank-{storage}", storage=storage)
    seconds = time.perf_counter() - start
    nbytes = sum(p.stat().st_size for p in (root / f"bank-{storage}").iterdir())
    return {
        "bytes_per_vector": nbytes / vectors,
        "build_seconds": seconds,
        "peak_above_start_bytes": _peak() - before,
        "relative_error": statistics.mean(bank[name].relative_error for name in bank),
    }


def _reset_peak() -> None:
    """Forget the peak so far: importing torch has one of its own."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Most memory the process held since the peak was reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def time_reads(root: Path, rounds: int) -> dict[str, dict[str, float]]:
    """One block of all vectors: read as stored, and unpacked to float32."""
    import torch

    from aniso.vectors import Bank

    torch.set_num_threads(2)
    banks = {storage: Bank.load(root / f"bank-{storage}") for storage in STORAGES}
    times: dict[str, dict[str, list[float]]] = {s: {"read": [], "dense": []} for s in STORAGES}
    for _ in range(rounds):
        for storage, bank in banks.items():
            start = time.perf_counter()
            row = bank.read_block(BLOCK)
            read = time.perf_counter()
            for delta in row.values():
                delta.dense()
            times[storage]["read"].append(read - start)
            times[storage]["dense"].append(time.perf_counter() - read)
    return {
        storage: {f"block_{what}_seconds": statistics.median(t) for what, t in kinds.items()}
        for storage, kinds in times.items()
    }


def measure(root: Path, vectors: int, rounds: int) -> dict[str, Any]:
    make_models(root, vectors)
    results: dict[str, Any] = {}
    for storage in STORAGES:
        command = [
            sys.executable,
            __file__,
            "--child",
            storage,
            "--root",
            str(root),
            "--vectors",
            str(vectors),
        ]
        results[storage] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(f"{storage}: built", file=sys.stderr)
    for storage, reads in time_reads(root, rounds).items():
        results[storage] |= reads
    largest = max(4 * _numel(shape) for shape in shapes().values())
    return {
        "model": "ViT-B/32 image encoder, random values",
        "blocks": len(shapes()),
        "parameters": sum(map(_numel, shapes().values())),
        "vectors": vectors,
        "largest_block_bytes": largest,
        "cores": os.cpu_count(),
        "block": BLOCK,
        "storages": results,
    }


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


COLUMNS = ("storage", "MB per vector", "of fp32", "relative error", "build s", "peak memory MB (blocks)",
           "read a block ms", "unpack it ms")  # fmt: skip


def print_table(report: dict[str, Any]) -> None:
    size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['blocks']} blocks"
    print(f"{report['vectors']} vectors, {size}")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    whole, block = report["storages"]["fp32"]["bytes_per_vector"], report["largest_block_bytes"]
    for storage, r in report["storages"].items():
        peak = r["peak_above_start_bytes"]
        cells = (
            storage,
            f"{r['bytes_per_vector'] / 1e6:.1f}",
            f"{r['bytes_per_vector'] / whole:.3f}",
            f"{r['relative_error']:.4f}",
            f"{r['build_seconds']:.1f}",
            f"{peak / 1e6:.0f} ({peak / block:.1f})",
            f"{r['block_read_seconds'] * 1e3:.1f}",
            f"{r['block_dense_seconds'] * 1e3:.1f}",
        )
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vectors", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--root", type=Path, help="where the models lie; a temporary directory by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=STORAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(build_one(args.root, args.vectors, args.child)))
        return
    with tempfile.TemporaryDirectory(dir=args.root) as root:
        report = measure(Path(root), args.vectors, args.rounds)
    print_table(report)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
