"""Write the banks in tests/golden: one of every storage, as this version writes them.

Files of a released schema are never written again: every later version must read them as they are.

    python scripts/make_golden.py tests/golden/schema-2
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from aniso.vectors import Bank, Storage
from aniso.weights import Ref, save_safetensors
from aniso.weights.atomic import atomic_directory, write_text


def base() -> dict[str, Tensor]:
    return {"fc.weight": wave(66, 64), "fc.bias": wave(66)}


def tuned(i: int) -> dict[str, Tensor]:
    return {name: value + 0.02 * wave(*value.shape, step=0.3 + i) for name, value in base().items()}


def wave(*shape: int, step: float = 0.1) -> Tensor:
    """Numbers that every machine computes alike: rounded to a multiple of 2^-10."""
    angles = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * step
    return (angles.sin() * 1024).round().div(1024).float().reshape(shape)


def write_adapter(path: Path) -> None:
    path.mkdir()
    key = "base_model.model.fc.lora_{}.weight"
    factors = {key.format("A"): wave(2, 64), key.format("B"): wave(66, 2) / 64}
    save_safetensors(path / "adapter_model.safetensors", factors)
    write_text(path / "adapter_config.json", json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))


def main(root: Path) -> None:
    with atomic_directory(root) as unfinished:
        write_adapter(unfinished / "adapter")
        models: dict[str, Ref] = {"a": tuned(0), "b": tuned(1), "lora": unfinished / "adapter"}
        for storage in Storage:
            Bank.build(base(), models, to=unfinished / storage, storage=storage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
