"""Measured beside published: means over tasks, errors over seeds, differences, and gaps that are named."""

from __future__ import annotations

import itertools
import json

import pytest

from aniso.analysis_records import AnalysisRecord, MatrixRecord, read_analysis
from aniso.errors import UsageError
from aniso.published import PublishedTable
from aniso.records import Record
from aniso.report.analysis_figures import analysis_figures
from aniso.report.figures import draw_figure
from aniso.report.published import RecordedRuns, comparison_rows, comparison_table
from aniso.report.recipe_report import FigureRequest, RecipeReport

numbers = itertools.count()


def record(label, accuracy, *, reference=None, out_of_domain=None, coefficients=None, **spec):
    def score(value):
        return {"correct": round(1000 * value), "total": 1000, "accuracy": value}

    options = {"setting": "few-shot", "model": "ViT-B-32", "method": "coefficients", "bank": "b", "seed": 0}
    metrics = {"accuracy": {name: score(value) for name, value in accuracy.items()}}
    metrics["out_of_domain"] = {name: score(value) for name, value in (out_of_domain or {}).items()}
    if reference is not None:
        metrics["reference"] = reference
    if not {"task", "tasks", "target"} & spec.keys():
        spec["task"] = next(iter(accuracy))
    made = {
        "schema": 1,
        "id": f"{next(numbers):064x}",
        "experiment": "x",
        "label": label,
        "spec": options | spec,
        "metrics": metrics,
        "coefficients": coefficients,
    }
    return Record.model_validate_json(json.dumps(made))


def table(**changes):
    own = {"backbone": "ViT-B-32", "axis": "shots", "columns": [1, 16], "rows": {"ours": [60.0, 70.0]}}
    return PublishedTable.model_validate_json(json.dumps(own | changes))


def test_means_are_over_tasks_and_errors_over_seeds():
    shots = {("a", 0): 0.5, ("b", 0): 0.7, ("a", 1): 0.6, ("b", 1): 0.8}
    runs = [record("ours", {task: v}, shots=1, seed=seed) for (task, seed), v in shots.items()]
    first, second = RecordedRuns(runs, tasks=("a", "b")).compare(table())
    assert first.measured.mean == pytest.approx(65.0)
    assert first.measured.error == pytest.approx(5.0)  # of 60 and 70
    assert first.difference == pytest.approx(5.0)
    assert first.measured.remark == ""
    assert (second.measured, second.difference, str(second)) == (None, None, "not run (paper 70)")
    assert str(first) == "65.0 ± 5.0 (paper 60, +5.0)"


def test_a_mean_over_fewer_tasks_says_so():
    (first, _) = RecordedRuns([record("ours", {"a": 0.5}, shots=1)], tasks=("a", "b")).compare(table())
    assert first.measured.remark == "1 of 2 tasks"


def test_seeds_that_lack_a_task_are_left_out():
    runs = [record("ours", {"a": 0.2}, shots=1), record("ours", {"b": 0.8}, shots=1)]
    runs.append(record("ours", {"b": 0.9}, shots=1, seed=1))
    (first, _) = RecordedRuns(runs, tasks=("a", "b")).compare(table())
    assert (first.measured.mean, first.measured.error) == (pytest.approx(50.0), None)


def test_the_base_does_not_depend_on_shots():
    zero = record("zero", {"a": 0.5}, shots=1, method="none")
    own = table(rows={"zero": [49.0, 49.0]})
    assert [n.difference for n in RecordedRuns([zero], tasks=("a",)).compare(own)] == [1.0, 1.0]


def test_columns_by_task_and_their_mean():
    runs = [record("ours", {"a": 0.5}, shots=4), record("ours", {"b": 0.7}, shots=4)]
    runs.append(record("ours", {"a": 0.9}, shots=8))
    own = table(axis="task", columns=["a", "b", "mean"], rows={"ours": [50.0, 60.0, None]}, at={"shots": 4})
    found = RecordedRuns(runs, tasks=("a", "b")).compare(own)
    assert [n.measured.mean for n in found] == pytest.approx([50.0, 70.0, 60.0])
    assert [n.difference for n in found[:2]] == pytest.approx([0.0, 10.0])
    assert found[2].difference is None


def test_out_of_domain_tasks_are_columns_but_not_part_of_means():
    run = record("ours", {"imagenet": 0.6}, out_of_domain={"imagenet_a": 0.3}, shots=4)
    own = table(axis="task", columns=["imagenet", "imagenet_a", "mean"], rows={"ours": [60.0, 31.0, 60.0]})
    found = RecordedRuns([run]).compare(own)
    assert [round(n.difference, 6) for n in found] == [0.0, -1.0, 0.0]


def test_relative_accuracy_is_to_the_runs_own_vectors():
    added = record(
        "ours", {"a": 0.4, "b": 0.9}, reference={"a": 0.8, "b": 0.9}, setting="addition", tasks=["a", "b"]
    )
    own = table(axis="measure", columns=["accuracy", "relative"], rows={"ours": [65.0, 75.0]})
    assert [n.difference for n in RecordedRuns([added]).compare(own)] == pytest.approx([0.0, 0.0])


def test_relative_accuracy_falls_back_to_recorded_fine_tuning_and_counts_bases():
    shared = {"setting": "data-fraction", "fraction": 1.0}
    runs = [
        record("tuned", {"a": 0.8}, method="vector", **shared),
        record("vectors", {"a": 0.6}, budget=2, select="random", **shared),
        record("drawn", {"a": 0.4}, bank="random:2", **shared),
    ]
    own = table(axis="bases", columns=[1, 2], rows={"vectors": [None, 75.0], "drawn": [None, 60.0]},
                measure="relative", at={"task": "a"})  # fmt: skip
    found = RecordedRuns(runs).compare(own)
    assert [n.difference for n in found] == [None, pytest.approx(0.0), None, pytest.approx(-10.0)]


def test_negation_has_a_target_and_a_control():
    run = record("ours", {"a": 0.1, "guard": 0.6}, setting="negation", target="a", control="guard")
    own = table(axis="measure", columns=["target", "control"], rows={"ours": [12.0, 61.0]})
    assert [n.difference for n in RecordedRuns([run], tasks=("a",)).compare(own)] == pytest.approx(
        [-2.0, -1.0]
    )
    by_task = table(axis="task", columns=["a"], rows={"ours": [61.0]}, measure="control")
    assert RecordedRuns([run]).compare(by_task)[0].difference == pytest.approx(-1.0)


def matrix(title="ours", values=((None, 0.1), (0.3, None))):
    return MatrixRecord(title=title, rows=("a", "b"), columns=("a", "b"), values=values)


def test_errors_come_from_the_analysis():
    found = AnalysisRecord(analysis="disentanglement", model="mini", matrices=(matrix(),))
    own = table(axis="measure", columns=["error"], rows={"ours": [19.0]})
    assert RecordedRuns([], found).compare(own)[0].difference == pytest.approx(1.0)
    assert RecordedRuns([]).compare(own)[0].measured is None


def test_tables_for_people_and_for_programs():
    (first, second) = RecordedRuns([record("ours", {"a": 0.5}, shots=1)]).compare(
        table(errors={"ours": [0.2, None]})
    )
    shown = comparison_table("t", [first, second])
    assert shown.columns == ("", "1", "16")
    assert shown.rows == (("ours", "50.0 (paper 60, -10.0)", "not run (paper 70)"),)
    lines = comparison_rows([("t", [first, second])]).csv().splitlines()
    assert lines[0] == "table,row,column,measured,published,published s.e.,difference"
    assert lines[1] == "t,ours,1,50.0000,60.0000,0.2000,-10.0000"
    assert lines[2] == "t,ours,16,,70.0000,,"


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": {"ours": [1.0]}},
        {"errors": {"theirs": [1.0, 1.0]}},
        {"axis": "epochs"},
        {"measure": "loss"},
        {"rows": {}},
        {"more": 1},
    ],
)
def test_unusable_tables_are_refused(changes):
    with pytest.raises(ValueError, match="PublishedTable"):
        table(**changes)


def test_a_report_has_tables_figures_and_says_what_is_missing():
    pytest.importorskip("matplotlib")
    five = [-1.0, -0.5, 0.0, 0.5, 1.0]
    run = record("ours", {"a": 0.5}, shots=1, coefficients={"kind": {"mlp": five}, "depth": {"0": five}})
    figures = [
        FigureRequest("boxes", "coefficient-boxes-kind", [run]),
        FigureRequest("curves", "few-shot-curves", []),
    ]
    other = table(backbone="RN50")
    made = RecipeReport(
        "tab-x", "X", [table(), other], {"ViT-B-32": RecordedRuns([run])}, figures, ["doubts: none"]
    )
    files, lost = made.files()
    assert sorted(files) == ["boxes.png", "boxes.svg", "tab-x.csv", "tab-x.md"]
    assert files["boxes.png"].startswith(b"\x89PNG")
    assert lost == ["curves: not drawn, since it has no records"]
    text = files["tab-x.md"].decode()
    assert "50.0 (paper 60, -10.0)" in text
    assert "doubts: none" in text
    assert "curves: not drawn" in text
    assert "RN50" not in text
    assert sorted(made.files(figures=False)[0]) == ["tab-x.csv", "tab-x.md"]


def test_a_figure_that_does_not_exist_is_refused():
    with pytest.raises(UsageError):
        draw_figure("no-such-figure", [record("ours", {"a": 0.5}, shots=1)])


def test_analyses_are_drawn_and_read_back(tmp_path, refused):
    pytest.importorskip("matplotlib")
    for analysis, parts in (("significance", {"matrix"}), ("disentanglement", {"matrix"})):
        found = AnalysisRecord(analysis=analysis, model="mini", matrices=(matrix(),))
        assert analysis_figures(found, "png").keys() == parts
    ellipses = [
        {"name": name, "mean": (x, 0.0), "covariance": ((1.0, 0.0), (0.0, 1.0))}
        for name, x in (("a", 0.0), ("b", 3.0))
    ]
    content = {"analysis": "distributions", "model": "mini", "ellipses": tuple(ellipses)}
    made = AnalysisRecord.model_validate(content, strict=False)
    assert analysis_figures(made, "svg").keys() == {"1-std", "3-std"}
    file = tmp_path / "a.json"
    file.write_text(made.model_dump_json())
    assert read_analysis(file) == made
    file.write_text("{}")
    with refused("RECORD", 3, "a.json"):
        read_analysis(file)


def test_means_of_a_matrix_leave_undefined_cells_out():
    assert matrix().mean == pytest.approx(0.2)
    assert matrix().column_means == (0.3, 0.1)
    assert matrix(values=((None, None), (None, None))).mean is None
