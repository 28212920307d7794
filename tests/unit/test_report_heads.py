"""Reports on heads: complementarity, out-of-domain accuracy, and heads on the base are not zero-shot."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from aniso.report import Record, build, gains, out_of_domain, table

numbers = itertools.count()
TOTAL = 8


def score(right: set[int]) -> dict[str, Any]:
    bits = f"{sum(1 << i for i in right):x}"
    return {"correct": len(right), "total": TOTAL, "accuracy": len(right) / TOTAL, "right": bits}


def made(
    label: str, right: set[int], task: str = "a", others: dict[str, set[int]] | None = None, **spec: Any
):
    said = {
        "setting": "few-shot",
        "model": "mini",
        "method": "coefficients",
        "task": task,
        "shots": 4,
        "seed": 0,
    }
    metrics: dict[str, Any] = {"accuracy": {task: score(right)}}
    if others:
        metrics["out_of_domain"] = {name: score(found) for name, found in others.items()}
    data = {
        "schema": 1,
        "id": f"{next(numbers):064x}",
        "experiment": "heads",
        "label": label,
        "metrics": metrics,
        "coefficients": None,
        "inputs": {"model": "m", "data": {task: f"data of {task}"}},
        "versions": {},
        "seconds": 1.0,
        "status": "ok",
        "spec": said | spec,
    }
    return Record.model_validate_json(json.dumps(data))


def base(right: set[int], task: str = "a", **more: Any) -> Record:
    return made("zero-shot", right, task, method="none", **more)


def row(found: Any, *names: str) -> list[Any]:
    return next(list(r[len(names) :]) for r in found.rows if r[: len(names)] == names)


def test_a_head_on_the_base_is_not_zero_shot_and_has_a_column_for_every_number_of_shots() -> None:
    heads = [made("Tip", {0, 1}, method="none", head="tip", shots=n) for n in (1, 4)]
    found = table([base({0}, shots=1), *heads])
    assert [str(cell) for cell in row(found, "zero-shot")] == ["12.5", "12.5"]
    assert [str(cell) for cell in row(found, "Tip")] == ["25.0", "25.0"]
    only = table([base({0}, shots=1), heads[1]])
    assert row(only, "Tip")[0] is None  # and not what it is at four


def test_methods_come_without_a_head_first() -> None:
    with_head, without = made("a pair", {1}, head="tip"), made("learned", {1})
    names = [r[0] for r in table([with_head, without, base({0})]).rows]
    assert names == ["zero-shot", "learned", "a pair"]


def test_gains_are_shares_of_what_the_base_gets_wrong() -> None:
    found = gains([base({0, 1}), made("x", {0, 2, 3, 4}), made("y", {1, 4, 5})])
    assert found is not None
    assert [cell.mean for cell in row(found, "x", "y")] == pytest.approx([25.0, 12.5, 12.5])


def test_gains_are_means_over_tasks_and_seeds_at_the_most_shots() -> None:
    records = [base({0}), base({0}, "b")]
    records += [made("x", {1}, seed=s) for s in (0, 1)] + [made("x", set(), "b", seed=s) for s in (0, 1)]
    records += [made("y", {1 + s}, seed=s) for s in (0, 1)] + [made("y", set(), "b", seed=s) for s in (0, 1)]
    records += [made("x", {5, 6, 7}, shots=1), made("y", {5, 6, 7}, shots=1)]  # not looked at
    found = gains(records)
    assert found is not None and "4 shots" in found.title
    only, both, second = row(found, "x", "y")
    # a: both in the first seed, one each in the second; b: nothing in either
    assert [only.mean, both.mean, second.mean] == pytest.approx([3.125, 3.125, 3.125])
    assert only.error == pytest.approx(3.125)


def test_without_two_methods_or_without_the_base_there_are_no_gains() -> None:
    assert gains([base({0}), made("x", {1})]) is None
    assert gains([made("x", {1}), made("y", {2})]) is None


def test_out_of_domain_accuracies_have_a_table_of_their_own() -> None:
    records = [base({0}, shots=4, others={"far": {0, 1}})]
    records += [
        made("x", {0, 1}, seed=s, shots=n, others={"far": {0} if s else set()})
        for s in (0, 1)
        for n in (4, 16)
    ]
    found = out_of_domain(records)
    assert found is not None
    assert found.columns == ("method", "a, 4", "far, 4", "a, 16", "far, 16")
    assert [str(cell) for cell in row(found, "zero-shot")] == ["12.5", "25.0", "12.5", "25.0"]
    assert [cell.mean for cell in row(found, "x")] == pytest.approx([25.0, 6.25, 25.0, 6.25])
    assert out_of_domain([base({0}), made("x", {1})]) is None


def test_a_report_has_both_tables_where_there_is_something_to_say() -> None:
    rich = [
        base({0}, others={"far": {1}}),
        made("x", {1}, others={"far": {1}}),
        made("y", {2}, others={"far": {1}}),
    ]
    files = build(rich, figures=False)
    assert {"complementarity-heads.md", "complementarity-heads.csv", "out-of-domain-heads.md"} <= set(files)
    assert all(b"errors of the base corrected" in files[name] for name in ("report.md", "index.html"))
    poor = build([base({0}), made("x", {1})], figures=False)
    assert not any(name.startswith(("complementarity", "out-of-domain")) for name in poor)
