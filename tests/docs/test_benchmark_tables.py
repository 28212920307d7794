"""Tables of the benchmarks' page are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()


def _section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_latency_of_the_desk_is_what_was_measured():
    section = _section("The mixing desk")
    results = json.loads((BENCHMARKS / "results" / "explore.json").read_text())
    for model in ("mini", "MiniLM"):
        for move, times in results[model]["milliseconds"].items():
            cells = [f"{times[name]:.0f}" for name in ("median", "95th percentile", "CPU, median")]
            assert f"| {model} | {move} | {' | '.join(cells)} |" in section
            if move.endswith("first answer"):
                assert times["95th percentile"] < 300  # as the text states


def test_what_several_processes_take_is_what_was_measured():
    section = _section("Several processes")
    results = json.loads((BENCHMARKS / "results" / "devices.json").read_text())
    assert f"{results['vectors']} vectors" in section and f"{results['batch']} images" in section
    for row in results["rows"]:
        cells = (row["processes"], f"{row['step_seconds']:.1f} s", f"{row['bank_mib']:,} MiB")
        assert f"| {' | '.join(map(str, cells))} |" in section


def test_what_selection_from_object_storage_takes_is_what_was_measured():
    section = _section("Selection from object storage")
    results = json.loads((BENCHMARKS / "results" / "object_store.json").read_text())
    row = max(results["rows"], key=lambda one: (one["adapters"], one["latency"]))
    for stage in row["stages"].values():
        cpu = f"{stage['cpu_seconds']:.1f}".replace("0.0", f"{stage['cpu_seconds']:.2f}")
        megabytes = f"{stage['bytes'] / 1e6:.1f}" if stage["bytes"] else "0"
        cells = (f"{stage['seconds']:.1f}", cpu, f"{stage['requests']:,}", megabytes)
        assert f"| {' | '.join(cells)} |" in section, stage


def test_what_texts_cost_is_what_was_measured():
    section = _section("Texts")
    results = json.loads((BENCHMARKS / "results" / "texts.json").read_text())
    two, one = (results["steps"][threads] for threads in ("2", "1"))
    for case in ("fp32", "int8", "all rows", "lora"):
        ratios = [steps[case]["median"] / steps["floor"]["median"] for steps in (two, one)]
        assert f" | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |" in section, case
    added = two["fp32"]["median"] - two["floor"]["median"]
    assert f"takes {1000 * added:.0f} ms beside {1000 * two['floor']['median']:.0f} ms" in section
    for tasks, share in results["padding"].items():
        assert f"| {tasks} | {100 * share['whole']:.0f} % | {100 * share['pieces']:.0f} % |" in section
        assert share["pieces"] < 0.15
    slower = []
    for task, speed in results["texts per second"].items():
        cells = [f"{speed[name]:.0f}" for name in ("whole", "pieces", "evaluation")]
        assert f"| {task} | {' | '.join(cells)} |" in section
        slower.append(1 - speed["pieces"] / speed["whole"])
    assert [round(100 * share) for share in sorted(slower) if share > 0] == [5, 7]


def test_what_engines_add_is_what_was_measured():
    section = _section("Engines")
    results = json.loads((BENCHMARKS / "results" / "engines.json").read_text())
    assert f"of 2 and of {results['cells']} cells" in section and len(results["rows"]) == 4
    for row in results["rows"]:
        cells = (row["engine"], f"{row['seconds_per_cell']:.2f}", f"{row['seconds_once']:.1f}")
        assert f"| {' | '.join(cells)} |" in section
