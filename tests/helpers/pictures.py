"""Small pictures and data sets on disk, made in the test that needs them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, side: int = 12) -> Image.Image:
    """Random colours around one that the seed decides."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(40, 215, 3)
    pixels = np.clip(centre + rng.integers(-30, 30, (side, side, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(seed: int, kind: str = "PNG", side: int = 12) -> bytes:
    buffer = io.BytesIO()
    picture(seed, side).save(buffer, kind)
    return buffer.getvalue()


def folder(root: Path, counts: Mapping[str, int], first: int = 0) -> Path:
    """A folder per class with so many pictures each."""
    seed = first
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (root / name / f"{i:03}.png").write_bytes(encoded(seed))
            seed += 1
    return root


def parquet(root: Path, name: str, labels: list[int], first: int = 0) -> Path:
    """One split in the layout of Hugging Face's datasets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "image": [{"bytes": encoded(first + i), "path": None} for i in range(len(labels))],
            "label": labels,
            "key": [f"{name}{i}" for i in range(len(labels))],
        }
    )
    pq.write_table(table, root / f"{name}.parquet")
    return root


def card(root: Path, classes: list[str], prompts: tuple[str, ...] = ("a photo of a {}.",)) -> Path:
    (root / "card.json").write_text(json.dumps({"classes": classes, "prompts": list(prompts)}))
    return root
