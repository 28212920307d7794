"""Files of predictions: what is written is read back, one line per item, whatever names contain."""

from __future__ import annotations

import csv
import hashlib
import json

import pytest

from aniso.csv_text import csv_text
from aniso.prediction_files import (
    PredictedItem,
    PredictionFile,
    PredictionHeader,
    first_line,
    item_line,
    meta_path,
    meta_text,
    prediction_columns,
)

HOSTILE = [
    "a b.png",
    'quo"te,d;x.png',
    "=cmd|' /C calc'!A0",
    "li\nne.png",
    "\x1b[31mred",
    "é 日本 \udcff",
    "#1",
]


def header(**columns):
    return PredictionHeader(made_by="test", model="m", columns=prediction_columns(**columns))


def write(path, head, items, kind):
    lines = [first_line(head, kind), *(item_line(head, item, kind) for item in items)]
    path.write_bytes("".join(lines).encode())
    meta_path(path).write_text(meta_text(head, kind))
    return PredictionFile.open(path)


def test_columns_are_named_by_what_is_known():
    assert prediction_columns() == ["id", "prediction", "probability"]
    assert prediction_columns(top=2, task=True, text=True, label=True) == [
        *("task", "id", "text", "label"),
        *("prediction", "probability", "prediction_2", "probability_2"),
    ]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_items_are_read_back_in_order_one_line_each(tmp_path, kind):
    ranked = (("cat", 0.75), ("=dog", 0.25))
    items = [PredictedItem(name, ranked, text=name, label="cat", task="t") for name in HOSTILE]
    head = header(top=2, task=True, text=True, label=True)
    file = write(tmp_path / "p", head, items, kind)
    assert (file.header, file.kind, file.header.top) == (head, kind, 2)
    lines = (tmp_path / "p").read_bytes().count(b"\n")
    assert lines == len(items) + (1 if kind == "csv" else 0)
    shown = csv_text if kind == "csv" else str
    read = list(file.items())
    assert [item.id for item in read] == [shown(name) for name in HOSTILE]
    assert [item.text for item in read] == [shown(name) for name in HOSTILE]
    assert read[0].ranked == (("cat", 0.75), (shown("=dog"), 0.25))
    assert {(item.label, item.task, item.prediction, item.probability) for item in read} == {
        ("cat", "t", "cat", 0.75)
    }


def test_a_csv_file_is_a_plain_table_of_items(tmp_path):
    items = [PredictedItem('a,"b".png', (("cat", 0.5),)), PredictedItem("c.png", (("dog", 1.0),))]
    write(tmp_path / "p.csv", header(), items, "csv")
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "id,prediction,probability"
    with (tmp_path / "p.csv").open(newline="") as file:
        assert list(csv.DictReader(file, strict=True)) == [
            {"id": 'a,"b".png', "prediction": "cat", "probability": "0.5"},
            {"id": "c.png", "prediction": "dog", "probability": "1"},
        ]


def test_json_lines_hold_items_only(tmp_path):
    write(tmp_path / "p", header(), [PredictedItem("a.png", (("cat", 0.5),))], "jsonl")
    (line,) = (tmp_path / "p").read_text().splitlines()
    assert json.loads(line) == {
        "id": "a.png",
        "prediction": "cat",
        "predictions": [{"class": "cat", "probability": 0.5}],
    }


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_unreadable_item_has_a_row_without_a_prediction(tmp_path, kind):
    bad, good = PredictedItem("bad.png", error="damaged"), PredictedItem("b.png", (("cat", 1.0),))
    read = list(write(tmp_path / "p", header(top=3), [bad, good], kind).items())
    assert [(item.id, item.prediction, item.probability) for item in read] == [
        ("bad.png", "", 0.0),
        ("b.png", "cat", 1.0),
    ]
    assert read[0].error == ("damaged" if kind == "jsonl" else "")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_header_says_whether_probabilities_are_calibrated(kind):
    assert json.loads(meta_text(header(), kind))["header"]["calibration"] == "not calibrated"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_incomplete_last_line_is_left_out(tmp_path, kind):
    items = [PredictedItem(f"{i}.png", (("cat", 0.5),)) for i in range(3)]
    whole = write(tmp_path / "p", header(), items, kind).path.read_bytes()
    start = len(first_line(header(), kind).encode())
    for size in range(start, len(whole) + 1):
        (tmp_path / "p").write_bytes(whole[:size])
        found = list(PredictionFile.open(tmp_path / "p").items())
        assert [item.id for item in found] == [f"{i}.png" for i in range(whole[start:size].count(b"\n"))]
    for size in range(start):
        (tmp_path / "p").write_bytes(whole[:size])
        with pytest.raises(Exception, match="DATA-FORMAT"):
            PredictionFile.open(tmp_path / "p")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_complete_file_that_was_changed_is_refused(tmp_path, refused, kind):
    path = write(tmp_path / "p", header(), [PredictedItem("x", (("cat", 0.5),))], kind).path
    whole = path.read_bytes()
    meta_path(path).write_text(meta_text(header(), kind, hashlib.sha256(whole).hexdigest()))
    assert len(list(PredictionFile.open(path).items())) == 1
    path.write_bytes(whole.replace(b"cat", b"dog"))
    with refused("DATA-FORMAT", 3, "another content than when p.meta.json was written"):
        PredictionFile.open(path)


@pytest.mark.parametrize("content", [b"", b"mine\n", b"\xff\n", b"id,prediction\n"])
def test_other_files_are_refused(tmp_path, refused, content):
    (tmp_path / "p").write_bytes(content)
    with refused("DATA-FORMAT", 3, "p.meta.json: No such file"):
        PredictionFile.open(tmp_path / "p")
    meta_path(tmp_path / "p").write_text(meta_text(header(), "csv"))
    with refused("DATA-FORMAT", 3, "no file of predictions"):
        PredictionFile.open(tmp_path / "p")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b'{"format": "csv", "sha256": null, "header": 3}', b'{"x": ' * 9000, b"\xff"],
)
def test_damaged_headers_are_refused(tmp_path, refused, content):
    path = write(tmp_path / "p", header(), [PredictedItem("x", (("cat", 0.5),))], "csv").path
    meta_path(path).write_bytes(content)
    with refused("DATA-FORMAT", 3, "p.meta.json is no header"):
        PredictionFile.open(path)


@pytest.mark.parametrize("row", [b"a\n", b"a,cat,much\n", b'"a,cat,0.5\n', b"\xff,cat,0.5\n", b"a,b,1,2\n"])
def test_a_damaged_row_is_named(tmp_path, refused, row):
    path = write(tmp_path / "p", header(), [PredictedItem("x", (("cat", 0.5),))], "csv").path
    path.write_bytes(path.read_bytes() + row)
    with refused("DATA-FORMAT", 3, "item 2"):
        list(PredictionFile.open(path).items())
