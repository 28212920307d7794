"""Make a tiny base and two models tuned from it, build a bank of the two, and mix them into one model.

This runs the command line as a user would; nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from aniso.weights import save_safetensors

OUT = Path("demo-out")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    make_models()
    run("bank", "build", "--base", "base.safetensors", "cars.safetensors", "textures=textures.pt",
        "-o", "bank", "--overwrite")  # fmt: skip
    run("bank", "quantise", "bank", "--storage", "int8", "-o", "bank-int8", "--overwrite")
    run("bank", "check", "bank-int8")
    run("vector", "cosine", "bank")
    run("bank", "plan", "bank-int8")
    run("coefficients", "make", "cars=0.6", "textures=0.4", "--bank", "bank", "-o", "mix.safetensors",
        "--overwrite")  # fmt: skip
    run("bake", "mix.safetensors", "--bank", "bank", "--base", "base.safetensors", "-o", "mixed.safetensors",
        "--overwrite")  # fmt: skip


def make_models() -> None:
    """A small vision transformer under open_clip's names; one tuned model is a pickle, as many are."""
    torch.manual_seed(0)
    base = {f"visual.{name}": torch.randn(shape) * 0.05 for name, shape in shapes().items()}
    cars, textures = ({name: w + 0.001 * torch.randn(w.shape) for name, w in base.items()} for _ in range(2))
    save_safetensors(OUT / "base.safetensors", base, overwrite=True)
    save_safetensors(OUT / "cars.safetensors", cars, overwrite=True)
    torch.save({"state_dict": textures, "epoch": 10}, OUT / "textures.pt")


def shapes(width: int = 128, layers: int = 4) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {
        "class_embedding": (width,),
        "positional_embedding": (50, width),
        "conv1.weight": (width, 3, 8, 8),
        "proj": (width, 64),
    }
    norms = [
        "ln_pre",
        "ln_post",
        *(f"transformer.resblocks.{i}.ln_{j}" for i in range(layers) for j in (1, 2)),
    ]
    for norm in norms:
        out |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    for i in range(layers):
        block = f"transformer.resblocks.{i}"
        out |= {
            f"{block}.attn.in_proj_weight": (3 * width, width),
            f"{block}.attn.in_proj_bias": (3 * width,),
        }
        for name, rows, columns in (
            ("attn.out_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            out |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
    return out


def run(*args: str) -> None:
    print(f"\n$ aniso {' '.join(args)}", flush=True)
    subprocess.run([sys.executable, "-m", "aniso", *args], check=True, cwd=OUT)


if __name__ == "__main__":
    main()
