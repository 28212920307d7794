"""Recipes of the paper: complete, equal to the printed numbers, and counted as the paper counts steps."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from aniso.data.card import known_card
from aniso.errors import UsageError
from aniso.experiments.paper.catalogue import bank_names, data_sets, recipe, recipe_files, recipes
from aniso.experiments.paper.cost import GFLOPS, Work, setting_work
from aniso.experiments.paper.description import compared_values, needs, parents, specs
from aniso.experiments.paper.recipe import BACKBONES, parse_recipes, spliced
from aniso.experiments.paper.template import Setup, counted_settings, recipe_cells
from aniso.experiments.recipes import setting
from aniso.experiments.strict_yaml import parse_yaml

PRINTED = """
tab:negation tab:addition tab:resultsTT tab:lora-as-tv tab:ft-hyperparameter tab:neg-hyperparameter
tab:detailed-negation tab:detailed-addition tab:resultsfewshots tab:comp-seq-joint tab:resultsdetailfewshots
tab:resultsdetailfewshotsbackbones tab:oodgen tab:resultsselection tab:apdx-lora-as-tv tab:resultsgfree
tab:resultspeftfs
fig:teaser fig:teaser-a fig:teaser-b fig:intrinsic-dim fig:intrinsic-a fig:intrinsic-b fig:coef-vis
fig:neg-vis-a fig:add-vis-a fig:add-vis-b fig:disentangle-error fig:disentangle-error-std
fig:disentangle-error-lin fig:disentangle-error-std-lrnd fig:disentangle-error-lin-lrnd fig:few_shots
fig:separateimprov fig:oodrobust fig:select fig:peftfull fig:dataset-dist fig:dataset-dist-a
fig:dataset-dist-b fig:lrnd-neg-coef fig:lrnd-neg-coef-std fig:lrnd-neg-coef-lin fig:more-neg-vis
fig:neg-vis-dtd-std fig:neg-vis-dtd-lin fig:neg-vis-eurosat-std fig:neg-vis-eurosat-lin
fig:neg-vis-gtsrb-std fig:neg-vis-gtsrb-lin fig:neg-vis-mnist-std fig:neg-vis-mnist-lin
fig:neg-vis-resisc45-std fig:neg-vis-resisc45-lin fig:neg-vis-sun397-std fig:neg-vis-sun397-lin
fig:neg-vis-svhn-std fig:neg-vis-svhn-lin fig:comp-against-full fig:lrnd-add-coef fig:lrnd-add-coef-std
fig:lrnd-add-coef-lin fig:pariwise
"""
LABELS = PRINTED.split()
RUNNABLE = [name for name, found in recipes().items() if found.entry.runnable]


def test_every_label_of_the_paper_has_an_entry():
    assert sorted(parents()) == sorted(LABELS)


def test_the_labels_are_those_of_the_papers_source(paper_source):
    printed = re.findall(r"\\label\{((?:tab|fig):[^}]*)\}", paper_source)
    assert sorted(printed) == sorted(LABELS)


def _block(source: str, label: str) -> str:
    """The table or figure around a label."""
    at = source.index(f"\\label{{{label}}}")
    kind = "table" if label.startswith("tab") else "figure"
    starts = [m.start() for m in re.finditer(rf"\\begin\{{(?:wrap)?{kind}\}}", source) if m.start() < at]
    return source[
        starts[-1] : source.index(f"{kind}}}", source.index("\\end{", at) if kind == "table" else at)
    ]


def _numbers(text: str) -> Counter[float]:
    plain = re.sub(r"\\(?:textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    return Counter(float(number) for number in re.findall(r"\d+(?:\.\d+)?", plain.replace(",", "")))


@pytest.mark.parametrize(
    "name", [n for n in recipes() if n.startswith("tab:") and recipes()[n].entry.published]
)
def test_published_numbers_are_printed_in_the_table(name, paper_source):
    printed = _numbers(_block(paper_source, name))
    own = [t for t in recipe(name).entry.published if t.title != "Numbers in the text"]
    carried = Counter(v for t in own for values in t.rows.values() for v in values if v is not None)
    assert carried - printed == Counter()


def test_numbers_in_the_text_are_in_the_text(paper_source):
    own = [t for r in recipes().values() for t in r.entry.published if t.title == "Numbers in the text"]
    values = [v for t in own for row in t.rows.values() for v in row if v is not None]
    assert len(values) == 4
    assert all(f"${value:.2f}$" in paper_source for value in values)


@pytest.mark.parametrize(
    ("table", "measure", "row", "means"),
    [
        ("tab:detailed-addition", "accuracy", "Std. aniso.", (84.08, 82.90, 91.36)),
        ("tab:detailed-addition", "accuracy", "Lin. aniso.", (82.02, None, None)),
        ("tab:detailed-negation", "target", "Std. aniso.", (19.42, 18.07, 17.75)),
    ],
)
def test_doubts_state_the_means_of_the_rows(table, measure, row, means):
    found = [t for t in recipe(table).entry.published if t.measure == measure]
    for own, mean in zip(found, means, strict=True):
        if mean is not None:
            assert fmean(own.rows[row][:-1]) == pytest.approx(mean, abs=0.006)
            doubts = " ".join(recipe(table).entry.doubts)
            assert f"{mean:.2f}" in doubts or own.rows[row][-1] == pytest.approx(mean, abs=0.006)


def test_hyper_parameters_of_the_paper_are_what_settings_resolve_to():
    found = [value for own in recipes().values() for value in compared_values(own.entry.values)]
    assert len(found) == 8 + 8 + 22 + 3
    assert [value for value in found if not value.same] == []


def test_a_hyper_parameter_that_differs_is_seen():
    (first, *_) = recipe("tab:neg-hyperparameter").entry.values
    other = first.model_copy(update={"published": {"cars": 0.1}})
    assert [value.same for value in compared_values([other])] == [False]


def test_data_sets_have_the_classes_of_their_cards():
    differ = {
        name: (own.classes, len(classes))
        for name, own in data_sets().items()
        if (classes := known_card(name).classes) and len(classes) != own.classes
    }
    assert differ == {}


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_recipe_has_checked_settings_on_every_backbone(name):
    found = recipe(name)
    for backbone in found.entry.backbones:
        assert backbone in BACKBONES
        counted = counted_settings(found, Setup(backbone))
        assert all(own.model == backbone for own, _ in counted)
        assert bool(counted) == (found.entry.kind != "analysis")
        assert set(needs(found, backbone).banks) <= {*bank_names()}


@pytest.mark.parametrize("name", RUNNABLE)
def test_published_rows_and_figures_are_labels_of_runs(name):
    found = recipe(name)
    labels = {variant["label"] for spec in specs(found) for variant in spec["variants"]}
    rows = {row for table in found.entry.published for row in table.rows}
    drawn = {label for use in found.entry.figures for label in use.variants}
    assert rows | drawn <= labels


def test_cells_with_the_same_runs_are_the_same_cells():
    one, two = (
        {cell.setting.id for own in recipe_cells(recipe(name), Setup("ViT-B-32")) for cell in own.cells}
        for name in ("fig:few_shots", "tab:resultsfewshots")
    )
    assert one < two


def test_single_vectors_leave_the_own_one_out():
    (own,) = recipe_cells(recipe("fig:pariwise"), Setup("ViT-B-32"))
    single = [cell.setting.spec() for cell in own.cells if cell.label == "One vector"]
    assert len(single) == 22 * 21
    assert all(spec["only"] != [spec["task"]] for spec in single)


def test_the_spec_of_a_recipe_does_not_repeat_defaults():
    (spec,) = specs(recipe("tab:addition"))
    assert spec["base"]["schedule"] == {"restarts": 0}


@pytest.mark.parametrize("name", ["tab:addition", "tab:negation", "tab:resultsfewshots", "tab:resultsTT"])
def test_recipes_have_no_safeguards_that_the_paper_does_not_have(name):
    for own in recipe_cells(recipe(name), Setup("ViT-B-32")):
        for cell in own.cells:
            spec = cell.setting.spec()
            assert not spec.get("limit_lr") and spec.get("schedule", {"restarts": 0})["restarts"] == 0


# steps and hours


@pytest.mark.parametrize(("target", "steps"), [("dtd", 120), ("mnist", 553), ("svhn", 158), ("cars", 260)])
def test_steps_of_negation_are_passes_over_the_target(target, steps):
    made = setting("negation", model="ViT-B-32", bank="standard", target=target, control="imagenet")
    assert setting_work(made, data_sets()).steps == steps


def test_addition_takes_480_steps():
    made = setting(
        "addition", model="ViT-B-32", bank="standard", tasks=list(recipe("tab:addition").file.tasks)
    )
    work = setting_work(made, data_sets())
    assert (work.steps, work.trained) == (480, 480 * 128)


@pytest.mark.parametrize(("model", "epochs"), [("ViT-B-32", 10), ("RN50", 30)])
def test_few_shot_steps_by_backbone(model, epochs):
    made = setting("few-shot", model=model, bank="standard", task="cars", shots=16)
    work = setting_work(made, data_sets())
    assert work.steps == epochs * 25  # 16 x 196 images in batches of 128
    assert work.passes == 3 * work.steps * 128 + data_sets()["cars"].test * 2  # the base is evaluated, too


def test_linearised_runs_count_twice_and_search_counts_21_scales():
    own = {"model": "ViT-B-32", "bank": "b", "target": "dtd", "control": "imagenet", "method": "search"}
    once = setting_work(setting("negation", **own, compare=False), data_sets())
    twice = setting_work(setting("negation", **own, compare=False, linearised=True), data_sets())
    assert once.passes == 21 * (376 + 5000) + 1880 + 50000
    assert twice.passes == 2 * once.passes


def test_hours_are_passes_times_operations_over_the_rate():
    work = Work(passes=3_600_000)
    assert work.hours("ViT-B-32", 10.0) == pytest.approx(GFLOPS["ViT-B-32"] / 10)
    assert work.hours("ViT-B-32", 20.0) == pytest.approx(GFLOPS["ViT-B-32"] / 20)
    assert (work + Work(1, 2, 3, 4)).times(2) == Work(2, 4, 7_200_006, 8)


def test_seeds_are_multiplied():
    counted = counted_settings(recipe("tab:resultsTT"), Setup("ViT-B-32"))
    (cells,) = recipe_cells(recipe("tab:resultsTT"), Setup("ViT-B-32"))
    assert sum(count for _, count in counted) == len(cells.cells) == 22 + 6 * 22 * 3


# files

GOOD = """schema: 1
experiment: x
tasks: [cars, dtd]
spec:
  base: { setting: addition, tasks: $tasks, bank: standard }
  variants:
    - label: ours
entries:
  - id: tab:x
    title: X
    backbones: [ViT-B-32]
    published:
      - backbone: ViT-B-32
        axis: task
        columns: [$tasks, mean]
        rows: { ours: [1.0, 2.0, 1.5] }
"""


def test_tasks_are_put_in_place():
    (found,) = parse_recipes(parse_yaml(GOOD, "x.yaml"))
    assert found.entry.published[0].columns == ("cars", "dtd", "mean")
    assert spliced({"a": "$tasks", "b": ["$tasks", 1]}, {"$tasks": [2, 3]}) == {"a": [2, 3], "b": [2, 3, 1]}


@pytest.mark.parametrize(
    ("old", "new", "mentions"),
    [
        ("title: X", "titel: X", ("line 10", "titel", "title")),
        ("[1.0, 2.0, 1.5]", "[1.0, 2.0]", ("line 13", "row 'ours' has 2 values for 3 columns")),
        ("backbones: [ViT-B-32]", "backbones: [ViT-B-31]", ("line 11", "ViT-B-32")),
        ("backbones: [ViT-B-32]", "runs: [{ variants: [other] }]\n    backbones: [ViT-B-32]", ("other",)),
        ("id: tab:x", "id: table:x", ("line 9",)),
        ("    backbones: [ViT-B-32]\n", "", ("tab:x has no backbones",)),
    ],
)
def test_mistakes_in_a_recipe_name_file_and_line(old, new, mentions):
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        parse_recipes(parse_yaml(GOOD.replace(old, new, 1), "x.yaml"))
    for text in ("x.yaml", *mentions):
        assert text in str(caught.value)


def test_a_mistake_in_a_setting_names_the_line_of_the_recipe():
    (found,) = parse_recipes(parse_yaml(GOOD.replace("bank: standard", "bnak: standard"), "x.yaml"))
    with pytest.raises(UsageError) as caught:
        recipe_cells(found, Setup("ViT-B-32"))
    assert all(text in str(caught.value) for text in ("x.yaml", "line 5", "bnak"))


def test_ids_are_unique_and_files_are_package_data():
    ids = [
        own.id for path in recipe_files() for own in parse_recipes(parse_yaml(path.read_text(), path.name))
    ]
    assert len(ids) == len(set(ids)) == len(recipes())
    assert all(Path(path).parent.name == "recipes" for path in recipe_files())


def test_a_part_finds_its_figure_and_an_unknown_name_is_refused(refused):
    assert recipe("fig:neg-vis-dtd-std").id == "fig:more-neg-vis"
    with refused("USAGE", 2, "tab:addition", "aniso paper ls"):
        recipe("tab:adition")
