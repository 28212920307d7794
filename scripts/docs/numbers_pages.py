"""Pages of numbers of the documentation site, read from committed records, benchmark results and recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from tables import markdown_table, plain

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = ROOT / "experiments"
_MB = 1e6


def pages() -> dict[str, str]:
    """Return all pages of numbers, by path below the documentation."""
    return {
        "numbers/resources.md": resources_page(),
        "numbers/paper.md": paper_page(),
        "project/changelog.md": changelog_page(),
        "adr/index.md": decisions_page(),
    }


# Resources


def resources_page() -> str:
    """Return sizes of banks, time and memory of a learning step, and what recorded runs took."""
    lines = [
        "# Time and memory",
        "",
        "Read from committed results of the [benchmarks](../benchmarks/README.md) and from the records of "
        "the [experiments](../experiments/README.md). All of it was measured on two cores of one machine "
        "without a GPU.",
        "",
        "## Size of a bank",
        "",
        _bank_table(),
        "",
        "The error is ‖stored − exact‖ / ‖exact‖; it is measured when a bank is written, printed, and stored "  # noqa: RUF001
        "in the bank.",
        "",
        "## A learning step",
        "",
        "Forward and backward of a ViT-B/32's image encoder with 21 vectors, batch 16, at new coefficients "
        "in every step, divided by the same for the model alone with gradients for all weights. Naive is a "
        "Python sum of scaled vectors.",
        "",
        _step_table(),
        "",
        "## Recorded runs",
        "",
        "Median over the runs of a label. Seconds are of the whole run, evaluation included, at the threads "
        "that the last column says; memory is the peak of the process.",
        "",
        _runs_table(),
    ]
    return "\n".join(lines)


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _bank_table() -> str:
    found = _result("bank")
    whole = found["storages"]["fp32"]["bytes_per_vector"]
    rows = [
        (
            f"`{name}`",
            f"{row['bytes_per_vector'] / _MB:.1f}",
            f"{row['bytes_per_vector'] / whole:.0%}",
            f"{row['relative_error']:.2%}",
            f"{row['build_seconds']:.0f}",
            f"{row['peak_above_start_bytes'] / _MB:.0f}",
            f"{1000 * row['block_read_seconds']:.0f}",
        )
        for name, row in sorted(found["storages"].items(), key=lambda item: -item[1]["bytes_per_vector"])
    ]
    head = ("storage", "MB per vector", "of fp32", "error", "seconds to build", "peak memory, MB")
    table = markdown_table((*head, "ms to read one block of all"), rows, numbers=True)
    text = (
        f"21 vectors of a {found['model']}: {found['parameters'] / 1e6:.1f} M parameters in "
        f"{found['blocks']} blocks, the largest of {found['largest_block_bytes'] / _MB:.1f} MB."
    )
    return f"{text}\n\n{table}"


def _step_table() -> str:
    found = _result("engine")
    rows = []
    for heading, threads in found["steps"].items():
        if not heading.startswith("n = 21"):
            continue
        for case in threads["2"]:
            if case == "floor":
                continue
            ratios = [threads[n][case]["median"] / threads[n]["floor"]["median"] for n in ("2", "1")]
            peak = _peak(found["peak"]["21"], case)
            rows.append((case.replace("in passing", "recomputed"), *(f"{r:.2f}" for r in ratios), peak))
    head = ("vectors", "step, two threads", "step, one thread", "peak memory, MB")
    return markdown_table(head, rows, numbers=True)


def _peak(found: dict[str, Any], case: str) -> str:
    value = found.get(case)
    return "" if value is None else f"{value / _MB:.0f}"


def _runs_table() -> str:
    rows = []
    for path in sorted(EXPERIMENTS.glob("*/records/records.jsonl")):
        labels: dict[str, list[Any]] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            labels.setdefault(record["label"], []).append(record)
        for label, records in labels.items():
            seconds = [r["seconds"] for r in records if r.get("seconds") is not None]
            memory = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes") is not None]
            threads = sorted({str(r.get("environment", {}).get("threads", "")) for r in records})
            rows.append(
                (
                    plain(path.parent.parent.name),
                    plain(label),
                    str(len(records)),
                    f"{median(seconds):.0f}" if seconds else "",
                    f"{median(memory) / _MB:.0f}" if memory else "",
                    ", ".join(threads),
                )
            )
    return markdown_table(("experiment", "label", "runs", "seconds", "MB", "threads"), rows)


# Recipes of the paper


def paper_page() -> str:
    """Return every recipe of the paper with its cost and the numbers to expect."""
    from aniso.experiments.paper.catalogue import recipes
    from aniso.experiments.paper.description import needs

    lines = [
        "# Numbers of the paper",
        "",
        "What each recipe of [`aniso paper`](../howto/paper.md) should reproduce: the numbers that the paper "
        "prints, in per cent, with the doubts that we have about some of them. GPU hours are estimates at "
        "the rate that `aniso paper show ID` states. Tables by data set are left out here; the same "
        "command prints them. None of these recipes was run at full size by us; what we ran is in the "
        "[experiments](../experiments/README.md).",
        "",
    ]
    rows = []
    for found in recipes().values():
        hours = ", ".join(f"{name} {needs(found, name).hours():.1f}" for name in found.entry.backbones)
        rows.append((f"`{found.id}`", plain(found.entry.title), hours if found.entry.runs else ""))
    lines += [markdown_table(("recipe", "what", "GPU hours"), rows), ""]
    for found in recipes().values():
        tables = [table for table in found.entry.published if len(table.columns) <= _WIDEST]
        if not tables:
            continue
        lines += [f"## {found.id}", "", f"{plain(found.entry.title)}.", ""]
        for table in tables:
            lines += [plain(table.heading), "", _published(table), ""]
        lines += [f"- Doubt: {plain(text)}" for text in found.entry.doubts]
        lines.append("")
    return "\n".join(lines)


_WIDEST = 8  # columns of a table on a page


def _published(table: Any) -> str:
    rows = []
    for name, values in table.rows.items():
        errors = table.errors.get(name, (None,) * len(values))
        rows.append((plain(name), *map(_number, values, errors)))
    return markdown_table(("", *(plain(str(column)) for column in table.columns)), rows, numbers=True)


def _number(value: float | None, error: float | None) -> str:
    if value is None:
        return "\N{EN DASH}"
    return f"{value:g}" if error is None else f"{value:g} ± {error:g}"


# Project


def changelog_page() -> str:
    """Return the changelog with the notes of changes that are not in it yet."""
    text = (ROOT / "CHANGELOG.md").read_text()
    _, _, rest = text.partition("## ")
    notes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "changelog.d").glob("*-*.md")):
        notes.setdefault(path.name.partition("-")[0], []).append(path.read_text().strip())
    lines = ["# Changelog", "", "## Since the last entry", ""]
    for kind, found in notes.items():
        lines += [f"### {kind.capitalize()}", "", *(f"- {note}" for note in found), ""]
    return "\n".join(lines) + f"\n## {rest}"


def decisions_page() -> str:
    """Return a list of all decisions."""
    rows = []
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        title = re.sub(r"^# (ADR )?\d*[.:]? ?", "", path.read_text().splitlines()[0])
        rows.append((path.name[:4], f"[{title}]({path.name})"))
    text = "Decisions that a reader might question, one page each."
    return f"# Decisions\n\n{text}\n\n{markdown_table(('', 'decision'), rows)}\n"
