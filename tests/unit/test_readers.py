"""Readers: every layout on disk, made here in small, gives the same pictures and classes as its own tools."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import multiprocessing
import pickle
import struct
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torchvision import datasets
from watch import contents

from aniso.data.part import Reading
from aniso.data.reader import Reader
from aniso.data.readers import fetch, parquet_images, read, recognise
from aniso.data.readers import parquet as parquet_reader
from aniso.data.readers.naming import part_of_file
from aniso.data.readers.tar_index import members
from aniso.errors import InputError
from aniso.item_files import natural
from aniso.registry import READERS
from aniso.weights.files import RawFile

# pictures, each of a colour of its own


def pixels(number: int, size: int = 4) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)


def encoded(number: int, kind: str = "PNG", size: int = 4) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(number, size)).save(out, kind)
    return out.getvalue()


def picture(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {".jpg": "JPEG", ".jpeg": "JPEG", ".ppm": "PPM"}
    path.write_bytes(encoded(number, kinds.get(path.suffix.lower(), "PNG")))
    return path


def text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def table(path: Path, numbers, labels, keys=None, metadata=None, group=None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": encoded(n), "path": f"{n}.png"} for n in numbers]
    columns = {
        "image": pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        "label": labels if isinstance(labels, pa.Array) else pa.array(labels),
    }
    if keys is not None:
        columns["key"] = pa.array(keys)
    made = pa.table(columns)
    pq.write_table(made.replace_schema_metadata(metadata) if metadata else made, path, row_group_size=group)
    return path


def archive(path: Path, files: dict[str, bytes], kind: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def shown(reading) -> dict[str, list[tuple[str, str]]]:
    """For every part what its pictures are called and what they show."""
    return {
        part: [(id_, found.classes[code]) for id_, code in zip(found.items.ids, found.codes, strict=True)]
        for part, found in reading.parts.items()
    }


# every layout there is a reader for


def folder(root, patch):
    for i, name in enumerate(["train/cat/1.png", "train/dog/deep/2.PNG", "val/cat/3.jpg", "test/dog/4.png"]):
        picture(root / name, i)
    return {}


def folder_parts(root, patch):
    picture(root / "seen/a/1.png", 1)
    picture(root / "seen/b/1.png", 3)
    picture(root / "unseen/x/a/1.png", 2)
    return {"parts": {"train": "seen", "test": "unseen/x"}}


def folder_all(root, patch):
    picture(root / "cat/1.png", 1)
    picture(root / "dog/1.png", 2)
    return {}


def parquet(root, patch):
    table(root / "train-00000-of-00002.parquet", [1, 2, 3], [0, 1, 0], group=2)
    table(root / "train-00001-of-00002.parquet", [4], [1])
    table(root / "validation-00000-of-00001.parquet", [5], [0])
    text(root / "card.json", json.dumps({"classes": ["cat", "dog"], "prompts": ["a {}."]}))
    return {}


def csv_file(root, patch):
    for i in range(4):
        picture(root / f"pictures/{i}.png", i)
    rows = ["path,label,split", *(f"pictures/{i}.png,{'cat' if i % 2 else 'dog'},train" for i in range(3))]
    text(root / "all.csv", "\n".join([*rows, "pictures/3.png,cat,Valid"]))
    return {}


def csv_files(root, patch):
    for i, part in enumerate(("train", "train", "test")):
        picture(root / f"{part}/{i}.png", i)
    text(root / "train.csv", "filename;class;size\ntrain/0.png;b;4\ntrain/1.png;a;4\n")
    text(root / "test.csv", "filename;class;size\ntest/2.png;a;4\n")
    return {}


def webdataset(root, patch):
    first = {"0001.png": encoded(1), "0001.cls": b"0", "0002.jpg": encoded(2, "JPEG"), "0002.cls": b"1\n"}
    archive(root / "train-000.tar", first)
    archive(root / "train-001.tar", {"d/0001.png": encoded(3), "d/0001.json": b'{"label": 1}'})
    text(root / "classes.txt", "cat\ndog\n")
    archive(root / "test-000.tar", {"0001.txt": b"1", "0001.webp": encoded(4, "WEBP")})
    return {}


def lists(root, patch):
    names = ["a b/1.jpg", "a b/2.jpg", "c/3.jpg", "golf_course/golf_course_1.jpg", "pier_7.jpg"]
    for i, name in enumerate(names):
        picture(root / "pictures" / name, i)
    text(root / "train.txt", "a b/1.jpg\nc/3.jpg\n\ngolf_course_1.jpg\npier_7.jpg\n")
    text(root / "sets/test.txt", "a b/2.jpg c\n")
    return {"images": "pictures", "parts": {"train": "train.txt", "test": "sets/test.txt"}}


def coop(root, patch):
    for i in range(3):
        picture(root / f"pics/{i}.jpg", i)
    split = {"train": [["0.jpg", 1, "ant"], ["1.jpg", 0, "zebra"]], "val": [], "test": [["2.jpg", 1, "ant"]]}
    text(root / "split_zhou.json", json.dumps(split))
    return {"images": "pics", "file": "split_zhou.json", "parts": ["train", "test"]}


def cub(root, patch):
    base = root / "CUB_200_2011"
    names = ["001.Albatross/a_1.jpg", "002.Auk/b_1.jpg", "001.Albatross/a_2.jpg"]
    for i, name in enumerate(names):
        picture(base / "images" / name, i)
    text(base / "images.txt", "".join(f"{i} {name}\n" for i, name in enumerate(names, 1)))
    text(base / "classes.txt", "1 001.Albatross\n2 002.Auk\n")
    text(base / "image_class_labels.txt", "1 1\n2 2\n3 1\n")
    text(base / "train_test_split.txt", "1 1\n2 1\n3 0\n")
    return {"images": "CUB_200_2011"}


def annotation(*objects):
    inner = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{box[0]}</xmin>"
        f"<ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
        for name, difficult, box in objects
    )
    return f"<annotation><size><width>4</width></size>{inner}</annotation>"


def voc(root, patch):
    base = root / "VOCdevkit/VOC2007"
    for name, items in {
        "000012": [("car", 0, (1, 1, 2, 3)), ("dog", 1, (1, 1, 4, 4)), ("dog", 0, (2.0, 2, 4, 4))],
        "000017": [("dog", 0, (1, 1, 4, 4))],
    }.items():
        picture(base / f"JPEGImages/{name}.jpg", int(name))
        text(base / f"Annotations/{name}.xml", annotation(*items))
    text(base / "ImageSets/Main/train.txt", "000012\n")
    text(base / "ImageSets/Main/test.txt", "000017\n")
    return {"parts": {"train": "train", "test": "test"}, "year": "2007"}


# layouts of torchvision


def idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + shape + values.tobytes())


def mnist(root, patch, name="MNIST"):
    for i, part in enumerate(("train", "t10k")):
        idx(
            root / name / f"raw/{part}-images-idx3-ubyte",
            np.stack([pixels(2 * i + k)[..., 0] for k in (0, 1)]),
        )
        idx(root / name / f"raw/{part}-labels-idx1-ubyte", np.array([3, i], dtype=np.uint8))
    return {"dataset": name, "parts": {"train": {"train": True}, "test": {"train": False}}}


def fashion(root, patch):
    return mnist(root, patch, "FashionMNIST")


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def cifar(root, patch, kind=datasets.CIFAR10, labels="labels"):
    base = root / kind.base_folder
    base.mkdir(parents=True)
    for lists_ in ("train_list", "test_list"):
        made = []
        for i, (name, _) in enumerate(getattr(kind, lists_)):
            rows = np.stack([pixels(len(name) + i, 32).transpose(2, 0, 1).reshape(-1)])
            (base / name).write_bytes(pickle.dumps({"data": rows, labels: [i % 2]}, protocol=2))
            made.append([name, md5(base / name)])
        patch.setattr(kind, lists_, made)
    (base / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: ["cat", "dog"]}, protocol=2))
    patch.setattr(kind, "meta", {**kind.meta, "md5": md5(base / kind.meta["filename"])})
    return {"dataset": kind.__name__, "parts": {"train": {"train": True}, "test": {"train": False}}}


def cifar100(root, patch):
    return cifar(root, patch, datasets.CIFAR100, "fine_labels")


def mat(patch):
    """scipy's writer, or, where scipy is not installed, a stand-in for its reader and writer."""
    if importlib.util.find_spec("scipy"):
        from scipy.io import savemat

        return savemat
    kept = {}
    fake, package = types.ModuleType("scipy.io"), types.ModuleType("scipy")

    def savemat(path, values):
        Path(path).write_bytes(repr(sorted(values)).encode())
        kept[str(path)] = values

    fake.loadmat = lambda path, squeeze_me=False: kept[str(path)]
    package.io = fake
    patch.setitem(sys.modules, "scipy", package)
    patch.setitem(sys.modules, "scipy.io", fake)
    return savemat


def svhn(root, patch):
    root.mkdir()
    save = mat(patch)
    known = {}
    for i, part in enumerate(("train", "test")):
        path = root / f"{part}_32x32.mat"
        stack = np.stack([pixels(i, 32), pixels(i + 5, 32)], axis=3)
        save(path, {"X": stack, "y": np.array([[10], [7]], dtype=np.uint8)})
        known[part] = ["", path.name, md5(path)]
    patch.setattr(datasets.SVHN, "split_list", known)
    return {"dataset": "SVHN", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def stl10(root, patch):
    base = root / "stl10_binary"
    base.mkdir(parents=True)
    for i, part in enumerate(("train", "test", "unlabeled")):
        (base / f"{part}_X.bin").write_bytes(pixels(i, 96).transpose(2, 1, 0).tobytes())
        (base / f"{part}_y.bin").write_bytes(bytes([i + 1]))
    text(base / "class_names.txt", "airplane\nbird\ncar")
    for lists_ in ("train_list", "test_list"):
        patch.setattr(
            datasets.STL10, lists_, [[n, md5(base / n)] for n, _ in getattr(datasets.STL10, lists_)]
        )
    return {"dataset": "STL10", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def dtd(root, patch):
    base = root / "dtd/dtd"
    names = {
        "train": ["dotted/d_1.jpg", "woven/w_1.jpg"],
        "val": ["woven/w_2.jpg"],
        "test": ["woven/w_3.jpg"],
    }
    for i, name in enumerate(name for of in names.values() for name in of):
        picture(base / "images" / name, i)
    for part, of in names.items():
        text(base / f"labels/{part}1.txt", "".join(f"{name}\n" for name in of))
    return {"dataset": "DTD", "parts": {part: {"split": part, "partition": 1} for part in names}}


def eurosat(root, patch):
    picture(root / "eurosat/2750/Forest/Forest_1.jpg", 1)
    picture(root / "eurosat/2750/River/River_1.jpg", 2)
    return {"dataset": "EuroSAT", "parts": {"all": {}}}


def gtsrb(root, patch):
    base = root / "gtsrb"
    for i, name in enumerate(["00000/00000_00000.ppm", "00001/00000_00000.ppm"]):
        picture(base / "GTSRB/Training" / name, i)
    picture(base / "GTSRB/Final_Test/Images/00000.ppm", 7)
    text(base / "GT-final_test.csv", "Filename;Width;ClassId\n00000.ppm;4;1\n")
    return {"dataset": "GTSRB", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def cars(root, patch):
    save = mat(patch)
    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    kind = [("fname", "O"), ("class", "O")]
    places = {"train": "devkit/cars_train_annos", "test": "cars_test_annos_withlabels"}
    for i, (part, place) in enumerate(places.items()):
        for k in (1, 2):
            picture(base / f"cars_{part}/0000{k}.jpg", 3 * i + k)
        rows = np.array([("00001.jpg", 1 + i), ("00002.jpg", 2)], dtype=kind)
        save(base / f"{place}.mat", {"annotations": rows})
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)
    save(str(base / "devkit/cars_meta.mat"), {"class_names": names})
    return {"dataset": "StanfordCars", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def food101(root, patch):
    base = root / "food-101"
    for i, name in enumerate(["pizza/1", "pizza/2", "sushi/3"]):
        picture(base / f"images/{name}.jpg", i)
    text(base / "meta/train.json", json.dumps({"sushi": ["sushi/3"], "pizza": ["pizza/1"]}))
    text(base / "meta/test.json", json.dumps({"sushi": [], "pizza": ["pizza/2"]}))
    return {"dataset": "Food101", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def flowers(root, patch):
    save = mat(patch)
    base = root / "flowers-102"
    for i in (1, 2, 3):
        picture(base / f"jpg/image_{i:05d}.jpg", i)
    save(base / "imagelabels.mat", {"labels": np.array([77, 2, 1], dtype=np.uint8)})
    # a list of one would be squeezed to a number, and torchvision expects more
    sets = {"trnid": np.array([1, 2]), "valid": np.array([3, 3]), "tstid": np.array([3, 1])}
    save(base / "setid.mat", sets)
    known = {
        key: (name, md5(base / name) if key != "image" else "")
        for key, (name, _) in datasets.Flowers102._file_dict.items()
    }
    patch.setattr(datasets.Flowers102, "_file_dict", known)
    return {"dataset": "Flowers102", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def pets(root, patch):
    base = root / "oxford-iiit-pet"
    for i, name in enumerate(["Abyssinian_1", "great_pyrenees_2", "Abyssinian_3"]):
        picture(base / f"images/{name}.jpg", i)
    text(base / "annotations/trainval.txt", "Abyssinian_1 1 1 1\ngreat_pyrenees_2 2 2 1\n")
    text(base / "annotations/test.txt", "Abyssinian_3 1 1 1\n")
    return {"dataset": "OxfordIIITPet", "parts": {"train": {"split": "trainval"}, "test": {"split": "test"}}}


def caltech101(root, patch):
    mat(patch)  # torchvision asks for scipy at every picture, needed or not
    base = root / "caltech101/101_ObjectCategories"
    for i, name in enumerate(["BACKGROUND_Google", "Faces", "Faces", "ant"]):
        picture(base / name / f"image_{1 + (i == 2):04d}.jpg", i)
    return {"dataset": "Caltech101", "parts": {"all": {}}}


def caltech256(root, patch):
    base = root / "caltech256/256_ObjectCategories"
    for name in ("001.ak47/001_0001.jpg", "002.flag/002_0001.jpg", "002.flag/002_0002.jpg"):
        picture(base / name, int(name[-5]) + int(name[2]))
    return {"dataset": "Caltech256", "parts": {"all": {}}}


def aircraft(root, patch):
    base = root / "fgvc-aircraft-2013b/data"
    for i in (1, 2, 3):
        picture(base / f"images/000{i}.jpg", i)
    text(base / "variants.txt", "707-320\nF/A-18\n")
    text(base / "images_variant_train.txt", "0001 707-320\n0002 F/A-18\n")
    text(base / "images_variant_test.txt", "0003 F/A-18\n")
    return {"dataset": "FGVCAircraft", "parts": {"train": {"split": "train"}, "test": {"split": "test"}}}


def sun397(root, patch):
    base = root / "SUN397"
    text(base / "ClassName.txt", "/a/abbey\n/b/balcony/exterior\n")
    for i, name in enumerate(["a/abbey/sun_a.jpg", "b/balcony/exterior/sun_b.jpg", "a/abbey/sun_c.jpg"]):
        picture(base / name, i)
    return {"dataset": "SUN397", "parts": {"all": {}}}


def country211(root, patch):
    for i, part in enumerate(("train", "valid", "test")):
        picture(root / f"country211/{part}/AD/1.jpg", i)
        picture(root / f"country211/{part}/ZW/1.jpg", i + 9)
    parts = {"train": "train", "val": "valid", "test": "test"}
    return {"dataset": "Country211", "parts": {part: {"split": name} for part, name in parts.items()}}


def sst2(root, patch):
    for i, part in enumerate(("train", "valid", "test")):
        picture(root / f"rendered-sst2/{part}/negative/1.png", i)
        picture(root / f"rendered-sst2/{part}/positive/1.png", i + 9)
    return {"dataset": "RenderedSST2", "parts": {part: {"split": part} for part in ("train", "val", "test")}}


TORCHVISION = {
    made.__name__: made
    for made in (
        *(mnist, fashion, cifar, cifar100, svhn, stl10, dtd, eurosat, gtsrb, cars, food101, flowers),
        *(pets, caltech101, caltech256, aircraft, sun397, country211, sst2),
    )
}
LAYOUTS = {
    "folder": ("folder", folder),
    "folder_parts": ("folder", folder_parts),
    "folder_all": ("folder", folder_all),
    "parquet": ("parquet", parquet),
    "csv": ("csv", csv_file),
    "csv_files": ("csv", csv_files),
    "webdataset": ("webdataset", webdataset),
    "lists": ("lists", lists),
    "coop": ("coop", coop),
    "cub": ("cub", cub),
    "voc": ("voc", voc),
    **{name: ("torchvision", made) for name, made in TORCHVISION.items()},
}


@pytest.fixture
def layout(request, tmp_path, monkeypatch):
    kind, made = LAYOUTS[request.param]
    root = tmp_path / "my data"
    return kind, root, made(root, monkeypatch)


every_layout = pytest.mark.parametrize("layout", LAYOUTS, indirect=True)


def test_every_reader_is_tested():
    texts = {"text_table", "text_folder"}  # in test_text_tasks.py
    assert {kind for kind, _ in LAYOUTS.values()} == set(READERS.names) - texts


# what holds for every reader


@every_layout
def test_listing_decodes_nothing(layout, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr(Image, "open", never)
    monkeypatch.setattr(Image, "fromarray", never)
    assert all(len(part.items) for part in read(*layout).parts.values())


@every_layout
def test_listing_changes_nothing_and_is_repeatable(layout):
    _, root, _ = layout
    before = contents(root)
    assert shown(read(*layout)) == shown(read(*layout))
    assert contents(root) == before


@every_layout
def test_ids_are_unique_and_do_not_depend_on_the_place(layout, tmp_path):
    kind, root, settings = layout
    there = shown(read(kind, root, settings))
    for part in there.values():
        ids = [id_ for id_, _ in part]
        assert len(set(ids)) == len(ids)
        assert not any(id_.startswith("/") or "my data" in id_ or "\\" in id_ for id_ in ids)
    if hasattr(sys.modules.get("scipy", np), "__file__"):  # the stand-in knows files by their path
        root.rename(tmp_path / "moved")
        assert shown(read(kind, tmp_path / "moved", settings)) == there


@every_layout
def test_all_parts_have_the_same_classes(layout):
    parts = read(*layout).parts
    assert len({part.classes for part in parts.values()}) == 1
    classes = next(iter(parts.values())).classes
    assert len(set(classes)) == len(classes) > 1


@every_layout
def test_pictures_are_read_here_and_in_another_process(layout):
    for part in read(*layout).parts.values():
        copy = pickle.loads(pickle.dumps(part.items))
        for i in range(len(part.items)):
            assert part.items.open(i).mode == "RGB"
            assert copy.content(i) == part.items.content(i)
            assert copy.ids[i] == part.items.ids[i]
            assert part.items.describe(i)


# folders


def test_folders(tmp_path):
    folder(tmp_path, None)
    reading = read("folder", tmp_path, {})
    assert list(reading.parts) == ["train", "val", "test"]
    assert shown(reading) == {
        "train": [("train/cat/1.png", "cat"), ("train/dog/deep/2.PNG", "dog")],
        "val": [("val/cat/3.jpg", "cat")],
        "test": [("test/dog/4.png", "dog")],
    }
    assert reading.notes == ()
    assert recognise(tmp_path) == "folder"


def test_folders_without_parts_are_one(tmp_path):
    folder_all(tmp_path, None)
    assert shown(read("folder", tmp_path, {})) == {"all": [("cat/1.png", "cat"), ("dog/1.png", "dog")]}


@pytest.mark.parametrize(
    ("name", "part"),
    [("Training", "train"), ("VAL", "val"), ("valid", "val"), ("validation", "val"), ("Testing", "test")],
)
def test_parts_have_many_names(tmp_path, name, part):
    picture(tmp_path / name / "a/1.png", 1)
    assert list(read("folder", tmp_path, {}).parts) == [part]


def test_a_class_may_be_called_train(tmp_path):
    for name in ("bus", "train", "test"):
        picture(tmp_path / name / "1.png", 1)
    reading = read("folder", tmp_path, {})
    assert list(reading.parts) == ["all"]
    assert reading.parts["all"].classes == ("bus", "test", "train")


def test_what_lies_beside_the_parts_is_noted(tmp_path):
    folder(tmp_path, None)
    picture(tmp_path / "extra/a/1.png", 1)
    text(tmp_path / "README", "")
    text(tmp_path / "task.toml", "")
    picture(tmp_path / "train/loose.jpg", 1)
    text(tmp_path / "train/cat/list.txt", "")
    notes = read("folder", tmp_path, {}).notes
    assert notes == (
        "ignored files that are no images: README, extra, train/cat/list.txt",
        "ignored images outside of class folders: train/loose.jpg",
    )


def test_people_count_so(tmp_path):
    names = ["2", "10", "1", "a10b2", "a10b10", "a9", "010", "x" * 200, "9" * 200]
    for name in names:
        picture(tmp_path / name / "1.png", 1)
    classes = read("folder", tmp_path, {}).parts["all"].classes
    assert classes == ("1", "2", "010", "10", "9" * 200, "a9", "a10b2", "a10b10", "x" * 200)


@pytest.mark.parametrize("digits", ["9" * 5000, "0" * 5000])
def test_numbers_of_any_length_have_an_order(digits):
    ordered = sorted(["10", digits, "2"], key=natural)
    assert ordered.index("2") < ordered.index("10")


def test_many_files_are_listed_fast(tmp_path):
    for i in range(20):
        (tmp_path / str(i)).mkdir()
        for k in range(500):
            (tmp_path / str(i) / f"{k}.jpg").touch()
    start = time.process_time()
    assert len(read("folder", tmp_path, {}).parts["all"].codes) == 10_000
    assert time.process_time() - start < 1  # a tenth, on an idle machine


# parquet


def test_parquet(tmp_path):
    parquet(tmp_path, None)
    reading = read("parquet", tmp_path, {})
    assert shown(reading) == {
        "train": [("train/0", "cat"), ("train/1", "dog"), ("train/2", "cat"), ("train/3", "dog")],
        "val": [("val/0", "cat")],
    }
    assert reading.prompts == ("a {}.",)
    train = reading.parts["train"].items
    assert [train.content(i) for i in (3, 0, 2, 1)] == [encoded(n) for n in (4, 1, 3, 2)]
    assert train.describe(2) == f"{tmp_path}/train-00000-of-00002.parquet row 2"
    assert recognise(tmp_path) == "parquet"


def test_parquet_in_the_folder_data_or_a_folder_per_part(tmp_path):
    table(tmp_path / "a/data/test.parquet", [1], ["x"])
    table(tmp_path / "b/train/0000.parquet", [1], ["x"])
    table(tmp_path / "b/train/0001.parquet", [2], ["x"])
    assert shown(read("parquet", tmp_path / "a", {})) == {"test": [("test/0", "x")]}
    assert shown(read("parquet", tmp_path / "b", {})) == {"train": [("train/0", "x"), ("train/1", "x")]}


@pytest.mark.parametrize(("name", "part"), [("mine.parquet", "all"), ("test-0.parquet", "test")])
def test_one_parquet_file(tmp_path, name, part):
    path = table(tmp_path / name, [1, 2], ["b", "a"])
    assert recognise(path) == "parquet"
    assert shown(read("parquet", path, {})) == {part: [(f"{part}/0", "b"), (f"{part}/1", "a")]}


def test_class_names_from_the_schema(tmp_path):
    feature = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table(tmp_path / "train.parquet", [1], [1], metadata={"huggingface": json.dumps(feature)})
    reading = read("parquet", tmp_path, {})
    assert reading.parts["train"].classes == ("cat", "dog")
    assert reading.parts["train"].codes == (1,)


@pytest.mark.parametrize(
    "labels",
    [
        pa.array(["9", "10"]),
        pa.array(["9", "10"]).dictionary_encode(),
        pa.array([9, 10], pa.uint8()),
        pa.array([9, 10]).dictionary_encode(),
        pa.array(["9", "10"], pa.large_string()),
    ],
    ids=lambda labels: str(labels.type),
)
def test_labels_without_a_list_of_classes_are_their_own_names(tmp_path, labels):
    table(tmp_path / "train.parquet", [1, 2], labels)
    part = read("parquet", tmp_path, {}).parts["train"]
    assert (part.classes, part.codes) == (("9", "10"), (0, 1))


def test_numbers_count_and_names_name(tmp_path):
    text(tmp_path / "card.json", '{"classes": ["1", "0"]}')
    table(tmp_path / "train.parquet", [1], [1])
    assert shown(read("parquet", tmp_path, {})) == {"train": [("train/0", "0")]}
    table(tmp_path / "train.parquet", [1], ["1"])
    assert shown(read("parquet", tmp_path, {})) == {"train": [("train/0", "1")]}


def test_keys_and_other_columns(tmp_path):
    path = tmp_path / "train.parquet"
    made = pa.table({"img": [encoded(1), encoded(2)], "fine": [True, False], "id": [7, 8], "more": [0, 0]})
    pq.write_table(made, path)
    reading = read("parquet", tmp_path, {"image": "img", "label": "fine", "key": "id"})
    assert shown(reading) == {"train": [("7", "1"), ("8", "0")]}
    assert reading.parts["train"].items.content(1) == encoded(2)


def test_parts_are_left_out_only_when_the_card_says_so(tmp_path):
    for part in ("train", "dev", "pool"):
        table(tmp_path / f"{part}.parquet", [1], ["x"])
    assert list(read("parquet", tmp_path, {}).parts) == ["train", "dev", "pool"]
    reading = read("parquet", tmp_path, {"parts": {"train": "train", "val": "dev"}})
    assert list(reading.parts) == ["train", "val"]
    assert reading.notes == ("parts that the card does not select: pool",)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("validation_1.tar", "val"),
        ("pool.parquet", "pool"),
        ("000123.tar", "all"),
        ("shard_000123.tar", "shard"),
        ("cifar10.parquet", "cifar10"),
    ],
)
def test_parts_of_file_names(name, part):
    assert part_of_file(name) == part


def test_large_tables_keep_the_last_row_groups_alone(tmp_path, monkeypatch):
    table(tmp_path / "train.parquet", range(12), ["x"] * 12, group=1)
    loaded = []
    cells = parquet_images.read_cells
    monkeypatch.setattr(parquet_images, "read_cells", lambda groups, n: loaded.append(n) or cells(groups, n))
    images = read("parquet", tmp_path, {}).parts["train"].items
    for _ in range(2):
        assert [images.content(i) for i in range(12)] == [encoded(i) for i in range(12)]
    assert loaded == list(range(12))  # small: each once
    monkeypatch.setattr(parquet_reader, "_IN_MEMORY", 10)
    images = read("parquet", tmp_path, {}).parts["train"].items
    loaded.clear()
    for i in (0, 1, 2, 3, 0, 4, 1, 0):
        assert images.content(i) == encoded(i)
    assert loaded == [0, 1, 2, 3, 4, 1]


def test_the_cache_does_not_travel(tmp_path):
    table(tmp_path / "train.parquet", range(3), ["x"] * 3)
    images = read("parquet", tmp_path, {}).parts["train"].items
    empty = len(pickle.dumps(images))
    images.content(0)
    assert len(pickle.dumps(images)) == empty


def _child(images, pipe):
    pipe.send([images.content(i) for i in range(len(images))])


@pytest.mark.parametrize("name", ["parquet", "webdataset"])
def test_pictures_are_read_after_a_fork(tmp_path, name):
    kind, made = LAYOUTS[name]
    made(tmp_path, None)
    images = read(kind, tmp_path, {}).parts["train"].items
    here = [images.content(i) for i in range(len(images))]
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(images, theirs))
    child.start()
    assert ours.poll(20)
    assert ours.recv() == here
    child.join()


@pytest.mark.parametrize("name", ["mnist", "dtd10", "tiny_imagenet"])
def test_mini(name, mini_data):
    card = json.loads((mini_data / name / "card.json").read_text())
    reading = read("parquet", mini_data / name, {})
    assert {part: len(found.codes) for part, found in reading.parts.items()} == {
        part: count for part, count in card["counts"].items() if count
    }
    assert reading.parts["test"].classes == tuple(card["classes"])
    assert reading.prompts == tuple(card["prompts"])
    assert reading.parts["test"].items.open(5).mode == "RGB"


# csv


def test_csv_with_a_column_of_parts(tmp_path):
    csv_file(tmp_path, None)
    expected = {
        "train": [("pictures/0.png", "dog"), ("pictures/1.png", "cat"), ("pictures/2.png", "dog")],
        "val": [("pictures/3.png", "cat")],
    }
    assert shown(read("csv", tmp_path / "all.csv", {})) == expected
    assert shown(read("csv", tmp_path, {})) == expected
    assert recognise(tmp_path) == recognise(tmp_path / "all.csv") == "csv"


def test_a_csv_for_each_part(tmp_path):
    csv_files(tmp_path, None)
    text(tmp_path / "sizes.csv", "a,b\n1,2\n")
    reading = read("csv", tmp_path, {})
    assert shown(reading) == {
        "train": [("train/0.png", "b"), ("train/1.png", "a")],
        "test": [("test/2.png", "a")],
    }
    assert reading.notes == (
        "ignored tables whose names are no split: sizes.csv",
        "columns of test.csv not used: size",
        "columns of train.csv not used: size",
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "path,label\r\n a/1.png , x \r\n"),
        ("t.csv", "\ufeffPath,Label\na/1.png,x\n"),
        ("t.csv", 'label,file\n"x","a/1.png"'),
        ("t.tsv", "filepath\ttarget\na/1.png\tx\n"),
        ("t.csv", "image;category\n./a//1.png;x\n\n"),
        ("t.csv", "path,label\ra/1.png,x\r"),
    ],
)
def test_ways_to_write_a_table(tmp_path, name, content):
    picture(tmp_path / "a/1.png", 1)
    (tmp_path / name).write_bytes(content.encode())
    assert shown(read("csv", tmp_path / name, {})) == {"all": [("a/1.png", "x")]}


def test_columns_by_settings(tmp_path):
    picture(tmp_path / "1.png", 1)
    text(tmp_path / "t.csv", "path,where,label,Kind,fold\nno,1.png,no,x,testing\n")
    reading = read("csv", tmp_path, {"path": "where", "label": "Kind", "split": "fold"})
    assert shown(reading) == {"test": [("1.png", "x")]}
    assert reading.notes == ("columns of t.csv not used: path, label",)


def test_a_line_that_repeats_another_is_noted(tmp_path):
    picture(tmp_path / "1.png", 1)
    text(tmp_path / "t.csv", "path,label\n1.png,x\n./1.png,x\n")
    reading = read("csv", tmp_path, {})
    assert shown(reading) == {"all": [("1.png", "x")]}
    assert reading.notes == ("all: 1 repeated lines ignored",)


def test_links_inside_are_followed(tmp_path):
    picture(tmp_path / "a/1.png", 1)
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "2.png").symlink_to("a/1.png")
    text(tmp_path / "t.csv", "path,label\nb/1.png,x\n2.png,y\n")
    assert shown(read("csv", tmp_path, {})) == {"all": [("b/1.png", "x"), ("2.png", "y")]}


# webdataset


def test_webdataset(tmp_path):
    webdataset(tmp_path, None)
    reading = read("webdataset", tmp_path, {})
    assert shown(reading) == {
        "train": [
            ("train-000.tar/0001.png", "cat"),
            ("train-000.tar/0002.jpg", "dog"),
            ("train-001.tar/d/0001.png", "dog"),
        ],
        "test": [("test-000.tar/0001.webp", "dog")],
    }
    assert reading.parts["train"].items.content(2) == encoded(3)
    assert recognise(tmp_path) == recognise(tmp_path / "test-000.tar") == "webdataset"


def test_archives_in_a_folder_for_each_part(tmp_path):
    archive(tmp_path / "train/000.tar", {"1.png": encoded(1), "1.cls": b"cat"})
    archive(tmp_path / "Val/000.tar", {"1.png": encoded(2), "1.cls": b"cat"})
    assert recognise(tmp_path) == "webdataset"
    assert shown(read("webdataset", tmp_path, {})) == {
        "train": [("train/000.tar/1.png", "cat")],
        "val": [("Val/000.tar/1.png", "cat")],
    }


def test_what_is_ignored_in_an_archive_is_said(tmp_path):
    files = {
        "1.png": encoded(1),
        "1.cls": b"cat",
        "1.seg.png": encoded(2),
        "._1.png": b"",
        "1.pkl": b"I am not read",
    }
    archive(tmp_path / "all.tar", {**files, "__MACOSX/1.png": b"", "meta.json": b"{}"})
    reading = read("webdataset", tmp_path, {})
    assert shown(reading) == {"all": [("all.tar/1.png", "cat")]}
    assert reading.notes == (
        "ignored hidden members: all.tar/._1.png, all.tar/__MACOSX/1.png",
        "ignored unread, because they could run code: all.tar/1.pkl",
        "ignored members that are neither image nor label: all.tar/1.seg.png, all.tar/meta.json",
    )


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_are_read_as_tarfile_reads_them(tmp_path, kind):
    names = ["a.png", "d/e/f.jpg", "x" * 90 + "/" + "y" * 90, "with space", "a" * 100]
    if kind != tarfile.USTAR_FORMAT:
        names += ["n" * 300, "deep/" * 60 + "x", "ümläut 🙂"]
    files = {name: bytes([i]) * (i * 300) for i, name in enumerate(names)}
    path = archive(tmp_path / "t.tar", files, kind)
    with tarfile.open(path, "a", format=kind) as tar:
        tar.add(tmp_path, "a folder", recursive=False)
        last = tarfile.TarInfo("last")
        last.size, last.mtime = 3, 1.5
        tar.addfile(last, io.BytesIO(b"end"))
    with tarfile.open(path) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]
    file = RawFile(path)
    found = list(members(file))
    assert [(m.name, m.offset, m.size) for m in found] == expected
    assert file.read(found[-1].offset, found[-1].size) == b"end"


def test_an_archive_without_its_closing_zeros(tmp_path):
    path = archive(tmp_path / "t.tar", {"1.png": encoded(1), "1.cls": b"x"})
    size = 2 * 512 + 512 + -(-len(encoded(1)) // 512) * 512
    path.write_bytes(path.read_bytes()[:size])
    assert shown(read("webdataset", tmp_path, {})) == {"t": [("t.tar/1.png", "x")]}


# torchvision


@pytest.mark.parametrize("layout", TORCHVISION, indirect=True)
def test_torchvision_sees_the_same(layout):
    kind, root, settings = layout
    made = getattr(datasets, settings["dataset"])
    for part, found in read(kind, root, settings).parts.items():
        theirs = made(str(root), **settings["parts"][part])
        names = getattr(theirs, "classes", None) or getattr(theirs, "categories", None)
        expected = sorted(
            (image.convert("RGB").tobytes(), names[label] if names else str(label))
            for image, label in (theirs[i] for i in range(len(theirs)))
        )
        ours = [(found.items.open(i).tobytes(), found.classes[code]) for i, code in enumerate(found.codes)]
        assert sorted(ours) == expected
        assert not any(value is theirs for value in vars(found.items).values())


def test_caltech_has_no_background(tmp_path, monkeypatch):
    reading = read("torchvision", tmp_path, caltech101(tmp_path, monkeypatch))
    assert reading.parts["all"].classes == ("Faces", "ant")


def test_parts_of_torchvision_are_matched_by_name(tmp_path, monkeypatch):
    reading = read("torchvision", tmp_path, dtd(tmp_path, monkeypatch))
    assert shown(reading)["val"] == [("dtd/dtd/images/woven/w_2.jpg", "woven")]
    assert reading.parts["val"].codes == (1,)


def test_fetching_asks_torchvision_to_download(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets.EuroSAT, "__init__", lambda self, *a, **k: asked.append((a, k)))
    for name in ("HF_HUB_OFFLINE", "ANISO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    fetch("torchvision", tmp_path, {"dataset": "EuroSAT", "parts": {"all": {}}})
    assert asked == [((str(tmp_path),), {"download": True})]


# the rest of the catalogue's layouts


def test_lists(tmp_path):
    reading = read("lists", tmp_path, lists(tmp_path, None))
    assert shown(reading) == {
        "train": [
            ("pictures/a b/1.jpg", "a b"),
            ("pictures/c/3.jpg", "c"),
            ("pictures/golf_course/golf_course_1.jpg", "golf_course"),
            ("pictures/pier_7.jpg", "pier"),
        ],
        "test": [("pictures/a b/2.jpg", "c")],
    }


def test_lists_as_sun397_writes_them(tmp_path):
    for name in ("a/abbey/sun_1.jpg", "a/apse/indoor/sun_2.jpg"):
        picture(tmp_path / "SUN397" / name, 1)
    text(tmp_path / "Training_01.txt", "/a/abbey/sun_1.jpg\n/a/apse/indoor/sun_2.jpg\n")
    reading = read("lists", tmp_path, {"images": "SUN397", "parts": {"train": "Training_01.txt"}})
    assert shown(reading) == {
        "train": [
            ("SUN397/a/abbey/sun_1.jpg", "a/abbey"),
            ("SUN397/a/apse/indoor/sun_2.jpg", "a/apse/indoor"),
        ]
    }


def test_coop(tmp_path):
    reading = read("coop", tmp_path, coop(tmp_path, None))
    assert shown(reading) == {
        "train": [("pics/0.jpg", "ant"), ("pics/1.jpg", "zebra")],
        "test": [("pics/2.jpg", "ant")],
    }
    assert reading.parts["train"].classes == ("zebra", "ant")  # as they are numbered
    assert reading.notes == ("parts that the card does not select: val",)


def test_cub(tmp_path):
    reading = read("cub", tmp_path, cub(tmp_path, None))
    assert shown(reading) == {
        "train": [
            ("CUB_200_2011/images/001.Albatross/a_1.jpg", "001.Albatross"),
            ("CUB_200_2011/images/002.Auk/b_1.jpg", "002.Auk"),
        ],
        "test": [("CUB_200_2011/images/001.Albatross/a_2.jpg", "001.Albatross")],
    }


def test_the_folder_of_pictures_may_be_the_root(tmp_path):
    cub(tmp_path, None)
    reading = read("cub", tmp_path / "CUB_200_2011", {"images": "."})
    assert reading.parts["test"].items.ids == ("images/001.Albatross/a_2.jpg",)
    folder_all(tmp_path / "f", None)
    reading = read("folder", tmp_path / "f", {"parts": {"train": "./"}})
    assert reading.parts["train"].items.ids == ("cat/1.png", "dog/1.png")


def test_voc(tmp_path):
    reading = read("voc", tmp_path, voc(tmp_path, None))
    assert shown(reading) == {
        "train": [("000012#0", "car"), ("000012#2", "dog")],
        "test": [("000017#0", "dog")],
    }
    assert reading.notes == ("left out 1 objects marked difficult",)
    every = read("voc", tmp_path, {**voc(tmp_path, None), "difficult": True})
    assert shown(every)["train"] == [("000012#0", "car"), ("000012#1", "dog"), ("000012#2", "dog")]
    assert every.notes == ()
    whole = Image.open(tmp_path / "VOCdevkit/VOC2007/JPEGImages/000012.jpg")
    train = reading.parts["train"].items
    assert train.open(0).tobytes() == whole.crop((0, 0, 2, 3)).tobytes()
    assert train.open(1).tobytes() == whole.crop((1, 1, 4, 4)).tobytes()


def test_only_what_can_be_recognised_is(tmp_path):
    assert recognise(tmp_path / "nothing") is None
    assert recognise(tmp_path) is None
    assert recognise(text(tmp_path / "a.txt", "")) is None
    text(tmp_path / "numbers.csv", "a,b\n1,2\n")
    (tmp_path / ".git").mkdir()
    assert recognise(tmp_path) is None
    archive(tmp_path / "data.tar", {})
    assert recognise(tmp_path) == "webdataset"
    picture(tmp_path / "unpacked/1.png", 1)
    assert recognise(tmp_path) == "folder"


def test_readers_are_known_by_name_and_summary_without_being_imported():
    code = (
        "import sys, aniso.registry as r; [r.READERS.summary(name) for name in r.READERS.names]; "
        "print([name for name in sys.modules if name.startswith('aniso.data')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert all(READERS.summary(name).startswith("Reads ") for name in READERS.names)


def test_a_reader_of_another_package_recognises_and_reads(tmp_path, monkeypatch):
    class Blobs(Reader):
        """Reads blobs."""

        def recognises(self, path):
            return path.suffix == ".blob"

        def read(self, root, settings):
            return Reading({})

    monkeypatch.setattr(READERS, "_classes", {**READERS._classes, "blobs": Blobs})
    text(tmp_path / "x.blob", "")
    assert recognise(tmp_path / "x.blob") == "blobs"
    assert read("blobs", tmp_path, {}) == Reading({})
    with pytest.raises(InputError, match="no address to download datasets of kind 'blobs'"):
        fetch("blobs", tmp_path, {})
