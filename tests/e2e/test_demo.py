"""The tour, shortened: the same commands on fewer images for fewer epochs."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from aniso.data import load_task
from aniso.demo import images, steps
from aniso.models import load_model


@pytest.fixture
def short(monkeypatch):
    import aniso.demo.tour as module

    monkeypatch.setattr(images, "EACH", 14)
    once = ("--epochs", "1", "--lr", "0.1", "--batch-size", "24", "--min-steps-per-epoch", "2")
    monkeypatch.setattr(module, "_FEW", ("--view", "train", *once))
    monkeypatch.setattr(module, "_JOINT", once)
    monkeypatch.setattr(module, "_AWAY", once)
    monkeypatch.setattr(module, "_EPOCHS", dict.fromkeys(module._EPOCHS, "1"))


def test_the_tour_runs_and_its_page_and_files_are_there(short, aniso, tmp_path):
    ran = aniso("demo", "-o", tmp_path / "tour", "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert set(said["tables"]) == {"Digits", "Three tasks", "Digits negated"}
    guessing = said["tables"]["Digits negated"][-1]
    expected = {"": "guessing", "digits (lower is better)": "10.0%", "colours (control)": "12.5%"}
    assert guessing == expected
    assert ran.err.count("$ aniso ") == len(steps()) == 11
    page = (tmp_path / "tour/index.html").read_text()
    assert page.count("<img ") == 11  # three of coefficients for each setting, two of bars
    assert "default-src 'none'" in page and page.count("<script") == page.count('<script type="module">') == 1
    for step in steps():
        assert step.command[0] in page
    record = json.loads((tmp_path / "tour/addition/record.json").read_text())
    assert str(tmp_path) not in json.dumps(record)


def test_what_the_tour_bakes_is_a_model_like_any_other(short, aniso, tmp_path):
    assert aniso("demo", "-o", tmp_path / "tour").code == 0
    ran = aniso("demo", "-o", tmp_path / "tour")
    assert ran.code == 2 and "OUT-EXISTS" in ran.err
    baked = load_model(tmp_path / "tour/all-in-one")
    assert baked.has_text
    card = (tmp_path / "tour/all-in-one/README.md").read_text()
    assert re.search(r"\| colours \| weights.safetensors \|", card) and "aniso" in card
    record = json.loads((tmp_path / "tour/addition/record.json").read_text())
    ran = aniso("eval", tmp_path / "tour/all-in-one", "--task", tmp_path / "tour/data/colours", "--json")
    (evaluated,) = json.loads(ran.out)
    assert evaluated["accuracy"] == pytest.approx(record["metrics"]["accuracy"]["colours"]["accuracy"])


def test_a_directory_that_is_not_the_tours_is_never_removed(aniso, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    ran = aniso("demo", "-o", tmp_path / "mine", "--overwrite")
    assert ran.code == 2 and (tmp_path / "mine/thesis.txt").exists()


def test_images_are_the_same_every_time_and_make_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "EACH", 10)
    for name in ("a", "b"):
        images.write_tasks(tmp_path / name, lambda *progress: None)
    first = sorted((tmp_path / "a").rglob("*.png"))
    assert len(first) == 10 * (10 + 6 + 8)
    for path in first:
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
        assert Image.open(path).size == (64, 64)
    task = load_task(tmp_path / "a/digits")
    assert task.classes.names == tuple("0123456789") and "handwritten" in task.classes.prompts[1]


def test_digits_are_white_on_black_and_differ_within_a_class():
    digits = images._digits()
    zero = [digits["0"](i).convert("L") for i in range(20)]
    assert len({picture.tobytes() for picture in zero}) > 15
    assert all(picture.getpixel((0, 0)) < 128 for picture in zero)
    assert all(picture.getextrema()[1] > 180 for picture in zero)


def test_every_step_is_a_command_that_exists(aniso):
    for step in steps():
        ran = aniso(*step.command[: 2 if step.command[0] in ("fit", "search", "bank") else 1], "--help")
        assert ran.code == 0
        for word in step.command:
            assert not word.startswith("--") or word in ran.out, (step.command, word)
