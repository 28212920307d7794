"""Reports: means and standard errors in closed form, every gap named, bytes that repeat."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import pytest

from aniso.report import (
    Estimate,
    PageFigure,
    Record,
    Section,
    Table,
    bars,
    boxes,
    budgets,
    build,
    complementarity,
    details,
    experiments,
    few_shot_curves,
    heat_map,
    mixed,
    page,
    pareto,
    read_records,
    table,
)
from aniso.report.figures import coefficient_figures
from aniso.report.figures.canvas import spread

ZERO = {"a": 0.2, "b": 0.4, "c": 0.5, "guard": 0.4}
numbers = itertools.count()


def score(accuracy, total=1000, **more):
    return {"correct": round(accuracy * total), "total": total, "accuracy": accuracy, **more}


def raw(setting="few-shot", label="learned", accuracy=None, **changes):
    """A record as JSON would give it; spec fields and the parts of a record by name."""
    accuracy = accuracy or {"a": 0.5}
    first = next(iter(accuracy))
    axes = {
        "few-shot": {"task": first, "shots": 4},
        "data-fraction": {"task": first, "fraction": 0.25},
        "addition": {"tasks": list(accuracy)},
        "negation": {"target": first, "control": "guard"},
        "test-time": {"task": first},
    }[setting]
    parts = {
        "schema": 1,
        "id": f"{next(numbers):064x}",
        "experiment": setting,
        "label": label,
        "metrics": {
            "accuracy": {task: score(value) for task, value in accuracy.items()},
            "zero_shot": {task: ZERO[task] for task in accuracy if task in ZERO},
        },
        "coefficients": None,
        "inputs": {"model": "m" * 8, "bank": "b" * 8, "data": {task: f"data of {task}" for task in accuracy}},
        "versions": {"aniso": "0.1"},
        "seconds": 1.5,
        "status": "ok",
    }
    own = {key: changes.pop(key) for key in list(changes) if key in {*parts, "notes"}}
    spec = {"setting": setting, "model": "mini", "bank": "mini", "method": "coefficients", "seed": 0}
    return parts | own | {"spec": spec | axes | changes}


def record(*args, **changes):
    return Record.model_validate_json(json.dumps(raw(*args, **changes)))


def shots(values, label="learned", **changes):
    """Few-shot records from {(shots, task, seed): accuracy}."""
    return [
        record(label=label, accuracy={task: value}, shots=n, seed=seed, **changes)
        for (n, task, seed), value in values.items()
    ]


def row(made, name):
    return next(r for r in made.rows if r[0] == name)[1:]


def noted(made, text):
    return any(text in note for note in made.notes)


# reading


def test_records_are_found_in_directories_and_copies_count_once(tmp_path):
    data = raw()
    (tmp_path / "deep").mkdir()
    for name in ("x.json", "deep/copy.json"):
        (tmp_path / name).write_text(json.dumps(data))
    (tmp_path / "notes.txt").write_text("no record")
    (found,) = read_records([tmp_path, tmp_path / "x.json"])
    assert (found.label, found.accuracy("a"), found.seed) == ("learned", 0.5, 0)


def test_records_are_read_by_label(tmp_path, refused):
    for name in ("probe", "coefficients"):
        (tmp_path / f"{name}.json").write_text(json.dumps(raw(label=name)))
    assert [found.label for found in read_records([tmp_path], ["probe"])] == ["probe"]
    with refused("RECORD", 2, "prob", "coefficients, probe"):
        read_records([tmp_path], ["prob"])


def test_two_records_of_one_run_must_agree(tmp_path, refused):
    data = raw()
    (tmp_path / "x.json").write_text(json.dumps(data))
    (tmp_path / "y.json").write_text(json.dumps(data | {"seconds": 2.0}))
    with refused("RECORD", 3, "x.json", "y.json", "seconds"):
        read_records([tmp_path])


def test_what_later_versions_add_is_kept():
    assert record(lr=0.1).spec.model_dump()["lr"] == 0.1
    with pytest.raises(ValueError, match="frozen"):
        record().label = "other"


def test_banks_that_were_chosen_from_or_drawn_may_differ():
    inputs = {"model": "m" * 8, "data": {"a": "data of a"}}
    several = [
        record(label=f"{word} {i}", inputs={**inputs, "bank": word * i}, seed=i, **more)
        for word, more in (("c", {"select": "random", "budget": 1}), ("d", {"bank": "random:3"}))
        for i in (1, 2)
    ]
    assert mixed(several) == []


def test_experiments_may_have_a_run_in_common(tmp_path):
    data = raw()
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(data | {"experiment": name, "seconds": len(name)}))
    assert {found.experiment for found in read_records([tmp_path])} == {"one", "two"}


def test_rows_are_in_the_order_of_their_numbers():
    made = table([record(label="chosen", select="random", budget=n, accuracy={"a": 0.5}) for n in (10, 2, 1)])
    assert [r[0] for r in made.rows[-3:]] == [f"chosen (budget: {n})" for n in (1, 2, 10)]


def test_mixed_inputs_are_said():
    same = [record(), record(label="other")]
    assert mixed(same) == []
    inputs = {"model": "n" * 8, "bank": "b", "data": {"a": "other data"}}
    model, data, bank = mixed([*same, record(label="third", inputs=inputs)])
    assert "different contents of bank" in bank
    assert "2 different models" in model and "nnnnnnnn" in model
    assert "2 different sets of images of a" in data
    assert noted(table([*same, record(label="third", inputs=inputs)]), "different models")


def test_experiments_are_kept_apart(refused):
    records = [record(), record("addition"), record("addition", experiment="few-shot")]
    assert sorted(experiments(records)) == ["addition", "few-shot, addition", "few-shot, few-shot"]
    with refused("RECORD", 2, "one experiment"):
        table(records)


# few-shot and fraction


def test_the_mean_over_tasks_and_its_standard_error_over_seeds():
    values = {(4, "a", 0): 0.5, (4, "b", 0): 0.7, (4, "a", 1): 0.6, (4, "b", 1): 0.9}
    made = table(shots(values))
    assert made.columns == ("method", "4 shots")
    # seeds have means 60 and 75: their mean is 67.5, their standard deviation 15/sqrt(2), over sqrt(2) 7.5
    (cell,) = row(made, "learned")
    assert cell.mean == pytest.approx(67.5) and cell.error == pytest.approx(7.5)
    assert str(cell) == "67.5 ± 7.5"
    assert row(made, "zero-shot") == (Estimate(pytest.approx(30.0)),)
    assert made.notes == ("± is the standard error of the mean over 2 seeds",)


def test_three_seeds():
    made = table(shots({(1, "a", seed): value for seed, value in enumerate((0.1, 0.2, 0.6))}))
    (cell,) = row(made, "learned")
    variance = ((10 - 30) ** 2 + (20 - 30) ** 2 + (60 - 30) ** 2) / 2
    assert cell.mean == pytest.approx(30) and cell.error == pytest.approx(math.sqrt(variance / 3))


def test_columns_are_shots_in_order():
    made = table(shots({(n, "a", 0): 0.3 for n in (16, 1, 2)}))
    assert made.columns == ("method", "1 shot", "2 shots", "16 shots")


def test_fractions_are_per_cent():
    records = [record("data-fraction", fraction=f, accuracy={"a": 0.5}) for f in (0.25, 0.01, 1.0)]
    assert table(records).columns == ("method", "1 %", "25 %", "100 %")


def test_one_seed_has_no_interval():
    made = table(shots({(4, "a", 0): 0.5}))
    assert str(row(made, "learned")[0]) == "50.0" and noted(made, "1 seed, no interval")


def test_a_missing_column_is_a_dash_and_said():
    made = table(
        shots({(1, "a", 0): 0.5, (2, "a", 0): 0.6}) + shots({(1, "a", 0): 0.3}, "other", method="weights")
    )
    assert row(made, "other")[1] is None and "| 30.0 | \N{EN DASH} |" in made.markdown()
    assert noted(made, "other (2 shots): no run")


def test_means_over_fewer_tasks_say_so_in_the_cell_and_below():
    made = table(
        shots({(1, "a", 0): 0.5, (1, "b", 0): 0.9}) + shots({(1, "b", 0): 0.3}, "other", method="search")
    )
    assert str(row(made, "other")[0]) == "30.0 (1 of 2 tasks)"
    assert noted(made, "other (1 shot): without a")


def test_a_seed_that_lacks_a_task_is_left_out_not_averaged_in():
    values = {(1, "a", 0): 0.5, (1, "b", 0): 0.7, (1, "a", 1): 0.1}
    made = table(shots(values))
    assert str(row(made, "learned")[0]) == "60.0"
    assert noted(made, "learned (1 shot): without seed 1, which lacks b")


def test_seeds_without_a_common_task_have_no_mean():
    made = table(shots({(1, "a", 0): 0.5, (1, "b", 1): 0.7}))
    assert row(made, "learned") == (None,) and noted(made, "no task that every seed has")


def test_a_missing_seed_is_named():
    made = table(
        shots({(1, "a", 0): 0.5, (1, "a", 1): 0.7}) + shots({(1, "a", 0): 0.3}, "other", method="weights")
    )
    assert noted(made, "other (1 shot): without seed 1; 1 seed, no interval")


def test_a_zero_shot_label_replaces_the_stated_one_and_fills_every_column():
    plain = record(label="base", accuracy={"a": 0.25}, method="none", shots=None)
    made = table([plain, *shots({(n, "a", s): 0.5 for n in (1, 2) for s in (0, 1)})])
    assert [r[0] for r in made.rows] == ["base", "learned"]
    assert [str(cell) for cell in row(made, "base")] == ["25.0", "25.0"]
    assert len(made.notes) == 1


def test_zero_shot_records_alone_make_a_table():
    made = table([record(label="base", method="none", shots=None)])
    assert str(row(made, "base")[0]) == "50.0" and noted(made, "no seeds")
    assert few_shot_curves([record(label="base", method="none", shots=None)])


def test_disagreeing_zero_shot_is_said():
    odd = record(
        accuracy={"a": 0.5}, seed=1, metrics={"accuracy": {"a": score(0.5)}, "zero_shot": {"a": 0.3}}
    )
    made = table([*shots({(4, "a", 0): 0.5}), odd])
    assert row(made, "zero-shot")[0].mean == pytest.approx(25) and noted(made, "disagree on a")


def test_one_label_for_two_models_becomes_two_rows():
    made = table([record(model="mini"), record(model="maxi")])
    names = [r[0] for r in made.rows]
    assert names == [f"{what} (model: {m})" for what in ("zero-shot", "learned") for m in ("maxi", "mini")]


def test_runs_of_one_cell_are_told_apart_by_what_differs(refused):
    made = table([record(lr=0.1), record(lr=0.2)])
    assert [r[0] for r in made.rows][1:] == ["learned (lr: 0.1)", "learned (lr: 0.2)"]
    with refused("RECORD", 3, "same cell"):
        table([record(), record(accuracy={"a": 0.6})])


def test_failed_runs_are_left_out_and_counted():
    failed = record(label="learned", status="failed", metrics={}, seed=1)
    made = table([*shots({(4, "a", 0): 0.5}), failed])
    assert noted(made, "left out: 1 run of learned that ended as 'failed'") and noted(made, "1 seed")


def test_details_have_a_row_for_each_task():
    values = {(n, t, s): 0.1 * n + 0.1 * s for n in (1, 2) for t in "ab" for s in (0, 1)}
    made = details(shots(values))
    assert made.columns == ("task", "zero-shot", "learned, 1 shot", "learned, 2 shots")
    assert [str(cell) for cell in row(made, "b")] == ["40.0", "15.0 ± 5.0", "25.0 ± 5.0"]


# addition and negation


def added(accuracy, reference=None, **changes):
    data = raw("addition", accuracy=accuracy, **changes)
    data["metrics"]["reference"] = reference
    return Record.model_validate_json(json.dumps(data))


def test_addition_has_every_task_the_mean_and_the_relative_mean():
    reference = {"a": 0.8, "b": 0.5}
    made = table([added({"a": 0.4, "b": 0.5}, reference), added({"a": 0.8, "b": 0.3}, reference, seed=1)])
    assert made.columns == ("method", "a", "b", "mean", "relative")
    a, b, mean, relative = row(made, "learned")
    assert (str(a), str(b)) == ("60.0", "40.0")
    assert (mean.mean, mean.error) == pytest.approx((50.0, 5.0))  # seeds: 45 and 55
    assert (relative.mean, relative.error) == pytest.approx((77.5, 2.5))  # seeds: (50+100)/2, (100+60)/2
    assert row(made, "zero-shot")[3].mean == pytest.approx((25 + 80) / 2)


def test_a_task_without_reference_is_left_out_of_relative_and_named():
    made = table([added({"a": 0.4, "b": 0.5}, {"a": 0.8, "b": 0.0})])
    assert row(made, "learned")[3].mean == pytest.approx(50) and noted(made, "relative is without b")
    assert row(table([added({"a": 0.4})]), "learned")[2] is None


def test_addition_over_fewer_tasks_is_never_compared_silently():
    made = table([added({"a": 0.4, "b": 0.6}), added({"a": 0.5}, label="small", method="search")])
    assert [str(cell) for cell in row(made, "small")][:3] == ["50.0", "None", "50.0 (1 of 2 tasks)"]
    assert noted(made, "small (accuracy): without b")


def test_objectives_of_addition_are_rows_of_their_own_and_earlier_records_had_labels():
    earlier, labels = added({"a": 0.4}), added({"a": 0.6}, seed=1, objective="cross-entropy", match="kl")
    assert row(table([earlier, labels]), "learned")[0].mean == pytest.approx(50)
    teachers = [
        added({"a": 0.5 + seed / 10}, seed=seed, objective="distil", match=match)
        for seed, match in enumerate(("kl", "features"))
    ]
    names = [one[0] for one in table([earlier, *teachers]).rows]
    assert names == [
        "zero-shot",
        "learned (match: features, objective: distil)",
        "learned (match: kl, objective: cross-entropy)",
        "learned (match: kl, objective: distil)",
    ]
    rounds = table([earlier, added({"a": 0.7}, seed=1, rounds=3)])
    assert [one[0] for one in rounds.rows][1:] == ["learned (rounds: 1)", "learned (rounds: 3)"]


def negated(target, left, control, **changes):
    return record("negation", accuracy={target: left, "guard": control}, **changes)


def test_negation_counts_the_runs_that_kept_the_control():
    # the control's zero-shot accuracy is 0.4: 0.38 keeps it, 0.379 does not
    made = table([negated("a", 0.1, 0.38), negated("b", 0.3, 0.379)])
    assert [r[0] for r in made.rows] == ["zero-shot", "learned"]
    assert [str(cell) for cell in row(made, "zero-shot")][:2] == ["30.0", "40.0"]
    target, control, kept = row(made, "learned")
    assert (str(target), kept) == ("20.0", "1 of 2") and control.mean == pytest.approx(37.95)
    assert "lower is better" in made.columns[1]


def test_negation_without_zero_shot_counts_nothing():
    data = raw("negation", accuracy={"a": 0.1, "guard": 0.3})
    data["metrics"]["zero_shot"] = {}
    made = table([Record.model_validate_json(json.dumps(data))])
    assert row(made, "learned")[2] is None and noted(made, "1 runs do not state")


# complementarity


def answers(label, right, total=8, task="a", manifest="same"):
    mask = sum(1 << i for i in right)
    metrics = {"accuracy": {task: score(len(right) / total, total, right=f"{mask:x}")}}
    return record(
        label=label, accuracy={task: 0.5}, metrics=metrics, inputs={"model": "m", "data": {task: manifest}}
    )


def test_complementarity_counts_each_image_once():
    counts = complementarity(
        {"x": answers("x", {0, 1, 2}), "y": answers("y", {2, 3}), "z": answers("z", {2, 7})}
    )
    assert counts == {
        frozenset("x"): 2,
        frozenset("y"): 1,
        frozenset("z"): 1,
        frozenset("xyz"): 1,
        frozenset(): 3,
    }
    assert sum(counts.values()) == 8


@pytest.mark.parametrize(
    "other",
    [
        answers("y", {1}, manifest="other"),
        answers("y", {1}, total=9),
        answers("y", {1}, task="b"),
        record(label="y"),
    ],
    ids=["data", "total", "task", "no answers"],
)
def test_complementarity_needs_the_same_images(other, refused):
    with refused("RECORD", 2):
        complementarity({"x": answers("x", {0}), "y": other})


# tables as text


def test_csv_has_numbers_in_cells_of_their_own():
    made = Table("t", ("method", "4"), (("x", Estimate(50, 1.5)), ("-y", Estimate(40, None, "1 of 2 tasks"))))
    assert made.csv().splitlines() == [
        "method,4,4 s.e.,4 remark",
        "x,50.0000,1.5000,",
        "'-y,40.0000,,1 of 2 tasks",
    ]


def test_markdown_is_a_table_with_notes():
    made = Table("t", ("method", "x"), (("m", Estimate(1.25, 0.05)), ("n", None)), ("note",))
    assert made.markdown().splitlines()[2:] == [
        "| method | x |",
        "| --- | ---: |",
        "| m | 1.2 ± 0.1 |",
        "| n | \N{EN DASH} |",
        "",
        "- note",
    ]


def test_a_whole_table_as_csv():
    values = {(n, t, s): 0.1 * n + 0.1 * s for n in (1, 2) for t in "ab" for s in (0, 1)}
    assert table(shots(values)).csv().splitlines() == [
        "method,1 shot,1 shot s.e.,2 shots,2 shots s.e.",
        "zero-shot,30.0000,,30.0000,",
        "learned,15.0000,5.0000,25.0000,5.0000",
    ]


# figures


def summaries():
    return {
        "kind": {"attention": [-1, 0, 0.5, 1, 2], "mlp": [0, 0, 0, 0, 0]},
        "depth": {"0": [0, 1, 2, 3, 4]},
    }


FIGURES = {
    "curves": lambda kind: few_shot_curves(
        shots({(n, "a", s): 0.1 * n + 0.01 * s for n in (1, 2, 4) for s in (0, 1)}), kind=kind
    ),
    "bars": lambda kind: bars({"a": {"x": 0.5, "zero-shot": 0.1}, "b": {"x": 0.2}}, "title", kind=kind),
    "heat map": lambda kind: heat_map([[0.0, 1.0], [float("nan"), -1.0]], ["v", "w"], ["p", "q"], kind=kind),
    "boxes": lambda kind: boxes(summaries()["kind"], "title", kind=kind),
    "depths": lambda kind: boxes(summaries()["depth"], kind=kind),
    "pareto": lambda kind: pareto([negated("a", 0.1, 0.38), negated("a", 0.2, 0.3, seed=1)], kind=kind),
}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_figures_have_the_same_bytes_every_time(draw):
    png, svg = draw("png"), draw("svg")
    assert png.startswith(b"\x89PNG") and b"<svg" in svg and b"<dc:date>" not in svg
    assert (png, svg) == (draw("png"), draw("svg"))


def test_figures_ignore_and_leave_the_users_settings():
    import matplotlib

    before = FIGURES["bars"]("svg")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert FIGURES["bars"]("svg") == before
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize("matrix", [[[1.0]], [1.0, 2.0], []])
def test_a_heat_map_needs_a_name_for_each_row_and_column(matrix, refused):
    with refused("RECORD", 2, "does not fit"):
        heat_map(matrix, ["v"], ["p", "q"])


@pytest.mark.parametrize("five", [[1, 2, 3], [5, 4, 3, 2, 1], [0, 0, 0, 0, float("inf")]])
def test_a_box_needs_five_numbers_in_order(five, refused):
    with refused("RECORD", 2, "box"):
        boxes({"x": five})


def test_figures_of_other_settings_are_refused(refused):
    with refused("RECORD", 2, "negation"):
        pareto([record()])
    with refused("RECORD", 2, "few-shot"):
        few_shot_curves([record("addition")])
    with refused("RECORD", 2, "png or svg"):
        boxes({}, kind="gif")


def test_labels_are_moved_apart_and_no_further():
    assert spread([0, 10], [1]) == [0, 10]
    assert spread([5, 5], [1]) == [4.5, 5.5]
    assert spread([0, 0, 0, 9], [1, 1, 1]) == [-1, 0, 1, 9]
    assert spread([], []) == []
    assert spread([5, 5], [1], 0, 5) == [4, 5] and spread([0, 0], [1], 0, 5) == [0, 1]


# page and whole report


def test_the_page_shows_its_sections_in_order():
    made = Table("t", ("m", "x"), (("r", Estimate(1, 0.5)),), ("a note",))
    text = page(
        "Title",
        [Section("One", ("words",), made, (PageFigure(FIGURES["boxes"]("png"), "seen"),), ("aniso report",))],
    )
    order = [
        "<h1>Title",
        "<h2>One",
        "<p>words",
        "1.0 ± 0.5",
        "a note",
        "data:image/png;base64",
        "<figcaption>seen",
        "<code>",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert "data:image/svg+xml;base64" in page(
        "t", [Section("s", figures=(PageFigure(FIGURES["boxes"]("svg")),))]
    )


def test_a_page_stays_below_its_limit_with_links_to_figures_that_do_not_fit():
    drawn = [FIGURES["boxes"]("svg") + b"<!-- " + b"x" * size + b" -->" for size in (9000, 6000, 6000)]
    below = Section(
        "curves", table=Table("t", ("a",), (("b",),)), figures=(PageFigure(drawn[0], "c", "c.svg"),)
    )
    alone = [
        Section(name, figures=(PageFigure(d, name, f"{name}.svg"),))
        for name, d in zip("de", drawn[1:], strict=True)
    ]
    sections = [*alone, below]
    whole = page("t", sections)
    assert whole.count("<img") == 3 and "beside this page" not in whole
    least = len(page("t", sections, 0).encode()) + 10  # the limit is written on the page, with its digits
    for most in range(least, len(whole.encode()) + 600, 500):
        text = page("t", sections, most)
        assert len(text.encode()) <= most
        assert text.count("<img") + text.count("(figure in a file)") == 3
    one = len(page("t", [below]).encode()) - len(page("t", [below], 0).encode())
    tight = page("t", sections, least + one + 500)
    assert 'alt="c"' in tight  # the figure below a table comes first, although its section is the last
    assert '<a href="d.svg">' in tight and "2 of 3 figures are files beside this page" in tight
    assert (
        page("t", [Section("s", figures=(PageFigure(drawn[0]),))], 0).count("<img") == 1
    )  # there is no file


def test_a_report_has_every_file_and_repeats():
    records = [
        *shots({(n, "a", s): 0.1 * n for n in (1, 2) for s in (0, 1)}, coefficients=summaries()),
        *[added({"a": 0.4, "b": 0.5}, {"a": 0.8, "b": 0.5})],
        *[negated("a", 0.1, 0.38)],
    ]
    files = build(records, "Everything")
    for name in ("few-shot", "addition", "negation"):
        assert {
            f"{kind}-{name}.{end}" for kind in ("table", "details") for end in ("md", "csv")
        } <= files.keys()
    pictures = ("few-shot-curves-few-shot", "tasks-few-shot", "tasks-addition", "negation-negation")
    boxed = [f"coefficient-boxes-{by}-few-shot-learned" for by in ("kind", "depth")]
    assert {f"{name}.{kind}" for name in (*pictures, *boxed) for kind in ("png", "svg")} <= files.keys()
    text = files["report.md"].decode()
    assert "# Everything" in text and "](few-shot-curves-few-shot.png)" in text and "data of a" in text
    assert files == build(records, "Everything")


def test_a_report_can_do_without_figures():
    assert not [name for name in build([record()], figures=False) if name.endswith(("png", "svg"))]


def test_boxes_of_several_runs_are_means_of_the_runs_with_most_shots(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        coefficient_figures, "box_panels", lambda panels, *_, **__: drawn.append(panels) or b""
    )
    runs = [
        record(shots=n, seed=s, coefficients={"kind": {"k": [s, s, s, s, s + n]}, "depth": {}})
        for n in (1, 8)
        for s in (0, 1)
    ]
    build(runs)
    assert drawn[0] == {"a": {"k": [0.5, 0.5, 0.5, 0.5, 8.5]}}


def test_reports_need_no_torch():
    code = "import sys; from aniso.report import boxes; boxes({'0': [0] * 5}); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "False", run.stderr


def test_without_matplotlib_figures_say_what_to_install(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused("MODEL-LIBRARY", 2, "pip install 'aniso[plot]'"):
        boxes({})


def test_what_is_not_drawn_at_random_needs_no_second_seed():
    made = table(
        shots({(1, "a", 0): 0.5, (1, "a", 1): 0.7}) + shots({(1, "a", 0): 0.3}, "other", method="search")
    )
    assert not noted(made, "other (1 shot): without seed 1; 1 seed, no interval")


def test_zero_shot_accuracies_are_those_of_the_record_that_has_them():
    learned = shots({(1, "a", 0): 0.5, (2, "a", 0): 0.7})
    without = [
        one.model_copy(update={"metrics": one.metrics.model_copy(update={"zero_shot": {}})})
        for one in learned
    ]
    zero = shots({(1, "a", 0): 0.25}, "zero-shot", method="none")
    made = table([*without, *zero])
    (row,) = [row for row in made.rows if row[0] == "zero-shot"]
    assert [cell.mean for cell in row[1:]] == [25.0, 25.0]


# test time


def adapted(seed, accuracy, agreement, online=None, label="learned"):
    made = raw("test-time", label, {"cars": accuracy}, seed=seed)
    made["metrics"]["answers"] = {"agreement": agreement, "confidence": [0.5, 0.6], "counts": {"a": 8}}
    if online is not None:
        made["metrics"]["online"] = {"cars": score(online)}
    return Record.model_validate_json(json.dumps(made))


def test_runs_without_labels_have_online_accuracy_and_agreement_with_zero_shot():
    runs = [adapted(0, 0.5, 0.75, online=0.25), adapted(1, 0.7, 0.25, online=0.75)]
    other = [adapted(seed, 0.4, 0.5, label="offline") for seed in (0, 1)]
    made = table([*runs, *other])
    assert made.columns == ("method", "accuracy", "online accuracy", "same as zero-shot")
    accuracy, way, same = row(made, "learned")
    assert (accuracy.mean, same.mean, way.mean) == pytest.approx((60.0, 50.0, 50.0))
    assert way.error == pytest.approx(25.0)
    assert row(made, "offline")[1] is None
    assert "online accuracy" not in table(other).columns


def test_what_was_learned_without_gradients_and_from_fewer_vectors_has_rows_of_its_own():
    evolved = record(method="gradient-free", evaluations=50)
    chosen = [record(select="random", budget=b, seed=0) for b in (1, 2)]
    made = table([evolved, *chosen, record()])
    assert len(made.rows) == 5  # and zero-shot
    assert len({name for name, *_ in made.rows}) == 5


def test_budgets_are_columns_between_none_and_all():
    kept = {(1, 0): 0.4, (1, 1): 0.6, (10, 0): 0.7, (2, 0): 0.5}
    chosen = [record(select="random", budget=b, seed=s, accuracy={"a": x}) for (b, s), x in kept.items()]
    other = [record(select="features", budget="2MB", shots=16)]
    ends = [record(accuracy={"a": 0.8}), record(label="zero-shot", method="none", accuracy={"a": 0.1})]
    made = budgets([*chosen, *other, *ends, record(head="tip", label="head"), record(shots=8)])
    assert made.columns == ("shots", "selection rule", "0", "1", "2", "10", "2MB", "all")
    few, many = made.rows
    assert few[:2] == ("4", "random") and many[:2] == ("16", "features")
    assert [cell.mean if cell else None for cell in few[2:]] == pytest.approx([10, 50, 50, 70, None, 80])
    assert few[3].error == pytest.approx(10.0) and few[4].error is None
    assert [cell.mean if cell else None for cell in many[2:]] == [10, None, None, None, 50, None]
    assert budgets(ends) is None
    assert "budgets-few-shot.md" in build([*chosen, *ends], "T", figures=False)


# settings and methods of other packages


def foreign(accuracy, **changes):
    """A record of a setting that aniso does not have."""
    data = raw("few-shot", accuracy=accuracy, experiment="ours", **changes)
    data["spec"] |= {"setting": "calibration", "task": None, "shots": None}
    return Record.model_validate_json(json.dumps(data))


def test_an_unknown_setting_gets_a_table_of_labels_and_tasks_with_means_over_seeds():
    made = table([foreign({"a": 0.4, "b": 0.6}), foreign({"a": 0.6, "b": 0.6}, seed=1)])
    assert made.columns == ("method", "a", "b", "mean")
    a, b, mean = row(made, "learned")
    assert (str(a), str(b), str(mean)) == ("50.0 ± 10.0", "60.0 ± 0.0", "55.0 ± 5.0")
    assert [str(cell) for cell in row(made, "zero-shot")] == ["20.0", "40.0", "30.0"]
    assert made.notes == ("± is the standard error of the mean over 2 seeds",)


def test_runs_of_an_unknown_setting_are_told_apart_by_what_differs():
    made = table([foreign({"a": 0.4}, bins=n) for n in (5, 10)])
    assert [r[0] for r in made.rows] == ["zero-shot", "learned (bins: 5)", "learned (bins: 10)"]
    assert made.columns == ("method", "a")


def test_a_run_of_an_unknown_setting_without_accuracy_is_shown_as_a_gap():
    made = table([foreign({"a": 0.4}), foreign({"a": 0.4}, label="other", metrics={})])
    assert row(made, "other") == (None,) and noted(made, "other (accuracy): no accuracy")


def test_a_report_has_every_file_of_an_unknown_setting():
    files = build([foreign({"a": 0.4}, coefficients=summaries()), record()], "T")
    assert {
        "table-ours.md",
        "details-ours.csv",
        "tasks-ours.png",
        "coefficient-boxes-kind-ours-learned.svg",
    } <= (files.keys())


def test_an_unknown_method_is_a_row_after_the_known_ones():
    made = table([record(label="ridge", method="ridge"), record(), record(label="x", method="search")])
    assert [r[0] for r in made.rows] == ["zero-shot", "x", "learned", "ridge"]
