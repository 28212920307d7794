"""Tables on merge rules are those of the committed records, and the parity script compares what it says."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from aniso.merge import new_merge_rule
from aniso.registry import MERGE_RULES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def _section(page: Path, heading: str) -> str:
    return page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("merge_parity", ROOT / "scripts" / "merge_parity.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules["merge_parity"] = made
    spec.loader.exec_module(made)
    yield made
    del sys.modules["merge_parity"]


def test_differences_to_other_packages_are_what_was_measured(script):
    section = _section(ROOT / "docs" / "methods" / "README.md", "Compared with mergekit and FusionBench")
    record = json.loads((RESULTS / "merge_parity.json").read_text())
    for package in ("mergekit", "fusion-bench"):
        assert f"{package} {record['versions'][package]}" in section
    for row in record["rows"]:
        found = row["difference"]
        shown = "0" if found == 0 else f"{found:.0e}"
        cells = (
            f"`{row['rule']}`",
            row["options"] or "defaults",
            row["package"],
            f"`{row['function']}`",
            shown,
        )
        assert f"| {' | '.join((*cells, row['note']))} |" in section
        assert row["agrees"] == (found < script.AGREES)
    assert section.count("\n| `") == len(record["rows"])
    assert {row["rule"] for row in record["not_compared"]} == {"cart", "aswudi", "swudi"}
    rules = {row["rule"] for row in (*record["rows"], *record["not_compared"])}
    assert rules == set(MERGE_RULES.names)
    # every row that is another definition has one beside it, of the same rule and package, that agrees
    agreeing = {(row["rule"], row["package"]) for row in record["rows"] if row["agrees"]}
    assert all((row["rule"], row["package"]) in agreeing for row in record["rows"])


def test_the_script_compares_ours_as_merge_does(script):
    """Its own view of our rules gives what ``merge`` gives for a bank of the same vectors."""
    from merges import bank_of

    from aniso.merge import merge

    given = script.vectors()
    # named as the script's deltas are: random elements of DARE depend on the names
    bank = bank_of(
        {str(i): {b: x.float() for b, x in one.items()} for i, one in enumerate(given)}, script.SHAPES
    )
    for name in MERGE_RULES.names:
        rule = new_merge_rule(name)
        expected, found = script.merged(rule, given), merge(bank, rule)
        for block in found.blocks:
            torch.testing.assert_close(
                found[block.name].dense().double(), expected[block.name], rtol=1e-5, atol=1e-8
            )


def test_a_package_that_is_missing_is_named_with_the_reason(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["merge_parity.py", "--out", str(tmp_path / "record.json")])
    for name in ("mergekit", "fusion_bench"):
        monkeypatch.setitem(sys.modules, name, None)
    script.main()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["rows"] == [] and len(record["not_compared"]) == 3 + len(script.comparisons())
    assert "not compared" in capsys.readouterr().out


def test_a_rule_that_differs_ends_the_script(script):
    given = script.vectors()
    wrong = script.Comparison(
        "mean", {}, "other", "half", lambda them: script.merged(new_merge_rule("tsv"), them)
    )
    with pytest.raises(SystemExit, match="mean differs"):
        script.measured(wrong, given)


def test_what_merging_takes_is_what_was_measured():
    section = _section(ROOT / "benchmarks" / "README.md", "Merging")
    record = json.loads((RESULTS / "merging.json").read_text())
    rows = {(row["rule"], row["vectors"]): row for row in record["rows"]}
    assert f"{record['threads']} thread" in section
    many = [row for row in record["rows"] if row["vectors"] == 21]
    for row in many:
        few = rows.get((row["rule"], 8))
        cells = [f"`{row['rule']}`", str(row["reads"]), *_cost(row), f"{row['planned_megabytes']:.0f} MB"]
        cells += ["", "", ""] if few is None else _cost(few)
        assert f"| {' | '.join(cells)} |" in section
    assert section.count("\n| `") == len(many)
    # what the text says: minutes, one reading, and memory that is not that of the vectors
    taken = {row["rule"]: row["cpu_seconds"] / 60 for row in many}
    for rule, name in (("tsv", "TSV-M"), ("iso-c", "Iso-C"), ("iso-cts", "Iso-CTS"), ("aswudi", "ASWUDI")):
        assert f"{name} {taken[rule]:.1f}" in section
    assert rows["aswudi", 21]["reads"] == 1
    vector = 4 * sum(math.prod(shape) for shape in _shapes().values()) / 1e6
    assert f"{vector:.0f} MB" in section
    pairs = [(row, rows[row["rule"], 8]) for row in many if (row["rule"], 8) in rows]
    growth = max((a["megabytes"] - b["megabytes"]) / 13 for a, b in pairs)
    assert "iso-c" in {a["rule"] for a, _ in pairs} and f"at most {growth:.0f} MB" in section
    assert growth < vector / 20
    isos = [rows["iso-c", count]["megabytes"] for count in (21, 8)]
    assert f"{isos[0]:.0f} MB with 21 vectors and {isos[1]:.0f} MB with 8" in section
    above = [row["rule"] for row in many if row["megabytes"] > 1.15 * row["planned_megabytes"]]
    assert ", ".join(f"`{rule}`" for rule in above) in section


def _cost(row):
    return [f"{row['cpu_seconds']:.0f} s", f"{row['seconds']:.0f} s", f"{row['megabytes']:.0f} MB"]


def _shapes():
    spec = importlib.util.spec_from_file_location("benchmark_bank", ROOT / "benchmarks" / "bank.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.shapes()
