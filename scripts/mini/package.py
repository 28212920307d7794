"""Put the mini model and its banks into the package.

    python scripts/mini/package.py model RUN/model
    python scripts/mini/package.py bank standard|linearised TUNED [--storage int4]
    python scripts/mini/package.py bank lora4 TUNED --storage fp32
    aniso bank features src/aniso/models/mini/banks/standard --model mini --task MINI/cars --task …
    python scripts/mini/package.py card experiments/mini/table.md

The model is stored in 16 bits, and its vectors are made over the rounded weights: package it first, then
fine-tune `mini`, then package the bank. TUNED is what scripts/mini/finetune.py wrote; accuracies go into the
bank's manifest.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from aniso.models import load_model, mini_directory
from aniso.vectors import Bank
from aniso.weights import open_weights, save_safetensors

FACTS = ("task", "kind", "zero_shot", "tuned", "epochs", "lr", "batch")


def package_model(trained: Path) -> None:
    place = mini_directory()
    place.mkdir(parents=True, exist_ok=True)
    source = open_weights(trained)
    half = {key: source.read(key).to(torch.float16) for key in source.tensors if source.tensors[key].is_float}
    save_safetensors(place / "model.safetensors", half, {"format": "pt"}, overwrite=True)
    config: dict[str, Any] = json.loads((trained / "config.json").read_text())
    config.pop("transformers_version", None)
    config["dtype"] = "float16"
    (place / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / name, place / name)
    print(load_model("mini"))


def package_bank(kind: str, tuned: Path, storage: str) -> None:
    facts = {path.stem: json.loads(path.read_text()) for path in sorted(tuned.glob("*.json"))}
    is_adapter = kind.startswith("lora")
    files = {name: tuned / (name if is_adapter else f"{name}.safetensors") for name in facts}
    # 15 MB that one experiment uses stay out of the wheel
    home = Path(__file__).parents[2] / "experiments/mini" if kind == "linearised" else mini_directory()
    place = home / "banks" / kind
    place.parent.mkdir(exist_ok=True)
    bank = Bank.build(
        load_model("mini"), files, to=place, storage=storage, overwrite=True, allow_distant=True
    )
    bank.annotate({name: {key: found[key] for key in FACTS} for name, found in facts.items()})
    for name in bank:
        print(name, f"error {bank[name].relative_error:.1%}")
    size = sum(path.stat().st_size for path in place.iterdir())
    print(f"{len(bank)} vectors, {size / 1e6:.1f} MB, {size / len(bank) / 1e3:.0f} kB each")


CARD = """# mini

A small CLIP, and banks of task vectors over it, for trying and measuring aniso on two cores. Not a good image
classifier, and not meant to be one.

Trainable by `scripts/mini/pretrain.py` on 39,319 pictures of 64 x 64 or less: Tiny ImageNet's 200 classes and
slices of 15 of the tasks below that are in no train, val or test split; captions were made from class names.
Several of these sources allow research only, and their pictures are not part of this package. `docs/mini.md`
in aniso's repository says more, and how to build it again.

Test accuracy, zero-shot and with the task's own vector of the banks (coefficient 1), with 95 % intervals:

"""


def package_card(table: Path) -> None:
    (mini_directory() / "README.md").write_text(CARD + table.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model")
    model.add_argument("trained", type=Path)
    bank = commands.add_parser("bank")
    bank.add_argument("kind", choices=("standard", "linearised", "lora4"))
    bank.add_argument("tuned", type=Path)
    bank.add_argument("--storage", default="int4")
    card = commands.add_parser("card")
    card.add_argument("table", type=Path)
    args = parser.parse_args()
    if args.command == "model":
        package_model(args.trained)
    elif args.command == "card":
        package_card(args.table)
    else:
        package_bank(args.kind, args.tuned, args.storage)


if __name__ == "__main__":
    main()
