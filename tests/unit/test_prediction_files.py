"""Files of predictions: what is written is read back, one line per item, whatever names contain."""

from __future__ import annotations

import csv

import pytest

from aniso.csv_text import csv_text
from aniso.prediction_files import (
    PredictedItem,
    PredictionFile,
    PredictionHeader,
    header_lines,
    item_line,
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
    lines = [header_lines(head, kind), *(item_line(head, item, kind) for item in items)]
    path.write_bytes("".join(lines).encode())
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
    assert lines == len(items) + (2 if kind == "csv" else 1)
    shown = csv_text if kind == "csv" else str
    read = list(file.items())
    assert [item.id for item in read] == [shown(name) for name in HOSTILE]
    assert [item.text for item in read] == [shown(name) for name in HOSTILE]
    assert read[0].ranked == (("cat", 0.75), (shown("=dog"), 0.25))
    assert {(item.label, item.task, item.prediction, item.probability) for item in read} == {
        ("cat", "t", "cat", 0.75)
    }


def test_a_csv_file_without_its_first_line_is_a_plain_table(tmp_path):
    write(tmp_path / "p.csv", header(), [PredictedItem("a.png", (("cat", 0.5),))], "csv")
    with (tmp_path / "p.csv").open() as file:
        next(file)
        assert list(csv.DictReader(file)) == [{"id": "a.png", "prediction": "cat", "probability": "0.5"}]


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
    assert '"calibration": "not calibrated"' in header_lines(header(), kind)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_incomplete_last_line_is_left_out(tmp_path, kind):
    items = [PredictedItem(f"{i}.png", (("cat", 0.5),)) for i in range(3)]
    whole = write(tmp_path / "p", header(), items, kind).path.read_bytes()
    start = len(header_lines(header(), kind).encode())
    for size in range(start, len(whole) + 1):
        (tmp_path / "p").write_bytes(whole[:size])
        found = list(PredictionFile.open(tmp_path / "p").items())
        assert [item.id for item in found] == [f"{i}.png" for i in range(whole[start:size].count(b"\n"))]
    for size in range(start):
        (tmp_path / "p").write_bytes(whole[:size])
        with pytest.raises(Exception, match="DATA-FORMAT"):
            PredictionFile.open(tmp_path / "p")


@pytest.mark.parametrize(
    "content",
    [b"", b"id,prediction\n", b"# {}\nid\n", b'{"header": 3}\n', b'{"x": ' * 9000, b"\xff\n", b"# [1]\nid\n"],
)
def test_other_files_are_refused(tmp_path, refused, content):
    (tmp_path / "p").write_bytes(content)
    with refused("DATA-FORMAT", 3, "no file of predictions"):
        PredictionFile.open(tmp_path / "p")


@pytest.mark.parametrize("row", [b"a\n", b"a,cat,much\n", b'"a,cat,0.5\n', b"\xff,cat,0.5\n", b"a,b,1,2\n"])
def test_a_damaged_row_is_named(tmp_path, refused, row):
    path = write(tmp_path / "p", header(), [PredictedItem("x", (("cat", 0.5),))], "csv").path
    path.write_bytes(path.read_bytes() + row)
    with refused("DATA-FORMAT", 3, "item 2"):
        list(PredictionFile.open(path).items())
