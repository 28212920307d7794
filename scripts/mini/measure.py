"""Run `aniso eval` for every cell of a spec, keep the records, and write the table.

    python scripts/mini/measure.py experiments/mini/spec.yaml --data MINI

Records are the lines of `records.jsonl` beside the spec, and `table.md` is made from them alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from aniso.cli import main as aniso


def command(spec: dict[str, Any], column: dict[str, Any], task: str, args: argparse.Namespace) -> list[str]:
    words = ["eval", spec["model"], "--task", str(args.data / task), "--split", spec["split"]]
    if "bank" in column:
        words += ["--bank", column["bank"], "--vector", task]
    if column.get("linearised"):
        words.append("--linearised")
    return words


def measured(words: list[str]) -> dict[str, Any]:
    """Run `aniso eval`; the one record that it leaves."""
    with tempfile.TemporaryDirectory() as place:
        code = aniso([*words, "--record", place])
        if code:
            raise SystemExit(code)
        (path,) = Path(place).iterdir()
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def name_of(column: dict[str, Any], task: str) -> str:
    """What a cell is called among the records."""
    kind = "linearised " if column.get("linearised") else ""
    return f"{task}, with {kind}vector" if "bank" in column else f"{task}, zero-shot"


def table(spec: dict[str, Any], records: dict[str, Any]) -> str:
    """Accuracies in per cent with their 95 % intervals; means over the tasks, the control left out."""
    columns = list(spec["columns"])
    lines = [f"| task | classes | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    found_in: dict[str, list[float]] = {name: [] for name in columns}
    for task in [*spec["tasks"], spec["control"]]:
        cells, classes = [], 0
        for name, column in spec["columns"].items():
            found = records.get(name_of(column, task))
            if found is None:
                cells.append("")
                continue
            low, high = found["interval"]
            classes = found["classes"]
            cells.append(f"{found['accuracy']:.1%} ({low:.1%} to {high:.1%})")
            if task != spec["control"]:
                found_in[name].append(found["accuracy"])
        title = f"{task} (control)" if task == spec["control"] else task
        lines.append(f"| {title} | {classes} | {' | '.join(cells)} |")
    means = [f"{sum(all_) / len(all_):.1%} ({len(all_)} tasks)" if all_ else "" for all_ in found_in.values()]
    lines.append(f"| mean | | {' | '.join(means)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = args.spec.parent / "records.jsonl"
    records = {one["cell"]: one for one in map(json.loads, path.read_text().splitlines())}
    spec = YAML(typ="safe").load(args.spec.read_text())
    for column in spec["columns"].values():
        for task in [*spec["tasks"], *([] if "bank" in column else [spec["control"]])]:
            name = name_of(column, task)
            if name not in records:
                records[name] = {"cell": name, **measured(command(spec, column, task, args))}
                lines = (json.dumps(records[key], sort_keys=True) for key in sorted(records))
                path.write_text("".join(f"{line}\n" for line in lines))
    (args.spec.parent / "table.md").write_text(table(spec, records))


if __name__ == "__main__":
    main()
