"""Seconds and peak memory of every merge rule, for 21 vectors of ViT-B/32's image encoder (random values).

    OMP_NUM_THREADS=1 python benchmarks/merging.py --vectors 21 8 --out benchmarks/results/merging.json
    python benchmarks/merging.py --rules tsv iso-c --blocks 2

Every rule runs in a process of its own and writes one vector file. Deltas are shifted copies of one block of
random numbers, so that neither the disk nor making them is measured. Memory is the peak above the libraries
and that block. Every row has the CPU time beside the seconds, and the machine's load: on a machine that
others use, too, CPU time is the number that compares. ``--blocks N`` merges the first N matrices alone,
``--lora R`` merges adapters of rank R. The record is written after every row; rows that it has already stay,
unless they are measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bank import shapes
from engine import _dense, _low_rank

VECTORS = 21


def make_bank(vectors: int, blocks: int | None, lora: int | None) -> Any:
    """A bank in memory whose deltas are made when they are read; none is kept."""
    import torch

    from aniso.vectors import Bank, BlockSource, Provenance, TaskVector
    from aniso.weights import TensorMap

    base = BlockSource(TensorMap({name: torch.zeros(shape) for name, shape in shapes().items()}))
    info = base.identity()
    own = [b for b in base.layout.blocks if len(b.shape) == 2 and ".resblocks." in b.name]
    if blocks is None and lora is None:
        own = list(base.layout.blocks)
    noise = {b.shape: torch.randn(b.shape, generator=torch.Generator().manual_seed(1)) * 4e-4 for b in own}
    made = {}
    for i in range(vectors):
        chosen = own[:blocks] if blocks is not None else own
        if lora is None:
            cells = {b.name: partial(_dense, noise[b.shape], i + 1) for b in chosen}
            norms = {b.name: float(noise[b.shape].norm()) * (1 + 1e-9 * i) for b in chosen}
        else:
            cells = {b.name: partial(_low_rank, b.shape, lora, 1000 * i + k) for k, b in enumerate(chosen)}
            norms = {name: cell().norm() for name, cell in cells.items()}
        name = f"v{i:02d}"
        made[name] = TaskVector(name, base.layout, lambda: info, cells, Provenance(name, "random"), norms)
    return Bank(made)


def once(rule: str, vectors: int, blocks: int | None, lora: int | None) -> dict[str, float]:
    """Merge once; return seconds, peak memory and what the plan says, in MB."""
    import torch

    from aniso.merge import merge, new_merge_rule, plan_merge

    torch.linalg.svd(torch.randn(8, 8))  # the library's own buffers
    bank, made = make_bank(vectors, blocks, lora), new_merge_rule(rule)
    plan = plan_merge(bank, made)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from here
    before, begun, processor = _status("VmRSS"), time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as place:
        merge(bank, made, to=Path(place) / "merged.safetensors")
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - processor,
        "load": os.getloadavg()[0],
        "reads": made.reads,
        "megabytes": (_status("VmHWM") - before) / 1e6,
        "planned_megabytes": plan.memory_bytes / 1e6,
        "blocks": plan.blocks,
    }


def _status(field: str) -> int:
    """Return a number of bytes from the kernel's record of this process."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def in_process(rule: str, options: argparse.Namespace, vectors: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--once", rule, "--vectors", str(vectors)]
    for name in ("blocks", "lora"):
        if getattr(options, name) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _earlier_rows(out: Path | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record that was made in the same way."""
    if out is None or not out.exists():
        return []
    record: dict[str, Any] = json.loads(out.read_text())
    rows: list[dict[str, Any]] = record.pop("rows")
    if record != facts:
        sys.exit(f"{out} was made otherwise: {record}, now {facts}; write another file")
    return rows


def main() -> None:
    from aniso.registry import MERGE_RULES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", nargs="+", default=list(MERGE_RULES.names), choices=MERGE_RULES.names)
    parser.add_argument("--vectors", nargs="+", type=int, default=[VECTORS])
    parser.add_argument("--blocks", type=int, help="merge the first matrices alone")
    parser.add_argument("--lora", type=int, help="rank of adapters, instead of dense vectors")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once, options.vectors[0], options.blocks, options.lora)))
        return
    facts = {
        "lora": options.lora,
        "blocks": options.blocks,
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }
    rows = _earlier_rows(options.out, facts)
    for vectors, rule in product(options.vectors, options.rules):
        row = {"rule": rule, "vectors": vectors, **in_process(rule, options, vectors)}
        rows = [one for one in rows if (one["rule"], one["vectors"]) != (rule, vectors)] + [row]
        print(
            f"{vectors} x {rule:16} {row['seconds']:8.1f} s ({row['cpu_seconds']:.1f} s CPU) "
            f"{row['megabytes']:8.0f} MB, planned {row['planned_megabytes']:.0f} MB, {row['blocks']} blocks",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
