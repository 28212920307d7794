"""Fine-tune the mini model on every task, and measure what came of it.

    python scripts/mini/finetune.py --data MINI --out RUN [--linearised | --lora RANK] [--tasks mnist ...]

For each task RUN gets TASK.safetensors, the tuned weights, or the directory TASK, an adapter; and TASK.json
with accuracies before and after.
What is there already is skipped. Two calls with every other task each keep two cores busy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from aniso.data import load_task
from aniso.learn import CrossEntropy, EpochRow, Schedule, adapter, evaluate, finetune, fit
from aniso.models import load_model
from aniso.weights import save_safetensors

# Passes over the training images, as many as it takes; the paper, too, chooses them by data set.
EPOCHS = {"svhn": 16, "gtsrb": 15, "sign_digits": 14, "mnist": 12, "dtd10": 12, "pacs_cartoon": 12}
EPOCHS |= {"pacs_art_painting": 12, "pacs_photo": 12, "caltech101": 10, "flowers102": 10, "ucmerced": 10}
EPOCHS |= {"pacs_sketch": 10, "intel_scenes": 6}
USUAL = 8


def tune(args: argparse.Namespace, name: str) -> None:
    encoder = load_model(args.model)
    task = load_task(args.data / name)
    if task.train is None or task.test is None or task.val is None:
        raise SystemExit(f"{name} has no train split")
    epochs = args.epochs or EPOCHS.get(name, USUAL)
    # half as many where each pass costs more
    epochs = max(4, epochs // 2) if (args.linearised or args.lora) and not args.epochs else epochs
    # adapters: the best of 0.001, 0.002, 0.005 and 0.01 at rank 16 on two tasks
    schedule = Schedule(epochs=epochs, lr=args.lr or (2e-3 if args.lora else 5e-4), batch_size=args.batch)
    begun = time.time()

    def progress(row: EpochRow) -> None:
        print(f"{name} epoch {row.epoch} loss {row.loss or 0:.3f} {time.time() - begun:.0f} s", flush=True)

    model, losses = make(args, encoder, task.train, schedule, args.out / name, progress)
    kind = "linearised" if args.linearised else f"LoRA, rank {args.lora}" if args.lora else "standard"
    facts = {
        "task": name,
        "kind": kind,
        "epochs": schedule.epochs,
        "lr": schedule.lr,
        "batch": schedule.batch_size,
        "zero_shot": evaluate(encoder, task.test).value,
        "tuned": evaluate(model, task.test).value,
        "zero_shot_val": evaluate(encoder, task.val).value,
        "tuned_val": evaluate(model, task.val).value,
        "train_loss": losses[-1],
        "seconds": round(time.time() - begun),
    }
    (args.out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{name}: {facts['zero_shot']:.1%} -> {facts['tuned']:.1%}", flush=True)


def make(
    args: argparse.Namespace, encoder: Any, train: Any, schedule: Schedule, place: Path, progress: Any
) -> tuple[Any, list[float]]:
    """Train, and save what was trained; gives the model as it is then, and every epoch's loss."""
    if args.lora:
        made = adapter(encoder, args.lora, seed=args.seed)
        done = fit(made.trained, CrossEntropy(train), schedule, seed=args.seed, epoch_done=progress)
        made.save(place, overwrite=True)
        return made.trained.model, [row.loss for row in done.history if row.loss is not None]
    tuned = finetune(
        encoder, train, schedule, linearised=args.linearised, seed=args.seed, epoch_done=progress
    )
    blocks = {part.key for block in encoder.layout.blocks for part in block.parts}
    state = {key: tuned.weights.read(key) for key in tuned.weights.tensors if key in blocks}
    save_safetensors(place.with_name(f"{place.name}.safetensors"), state, overwrite=True)
    return tuned.model, list(tuned.losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--epochs", type=int, help="instead of the task's own")
    parser.add_argument("--lr", type=float, help="5e-4, of adapters 2e-3, unless said")
    parser.add_argument("--batch", type=int, default=32, help="small, for many steps on few images")
    parser.add_argument("--seed", type=int, default=0)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--linearised", action="store_true")
    how.add_argument("--lora", type=int, metavar="RANK", help="train an adapter instead of all weights")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    cards = {path.parent.name: json.loads(path.read_text()) for path in sorted(args.data.glob("*/card.json"))}
    for name in args.tasks or [name for name, card in cards.items() if card["counts"]["train"]]:
        if not (args.out / f"{name}.json").exists():
            tune(args, name)


if __name__ == "__main__":
    main()
