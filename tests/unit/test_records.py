"""Records in one file: merging, reading, and what a crash on the way may leave."""

from __future__ import annotations

import json

import pytest

from aniso.record_files import RECORDS, RecordStore, read_record, read_records


def content(number: int, accuracy: float = 0.5) -> dict:
    score = {"correct": round(100 * accuracy), "total": 100, "accuracy": accuracy}
    spec = {"setting": "few-shot", "model": "mini", "method": "coefficients", "task": "cats", "shots": 4}
    return {
        "schema": 1,
        "id": f"{number:064x}",
        "experiment": "cats",
        "label": "learned",
        "spec": {**spec, "seed": number},
        "metrics": {"accuracy": {"cats": score}},
    }


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_loose_records_are_merged_sorted_by_id_and_replace_older_ones(tmp_path):
    write(tmp_path / RECORDS, content(1), content(3))
    loose = [write(tmp_path / "b.json", content(2)), write(tmp_path / "c.json", content(3, 0.25))]
    store = RecordStore(tmp_path)
    text = store.merged(loose)
    found = [json.loads(line) for line in text.splitlines()]
    assert found == [content(1), content(2), content(3, 0.25)]
    (tmp_path / RECORDS).write_text(text)
    assert RecordStore(tmp_path).merged([]) == text


def test_files_that_were_merged_but_not_yet_removed_count_once(tmp_path):
    write(tmp_path / RECORDS, content(1), content(2))
    write(tmp_path / "b.json", content(2))
    assert len(read_records([tmp_path])) == 2


def test_a_bad_line_is_named_with_its_number(tmp_path, refused):
    path = write(tmp_path / RECORDS, content(1))
    path.write_text(path.read_text() + "{}\n")
    with refused("RECORD", 3, "records.jsonl, line 2"):
        read_records([tmp_path])


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json"])
def test_what_is_no_record_is_refused(tmp_path, refused, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with refused("RECORD", 3, "a.json"):
        read_record(path)


def test_what_a_record_does_not_say_is_not_written(tmp_path):
    record = read_record(write(tmp_path / "a.json", content(7)))
    assert record.content() == content(7)
