"""Gradients to choose vectors by: one pass over the pictures, against the paper's groups of vectors.

    python benchmarks/selection.py --out benchmarks/results/selection.json

A random model of ViT-B/32's size and 64 pictures in batches of 16. *Ours* goes forward and backward once,
with gradients for all weights, and then reads one cell after another. *Groups* is the paper's procedure: b
vectors at a time are composed with it, and the pictures go forward and backward for every group. Each case
runs in a process of its own, taking turns; seconds are medians of the rounds, memory is the peak above the
model and the libraries.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from engine import _low_rank, _vector, encoder

BATCHES, BATCH, GROUP = 4, 16, 5
CASES = {
    "21 adapters of rank 4": ("lora", 21),
    "200 adapters of rank 4": ("lora", 200),
    "21 int8": ("int8", 21),
}


def make_bank(root: Path, kind: str, count: int) -> None:
    import torch

    from aniso.vectors import Bank, BlockSource, Dense
    from aniso.weights import TensorMap

    blocks = BlockSource(TensorMap(encoder().state_dict()))
    identity = blocks.identity()
    matrices = [b for b in blocks.layout.blocks if len(b.shape) == 2 and ".resblocks." in b.parts[0].key]

    def dense(shape: tuple[int, ...], seed: int) -> Any:
        return Dense(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4e-4)

    vectors = {}
    for i in range(count):
        made = partial(_low_rank, rank=4) if kind == "lora" else dense
        own = matrices if kind == "lora" else blocks.layout.blocks
        cells = {b.name: partial(made, b.shape, seed=1000 * i + k) for k, b in enumerate(own)}
        vectors[f"v{i:03d}"] = _vector(f"v{i:03d}", blocks.layout, identity, cells)
    Bank(vectors).save(root / f"{kind}-{count}", storage="fp32" if kind == "lora" else kind)


def pictures() -> list[Any]:
    import torch

    g = torch.Generator().manual_seed(2)
    return [torch.randn(BATCH, 3, 224, 224, generator=g) for _ in range(BATCHES)]


def ours(model: Any, bank: Any) -> dict[str, dict[str, float]]:
    from aniso.learn.gradient import cell_gradients
    from aniso.weights import TensorMap

    for x in pictures():
        (model(x).square().mean() / BATCHES).backward()
    tensors = {name: p.grad for name, p in model.named_parameters()}
    layout = bank.over(TensorMap(model.state_dict())).layout
    gradient = {b.name: b.gathered(tensors.__getitem__) for b in layout.blocks}
    return {name: cell_gradients(bank[name], gradient) for name in bank}


def groups(model: Any, bank: Any) -> dict[str, dict[str, float]]:
    from aniso.compose import Composition

    found: dict[str, dict[str, float]] = {name: {} for name in bank}
    for start in range(0, len(bank), GROUP):
        some = bank.only(*bank.names[start : start + GROUP])
        composition = Composition(model, some)
        for x in pictures():
            (composition(x).square().mean() / BATCHES).backward()
        assert composition.values.grad is not None
        labels = composition.index.labels()
        for (name, block, _), value in zip(labels, composition.values.grad.tolist(), strict=True):
            found[name][block] = value
    return found


def once(root: Path, which: str, procedure: str) -> dict[str, Any]:
    from aniso.vectors import Bank

    kind, count = CASES[which]
    model, bank = encoder(), Bank.load(root / f"{kind}-{count}")
    bank.over(_weights(model))  # hashed before the clock starts, for both
    before, begun = _peak(), time.perf_counter()
    found = {"ours": ours, "groups": groups}[procedure](model, bank)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "megabytes": (_peak() - before) / 1e6, "first": found[bank.names[0]]}


def _weights(model: Any) -> Any:
    from aniso.weights import TensorMap

    return TensorMap(model.state_dict())


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_process(root: Path, which: str, procedure: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--root", str(root), "--once", which, procedure]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.once:
        print(json.dumps(once(said.root, *said.once)))
        return
    with tempfile.TemporaryDirectory() as place:
        rows = [measured(Path(place), which, said.rounds) for which in CASES]
    if said.out:
        facts = {"pictures": BATCHES * BATCH, "group": GROUP, "rounds": said.rounds}
        said.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def measured(root: Path, which: str, rounds: int) -> dict[str, Any]:
    make_bank(root, *CASES[which])
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "groups": []}
    for _ in range(rounds):
        for procedure, done in runs.items():
            done.append(in_process(root, which, procedure))
    first, other = (runs[name][0]["first"] for name in ("ours", "groups"))
    scale = max(abs(x) for x in other.values())
    row: dict[str, Any] = {"case": which, "difference": max(abs(first[b] - other[b]) for b in other) / scale}
    for name, done in runs.items():
        row[name] = {k: statistics.median(r[k] for r in done) for k in ("seconds", "megabytes")}
    text = ", ".join(f"{n} {row[n]['seconds']:.1f} s {row[n]['megabytes']:,.0f} MB" for n in runs)
    print(f"{which}: {text}; largest difference {row['difference']:.1e}", flush=True)
    return row


if __name__ == "__main__":
    main()
