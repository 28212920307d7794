"""Measure how far the vectors of a bank leave other tasks alone.

    python scripts/bases/disentanglement.py --model mini --bank mini --data MINI --out FILE

On validation items of the eight core tasks: how every vector (coefficient 1) changes the accuracy on its own
task and on the core tasks, and the share of the core vectors' own gains that their plain sum keeps at the
best of some scales. scripts/bases/make_bank.py measures a bank this way before it is published.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from aniso.compose import Composition, Linearised, Partition
from aniso.data import load_task
from aniso.experiments.banks import open_bank
from aniso.learn import evaluate
from aniso.models import Encoder, load_model
from aniso.vectors import Bank

SCALES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
IMAGES = ("cars", "dtd10", "eurosat", "gtsrb", "mnist", "resisc12", "intel_scenes", "svhn")
"""The core tasks of addition and negation."""


@dataclass(frozen=True)
class Measuring:
    """Accuracies of base + sum of scale * vector on validation items."""

    encoder: Encoder
    bank: Bank
    data: Path
    items: int
    kind: str = "standard"

    def accuracies(self, scales: dict[str, float], tasks: tuple[str, ...]) -> dict[str, float]:
        """Return the accuracy on every task."""
        model: torch.nn.Module = self.encoder
        if scales:
            base = Linearised(self.encoder) if self.kind == "linearised" else self.encoder
            model = Composition(base, self.bank.only(*scales), Partition.whole())
            with torch.no_grad():
                rows = torch.tensor([scales[name] for name in model.bank.names])
                model.values.copy_(rows.view_as(model.values))
        found = {}
        for task in tasks:
            split = load_task(self.data / task).split("val")
            found[task] = evaluate(model, split.take(range(min(self.items, len(split))))).value
        return found


def disentanglement(
    measuring: Measuring, core: tuple[str, ...], vectors: tuple[str, ...]
) -> dict[str, object]:
    """Measure every vector on its own task and the core tasks, and the sum of the core vectors."""
    alone, base = {}, measuring.accuracies({}, tuple(dict.fromkeys((*core, *vectors))))
    for name in vectors:
        alone[name] = measuring.accuracies({name: 1.0}, tuple(dict.fromkeys((*core, name))))
    gains = {name: alone[name][name] - base[name] for name in vectors}
    others = [alone[n][task] - base[task] for n in vectors for task in core if n != task]
    sums = {scale: measuring.accuracies(dict.fromkeys(core, scale), core) for scale in SCALES}
    own = sum(gains[task] for task in core)
    kept = {scale: sum(found[t] - base[t] for t in core) / own for scale, found in sums.items()}
    best = max(kept, key=kept.__getitem__)
    return {
        "items per task": measuring.items,
        "base": base,
        "alone": alone,
        "sums": {str(scale): found for scale, found in sums.items()},
        "own gain": sum(gains.values()) / len(gains),
        "change on other tasks": sum(others) / len(others),
        "absolute change on other tasks": sum(map(abs, others)) / len(others),
        "worst change on another task": min(others),
        "best scale of the sum": best,
        "share of own gains kept in the sum": kept[best],
    }


def show(found: dict[str, object], out: Path | None) -> None:
    """Print the summary, and write everything as JSON."""
    for name, value in found.items():
        if isinstance(value, float):
            print(f"{name}: {value:.3f}")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--bank", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--core", nargs="+", default=IMAGES)
    parser.add_argument("--items", type=int, default=100, help="validation items per task")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bank = open_bank(given.bank)
    measuring = Measuring(load_model(given.model), bank, given.data, given.items)
    vectors = tuple(name for name in bank.names if (given.data / name).is_dir())
    show(disentanglement(measuring, tuple(given.core), vectors), given.out)


if __name__ == "__main__":
    main()
