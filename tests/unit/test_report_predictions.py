"""Predictions in reports: counts in closed form, only those of the record beside them, bounded pages."""

from __future__ import annotations

import io
import json
import re

import pytest
import runs
from PIL import Image

from aniso.cli import main
from aniso.experiments.prediction.thumbnails import SIDE, error_items
from aniso.prediction_files import (
    PredictedItem,
    PredictionHeader,
    first_line,
    item_line,
    meta_path,
    meta_text,
    prediction_columns,
)
from aniso.record_files import read_record
from aniso.report import build, class_table, confusion_table, run_predictions, table
from aniso.report.predictions import MOST_BYTES, MOST_ERRORS

ITEMS = [
    *(PredictedItem(f"a{i}", (("cat", 0.9),), label="cat") for i in range(3)),
    PredictedItem("b0", (("dog", 0.6),), label="cat"),
    PredictedItem("b1", (("dog", 0.8),), label="cat"),
    PredictedItem("c0", (("<b>bird", 0.7),), label="dog"),
    PredictedItem("c1", (("dog", 0.7),), label="dog"),
]


def write_run(directory, items=ITEMS, *, record="r1", correct=None, label="coefficients", **spec):
    directory.mkdir()
    right = sum(item.label == item.prediction for item in items)
    right = right if correct is None else correct
    score = {"correct": right, "total": len(items), "accuracy": right / len(items)}
    content = {
        "schema": 1,
        "id": record,
        "experiment": "few-shot",
        "label": label,
        "spec": {"setting": "few-shot", "model": "m", "method": label, "task": "pets", "shots": 4, **spec},
        "metrics": {"accuracy": {"pets": score}},
    }
    (directory / "record.json").write_text(json.dumps(content))
    header = PredictionHeader(made_by="t", model="m", record="r1", columns=prediction_columns(label=True))
    lines = [first_line(header, "csv"), *(item_line(header, item, "csv") for item in items)]
    (directory / "predictions.csv").write_text("".join(lines))
    meta_path(directory / "predictions.csv").write_text(meta_text(header, "csv"))
    return read_record(directory / "record.json")


def test_accuracies_by_class_and_confusions_are_counted(tmp_path):
    record = write_run(tmp_path / "run")
    (found,), notes = run_predictions([tmp_path], [record])
    assert notes == [] and found.heading == "run: pets"
    rows = {row[0]: [str(cell) for cell in row[1:]] for row in class_table(found).rows}
    assert rows == {"cat": ["5", "60.0", "dog (2)"], "dog": ["2", "50.0", "<b>bird (1)"]}
    assert [row[0] for row in class_table(found).rows] == ["dog", "cat"]  # the worst first
    matrix = confusion_table(found)
    assert matrix.columns == ("label", "cat", "dog", "<b>bird")
    assert [[str(cell) for cell in row] for row in matrix.rows] == [
        ["cat", "3", "2", "0"],
        ["dog", "0", "1", "1"],
        ["<b>bird", "0", "0", "0"],
    ]
    assert [item.id for item in found.errors] == ["b1", "c0", "b0"]  # by the probability of the wrong class


def test_of_many_classes_the_most_frequent_confusions_are_listed(tmp_path):
    items = [PredictedItem(f"{i}", ((f"{(i + 1) % 40}", 0.5),), label=f"{i % 40}") for i in range(80)]
    items += [PredictedItem("x", (("7", 0.5),), label="3")] * 5
    record = write_run(tmp_path / "run", items)
    (found,), _ = run_predictions([tmp_path / "run"], [record])
    shown = confusion_table(found)
    assert shown.columns == ("label", "prediction", "items") and len(shown.rows) == 30
    assert [str(cell) for cell in shown.rows[0]] == ["3", "7", "5"]
    assert len(found.errors) == MOST_ERRORS


def test_predictions_that_do_not_belong_to_the_record_are_left_out_by_name(tmp_path):
    other = write_run(tmp_path / "other", record="r2")
    wrong = write_run(tmp_path / "wrong", correct=1)
    (tmp_path / "plain").mkdir()
    found, notes = run_predictions([tmp_path], [other, wrong])
    assert found == []
    assert "another run" in notes[0] and "other" in notes[0]
    assert "accuracy on pets" in notes[1] and "wrong" in notes[1]
    damaged = tmp_path / "wrong" / "predictions.csv"
    damaged.write_text("x")
    assert "no file of predictions" in run_predictions([tmp_path / "wrong"], [wrong])[1][0]


def test_the_page_shows_counts_and_errors_as_plain_text(tmp_path):
    record = write_run(tmp_path / "run")
    found, _ = run_predictions([tmp_path], [record])
    place = tmp_path / "run"
    errors = {(place, "pets", "b1"): b"\xff\xd8jpeg", (place, "pets", "c0"): "<script>alert()</script>"}
    files = build([record], figures=False, predictions=found, errors=errors)
    page = files["index.html"].decode()
    assert "run: pets: most confident errors" in page and "2 of 3 errors" in page
    assert page.count("data:image/jpeg;base64,") == 1
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>bird" not in page
    assert {"classes-run-pets.csv", "confusion-run-pets.md"} <= files.keys()
    assert "dog 80% (is cat): b1" in files["report.md"].decode()


def test_a_confusion_matrix_is_numbered_and_shaded_by_the_share_of_its_row(tmp_path):
    record = write_run(tmp_path / "run")
    found, _ = run_predictions([tmp_path], [record])
    page = build([record], figures=False, predictions=found, errors={})["index.html"].decode()
    head, *rows = re.findall(r"<tr>.*?</tr>", page[page.index('class="matrix"') :], re.DOTALL)[:4]
    assert re.findall(r'<abbr title="([^"]*)">(\d)</abbr>', head) == [
        *(("cat", "1"), ("dog", "2"), ("&lt;b&gt;bird", "3"))
    ]
    cells = [re.findall(r'<td class="n (\w+)">([^<]*)</td>', row) for row in rows]
    assert cells == [
        [("right5", "3"), ("wrong3", "2"), ("zero", "·")],  # 3 and 2 of 5 items, in eighths
        [("zero", "·"), ("right4", "1"), ("wrong4", "1")],
        [("zero", "·")] * 3,
    ]
    assert 'style="' not in page  # the policy of the page forbids it
    assert all(f".{name}5 {{" in page for name in ("right", "wrong"))


def test_a_title_that_repeats_the_heading_is_shown_once(tmp_path):
    record = write_run(tmp_path / "run")
    found, _ = run_predictions([tmp_path], [record])
    page = build([record], figures=False, predictions=found, errors={})["index.html"].decode()
    assert page.count("run: pets: accuracy by class, %") == 2  # in the list of contents, and as a heading


def test_images_of_a_page_are_bounded(tmp_path):
    record = write_run(tmp_path / "run")
    found, _ = run_predictions([tmp_path], [record])
    large = {(tmp_path / "run", "pets", name): b"x" * (MOST_BYTES // 2) for name in ("b1", "c0", "b0")}
    page = build([record], figures=False, predictions=found, errors=large)["index.html"].decode()
    assert page.count("data:image/jpeg") == 2 and len(page) < 1.5 * MOST_BYTES


@pytest.mark.parametrize(("head", "name"), [(None, "zero-shot"), ("tip", "tip on the base")])
def test_a_run_without_a_label_of_its_own_is_named_by_what_predicts(tmp_path, head, name):
    record = write_run(tmp_path / "run", label="none", **({} if head is None else {"head": head}))
    assert [row[0] for row in table([record]).rows] == [name]


def test_thumbnails_come_from_the_test_items_of_a_run(tmp_path):
    shelf = runs.shelf(tmp_path / "shelf")
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2, "--method", "none")
    out = tmp_path / "run"
    assert main([str(word) for word in ("fit", "few-shot", *given, "-o", out)]) == 0
    items, note = error_items(out, "cars", ["test/blue/0.png", "test/blue/gone.png"])
    assert note == "" and list(items) == ["test/blue/0.png"]
    assert max(Image.open(io.BytesIO(items["test/blue/0.png"])).size) <= SIDE
    assert error_items(out, "other", ["x"]) == ({}, "no gallery for run: its spec names no data of other")
    words = ("report", out, "-o", tmp_path / "page", "--no-figures")
    assert main([str(word) for word in words]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert len(re.findall("data:image/jpeg", page)) == 6  # all blue ones are taken for red
    (shelf.data / "cars").rename(tmp_path / "moved")
    items, note = error_items(out, "cars", ["test/blue/0.png"])
    assert items == {} and note.startswith("no gallery for run")
    assert main([str(word) for word in (*words, "--overwrite")]) == 0
