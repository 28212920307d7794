"""How fast pictures and class weights are made: images a second per worker, by view, and texts a second.

    python benchmarks/loaders.py --out benchmarks/results/loaders.json

Pictures are JPEGs of 256 x 256 random smooth colours, made here. Views are timed in rounds that alternate, so
that a noisy machine is noisy for all of them; the medians count. Ours is compared with torchvision's own
pipeline on Pillow images.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def make_pictures(root: Path, count: int, side: int) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / "test" / name).mkdir(parents=True)
        for i in range(count // 2):
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            buffer = io.BytesIO()
            coarse.resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
            (root / "test" / name / f"{i}.jpg").write_bytes(buffer.getvalue())


def measured(calls: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Medians of things done a second, each round going through all calls."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            done = call()
            rates[name].append(done / (time.perf_counter() - begun))
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}


def loaders(count: int, side: int, rounds: int) -> dict[str, float]:
    from torchvision import transforms as theirs

    from aniso.data import Batches, load_task
    from aniso.models.transforms import Pixels, Transforms

    with tempfile.TemporaryDirectory() as place:
        make_pictures(Path(place), count, side)
        split = load_task(place).split("test")
        ours = Transforms(Pixels(224))
        pillow = theirs.Compose(
            [
                theirs.RandomResizedCrop(224, (0.5, 1), interpolation=theirs.InterpolationMode.BICUBIC),
                theirs.RandomHorizontalFlip(),
                theirs.ToTensor(),
                theirs.Normalize(ours.pixels.mean, ours.pixels.std),
            ]
        )

        def reference() -> int:
            return len([pillow(split.open(i)) for i in range(len(split))])

        def viewed(view: Any, workers: int) -> Callable[[], int]:
            return lambda: sum(len(batch) for batch in Batches(split, view, size=32, workers=workers))

        def decoded() -> int:
            return len([split.open(i) for i in range(len(split))])

        calls: dict[str, Callable[[], int]] = {
            "decode only": decoded,
            "eval view": viewed(ours.eval, 0),
            "train view": viewed(ours.train, 0),
            "few-shot view": viewed(ours.few_shot, 0),
            "strong view": viewed(ours.strong, 0),
            "few-shot view, torchvision on Pillow": reference,
            "few-shot view, 2 workers": viewed(ours.few_shot, 2),
        }
        return measured(calls, rounds)


def class_weights(rounds: int) -> dict[str, float]:
    from aniso.classes import ClassList
    from aniso.models import WeightsCache, load_model

    encoder = load_model("mini")
    classes = ClassList(
        tuple(f"thing number {i}" for i in range(100)), ("a photo of a {}.", "a bad photo of a {}.")
    )
    with tempfile.TemporaryDirectory() as place:
        kept = WeightsCache(Path(place))
        encoder.class_weights(classes, cache=kept)

        def built() -> int:
            encoder.class_weights(classes, cache=WeightsCache(None))
            return 200

        def found() -> int:
            encoder.class_weights(classes, cache=kept)
            return 200

        return measured({"mini: prompts": built, "mini: prompts, from the cache": found}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "images a second": loaders(args.pictures, args.side, args.rounds),
        "prompts a second": class_weights(args.rounds),
        "settings": {
            "pictures": args.pictures,
            "side": args.side,
            "rounds": args.rounds,
            "torch": torch.__version__,
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
