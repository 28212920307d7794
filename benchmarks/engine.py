"""What a composition costs: a learning step against the model's own, for every way of keeping vectors.

    python benchmarks/engine.py --out benchmarks/results/engine.json

A random model of ViT-B/32's size, batch 16. The *floor* is forward and backward of the model with gradients
for all of its weights: full fine-tuning without the optimiser. *Naive* is what the field does, written here:
a Python sum of scaled task vectors for every weight, under autograd. All cases take turns within a round, so
that a busy machine slows all of them; medians and minima are over rounds. Peak memory is measured in a
process of its own for each case. Steps with one thread are in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

VECTORS = 21
STORAGES = ("fp32", "fp16", "int8", "int4")
# Memory that holds 21 vectors but not the composed weights, which are then composed as layers run.
PASSING = {"fp32": "7.6GB", "fp16": "3.9GB", "int8": "2.1GB", "int4": "1.2GB"}
RANKS = (4, 16, 64)
BATCH = 16
Step = Callable[[], None]


# the model and its banks


def encoder() -> Any:
    import torch
    from open_clip.model import CLIPVisionCfg, _build_vision_tower

    torch.manual_seed(0)
    tower = CLIPVisionCfg(image_size=224, patch_size=32, width=768, layers=12, head_width=64)
    return _build_vision_tower(512, tower).eval()


def _vector(name: str, layout: Any, base: Any, cells: dict[str, Any]) -> Any:
    from aniso.vectors import Provenance, TaskVector

    return TaskVector(name, layout, lambda: base, cells, Provenance(name, "random"))


def _dense(noise: Any, i: int) -> Any:
    from aniso.vectors import Dense

    return Dense(noise.reshape(-1).roll(7919 * i).reshape(noise.shape))


def _low_rank(shape: tuple[int, ...], rank: int, seed: int) -> Any:
    """Query, key and value have factors of their own, as adapters do."""
    import torch

    from aniso.vectors import LowRank
    from aniso.vectors.delta import Term

    g = torch.Generator().manual_seed(seed)
    parts = 3 if shape[0] == 3 * shape[1] else 1
    rows = shape[0] // parts
    terms = [
        Term(
            torch.randn(rows, rank, generator=g) * 1e-3,
            torch.randn(rank, shape[1], generator=g) * 1e-2,
            1.0,
            k * rows,
        )
        for k in range(parts)
    ]
    return LowRank(shape, tuple(terms))


def make_banks(root: Path, storages: tuple[str, ...] = STORAGES, ranks: tuple[int, ...] = RANKS) -> None:
    """One bank for each storage, of the same vectors, and one for each rank."""
    import torch

    from aniso.vectors import Bank, BlockSource
    from aniso.weights import TensorMap

    blocks = BlockSource(TensorMap(encoder().state_dict()))
    identity = blocks.identity()
    g = torch.Generator().manual_seed(1)
    noise = {b.name: torch.randn(b.shape, generator=g) * 4e-4 for b in blocks.layout.blocks}
    vectors = {
        f"v{i:02d}": _vector(
            f"v{i:02d}",
            blocks.layout,
            identity,
            {n: partial(_dense, t, i) for n, t in noise.items()},
        )
        for i in range(VECTORS)
    }
    for storage in storages:
        Bank(vectors).save(root / storage, storage=storage)
    matrices = [b for b in blocks.layout.blocks if ".attn." in b.name or ".mlp." in b.name]
    matrices = [b for b in matrices if len(b.shape) == 2]
    for rank in ranks:
        adapters = {}
        for i in range(VECTORS):
            cells = {b.name: partial(_low_rank, b.shape, rank, 1000 * i + k) for k, b in enumerate(matrices)}
            adapters[f"v{i:02d}"] = _vector(f"v{i:02d}", blocks.layout, identity, cells)
        Bank(adapters).save(root / f"lora{rank}")


# the cases


def images() -> Any:
    import torch

    return torch.randn(BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(2))


def floor_step() -> Step:
    """The model itself, with gradients for all weights."""
    model, x = encoder(), images()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def transformers_model() -> Any:
    """The same architecture in transformers, which PEFT adapts."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        patch_size=32,
        image_size=224,
        projection_dim=512,
    )
    model: Any = CLIPVisionModelWithProjection(config)
    return model.eval()


def transformers_step(*, rank: int | None = None) -> Step:
    """The floor over there; or plain training of one LoRA by PEFT, without the optimiser."""
    model, x = transformers_model(), images()
    if rank is not None:
        from peft import LoraConfig, get_peft_model

        layers = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=32, target_modules=layers))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(pixel_values=x).image_embeds.square().mean().backward()

    return step


def naive_step(root: Path, n: int, *, linear: bool = False) -> Step:
    """A sum of scaled vectors in Python for every weight; of 32-bit vectors that are all in memory."""
    import torch

    model, x = encoder(), images()
    bank = _bank(root, "fp32", n)
    deltas = {b.name: bank.read_block(b.name) for b in bank.layout.blocks}
    base = {k: v.detach() for k, v in model.named_parameters()}
    values = torch.zeros(n, len(base), requires_grad=True)

    def tangents() -> dict[str, Any]:
        out = {}
        for j, key in enumerate(base):
            own = deltas[f"visual.{key}"].values()
            out[key] = sum(values[i, j] * d.values for i, d in enumerate(own))
        return out

    def step() -> None:
        _move(values)
        values.grad = None
        if linear:
            y = _jvp(model, base, tangents(), x)
        else:
            weights = {k: base[k] + t for k, t in tangents().items()}
            y = torch.func.functional_call(model, weights, (x,))
        y.square().mean().backward()

    return step


def _jvp(model: Any, base: Any, tangents: Any, x: Any) -> Any:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        y, dy = torch.func.jvp(  # type: ignore[misc]
            lambda p: torch.func.functional_call(model, p, (x,)), (base,), (tangents,)
        )
    return y + dy


def our_step(
    root: Path, n: int, storage: str, *, partition: str = "blocks", linear: bool = False, **runtime: Any
) -> Step:
    from aniso.compose import Composition, Linearised, Partition, Runtime

    model, x = encoder(), images()
    composition = Composition(
        Linearised(model) if linear else model,
        _bank(root, storage, n),
        Partition.parse(partition),
        runtime=Runtime(**runtime, keep_freed=True),
    )
    assert bool(composition.plan.recomputed) == ("memory" in runtime or "stream" in runtime)

    def step() -> None:
        _move(composition.values)
        composition.values.grad = None
        composition(x).square().mean().backward()

    return step


@cache
def _bank(root: Path, storage: str, n: int) -> Any:
    """One bank for all cases of a process; 32-bit vectors, the largest, are in memory once for all."""
    from aniso.vectors import Bank

    bank = Bank.load(root / storage)
    chosen = bank.only(*bank.names[:n])
    if storage == "fp32" and not STREAMING:
        read = cache(chosen.read_block)
        chosen.read_block = lambda block, **how: read(block)  # type: ignore[method-assign]
    return chosen


def _move(values: Any) -> None:
    """As an optimiser would: nothing may be left over from the last step."""
    import torch

    with torch.no_grad():
        values.add_(1e-3)


CASES: dict[str, Callable[[Path, int], Step]] = {
    "floor": lambda root, n: floor_step(),
    "naive": naive_step,
    "fp32": partial(our_step, storage="fp32"),
    "fp32 plain": partial(our_step, storage="fp32", fast=False),
    "fp16": partial(our_step, storage="fp16"),
    "int8": partial(our_step, storage="int8"),
    "int4": partial(our_step, storage="int4"),
    "int8 plain": partial(our_step, storage="int8", fast=False),
    **{f"{s} in passing": partial(our_step, storage=s, memory=m) for s, m in PASSING.items()},
    "streamed fp32": partial(our_step, storage="fp32", stream=True),
    "streamed int8": partial(our_step, storage="int8", stream=True),
    "LoRA rank 4": partial(our_step, storage="lora4"),
    "LoRA rank 16": partial(our_step, storage="lora16"),
    "LoRA rank 64": partial(our_step, storage="lora64"),
    "transformers floor": lambda root, n: transformers_step(),
    "PEFT trains rank 4": lambda root, n: transformers_step(rank=4),
    "PEFT trains rank 16": lambda root, n: transformers_step(rank=16),
    "PEFT trains rank 64": lambda root, n: transformers_step(rank=64),
    "x1": partial(our_step, storage="fp32", partition="random:1"),
    "x5": partial(our_step, storage="fp32", partition="random:5"),
    "x80": partial(our_step, storage="fp32", partition="random:80"),
    "x20": partial(our_step, storage="fp32", partition="random:20"),
    "x1200": partial(our_step, storage="fp32", partition="random:1200"),
    "linearised": partial(our_step, storage="fp32", linear=True),
    "naive linearised": partial(naive_step, linear=True),
}
LOW_RANK = (
    *("floor", "LoRA rank 4", "LoRA rank 16", "LoRA rank 64"),
    *("transformers floor", "PEFT trains rank 4", "PEFT trains rank 16", "PEFT trains rank 64"),
)
# Cases that take turns in one process; naive sums leave its heap in pieces, which slows all that come after.
TIMED = (
    (21, ("floor", "naive")),
    (21, ("floor", "fp32", "fp32 in passing", "fp32 plain")),
    (21, ("floor", "fp16", "int8", "int8 in passing", "int8 plain", "int4")),
    (21, LOW_RANK),
    (21, ("floor", "streamed fp32", "streamed int8")),
    (8, ("floor", "naive")),
    (8, ("floor", "fp32", "int8", "x1", "x5", "x20", "x80", "x1200")),
    (8, ("floor", "linearised", "naive linearised")),
    (1, ("floor", "naive")),
    (1, ("floor", "fp32", "int8")),
)
STREAMING: list[str] = []
"""Cases of this process that read vectors from disk again and again."""
MEASURED = {
    21: (
        *("floor", "naive", "fp32", "fp16", "int8", "int4", *(f"{s} in passing" for s in PASSING)),
        *("streamed fp32", "streamed int8", *LOW_RANK[1:]),
    ),
    8: ("fp32", "x1", "x5", "x20", "x80", "x1200"),
}


# measuring


def take_turns(steps: dict[str, Step], rounds: int, threads: int) -> dict[str, dict[str, float]]:
    import torch

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # what is set up once is not a step's
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    return {name: {"median": statistics.median(t), "min": min(t)} for name, t in times.items()}


def timed(root: Path, n: int, cases: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Runs in a process of its own: all cases in memory at once, with one and two threads."""
    import torch

    torch.set_num_threads(2)
    STREAMING.extend(case for case in cases if "streamed" in case)
    steps = {case: CASES[case](root, n) for case in cases}
    return {str(threads): take_turns(steps, rounds, threads) for threads in (2, 1)}


def peak(root: Path, n: int, case: str) -> int:
    """Runs in a process of its own: most memory the process held in two steps."""
    import torch

    torch.set_num_threads(2)
    STREAMING.extend([case] if "streamed" in case else [])
    step = CASES[case](root, n)
    step()
    step()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def random_parts(root: Path) -> dict[str, Any]:
    """Nanoseconds per element of a block, forward and backward, n = 8, for several numbers of parts."""
    import torch

    from aniso.compose import Partition
    from aniso.compose._engine.block_partition import ElementPartition
    from aniso.compose._engine.delta_stack import DenseStack
    from aniso.vectors import Block, Kind

    torch.set_num_threads(2)
    n, block = 8, Block("w", (3072, 768), Kind.MLP)
    g = torch.Generator().manual_seed(0)
    deltas, out, grad = (torch.randn(s, block.numel, generator=g).squeeze(0) for s in (n, 1, 1))
    stack = DenseStack(tuple(range(n)), deltas)
    steps: dict[str, Step] = {}
    for parts in (1, 20, 1200):
        partition = Partition.random(parts, 0).for_block(block)
        values = torch.randn(n, partition.count, generator=g)

        def step(partition: Any = partition, values: Any = values) -> None:
            stack.add_to(out, values, partition)
            stack.dots(grad, partition)

        steps[str(parts)] = step
    for parts in (5, 20):
        division = Partition.random(parts, 0).for_block(block)
        assert isinstance(division, ElementPartition)
        index = division.part_of()
        masks = torch.nn.functional.one_hot(index, parts).T.float()

        def masked(masks: Any = masks) -> None:
            """What is done in the field: a mask for each part, each as large as the block."""
            for delta in deltas:
                for mask in masks:
                    out.add_(0.1 * mask * delta)
                    torch.dot(mask * delta, grad)

        steps[f"one-hot masks, {parts}"] = masked
    found = take_turns(steps, 5, 2)
    return {name: 1e9 * t["median"] / block.numel for name, t in found.items()}


def _in_process(*arguments: object) -> Any:
    command = [sys.executable, __file__, "--inside", *map(str, arguments)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def _inside(what: str, root: str, *rest: str) -> Any:
    if what == "banks":
        make_banks(Path(root))
        return None
    if what == "parts":
        return random_parts(Path(root))
    if what == "peak":
        return peak(Path(root), int(rest[0]), rest[1])
    return timed(Path(root), int(rest[0]), tuple(rest[2:]), int(rest[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--banks", type=Path, help="Keep the banks here and use them again.")
    parser.add_argument(
        "--only",
        help="Only steps that have this case, or only 'peak' or 'parts'; other results in --out are kept.",
    )
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(_inside(*options.inside)))
        return
    root = options.banks or Path(tempfile.mkdtemp(prefix="aniso-engine-"))
    root.mkdir(exist_ok=True)
    try:
        report(root, options.rounds, options.out, options.only)
    finally:
        if not options.banks:
            shutil.rmtree(root)


def report(root: Path, rounds: int, out: Path | None, only: str | None) -> None:
    if not (root / f"lora{RANKS[-1]}" / "manifest.json").exists():
        _in_process("banks", root)
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "batch": BATCH}
    result["steps"] = {}
    if only and out:
        result = json.loads(out.read_text())
    for n, cases in TIMED:
        if only is None or only in cases:
            found = _in_process("timed", root, n, rounds, *cases)
            result["steps"][f"n = {n}: {', '.join(cases)}"] = found
            print_steps(n, found)
    if only in (None, "peak"):
        measure_memory(root, result)
    if only in (None, "parts"):
        measure_parts(root, result)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def measure_memory(root: Path, result: dict[str, Any]) -> None:
    result["peak"] = {
        str(n): {case: _in_process("peak", root, n, case) for case in cases} for n, cases in MEASURED.items()
    }
    print_peaks(result["peak"])


def measure_parts(root: Path, result: dict[str, Any]) -> None:
    result["random_parts_ns"] = _in_process("parts", root)
    for name, ns in result["random_parts_ns"].items():
        print(f"parts {name:20s} {ns:7.1f} ns per element of the block, forward + backward, n = 8")


def print_steps(n: int, found: dict[str, dict[str, dict[str, float]]]) -> None:
    for threads, cases in found.items():
        base = cases["floor"]["median"]
        naive = cases.get("naive", {}).get("median", float("nan"))
        print(f"\nn = {n}, {threads} thread(s): floor {base:.3f} s (minimum {cases['floor']['min']:.3f})")
        for name, t in cases.items():
            over = t["median"] - base
            gain = (naive - base) / over if over > 0 else float("inf")
            print(
                f"  {name:18s} {t['median']:.3f} s  step/floor {t['median'] / base:.2f}"
                f"  (minima {t['min'] / cases['floor']['min']:.2f})  naive overhead / ours {gain:.1f}"
            )


def print_peaks(found: dict[str, dict[str, int]]) -> None:
    for n, cases in found.items():
        print(f"\npeak memory of the process, n = {n}")
        for name, nbytes in cases.items():
            print(f"  {name:18s} {nbytes / 1e6:7.0f} MB")


if __name__ == "__main__":
    main()
