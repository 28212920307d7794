"""The cards of the known tasks: complete, fit for torchvision as installed, split as the protocol says."""

from __future__ import annotations

import inspect
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest

import aniso

CATALOGUE = Path(aniso.__file__).parent / "data" / "catalogue"
CARDS = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted(CATALOGUE.glob("*.toml"))}

# classes and fine-tuning epochs: the paper's table of data sets; the variants are only tested on
TABLE = {
    "cars": (196, 35),
    "dtd": (47, 76),
    "eurosat": (10, 12),
    "gtsrb": (43, 11),
    "mnist": (10, 5),
    "resisc45": (45, 15),
    "sun397": (397, 14),
    "svhn": (10, 4),
    "cifar10": (10, 5),
    "cifar100": (100, 6),
    "imagenet": (1000, 10),
    "stl10": (10, 4),
    "food101": (101, 15),
    "caltech101": (101, 10),
    "caltech256": (257, 8),
    "fgvc_aircraft": (100, 60),
    "flowers102": (102, 40),
    "oxford_iiit_pet": (37, 5),
    "cub200": (200, 20),
    "pascal_voc": (20, 10),
    "country211": (211, 15),
    "ucf101": (101, 20),
    "imagenet_a": (200, None),
    "imagenet_r": (200, None),
    "imagenet_sketch": (1000, None),
    "imagenet_v2": (1000, None),
}

TENTH = {"share": 0.1, "most": 5000}
USUAL = {"train": "train", "val": TENTH, "test": "test"}
OFFICIAL = {"train": "train", "val": "val", "test": "test"}
NO_OFFICIAL = {"train": "all", "val": TENTH, "test": {"share": 0.2}}
SPLITS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(TABLE, USUAL),
    "dtd": {"train": ["train", "val"], "val": TENTH, "test": "test"},
    "eurosat": {"train": "all", "val": {"per_class": 270}, "test": {"per_class": 270}},
    "imagenet": {"train": "train", "val": {"most": 5000}, "test": "test"},
    "caltech101": NO_OFFICIAL,
    "caltech256": NO_OFFICIAL,
    "oxford_iiit_pet": {"train": "trainval", "val": TENTH, "test": "test"},
    **dict.fromkeys(("fgvc_aircraft", "flowers102", "pascal_voc", "country211", "ucf101"), OFFICIAL),
    **{name: {"test": "test"} for name in TABLE if name.startswith("imagenet_")},
}

MEAN_PER_CLASS = {"caltech101", "fgvc_aircraft", "flowers102", "oxford_iiit_pet"}
KEYS = {"title", "homepage", "licence", "metric", "notes", "prompts", "reader", "splits", "classes"}
READER_KEYS = {
    "torchvision": {"dataset", "parts"},
    "folder": {"parts"},
    "lists": {"images", "parts"},
    "coop": {"images", "file"},
    "cub": {"images"},
    "voc": {"parts", "year", "difficult"},
}
GIVEN_PARTS = {"coop": {"train", "val", "test"}, "cub": {"train", "test"}}

every_card = pytest.mark.parametrize("name", CARDS)
torchvision_cards = pytest.mark.parametrize(
    "name", [name for name, card in CARDS.items() if card["reader"]["kind"] == "torchvision"]
)


def test_there_is_a_card_for_every_data_set_of_the_paper() -> None:
    assert set(CARDS) == set(TABLE)


@every_card
def test_has_the_known_keys_and_no_others(name: str) -> None:
    card = CARDS[name]
    assert set(card) - {"epochs"} == KEYS
    reader = card["reader"]
    assert set(reader) - {"kind", "fetch"} == READER_KEYS[reader["kind"]]
    for key in ("title", "homepage", "licence", "notes"):
        assert card[key] == card[key].strip() != ""
    assert card["homepage"].startswith(("https://", "http://"))


@every_card
def test_says_how_to_get_what_is_not_downloaded(name: str) -> None:
    reader = CARDS[name]["reader"]
    by_hand = reader["kind"] != "torchvision" or name == "cars"
    assert ("fetch" in reader) == by_hand


@every_card
def test_classes_and_epochs_are_the_published_numbers(name: str) -> None:
    classes, epochs = TABLE[name]
    assert len(CARDS[name]["classes"]) == classes
    assert CARDS[name].get("epochs") == epochs


@every_card
def test_metric(name: str) -> None:
    assert CARDS[name]["metric"] == ("mean per class accuracy" if name in MEAN_PER_CLASS else "accuracy")
    assert ("mean per class accuracy" in CARDS[name]["notes"]) == (name in MEAN_PER_CLASS)


@every_card
def test_class_names_can_be_spoken_and_told_apart(name: str) -> None:
    classes = CARDS[name]["classes"]
    assert all(key.strip() == key != "" for key in classes)
    for spoken in classes.values():
        assert spoken == " ".join(spoken.split()) != ""
        assert "_" not in spoken
        assert "{" not in spoken
        assert spoken.isascii()
    folded = [spoken.lower() for spoken in classes.values()]  # CLIP reads lower case
    assert len(set(folded)) == len(folded)


@every_card
def test_prompts_have_one_place_for_the_name(name: str) -> None:
    prompts = CARDS[name]["prompts"]
    assert prompts
    assert len(set(prompts)) == len(prompts)
    for prompt in prompts:
        fields = [field for _, field, _, _ in string.Formatter().parse(prompt) if field is not None]
        assert fields == [""]
        assert prompt.count("{}") == 1


@every_card
def test_splits_follow_the_protocol(name: str) -> None:
    card = CARDS[name]
    assert card["splits"] == SPLITS[name]
    reader = card["reader"]
    parts = GIVEN_PARTS.get(reader["kind"]) or set(reader["parts"])
    wanted = {
        part for rule in card["splits"].values() for part in ([rule] if isinstance(rule, str) else rule)
    }
    wanted -= {"share", "most", "per_class"}
    assert wanted <= parts


@torchvision_cards
def test_torchvision_has_the_data_set_and_takes_the_arguments(name: str) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    reader = CARDS[name]["reader"]
    takes = inspect.signature(getattr(datasets, reader["dataset"])).parameters
    assert "root" in takes
    assert "download" in takes
    for arguments in reader["parts"].values():
        assert set(arguments) <= set(takes) - {"root", "download", "transform", "target_transform"}


@torchvision_cards
def test_class_names_are_torchvisions(name: str) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    classes = getattr(getattr(datasets, CARDS[name]["reader"]["dataset"]), "classes", None)
    if classes is not None:
        assert list(CARDS[name]["classes"]) == list(classes)


@pytest.mark.parametrize("name", ["gtsrb", "svhn", "imagenet_v2"])
def test_numbered_classes_are_in_the_order_of_their_numbers(name: str) -> None:
    keys = list(CARDS[name]["classes"])
    assert keys == [str(i) for i in range(len(keys))]


@pytest.mark.parametrize("name", ["dtd", "eurosat", "food101", "country211", "resisc45", "sun397", "cub200"])
def test_classes_that_are_folders_are_in_the_order_of_their_folders(name: str) -> None:
    keys = list(CARDS[name]["classes"])
    assert keys == sorted(keys)


def test_variants_of_imagenet_speak_of_its_classes_in_its_order() -> None:
    imagenet = CARDS["imagenet"]["classes"]
    assert list(imagenet) == sorted(imagenet)
    assert CARDS["imagenet_sketch"]["classes"] == imagenet
    assert list(CARDS["imagenet_v2"]["classes"].values()) == list(imagenet.values())
    for name in ("imagenet_a", "imagenet_r"):
        own = CARDS[name]["classes"]
        assert list(own.items()) == [item for item in imagenet.items() if item[0] in own]
    assert all(CARDS[name]["prompts"] == CARDS["imagenet"]["prompts"] for name in CARDS if "imagenet" in name)


def test_imagenets_names_are_open_clips_but_for_two_that_it_gives_twice() -> None:
    metadata = pytest.importorskip("open_clip.zero_shot_metadata")
    pairs = zip(CARDS["imagenet"]["classes"].items(), metadata.IMAGENET_CLASSNAMES, strict=True)
    differ = {wnid: (ours, theirs) for (wnid, ours), theirs in pairs if ours != theirs}
    assert differ == {"n04008634": ("projectile", "missile"), "n04355933": ("sunglass", "sunglasses")}
    assert CARDS["imagenet"]["prompts"] == [say("{}") for say in metadata.OPENAI_IMAGENET_TEMPLATES]
