"""Write smaller copies of text tasks, so that experiments on one core take minutes: fixed by a hash of keys.

    python scripts/texts/sample_tasks.py TEXTS OUT --train 1920 --val 200 --test 300

TEXTS has a folder per task with train.parquet, val.parquet, test.parquet and card.json.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path

import pyarrow.parquet as pq

CORE = ("trec", "emotion", "math_topic", "finance", "overruling", "coda19", "sst2", "genre")
"""The tasks of addition and negation."""
TASKS = (
    *CORE,
    *("adverse_drug", "advice", "agnews", "amazon_polarity", "cola", "dialogue_emotion", "emotion_templates"),
    *("event_sentiment", "hate", "irony", "logic2text", "sentiment140", "speaker", "stereotype_target"),
    *("tense", "wellformed", "yahoo_topics"),
)


def sample(source: Path, out: Path, count: int) -> int:
    """Copy the ``count`` rows whose keys have the lowest hashes, in that order; all if there are fewer."""
    table = pq.read_table(source)
    ranks = [hashlib.sha256(key.encode()).hexdigest() for key in table.column("key").to_pylist()]
    rows = sorted(range(len(ranks)), key=ranks.__getitem__)[:count]
    pq.write_table(table.take(rows), out)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    for split, default in (("train", 1920), ("val", 200), ("test", 300)):
        parser.add_argument(f"--{split}", type=int, default=default)
    given = parser.parse_args()
    for task in given.tasks:
        folder = given.out / task
        folder.mkdir(parents=True, exist_ok=True)
        counts = []
        for split in ("train", "val", "test"):
            file = f"{split}.parquet"
            count = sample(given.texts / task / file, folder / file, getattr(given, split))
            counts.append(f"{count:,} {split}")
        shutil.copyfile(given.texts / task / "card.json", folder / "card.json")
        print(f"{task}: {', '.join(counts)}")


if __name__ == "__main__":
    main()
