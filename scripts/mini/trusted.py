"""How good the answers are that unsupervised FixMatch begins with, and what came of them.

    python scripts/mini/trusted.py MINI experiments/test-time/records -o experiments/test-time/trusted.md

For every task: zero-shot accuracy and mean confidence on the test pictures, how many of them would be trusted
and how many of those rightly, how many answers are above the threshold once they are flattened, and by how
much FixMatch and the contrastive objective changed accuracy, from the records. Labels are read here, to look
at what happened; nothing is learned.
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
from aniso.learn.objectives.unlabelled import flattened
from aniso.models import load_model
from aniso.report import read_records

TRUSTED = 10
GAINS = ("coefficients, FixMatch", "coefficients, contrastive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    said = parser.parse_args()
    gains = changes(said.records)
    encoder = load_model("mini")
    lines = [
        "| task | zero-shot | confidence | trusted | of them right | above 0.9 | FixMatch | contrastive |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    pairs = []
    for name in sorted({task for found in gains.values() for task in found}):
        test = load_task(str(said.data / name)).split("test")
        logits = encoder.class_weights(test.classes).logits(
            features(encoder, test, cache=FeatureCache.usual())[0]
        )
        sure, answers = logits.softmax(-1).max(-1)
        right = answers == torch.tensor(test.labels)
        term = FixMatch(test.unlabelled(), most=TRUSTED)
        trusted = term.trust(logits) >= 0
        above = flattened(logits, term.power).max(-1).values > term.threshold
        own = [gains[label][name] for label in GAINS]
        good = float(right[trusted].float().mean())
        pairs.append((good, own[0]))
        seen = f"{right.float().mean():.1%} | {sure.mean():.2f}"
        chosen = f"{trusted.sum()} | {good:.0%} | {above.float().mean():.1%}"
        lines.append(f"| {name} | {seen} | {chosen} | {own[0]:+.1f} | {own[1]:+.1f} |")
    correlation = statistics.correlation(*map(list, zip(*pairs, strict=True)))
    lines += [
        "",
        f"Correlation of the share of right ones among the trusted with FixMatch's gain: {correlation:.2f}",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if said.out:
        said.out.write_text(text)


def changes(place: Path) -> dict[str, dict[str, float]]:
    """By label and task: points gained over zero-shot, the mean over seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_records([place]):
        for task in record.spec.measured:
            found[record.label][task].append(100 * record.accuracy(task))
    zero = {task: values[0] for task, values in found.pop("zero-shot").items()}
    return {
        label: {task: statistics.mean(values) - zero[task] for task, values in own.items()}
        for label, own in found.items()
    }


if __name__ == "__main__":
    main()
