"""Keep the accuracies of the demo: read its records, write experiments/demo/results.json.

python scripts/demo_results.py demo-out
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aniso.record_files import read_record

OUT = Path(__file__).parents[1] / "experiments" / "demo" / "results.json"
RUNS = ("few-shot", "addition-search", "addition", "negation-search", "negation")


def main(demo: Path) -> None:
    """Write the accuracies of every run, with those of zero-shot and of the tasks' own vectors."""
    found = {}
    for name in RUNS:
        record = read_record(demo / name / "record.json")
        found[name] = {
            "accuracy": {task: score.accuracy for task, score in record.metrics.accuracy.items()},
            "zero-shot": dict(record.metrics.zero_shot),
            "own vector": dict(record.metrics.reference or {}),
        }
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
