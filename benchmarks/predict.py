"""How fast ``aniso predict`` is against the bare encoder, and whether its memory grows with the images.

    python benchmarks/predict.py --out benchmarks/results/predict.json

Images are JPEGs of 256 x 256 smooth random colours, made here; the model is ``mini``. Both cases read the
same files in batches of the same size, in rounds that alternate; the medians count. The bare encoder decodes,
crops and encodes, and nothing else; predict also lists the folder, computes probabilities of ten classes, and
writes a CSV file. Peak memory is that of a process of its own for each number of images, which are links to
the same hundred files.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GOAL = 0.9
CLASSES = ("cat", "dog", "bird", "car", "ship", "house", "tree", "face", "digit", "letter")


def make_images(root: Path, count: int, side: int, distinct: int) -> Path:
    """Write ``distinct`` files, and so many links to them that there are ``count`` images."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    root.mkdir(parents=True)
    for i in range(count):
        path = root / f"{i}.jpg"
        if i >= distinct:
            path.hardlink_to(root / f"{i % distinct}.jpg")
            continue
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        path.write_bytes(buffer.getvalue())
    return root


def bare(encoder: Any, folder: Path, batch: int) -> int:
    """Decode, crop and encode all images of a folder, as a plain loop would."""
    from PIL import Image

    view, files = encoder.transforms.eval, sorted(folder.iterdir())
    generator = torch.Generator()
    with torch.no_grad():
        for start in range(0, len(files), batch):
            images = [Image.open(path).convert("RGB") for path in files[start : start + batch]]
            encoder(view.finish(torch.stack([view(image, generator) for image in images])))
    return len(files)


def predicted(encoder: Any, folder: Path, batch: int, out: Path) -> int:
    """Predict all images of a folder into a CSV file, as the command does."""
    from aniso.classes import ClassList
    from aniso.experiments.model_evaluation import Subject
    from aniso.experiments.prediction.classifier import LoadedClassifier
    from aniso.experiments.prediction.inputs import find_inputs
    from aniso.experiments.prediction.output import FileOutput
    from aniso.experiments.prediction.run import predict_inputs, prediction_header
    from aniso.learn import Calibration, ItemClassifier

    classes = ClassList(CLASSES)
    weights = encoder.class_weights(classes)
    loaded = LoadedClassifier("mini", encoder, Subject.base(encoder), weights, classes.key)
    found = find_inputs([str(folder)])
    header = prediction_header(loaded, Calibration(), found.kind, 1)
    output = FileOutput(out, header, "csv", overwrite=True)
    try:
        classifier = ItemClassifier(encoder, weights, batch_size=batch)
        counts = predict_inputs(classifier, output.skip(found.items()), output, kind=found.kind)
        output.finish()
    finally:
        output.close()
    return counts.items


def speed(count: int, side: int, batch: int, rounds: int) -> dict[str, float]:
    """Return medians of images a second, and the median ratio within a round."""
    from aniso.models import load_model

    encoder = load_model("mini")
    with tempfile.TemporaryDirectory() as place:
        folder = make_images(Path(place) / "images", count, side, count)
        calls: dict[str, Callable[[], int]] = {
            "bare encoder": lambda: bare(encoder, folder, batch),
            "predict": lambda: predicted(encoder, folder, batch, Path(place) / "p.csv"),
        }
        for call in calls.values():
            call()  # the first call fills caches
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                begun = time.perf_counter()
                done = call()
                rates[name].append(done / (time.perf_counter() - begun))
    ratios = [a / b for a, b in zip(rates["predict"], rates["bare encoder"], strict=True)]
    medians = {f"{name}, images per second": round(statistics.median(r), 1) for name, r in rates.items()}
    return {**medians, "predict / bare encoder": round(statistics.median(ratios), 3)}


def peak(count: int, side: int, batch: int) -> int:
    """Return the peak memory in MiB of a process that predicts so many images."""
    with tempfile.TemporaryDirectory() as place:
        folder = make_images(Path(place) / "images", count, side, min(count, 100))
        words = [sys.executable, __file__, "--child", str(folder), "--batch", str(batch)]
        run = subprocess.run(words, capture_output=True, text=True, check=True)
        return int(run.stdout)


def child(folder: Path, batch: int) -> None:
    """Predict a folder and print the peak memory of this process."""
    from aniso.models import load_model

    predicted(load_model("mini"), folder, batch, folder.parent / "p.csv")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000, help="of the comparison of speed")
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000], help="of peak memory")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.child, given.batch)
        return
    found: dict[str, Any] = {
        "speed": speed(given.images, given.side, given.batch, given.rounds),
        "goal": f"predict / bare encoder at least {GOAL}",
        "peak memory, MiB": {str(n): peak(n, given.side, given.batch) for n in given.counts},
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
