"""Check what ``aniso compare`` chooses against the test split: is it near the best of its candidates?

For every task and seed all candidates are learned from the shots and evaluated on the test split, which the
choice does not use. A task passes if the chosen candidate is, as a mean over seeds, at most one point below
the best candidate (the one with the highest mean over seeds) and at most one below the linear probe::

    python scripts/compare_check.py --model mini --bank mini --data MINI --task ./cars -o out.json

Finished tasks and seeds are kept in the file and not run again. The task's own vector is left out of the bank
by its name, as in every few-shot run; ``--leave-out`` leaves out more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from aniso.experiments.comparison.comparison import BY, Comparison, ComparisonOptions
from aniso.experiments.methods.zero_shot import ZeroShot
from aniso.experiments.result import RunOptions
from aniso.experiments.settings.few_shot import FewShot

MOST_BELOW = 0.01


def measured(arguments: argparse.Namespace, task: str, seed: int) -> dict[str, Any]:
    """Run one comparison; returns its content and the seconds it took."""
    setting = FewShot(
        model=arguments.model,
        bank=arguments.bank,
        task=task,
        shots=arguments.shots,
        seed=seed,
        method=ZeroShot(),
        leave_out=tuple(arguments.leave_out),
        allow_fewer_shots=True,
    )
    begun = time.monotonic()
    options = ComparisonOptions(by=arguments.by, test=True)
    comparison = Comparison(
        setting,
        options,
        RunOptions(data=arguments.data),
        done=lambda where, row: print(f"{task} seed {seed}, {where}: {row.candidate.label}", file=sys.stderr),
    )
    content = comparison.run().content()
    return {**content, "seed": seed, "ref": task, "seconds": round(time.monotonic() - begun, 1)}


def verdict(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the choice is below the best candidate and the linear probe, as means over seeds."""
    tests: dict[str, list[float]] = {}
    for one in found:
        for row in one["candidates"]:
            tests.setdefault(row["label"], []).append(row["test_accuracy"])
    by_label = {label: mean(values) for label, values in tests.items() if None not in values}
    chosen = mean(
        next(row["test_accuracy"] for row in one["candidates"] if row["label"] == one["chosen"])
        for one in found
    )
    best = max(by_label, key=lambda label: by_label[label])
    return {
        "task": found[0]["task"],
        "seeds": len(found),
        "chosen": [one["chosen"] for one in found],
        "chosen_test": chosen,
        "best": best,
        "best_test": by_label[best],
        "linear_test": by_label["linear probe"],
        "passes": chosen >= max(by_label[best], by_label["linear probe"]) - MOST_BELOW,
        "seconds": sum(one["seconds"] for one in found),
    }


def main() -> int:
    """Run what is missing, print a row per task, and return 1 if a task does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bank", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1 and 2")
    parser.add_argument("--by", choices=BY, default="auto")
    parser.add_argument("--leave-out", action="append", default=[])
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    key = [arguments.shots, arguments.by]
    for task in arguments.task:
        for seed in arguments.seed or (0, 1, 2):
            if any(one["key"] == [*key, task, seed] for one in found):
                continue
            found.append({**measured(arguments, task, seed), "key": [*key, task, seed]})
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    rows = []
    for task in arguments.task:
        rows.append(verdict([one for one in found if one["key"][:3] == [*key, task]]))
        row = rows[-1]
        print(
            f"{row['task']}: chosen {row['chosen_test']:.1%} ({'; '.join(row['chosen'])}), "
            f"best {row['best_test']:.1%} ({row['best']}), linear probe {row['linear_test']:.1%}: "
            f"{'passes' if row['passes'] else 'FAILS'} ({row['seconds']:.0f} s)"
        )
    return 0 if all(row["passes"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
