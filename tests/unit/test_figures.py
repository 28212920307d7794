"""Figures by name: what is drawn in closed form, and what records that do not allow a figure are told."""

from __future__ import annotations

import math
import subprocess
import sys
from xml.etree import ElementTree

import made_records
import pytest
from made_records import BLOCKS, LAYER, matrix, run, zero_shot

from aniso.report import FIGURES, build, draw_figure, draw_figures
from aniso.report.figures import (
    budget_curves,
    coefficient_figures,
    coefficient_runs,
    curves,
    domain_bars,
    find_figure,
    plan_figure,
    random_bases,
    validation_share,
    venn,
)


def lines(monkeypatch, module, plan, records):
    """What a figure of lines draws: panels, axis, label of the other axis, title and note."""
    drawn = []
    monkeypatch.setattr(module, "draw_lines", lambda *parts, **_: drawn.append(parts) or b"")
    plan(records).draw("png")
    return drawn[0]


def numbers(line):
    return {x: (round(cell.mean, 6), cell.error and round(cell.error, 6)) for x, cell in line.points}


def coefficients(setting="few-shot", value=lambda vector, block: 0.0, vectors=("a", "b"), **changes):
    return run(setting, coefficients=matrix(value, vectors), **changes)


EXAMPLES = {
    "coefficient-heatmap": lambda: [coefficients(value=lambda v, b: 0.1 if v == "a" else -0.2)],
    "coefficient-boxes-kind": lambda: [coefficients(), coefficients(accuracy={"b": 0.5})],
    "coefficient-boxes-depth": lambda: [coefficients()],
    "few-shot-curves": lambda: [run(shots=n, seed=s) for n in (1, 4) for s in (0, 1)],
    "venn": lambda: corrected(),
    "out-of-domain-bars": lambda: domains(),
    "budget-curves": lambda: [run(select="random", budget=n) for n in (1, 2)],
    "data-share-curves": lambda: [run("data-fraction", fraction=f) for f in (0.01, 1.0)],
    "random-bases": lambda: bases(),
    "validation-share-curves": lambda: [added(0.1, 0.4), added(1.0, 0.6)],
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_in_both_formats_and_repeats(name):
    records = EXAMPLES[name]()
    png, svg = draw_figure(name, records), draw_figure(name, records, kind="svg")
    assert png.startswith(b"\x89PNG") and ElementTree.fromstring(svg).tag.endswith("svg")
    assert (png, svg) == (draw_figure(name, records), draw_figure(name, records, kind="svg"))


@pytest.mark.parametrize("name", FIGURES)
def test_records_that_do_not_allow_a_figure_are_refused_with_what_it_needs(name, refused):
    with refused(
        "RECORD", 2, name, "cannot be drawn", "1 records of test-time", find_figure(name).needs[:20]
    ):
        draw_figure(name, [run("test-time", task="a")])
    with refused("RECORD", 2, name, "no setting"):
        draw_figure(name, [])


def test_an_unknown_figure_is_refused_with_similar_names(refused):
    with refused("RECORD", 2, "no figure 'ven'", "venn", "few-shot-curves"):
        draw_figure("ven", [run()])


def test_experiments_without_the_figure_are_ignored_and_two_with_it_are_refused(refused):
    few = EXAMPLES["few-shot-curves"]()
    assert draw_figure("few-shot-curves", [*few, run("data-fraction")])
    both = [*few, *(run(shots=n, experiment="other") for n in (1, 4))]
    assert list(plan_figure("few-shot-curves", both)) == ["few-shot", "other"]
    with refused("RECORD", 2, "one experiment", "few-shot, other"):
        draw_figure("few-shot-curves", both)
    assert sorted(draw_figures(both, ["few-shot-curves"])) == [
        f"few-shot-curves-{name}.{kind}" for name in ("few-shot", "other") for kind in ("png", "svg")
    ]


def test_failed_runs_are_left_out():
    records = [*EXAMPLES["random-bases"](), run("data-fraction", bank="random:8", status="failed")]
    assert draw_figure("random-bases", records)


# coefficients


def test_the_twelve_types_of_a_layer_are_derived_from_names():
    types = {coefficient_runs.block_type(block) for block in BLOCKS} - {None}
    letters = [f"{letter} ln_{n}" for n in (1, 2) for letter in "\N{GREEK SMALL LETTER GAMMA}β"]
    owners = ("attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
    assert types == {*letters, *(f"{letter} {owner}" for letter in "Wb" for owner in owners)}
    assert len(LAYER) == len(types) == 12


@pytest.mark.parametrize(
    ("name", "kind", "depth", "expected"),
    [
        ("encoder.layer.11.attention.self.query.weight", "attention weight", 11, "W attention.self.query"),
        ("layer3.0.conv1.weight", "conv weight", 0, "W conv1"),
        ("trunk.blocks.2.0.conv_dw.weight", "conv weight", 2, "W conv_dw"),
        ("trunk.blocks.2.1.bn3.bias", "norm", 2, "β bn3"),
        ("blocks.1.attn.in_proj_weight.q", "attention weight", 1, "attn.in_proj_weight.q"),
        ("visual.proj", "projection", None, None),
    ],
)
def test_types_of_other_architectures(name, kind, depth, expected):
    assert coefficient_runs.block_type(made_records.BlockLabel(name, kind, depth)) == expected


def heat(monkeypatch, records):
    drawn = []
    monkeypatch.setattr(coefficient_figures, "heat_map", lambda *parts, **_: drawn.append(parts) or b"")
    coefficient_figures.plan_heat_map(records).draw("png")
    return drawn[0]


def test_a_heat_map_of_several_runs_is_the_mean_of_every_cell(monkeypatch):
    records = [coefficients(value=lambda v, b, s=s: s if v == "a" else 1.0, seed=s) for s in (0, 1)]
    rows, vectors, columns, title = heat(monkeypatch, records)
    assert vectors == ("a", "b") and columns[:2] == ["conv1.weight", "0 ln_1.weight"]
    assert set(rows[0]) == {0.5} and set(rows[1]) == {1.0}
    assert "mean over 2 runs" in title
    assert "one run" in heat(monkeypatch, records[:1])[3]


def test_negations_of_different_targets_share_a_heat_map(monkeypatch):
    records = [
        coefficients("negation", lambda v, b: -0.5, (task,), accuracy={task: 0.1}) for task in ("cars", "dtd")
    ]
    rows, vectors, *_ = heat(monkeypatch, records)
    assert vectors == ("cars", "dtd") and {x for row in rows for x in row} == {-0.5}


def test_cells_that_no_run_has_are_not_drawn(monkeypatch):
    half = coefficients(value=lambda v, b: math.nan if v == "a" and b.depth == 0 else 1.0)
    rows, *_ = heat(monkeypatch, [half])
    assert [math.isnan(x) for x in rows[0]] == [block.depth == 0 for block in BLOCKS]


def panels(monkeypatch, records, by="kind"):
    drawn = []
    monkeypatch.setattr(coefficient_figures, "box_panels", lambda *parts, **_: drawn.append(parts) or b"")
    plot = find_figure(f"coefficient-boxes-{by}").plan(records)
    plot.draw("png")
    return drawn[0][0], plot.caption


def test_boxes_have_a_panel_of_all_and_one_per_data_set(monkeypatch):
    records = [
        coefficients(accuracy={task: 0.5}, value=lambda v, b, x=x: x, seed=s)
        for task, x in (("a", 0.0), ("b", 1.0))
        for s in (0, 1)
    ]
    found, caption = panels(monkeypatch, records)
    assert list(found) == ["all", "a", "b"] and len(found["all"]) == 12
    assert found["all"]["W mlp.c_fc"] == [0, 0, 0.5, 1, 1] and found["b"]["W mlp.c_fc"] == [1] * 5
    assert "of each" in caption


def test_one_model_for_several_tasks_has_a_panel_per_vector(monkeypatch):
    record = coefficients("addition", lambda v, b: float(ord(v)), tuple("abcdefgh"))
    found, caption = panels(monkeypatch, [record], "depth")
    assert list(found) == ["all", "a", "b", "c", "d", "e"] and set(found["all"]) == {"0", "1"}
    assert "3 more" in caption and found["c"]["1"] == pytest.approx([ord("c")] * 5, rel=1e-3)


def test_seeds_are_averaged_before_boxes_are_made(monkeypatch):
    records = [coefficients(vectors=("a",), value=lambda v, b, s=s: float(s), seed=s) for s in (0, 1)]
    found, _ = panels(monkeypatch, records)
    assert list(found) == ["a"] and found["a"]["b mlp.c_fc"] == [0.5] * 5


def test_coefficients_of_the_method_without_a_head_and_with_most_images_are_drawn():
    records = [
        coefficients(label="few", shots=1),
        coefficients(label="joint", head="tip", joint=True, metrics={"trainable": 9}),
        *(coefficients(label="plain", shots=n, metrics={"trainable": 5}) for n in (1, 16)),
    ]
    (chosen,) = coefficient_runs.main_runs(records)
    assert (chosen.label, chosen.spec.shots) == ("plain", 16)


def test_five_numbers_are_those_of_torch():
    import torch

    from aniso.learn.analysis import five_numbers

    values = torch.randn(23, generator=torch.Generator().manual_seed(0)).double()
    assert coefficient_runs.five_numbers(values.tolist()) == pytest.approx(five_numbers(values))


# curves


def test_one_seed_has_no_bars_and_says_so(monkeypatch):
    (panel,), *_, note = lines(monkeypatch, curves, curves.plan_few_shot, [run(shots=n) for n in (1, 2)])
    assert numbers(panel.lines[0]) == {1: (50, None), 2: (50, None)} and note == "1 seed, no interval"


def test_several_seeds_have_standard_errors(monkeypatch):
    records = [run(shots=1, seed=s, accuracy={"a": 0.4 + 0.2 * s}) for s in (0, 1)]
    (panel,), *_, title, note = lines(monkeypatch, curves, curves.plan_few_shot, records)
    assert numbers(panel.lines[0]) == {1: (50, 10)} and note == "bars: standard error over 2 seeds"
    assert title == "few-shot: a"


def test_a_point_that_lacks_a_task_is_left_out(monkeypatch):
    records = [run(shots=1), run(shots=1, accuracy={"b": 0.7}), run(shots=2)]
    (panel,), *_ = lines(monkeypatch, curves, curves.plan_few_shot, records)
    assert numbers(panel.lines[0]) == {1: (60, None)}


def test_shares_of_data_are_per_cent_and_records_about_vectors_are_left_to_other_figures(monkeypatch):
    records = EXAMPLES["data-share-curves"]()
    (panel,), axis, *_ = lines(monkeypatch, curves, curves.plan_data_share, records)
    assert axis.ticks == {1: "1", 100: "100"} and len(panel.lines) == 1
    assert curves.plan_data_share(bases()) is None


def test_budgets_run_from_zero_shot_to_all_vectors(monkeypatch):
    records = [
        zero_shot(accuracy={"a": 0.2}),
        *(run(select="random", budget=n, accuracy={"a": 0.3 + n / 10}) for n in (1, 2)),
        run(label="all", accuracy={"a": 0.9}),
    ]
    (panel,), axis, *_ = lines(monkeypatch, budget_curves, budget_curves.plan_budget_curves, records)
    assert axis.ticks == {0: "0", 1: "1", 2: "2", 3: "all"} and panel.title == "4 shots"
    assert numbers(panel.lines[0]) == {0: (20, None), 1: (40, None), 2: (50, None), 3: (90, None)}


def bases(**full):
    spec = {"setting": "data-fraction", "accuracy": {"a": 0.5}}
    return [
        zero_shot(
            "data-fraction",
            {"a": 0.2},
        ),
        *(run(**spec, label=f"random {n}", bank=f"random:{n}", seed=s) for n in (1, 4) for s in (0, 1)),
        *(run(**spec, label=f"vectors {n}", select="blockwise-gradient", budget=n) for n in (1, 4)),
    ]


def test_bases_are_absolute_without_fine_tuning_and_relative_with_it(monkeypatch):
    (panel,), _, label, _, note = lines(monkeypatch, random_bases, random_bases.plan_random_bases, bases())
    assert [line.name for line in panel.lines] == ["random bases", "task vectors"] and panel.title == "a"
    assert numbers(panel.lines[0]) == {0: (20, None), 1: (50, 0), 4: (50, 0)}
    assert label == "test accuracy, %" and "absolute" in note
    tuned = run("data-fraction", {"a": 0.8}, label="fine-tuned", method="weights", fraction=1.0)
    adapter = run("data-fraction", {"a": 0.4}, label="adapter", method="weights", lora=4, fraction=1.0)
    (panel,), _, label, _, note = lines(
        monkeypatch, random_bases, random_bases.plan_random_bases, [*bases(), tuned, adapter]
    )
    assert numbers(panel.lines[1]) == {0: (25, None), 1: (62.5, None), 4: (62.5, None)}
    assert "relative" in label and "absolute" not in note


def added(share, accuracy, label="learned", **changes):
    return run("addition", {"a": accuracy, "b": accuracy}, label=label, fraction=share, **changes)


def test_addition_over_the_share_of_validation_data(monkeypatch):
    records = [
        *(added(f, 0.4 + f / 10, seed=s) for f in (0.1, 1.0) for s in (0, 1)),
        *(added(f, 0.3, f"search, {100 * f:g} %", method="search", partition=None) for f in (0.1, 1.0)),
        added(1.0, 0.2, "zero-shot", method="none"),
    ]
    (panel,), axis, _, title, _ = lines(
        monkeypatch, validation_share, validation_share.plan_validation_share, records
    )
    assert {line.name: numbers(line) for line in panel.lines} == {
        "learned": {10: (41, 0), 100: (50, 0)},
        "search": {10: (30, None), 100: (30, None)},
    }
    assert panel.levels == {"zero-shot": 20} and axis.ticks == {10: "10", 100: "100"}
    assert title == "addition: mean over 2 tasks"
    assert validation_share.plan_validation_share([added(1.0, 0.5), added(1.0, 0.5, seed=1)]) is None


# images and domains


def corrected():
    """Eight images: the base gets the first right; three methods correct one to four of the others."""
    rights = {"Tip": "11110000", "LP": "10011000", "learned": "11000100"}
    spec = {"learned": {}, "Tip": {"method": "none", "head": "tip"}, "LP": {"method": "none", "head": "lpp"}}
    return [
        run(label="zero-shot", method="none", shots=None, right={"a": "10000000"}),
        *(run(label=name, right={"a": text}, **spec[name]) for name, text in rights.items()),
    ]


def test_shares_of_corrected_images_in_closed_form(monkeypatch):
    drawn = []
    monkeypatch.setattr(venn, "_draw", lambda *parts: drawn.append(parts) or b"")
    venn.plan_venn(corrected()).draw("png")
    names, shares, title, note, _ = drawn[0]
    assert names[0] == "learned" and set(names) == {"learned", "Tip", "LP"} and "4 shots" in title
    found = {" ".join(sorted(subset)): share for subset, share in shares.items() if share}
    # images 1 (Tip, learned), 2 (Tip), 3 (Tip, LP), 4 (LP), 5 (learned)
    assert found == {"Tip learned": 12.5, "Tip": 12.5, "LP Tip": 12.5, "LP": 12.5, "learned": 12.5}
    assert "1 tasks, 1 seeds" not in note and "1 task, 1 seed" in note


def test_two_methods_have_two_circles_and_one_has_none():
    assert venn.plan_venn(corrected()[:3]).draw("png")
    assert venn.plan_venn(corrected()[:2]) is None
    assert venn.plan_venn([run(), run(label="other"), zero_shot()]) is None  # no images recorded


@pytest.mark.parametrize("count", [2, 3])
def test_numbers_lie_in_their_region(count):
    centres = venn._CENTRES[count]
    for own in range(1, 2**count):
        inside = [c for i, c in enumerate(centres) if own >> i & 1]
        outside = [c for i, c in enumerate(centres) if not own >> i & 1]
        place = venn._region(inside, outside)
        assert all(math.dist(place, c) < 0.9 for c in inside)
        assert all(math.dist(place, c) > 1.05 for c in outside)


def domains(**changes):
    def scored(accuracy):
        score = {"correct": round(1000 * accuracy), "total": 1000, "accuracy": accuracy}
        return {"out_of_domain": {"sketches": score}}

    return [
        zero_shot(accuracy={"a": 0.2}, metrics=scored(0.1)),
        *(run(accuracy={"a": 0.5}, seed=s, metrics=scored(0.2 * s)) for s in (0, 1)),
    ]


def test_out_of_domain_is_relative_to_zero_shot():
    found = domain_bars.domain_accuracies(domains())
    assert found.data_sets == ("a", "sketches") and found.zero_shot == ("zero-shot",)
    own, other = (found.difference("learned", 4, name) for name in found.data_sets)
    assert own.mean == pytest.approx(30) and own.error == 0
    assert other.mean == pytest.approx(0) and other.error == pytest.approx(10)
    alone = domain_bars.domain_accuracies(domains()[1:])
    assert alone.difference("learned", 4, "a").mean == pytest.approx(50)


# reports and commands


def test_a_report_has_the_figures_that_records_allow():
    records = [*corrected(), coefficients(label="matrix", right={"a": "11111111"})]
    files = build(records, "T")
    for name in ("venn-few-shot", "few-shot-curves-few-shot", "coefficient-heatmap-few-shot-matrix"):
        assert {f"{name}.png", f"{name}.svg"} <= files.keys()
    assert not [name for name in files if name.startswith(("budget", "random-bases", "validation"))]


def test_drawing_needs_no_torch():
    code = (
        "import sys; sys.path.insert(0, 'tests/helpers'); from made_records import run;"
        "from aniso.report import draw_figure; draw_figure('few-shot-curves', [run()]);"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "False", ran.stderr
