"""What packing a bank costs in accuracy: single vectors, and compositions learned from 16 images per class.

    python scripts/mini/fidelity.py --data MINI --tuned TUNED --out experiments/mini/fidelity

TUNED is what scripts/mini/finetune.py wrote. Every cell is a line of `records.jsonl`, and what is recorded is
not run again; `table.md` is made from the records alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aniso.compose import Composition, Partition
from aniso.data import Labelled, load_task
from aniso.learn import CrossEntropy, Schedule, evaluate, fit
from aniso.models import load_model
from aniso.vectors import Bank

RECORDS = "records.jsonl"
STORAGES = ("fp32", "int8", "int4", "residual4", "residual2")
TASKS = ("cars", "dtd10", "eurosat", "gtsrb", "mnist", "resisc12", "intel_scenes", "svhn")
BATCH, PICTURES = 64, 4000  # in a step, and in all: about sixty steps, whatever the number of classes


def single(encoder: Any, bank: Bank, name: str, test: Labelled) -> float:
    composition = Composition(encoder, bank.only(name), Partition.whole())
    composition.values.data.fill_(1.0)
    return evaluate(composition, test).value


def learned(encoder: Any, bank: Bank, name: str, task: Any, seed: int) -> float:
    """16 shots, the task's own vector left out, one coefficient per vector and block; the last epoch."""
    shots = task.train.shots(16, seed, allow_fewer=True)
    composition = Composition(encoder, bank.without(name), Partition.blocks())
    epochs = max(1, round(PICTURES / max(len(shots), 6 * BATCH)))
    schedule = Schedule(epochs=epochs, lr=0.1, warmup_steps=0, batch_size=BATCH, min_steps_per_epoch=6)
    fit(composition, CrossEntropy(shots, view="few_shot"), schedule, seed=seed)
    return evaluate(composition, task.test).value


def run(args: argparse.Namespace) -> None:
    encoder = load_model("mini")
    known = {(one["task"], one["storage"], one["what"]) for one in recorded(args.out)}
    files = {path.stem: path for path in sorted(args.tuned.glob("*.safetensors"))}
    exact = Bank.build(encoder, files, allow_distant=True)
    with tempfile.TemporaryDirectory() as place:
        banks = {s: exact.save(Path(place) / s, storage=s) for s in STORAGES}
        for name in args.tasks:
            task = load_task(args.data / name)
            for storage, bank in banks.items():
                cells = {"single": partial(single, encoder, bank, name, task.split("test"))}
                for seed in range(3 if storage in args.learn else 0):
                    cells[f"16-shot-{seed}"] = partial(learned, encoder, bank, name, task, seed)
                for what, cell in cells.items():
                    if (name, storage, what) in known:
                        continue
                    found = {"task": name, "storage": storage, "what": what, "accuracy": cell()}
                    args.out.mkdir(parents=True, exist_ok=True)
                    with (args.out / RECORDS).open("a") as file:
                        file.write(json.dumps(found, sort_keys=True) + "\n")
                    print(found, flush=True)


def recorded(out: Path) -> list[dict[str, Any]]:
    path = out / RECORDS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(out: Path) -> str:
    """Means over tasks; differences to fp32 are paired by task and seed, with their standard error."""
    found: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for record in recorded(out):
        what = record["what"].rpartition("-")[0] or record["what"]
        found.setdefault((what, record["storage"]), {})[record["task"], record["what"]] = record["accuracy"]
    lines = ["| | storage | accuracy | minus fp32 (standard error) |", "|---|---|---|---|"]
    for what in ("single", "16-shot"):
        for storage in STORAGES:
            cells, exact = found.get((what, storage), {}), found.get((what, "fp32"), {})
            pairs = [cells[cell] - exact[cell] for cell in cells if cell in exact]
            if not pairs:
                continue
            error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
            title = "one vector, coefficient 1" if what == "single" else "learned, 16 shots"
            mean = statistics.mean(cells.values())
            difference = f"{statistics.mean(pairs):+.2%} ({error:.2%})" if storage != "fp32" else ""
            lines.append(f"| {title} | {storage} | {mean:.1%} | {difference} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tuned", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", default=TASKS)
    parser.add_argument("--learn", nargs="*", default=("fp32", "int8", "int4"), help="storages to learn with")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run(args)
    (args.out / "table.md").write_text(table(args.out))


if __name__ == "__main__":
    main()
