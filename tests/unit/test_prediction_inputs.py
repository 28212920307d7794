"""Inputs of predictions: what arguments name, in which order, and what is wrong with them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types

import pictures
import pytest

from aniso.experiments.prediction.inputs import find_inputs


def ids(*arguments, column=None):
    return [item.id for item in find_inputs([str(a) for a in arguments], column).items()]


def texts(*arguments, column=None):
    found = find_inputs([str(a) for a in arguments], column)
    assert found.kind == "texts"
    return [item.text for item in found.items()]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("10.png", "9.png", "a/2.JPG", "a/1.png", "b/x.webp", ".hidden/y.png", "b/.DS_Store"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures.encoded(1))
    (tmp_path / "photos" / "notes.md").write_text("x")
    return tmp_path / "photos"


def test_a_folder_gives_its_images_at_any_depth_in_natural_order(photos):
    found = find_inputs(["photos"])
    expected = ["photos/9.png", "photos/10.png", "photos/a/1.png", "photos/a/2.JPG", "photos/b/x.webp"]
    assert [item.id for item in found.items()] == expected
    assert [item.path for item in found.items()] == expected  # again: it is listed anew
    assert (found.kind, found.total) == ("images", 5)
    assert found.notes == ("photos: ignored 1 files that are no images",)


def test_files_folders_and_patterns_are_taken_in_the_order_they_are_named(photos):
    assert ids("photos/10.png", "photos/a") == ["photos/10.png", "photos/a/1.png", "photos/a/2.JPG"]
    assert ids("photos/*.png") == ["photos/9.png", "photos/10.png"]
    assert ids("photos/**/*.png") == ["photos/9.png", "photos/10.png", "photos/a/1.png"]
    assert ids("photos/*") == ["photos/9.png", "photos/10.png"]  # neither folders nor notes.md
    assert ids(photos / "9.png") == [str(photos / "9.png")]


def test_a_file_whose_name_is_a_pattern_is_that_file(photos):
    (photos / "[1].png").write_bytes(pictures.encoded(1))
    assert ids("photos/[1].png") == ["photos/[1].png"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", 'id,text\n1,one\n2,"two, and\nmore"\n', ["one", "two, and\nmore"]),
        ("t.csv", "\ufeffReview;stars\nfine;3\n", ["fine"]),
        ("t.tsv", "a\tsentence\nx\tone, two\n", ["one, two"]),
        ("t.jsonl", '{"text": "one", "n": 1}\n\n{"text": "two"}\n', ["one", "two"]),
        ("t.txt", "one\n\n  two \n", ["one", "two"]),
    ],
)
def test_tables_and_lines_give_texts(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    assert texts(tmp_path / name) == expected


def test_texts_are_named_by_file_and_row(tmp_path):
    (tmp_path / "t.csv").write_text("text\none\ntwo\n")
    (tmp_path / "t.txt").write_text("one\n\ntwo\n")
    assert ids(tmp_path / "t.csv") == [f"{tmp_path}/t.csv:1", f"{tmp_path}/t.csv:2"]
    assert ids(tmp_path / "t.txt") == [f"{tmp_path}/t.txt:1", f"{tmp_path}/t.txt:3"]


def test_a_column_can_be_named(tmp_path):
    (tmp_path / "t.csv").write_text("text,title\na,b\n")
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "a", "title": "b"}) + "\n")
    for name in ("t.csv", "t.jsonl"):
        assert texts(tmp_path / name, column="title") == ["b"]


def test_a_table_of_paths_gives_images_relative_to_it(tmp_path):
    (tmp_path / "t.csv").write_text("file,label\na/1.png,x\n")
    (tmp_path / "u.csv").write_text("where,label\n/b.jpg,x\n")
    assert ids(tmp_path / "t.csv") == [f"{tmp_path}/a/1.png"]
    assert ids(tmp_path / "u.csv", column="where") == ["/b.jpg"]
    (tmp_path / "list.txt").write_text("one.png\ntwo.png\n")
    assert find_inputs([str(tmp_path / "list.txt")]).kind == "images"


def test_a_folder_of_tables_gives_their_texts(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "b.txt").write_text("two\n")
    (tmp_path / "t" / "a.csv").write_text("text\none\n")
    assert texts(tmp_path / "t") == ["one", "two"]


@pytest.mark.parametrize(("content", "kind"), [("\none\ntwo\n", "texts"), ("a.png\nb.png\n", "images")])
def test_standard_input_holds_a_text_or_a_path_per_line(monkeypatch, content, kind):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(content.encode())))
    found = find_inputs(["-"])
    assert (found.kind, found.total) == (kind, None)
    assert len(list(found.items())) == 2


def test_rows_are_read_when_they_are_asked_for(tmp_path):
    """A pipe that is never closed gives its first item."""
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    with os.fdopen(reader, "rb", buffering=0) as stream:
        from aniso.experiments.prediction.tables import TextLines

        items = TextLines(None, stream).items()
        assert [next(items).text, next(items).text] == ["one", "two"]
    os.close(writer)


# what is wrong


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("t.csv", "a,b\n1,2\n", "DATA-FORMAT", ("no column", "a, b", "--column a")),
        ("t.csv", "text,b\n1\n", "DATA-FORMAT", ("line 2", "1 cells")),
        ("t.csv", "text,b\none,1\n ,2\n", "DATA-FORMAT", ("line 3", "'text' is empty")),
        ("t.csv", 'text\n"x\n', "DATA-FORMAT", ("cannot be read",)),
        ("t.csv", "", "DATA-FORMAT", ("no column",)),
        ("t.csv", "text\n", "DATA-EMPTY", ("holds no items",)),
        ("t.jsonl", '{"text": "a"}\n[1]\n', "DATA-FORMAT", ("line 2", "not a JSON object")),
        ("t.jsonl", '{"text": "a"}\n{\n', "DATA-FORMAT", ("line 2", "not JSON")),
        ("t.jsonl", '{"text": "a"}\n{"text": 1}\n', "DATA-FORMAT", ("line 2", "no text 'text'")),
        ("t.txt", "", "DATA-EMPTY", ("holds no items",)),
        ("t.txt", "x" * (1 << 20) + "xx\n", "DATA-FORMAT", ("line 1", "longer than")),
        ("t.pdf", "x", "DATA-FORMAT", ("is no input", ".jsonl")),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, refused, name, content, code, words):
    (tmp_path / name).write_text(content)
    with refused(code, 3, name, *words):
        find_inputs([str(tmp_path / name)])


def test_bytes_that_are_no_text_are_named(tmp_path, refused):
    (tmp_path / "t.txt").write_bytes(b"one\n\xff\n")
    with refused("DATA-FORMAT", 3, "line 2", "UTF-8"):
        find_inputs([str(tmp_path / "t.txt")])


def test_missing_empty_and_mixed_inputs_are_named(photos, refused):
    with refused("DATA-MISSING", 3, "nowhere", "no such file"):
        find_inputs(["nowhere"])
    with refused("DATA-MISSING", 3, "*.gif", "matches no file"):
        find_inputs(["photos/*.gif"])
    (photos / "empty").mkdir()
    with refused("DATA-EMPTY", 3, "photos/empty", "no files"):
        find_inputs(["photos/empty"])
    (photos.parent / "t.txt").write_text("one\n")
    with refused("DATA-ITEM", 2, "images: photos", "texts: t.txt"):
        find_inputs(["photos", "t.txt"])
    with refused("USAGE", 2, "--column"):
        find_inputs(["photos"], "text")
    with refused("DATA-FORMAT", 3, "a column 'nope'"):
        (photos.parent / "t.csv").write_text("text\none\n")
        find_inputs(["t.csv"], "nope")


def test_a_link_out_of_its_folder_is_refused_and_one_within_is_followed(photos, refused):
    (photos / "in.png").symlink_to("9.png")
    assert "photos/in.png" in ids("photos")
    (photos.parent / "secret.png").write_bytes(pictures.encoded(3))
    (photos / "out.png").symlink_to("../secret.png")
    with refused("DATA-PATH", 3, "out.png"):
        find_inputs(["photos"])
    (photos / "out.png").unlink()
    (photos.parent / "gone.png").symlink_to("nothing.png")
    with refused("DATA-MISSING", 3, "leads nowhere"):
        find_inputs(["gone.png"])


def test_inputs_and_models_are_found_without_torch():
    code = (
        "import sys, aniso.experiments.prediction.inputs, aniso.experiments.prediction.model_files; "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "False", run.stderr
