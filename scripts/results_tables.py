"""Write the tables of docs/results.md from committed records.

    python scripts/results_tables.py

A table stands below a comment with its name; everything else on the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from aniso.record_files import RecordStore
from aniso.records import Record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
NOTHING = "\N{EN DASH}"
BASES = ("MiniLM", "lite0", "mini")
ADDITION = dict(zip(BASES, ("minilm-addition", "lite0-addition", "addition"), strict=True))
FEW_SHOT = {
    "MiniLM": ("minilm-few-shot", "minilm-few-shot-more"),
    "lite0": ("lite0-few-shot",),
    "mini": ("few-shot",),
}
NEGATION = dict(zip(BASES, ("minilm-negation", "lite0-negation", "negation"), strict=True))
TEST_TIME = dict(zip(BASES, ("minilm-test-time", "lite0-test-time", "test-time"), strict=True))
SHOTS = (1, 16)
_TABLE = re.compile(r"\A(?:\|.*\n)+\n")
BLOCKS = "learned, one coefficient per vector and block"


def records(experiment: str, label: str) -> list[Record]:
    """Return the records of an experiment that have a label."""
    store = RecordStore(ROOT / "experiments" / experiment / "records")
    return [record for record in store.finished().values() if record.label == label]


def accuracy(record: Record, tasks: Sequence[str] = ()) -> float:
    """Return the mean accuracy over tasks in per cent."""
    scores = record.metrics.accuracy
    return 100 * mean(scores[name].accuracy for name in tasks or scores)


def relative(record: Record) -> float:
    """Return the mean over tasks of the share of the own vector's accuracy, in per cent."""
    own = record.metrics.reference or {}
    return 100 * mean(score.accuracy / own[task] for task, score in record.metrics.accuracy.items())


def cell(values: Mapping[int, Sequence[float]]) -> str:
    """Return the mean over tasks and seeds, with the standard error over seeds; a dash without values."""
    seeds = [mean(own) for own in values.values()]
    if not seeds:
        return NOTHING
    error = f" ± {stdev(seeds) / len(seeds) ** 0.5:.1f}" if len(seeds) > 1 else ""
    return f"{mean(seeds):.1f}{error}"


def by_seed(found: Sequence[Record], measure: Callable[[Record], float] = accuracy) -> dict[int, list[float]]:
    """Return a number of every record, by seed."""
    out: dict[int, list[float]] = {}
    for record in found:
        out.setdefault(record.seed, []).append(measure(record))
    return out


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


def tasks_of(found: Iterable[Record]) -> set[str]:
    """Return the tasks that were measured."""
    return {task for record in found for task in record.metrics.accuracy}


def addition() -> str:
    """One model for eight tasks."""
    labels = {
        "zero-shot": "zero-shot",
        "one scale for all vectors, searched": "isotropic search",
        "all weights fine-tuned on the same items": "fine-tuned on the same data",
        "learned, one coefficient per vector": "learned isotropic",
        BLOCKS: "learned anisotropic",
        "eight fine-tuned models, one per task": "own vector for each task",
    }
    rows = [
        (name, *(cell(by_seed(records(ADDITION[base], label))) for base in BASES))
        for name, label in labels.items()
    ]
    return table(["mean of eight tasks", *BASES], rows)


def merging() -> str:
    """Merges of MiniLM's eight vectors."""
    rows = []
    start = "learned anisotropic from"
    for experiment, label in (
        ("minilm-merge-rules", "TSV-M"),
        ("minilm-merge-rules", "TSV-M, FeatCal"),
        ("minilm-merge-rules", f"{start} TSV-M at its scale, teachers"),
        ("minilm-merge-rules", f"{start} TSV-M at its scale, labels"),
        ("minilm-merge-methods", "CART"),
        ("minilm-merge-methods", f"{start} CART at its scale, teachers"),
    ):
        found = records(experiment, label)
        (data,) = {record.metrics.supervision or "" for record in found}
        rows.append((label, data, cell(by_seed(found)), cell(by_seed(found, relative))))
    return table(["method", "data", "mean of eight tasks", "share of the own models, %"], rows)


def few_shot() -> str:
    """Few shots, by method."""
    labels = {
        "zero-shot": "zero-shot",
        BLOCKS: "learned anisotropic",
        "Tip-Adapter": "Tip-Adapter",
        "LP++": "LP++",
        "linear probe": "linear probe",
        "learned, then Tip-Adapter": "learned anisotropic + Tip-Adapter",
        "learned, then LP++": "learned anisotropic + LP++",
        "learned, then a linear probe": "learned anisotropic + linear probe",
    }
    columns = [(base, shots) for base in BASES for shots in SHOTS]
    tasks = {
        base: tasks_of(r for name in FEW_SHOT[base] for r in records(name, "zero-shot")) for base in BASES
    }
    rows = []
    for name, label in labels.items():
        cells = []
        for base, shots in columns:
            found = [r for name in FEW_SHOT[base] for r in records(name, label)]
            own = [r for r in found if label == "zero-shot" or r.spec.shots == shots]
            cells.append(cell(by_seed(own)) if tasks_of(own) == tasks[base] else NOTHING)
        rows.append((name, *cells))
    return table(["accuracy", *(f"{base}, {shots}" for base, shots in columns)], rows)


def _accuracy_of(kind: str, record: Record) -> float:
    """Return the accuracy of a negation's target, or of its control."""
    return accuracy(record, [str(getattr(record.spec, kind)).split("/")[-1]])


def negation() -> str:
    """Accuracy of the target and of the control."""
    labels = {
        "zero-shot": "zero-shot",
        "one scale, searched": "isotropic search",
        BLOCKS: "learned anisotropic",
    }
    rows = []
    for name, label in labels.items():
        cells: list[str] = []
        for base in BASES:
            found = records(NEGATION[base], label)
            cells += [cell(by_seed(found, partial(_accuracy_of, kind))) for kind in ("target", "control")]
        rows.append((name, *cells))
    head = [f"{base}, {what}" for base in BASES for what in ("target", "control")]
    return table(["accuracy", *head], rows)


def test_time() -> str:
    """Adaptation on the unlabelled items that are measured."""
    rows = [
        (name, *(cell(by_seed(records(TEST_TIME[base], label))) for base in BASES))
        for name, label in {"zero-shot": "zero-shot", "FixMatch": "coefficients, FixMatch"}.items()
    ]
    return table(["accuracy", *BASES], rows)


TABLES = {
    "addition": addition,
    "merging": merging,
    "few-shot": few_shot,
    "negation": negation,
    "test-time": test_time,
}


def written(text: str) -> str:
    """Return a page with all its tables made anew."""
    for name, make in TABLES.items():
        mark = f"<!-- table: {name} -->\n\n"
        if mark not in text:
            raise SystemExit(f"{PAGE.name} has no table '{name}'")
        before, _, after = text.partition(mark)
        rest = _TABLE.sub("", after, count=1)
        text = f"{before}{mark}{make()}\n{rest}"
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    print(PAGE)
