"""How good the answers are that unsupervised FixMatch begins with, and what came of them.

    python scripts/mini/trusted.py MINI experiments -o experiments/test-time/trusted.md

For every task: zero-shot accuracy and mean confidence on the test pictures, how many of them would be trusted
and how many of those rightly, how many answers are above the threshold once they are flattened; and from
the records by how much FixMatch and the contrastive objective changed accuracy, and what eight labelled
pictures of each class gain, which is what there is to be gained. Labels are read here, to look at what
happened; nothing is learned.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import torch

from aniso.data import load_task
from aniso.learn import FixMatch
from aniso.learn.features import FeatureCache, features
from aniso.learn.objectives.fixmatch import flattened
from aniso.models import load_model
from aniso.report import read_records

TRUSTED = 10
GAINS = ("coefficients, FixMatch", "coefficients, contrastive")
SHOTS = "learned anisotropic, 8 shots"
SEEN = ("zero-shot", "confidence", "trusted", "of them right", "above 0.9")
COLUMNS = ("task", *SEEN, "FixMatch", "contrastive", "8 shots")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("experiments", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    said = parser.parse_args()
    gains = changes(said.experiments / "test-time" / "records", said.experiments / "few-shot" / "records")
    encoder = load_model("mini")
    lines = [f"| {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * (len(COLUMNS) - 1)}"]
    good: list[float] = []
    names = sorted(gains[SHOTS])
    for name in names:
        test = load_task(str(said.data / name)).split("test")
        seen = features(encoder, test, cache=FeatureCache.default())[0]
        logits = encoder.class_weights(test.classes).logits(seen)
        sure, answers = logits.softmax(-1).max(-1)
        right = answers == torch.tensor(test.labels)
        term = FixMatch(test.unlabelled(), most=TRUSTED)
        trusted = term.trust(logits) >= 0
        above = flattened(logits, term.power).max(-1).values > term.threshold
        good.append(float(right[trusted].float().mean()))
        cells = [name, f"{right.float().mean():.1%}", f"{sure.mean():.2f}", f"{trusted.sum()}"]
        cells += [f"{good[-1]:.0%}", f"{above.float().mean():.1%}"]
        cells += [f"{gains[label][name]:+.1f}" for label in (*GAINS, SHOTS)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Correlation, over tasks, of the share of right ones among the trusted with what is gained by",
    ]
    for label in (*GAINS, SHOTS):
        lines.append(f"- {label}: {statistics.correlation(good, [gains[label][n] for n in names]):+.2f}")
    text = "\n".join(lines) + "\n"
    print(text)
    if said.out:
        said.out.write_text(text)


def changes(*places: Path) -> dict[str, dict[str, float]]:
    """By label and task: points gained over zero-shot, the mean over seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_records(places):
        shots = f", {record.spec.shots} shots" if record.spec.shots and record.label != "zero-shot" else ""
        for task in record.spec.measured:
            found[record.label + shots][task].append(100 * record.accuracy(task))
    zero = {task: values[0] for task, values in found.pop("zero-shot").items()}
    return {
        label: {task: statistics.mean(values) - zero[task] for task, values in own.items()}
        for label, own in found.items()
    }


if __name__ == "__main__":
    main()
