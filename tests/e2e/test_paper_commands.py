"""``aniso paper``: every id is listed and shown, runs scaled down, resumes, and is reported."""

from __future__ import annotations

import json

import pytest

from aniso.experiments.paper.catalogue import recipes

RUNNABLE = [name for name, found in recipes().items() if found.entry.runnable]


@pytest.fixture(scope="session")
def smoke_directory(tmp_path_factory):
    """One directory for all smoke runs: recipes with the same runs share them."""
    return tmp_path_factory.mktemp("paper")


@pytest.mark.smoke
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_recipe_runs_scaled_down(name, aniso, smoke_directory):
    ran = aniso("paper", "run", name, "--smoke", "-o", smoke_directory, "--json")
    assert ran.code == 0, ran.err
    reported = aniso("paper", "report", name, "--smoke", "-o", smoke_directory, "--json")
    assert reported.code == 0, reported.err
    found = json.loads(reported.out)
    measured = {number["row"] for number in found["numbers"] if number["measured"] is not None}
    first = recipes()[name].entry.backbones[0]
    rows = {r for t in recipes()[name].entry.published if t.backbone == first for r in t.rows}
    assert measured == rows
    again = aniso("paper", "run", name, "--smoke", "-o", smoke_directory, "--plan", "--json")
    assert json.loads(again.out)["todo"] == 0


def test_all_ids_are_listed_with_what_they_need(done):
    listed = {entry["id"]: entry for entry in done("paper", "ls")}
    assert listed.keys() == recipes().keys()
    added = listed["tab:addition"]["needs"]
    assert [own["backbone"] for own in added] == ["ViT-B-32", "ViT-B-16", "ViT-L-14"]
    assert added[0]["banks"] == ["linearised", "standard"]
    assert len(added[0]["data_sets"]) == 8
    assert 0 < added[0]["gpu_hours"] < added[2]["gpu_hours"]
    assert "TFLOP/s, assumed" in added[0]["basis"]
    assert listed["fig:teaser"]["needs"] == []
    assert listed["tab:lora-as-tv"]["missing"]


def test_every_id_is_shown(aniso):
    for name, found in recipes().items():
        shown = aniso("paper", "show", name)
        assert shown.code == 0, shown.err
        assert found.entry.title in shown.out
        assert all(doubt in shown.out for doubt in found.entry.doubts)
        command = f"aniso paper run {name} --backbone" if found.entry.runnable else "nothing to run"
        assert command in shown.out


def test_a_recipe_is_shown_with_spec_numbers_and_hyper_parameters(done):
    shown = done("paper", "show", "tab:addition")
    assert shown["specs"][0]["base"]["model"] == "ViT-B-32"
    assert shown["published"][0]["rows"]["Std. aniso."] == [84.98, 93.79]
    values = done("paper", "show", "tab:neg-hyperparameter")["values"]
    assert len(values) == 16
    assert all(value["same"] for value in values)


def test_a_figure_of_two_experiments_runs_resumes_and_is_reported(aniso, done, tmp_path):
    out = tmp_path / "results"
    planned = done("paper", "run", "fig:coef-vis", "--smoke", "-o", out, "--plan")
    assert planned["cells"] == {"negation": {"missing": 1}, "addition": {"missing": 1}}
    assert not out.exists()
    first = aniso("paper", "run", "fig:coef-vis", "--smoke", "-o", out)
    assert first.code == 0, first.err
    assert first.err.count("recorded") == 2
    second = aniso("paper", "run", "fig:coef-vis", "--smoke", "-o", out)
    assert second.code == 0
    assert "recorded" not in second.err
    (out / "smoke-data/cars/val/red/00.png").write_bytes(
        (out / "smoke-data/cars/val/blue/00.png").read_bytes()
    )
    changed = aniso("paper", "run", "fig:coef-vis", "--smoke", "-o", out)
    assert (changed.code, "RUN-CHANGED" in changed.err) == (3, True)
    pytest.importorskip("matplotlib")
    files = done("paper", "report", "fig:coef-vis", "--smoke", "-o", out)["files"]
    assert {f"fig-{part}-mini.png" for part in ("neg-vis-a", "add-vis-a", "add-vis-b")} <= {*files}
    assert {path.name for path in (out / "report").iterdir()} == {*files}


def test_missing_banks_are_made_and_made_once(aniso, done, tmp_path):
    made = aniso("paper", "run", "bank:lora4", "--smoke", "-o", tmp_path)
    assert made.code == 0, made.err
    assert made.err.count("recorded") == 2
    assert done("paper", "run", "bank:lora4", "--smoke", "-o", tmp_path, "--plan")["todo"] == 0
    names = {vector["name"] for vector in done("bank", "ls", tmp_path / "banks/mini/lora4")["vectors"]}
    assert names == {"cars", "mnist"}


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("run", "tab:additon"), "tab:addition"),
        (("run", "tab:addition", "--backbone", "RN50"), "ViT-L-14"),
        (("run", "tab:neg-hyperparameter"), "nothing to run"),
        (("report", "tab:addition", "-o", "nowhere"), "no results of tab:addition"),
    ],
)
def test_mistakes_are_refused(aniso, arguments, mentions):
    ran = aniso("paper", *arguments)
    assert ran.code == 2
    assert mentions in ran.err


def test_a_data_directory_that_does_not_exist_is_refused(aniso, tmp_path):
    ran = aniso("paper", "run", "tab:addition", "--data", tmp_path / "none", "-o", tmp_path / "out")
    assert (ran.code, "DATA-MISSING" in ran.err) == (3, True)
    assert not (tmp_path / "out").exists()


def test_a_full_plan_needs_no_data(done, tmp_path):
    planned = done("paper", "run", "tab:addition", "-o", tmp_path, "--plan")
    assert {own["bank"]: len(own["tasks"]) for own in planned["banks"]} == {"standard": 8, "linearised": 8}
    assert planned["cells"] == {"addition": {"missing": 7}}
    assert planned["todo"] == 16 + 7
    few = done("paper", "run", "tab:resultsTT", "-o", tmp_path, "--plan")
    assert {own["bank"]: len(own["tasks"]) for own in few["banks"]} == {"standard": 22}
