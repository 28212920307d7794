"""Captioned images: the layouts they are read from, and what is wrong with them."""

from __future__ import annotations

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from aniso.data.captions import caption_split, read_captions
from aniso.errors import InputError, UnsafeError, UsageError


def encoded(colour):
    out = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(out, "PNG")
    return out.getvalue()


def write_images(folder, *names):
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded((i * 40, 0, 0)))


def write_parquet(path, captions, **columns):
    images = [{"bytes": encoded((i, 0, 0)), "path": f"{i}.png"} for i in range(len(captions))]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "captions": captions, **columns}), path)


def test_parquet_with_several_captions_per_image(tmp_path):
    write_parquet(tmp_path / "set/train.parquet", [["a cat", "a small cat"], ["a dog"]], key=["x", "y"])
    found = read_captions(tmp_path / "set")
    assert found.name == "set"
    assert found.captions == (("a cat", "a small cat"), ("a dog",))
    split = caption_split([found])
    assert len(split) == 3
    assert [split.classes.names[label] for label in split.labels] == ["a cat", "a small cat", "a dog"]
    assert len(set(split.ids)) == 3
    assert split.open(0).getpixel((0, 0)) == split.open(1).getpixel((0, 0)) == (0, 0, 0)
    assert split.open(2).getpixel((0, 0)) == (1, 0, 0)


def test_one_caption_per_row_as_plain_text(tmp_path):
    write_parquet(tmp_path / "all.parquet", ["a cat", "a dog"])
    assert read_captions(tmp_path / "all.parquet").captions == (("a cat",), ("a dog",))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_tables_of_paths(tmp_path, suffix):
    write_images(tmp_path, "a.png", "b/c.png")
    rows = [("a.png", "a cat, asleep"), ("b/c.png", "a dog"), ("a.png", "another cat")]
    path = tmp_path / f"pairs.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"image": i, "caption": c}) + "\n" for i, c in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if suffix == "tsv" else ",")
            writer.writerows([("image", "caption"), *rows])
    found = read_captions(path)
    assert found.items.ids == ("a.png", "b/c.png")
    assert found.captions == (("a cat, asleep", "another cat"), ("a dog",))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_rows_that_a_table_holds_out_are_not_read(tmp_path, suffix):
    write_images(tmp_path, "a.png", "b.png", "c.png")
    rows = [("a.png", "a cat", "train"), ("b.png", "a dog", "test"), ("c.png", "a cow", "validation")]
    path, names = tmp_path / f"pairs.{suffix}", ("image", "caption", "split")
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        path.write_text("".join(";".join(row) + "\n" for row in (names, *rows)))
    assert read_captions(path).captions == (("a cat",),)


def test_a_classification_data_set_gets_prompts_as_captions(tmp_path):
    write_images(tmp_path / "pets", "train/cat/1.png", "train/cat/2.png", "train/dog_breed/1.png")
    found = read_captions(tmp_path / "pets")
    assert found.captions == (("a photo of a cat.",), ("a photo of a cat.",), ("a photo of a dog breed.",))
    again = read_captions(tmp_path / "pets")
    assert again.captions == found.captions


def test_a_source_that_is_given_twice_counts_twice(tmp_path):
    write_parquet(tmp_path / "all.parquet", ["a cat", "a dog"])
    one = read_captions(tmp_path / "all.parquet")
    split = caption_split([one, one])
    assert len(split) == 4
    assert len(split.classes) == 2
    assert len(set(split.ids)) == 4


@pytest.mark.parametrize("captions", [[["a cat"], []], [["a cat"], [" "]], [["a cat"], None]])
def test_empty_captions_are_named(tmp_path, captions):
    write_parquet(tmp_path / "all.parquet", pa.array(captions, pa.list_(pa.string())))
    with pytest.raises(InputError, match="1 images of all have an empty caption") as caught:
        read_captions(tmp_path / "all.parquet")
    assert caught.value.code == "DATA-CAPTION"
    assert "row 1" in str(caught.value.facts["found"])


def test_equal_captions_cannot_be_told_apart(tmp_path):
    write_parquet(tmp_path / "all.parquet", ["a cat", "a cat"])
    with pytest.raises(UsageError, match="cannot be compared"):
        caption_split([read_captions(tmp_path / "all.parquet")])


def test_held_out_files_are_refused(tmp_path):
    write_parquet(tmp_path / "test.parquet", ["a cat", "a dog"])
    with pytest.raises(UsageError, match="held out") as caught:
        read_captions(tmp_path / "test.parquet")
    assert caught.value.code == "LEARN-TEST"


def test_paths_that_lead_elsewhere_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    write_images(tmp_path, "secret.png")
    (tmp_path / "in/pairs.csv").write_text("image,caption\n../secret.png,a cat\n")
    with pytest.raises(UnsafeError, match="secret"):
        read_captions(tmp_path / "in/pairs.csv")


def test_an_image_that_cannot_be_read_is_named_when_it_is_opened(tmp_path):
    write_images(tmp_path, "a.png", "b.png")
    (tmp_path / "b.png").write_bytes(b"not an image")
    (tmp_path / "pairs.csv").write_text("image,caption\na.png,a cat\nb.png,a dog\n")
    split = caption_split([read_captions(tmp_path / "pairs.csv")])
    with pytest.raises(InputError, match=r"b\.png") as caught:
        split.open(1)
    assert caught.value.code == "IMAGE-READ"


def test_a_missing_image_is_named(tmp_path):
    (tmp_path / "pairs.csv").write_text("image,caption\na.png,a cat\n")
    with pytest.raises(InputError, match="1 files are missing") as caught:
        read_captions(tmp_path / "pairs.csv")
    assert caught.value.facts["missing"] == ["a.png"]


@pytest.mark.parametrize("text", ["image,caption\na.png\n", 'image,caption\n"a.png,a cat\n'])
def test_a_damaged_table_is_named(tmp_path, text):
    write_images(tmp_path, "a.png")
    (tmp_path / "pairs.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        read_captions(tmp_path / "pairs.csv")
    assert caught.value.code in ("DATA-FORMAT", "DATA-TEXT")


def test_what_holds_neither_captions_nor_classes(tmp_path):
    (tmp_path / "notes.csv").write_text("one,two\n1,2\n")
    with pytest.raises(InputError) as caught:
        read_captions(tmp_path / "notes.csv")
    assert caught.value.code == "DATA-FORMAT"
    with pytest.raises(InputError, match="there is no"):
        read_captions(tmp_path / "nowhere")
