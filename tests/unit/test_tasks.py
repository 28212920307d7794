"""Tasks from folders, tables and cards: classes by name, splits by rule, nothing silent."""

from __future__ import annotations

import shutil

import pictures
import pytest

from aniso.data import load_task
from aniso.data.card import known_card, known_tasks, read_card
from aniso.errors import AnisoError


def write_card(path, text):
    path.write_text(text)
    return path


def test_a_folder_with_splits_needs_no_card(tmp_path):
    pictures.folder(tmp_path / "train", {"tabby_cat": 20, "dog": 20})
    pictures.folder(tmp_path / "test", {"tabby_cat": 3, "dog": 4}, 100)
    task = load_task(tmp_path)
    assert task.name == tmp_path.name
    assert set(task.classes.names) == {"tabby cat", "dog"}
    assert task.classes.prompts == ("a photo of a {}.",)
    assert {role: len(split) for role, split in task.splits.items()} == {"train": 36, "val": 4, "test": 7}
    assert any("val: 10% of train" in note for note in task.notes)


def test_a_folder_of_classes_alone_is_split_by_seed(tmp_path):
    pictures.folder(tmp_path, {"a": 50, "b": 50})
    tasks = [load_task(tmp_path, seed=seed) for seed in (0, 0, 1)]
    for task in tasks:
        assert {role: len(split) for role, split in task.splits.items()} == {
            "train": 72,
            "val": 8,
            "test": 20,
        }
        ids = [set(split.ids) for split in task.splits.values()]
        assert len(set.union(*ids)) == sum(map(len, ids)) == 100
        assert set(task.test.counts.values()) == {10}  # as even as the data
    assert tasks[0].test.manifest == tasks[1].test.manifest != tasks[2].test.manifest


def test_classes_are_aligned_by_name_whatever_the_folders_are_called(tmp_path):
    names = ["zebra", "ant", "10", "9", "Ürsus"]
    pictures.folder(tmp_path / "train", dict.fromkeys(names, 2))
    pictures.folder(tmp_path / "val", {"9": 2, "zebra": 1})  # two classes are enough
    task = load_task(tmp_path)
    for split in task.splits.values():
        assert [split.classes.names[label] for label in split.labels] == [i.split("/")[1] for i in split.ids]
    assert task.val.counts["ant"] == 0
    assert list(task.classes.names).index("9") < list(task.classes.names).index("10")


def test_a_class_that_training_never_saw_is_an_error(tmp_path, refused):
    pictures.folder(tmp_path / "train", {"a": 2, "b": 2})
    pictures.folder(tmp_path / "test", {"a": 2, "c": 2})
    with refused("DATA-CLASS", 3, "c"):
        load_task(tmp_path)


def test_a_table_says_its_classes_and_prompts(tmp_path):
    pictures.parquet(tmp_path, "train", [0, 1, 2] * 4)
    pictures.parquet(tmp_path, "test", [2, 0], 50)
    pictures.parquet(tmp_path, "pool", [0, 0], 70)
    pictures.card(tmp_path, ["red", "green", "blue"], ("something {}.",))
    task = load_task(tmp_path)
    assert task.classes.names == ("red", "green", "blue")
    assert task.classes.prompts == ("something {}.",)
    assert task.test.labels == (2, 0)
    assert any("not used: pool (2 images)" in note for note in task.notes)
    assert load_task(tmp_path, prompts=["my {}"]).classes.prompts == ("my {}",)


# cards

CARD = """
title = "Pets"
prompts = ["a {}, a pet."]
[reader]
kind = "folder"
parts = { train = "images", test = "held-out" }
[splits]
train = "train"
val = { share = 0.25 }
test = "test"
[classes]
dog = "good dog"
cat = "cat"
"""


@pytest.fixture
def pets(tmp_path):
    pictures.folder(tmp_path / "images", {"cat": 4, "dog": 4})
    pictures.folder(tmp_path / "held-out", {"cat": 2, "dog": 1}, 50)
    write_card(tmp_path / "task.toml", CARD)
    return tmp_path


def test_a_card_decides_names_order_and_splits(pets):
    task = load_task(pets)
    assert task.classes.names == ("good dog", "cat")
    assert {role: len(split) for role, split in task.splits.items()} == {"train": 6, "val": 2, "test": 3}
    for name, label in zip(task.test.ids, task.test.labels, strict=True):
        assert label == {"dog": 0, "cat": 1}[name.split("/")[1]]
    assert task.card.title == "Pets"


def test_a_card_may_lie_elsewhere(pets, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("cards") / "mine.toml"
    shutil.move(pets / "task.toml", elsewhere)
    task = load_task(elsewhere, pets)
    assert task.name == "mine"
    assert len(task.test) == 3


def test_folders_the_card_does_not_know_are_an_error(pets, refused):
    pictures.folder(pets / "images", {"snake": 1}, 90)
    with refused("DATA-CLASS", 3, "snake"):
        load_task(pets)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("titel = 'x'", "titel"),
        ("[splits]\ntrain = 'all'\nvalidation = 'x'", "validation"),
        ("[splits]\nval = { share = 2 }", "share"),
        ("[splits]\nval = { shar = 0.1 }", "shar"),
        ("title = ", "TOML"),
        ("prompts = 'a {}'", "prompts"),
    ],
)
def test_mistakes_in_cards_are_named(tmp_path, text, says, refused):
    with refused("DATA-CARD", 3, says):
        read_card(write_card(tmp_path / "bad.toml", text))


def test_unknown_tasks_get_a_suggestion(refused, tmp_path):
    with refused("DATA-MISSING", 3, "eurosat", "aniso task ls"):
        load_task("eurosatt", tmp_path)


def test_known_tasks_are_the_papers_and_the_variants():
    assert len(known_tasks()) == 26
    assert all(known_card(name).classes for name in known_tasks())


def test_known_data_that_are_not_there_say_how_to_get_them(refused, tmp_path):
    with refused("DATA-MISSING", 3, "fetch"):
        load_task("eurosat", tmp_path)


def test_a_name_that_is_twice_in_a_table_is_refused(tmp_path, refused):
    pictures.parquet(tmp_path, "train", [0, 1])
    pictures.card(tmp_path, ["a", "b"])
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "train.parquet")
    pq.write_table(table.set_column(2, "key", [["same", "same"]]), tmp_path / "train.parquet")
    with refused("DATA-FORMAT", 3, "same"):
        load_task(tmp_path)


# pictures that cannot be read


@pytest.fixture
def damaged(tmp_path):
    pictures.folder(tmp_path / "test", {"cat": 4, "dog": 4})
    (tmp_path / "test" / "cat" / "001.png").write_bytes(b"")
    (tmp_path / "test" / "dog" / "002.png").write_text("not a picture")
    return tmp_path


def test_by_default_the_first_unreadable_picture_stops(damaged, refused):
    task = load_task(damaged)
    with refused("IMAGE-READ", 3, "001.png", "--on-bad-image skip"):
        [task.test.open(i) for i in range(len(task.test))]


def test_unreadable_pictures_can_be_left_out_and_that_is_said(damaged):
    progress = []
    task = load_task(damaged, on_bad_image="skip", progress=lambda *words: progress.append(words))
    assert len(task.test) == 6
    assert any("left out 2 unreadable images" in note and "001.png" in note for note in task.notes)
    assert progress[-1][1:] == (8, 8)


def test_or_up_to_a_number(damaged, refused):
    assert len(load_task(damaged, on_bad_image=2).test) == 6
    with refused("IMAGE-READ", 3, "more than 1", "002.png"):
        load_task(damaged, on_bad_image=1)


def test_the_mini_tasks_are_read_where_they_are(mini_data):
    for path in sorted(p.parent for p in mini_data.glob("*/card.json")):
        task = load_task(path)
        ids = [set(split.ids) for split in task.splits.values()]
        assert len(set.union(*ids)) == sum(map(len, ids))
        assert len(task.classes) == len({*task.classes.names})
        assert task.test.open(0).mode == "RGB"


# splits that would mix


def test_a_picture_in_two_splits_is_an_error_whatever_its_label(tmp_path, refused):
    pictures.folder(tmp_path / "pictures", {"cat": 3, "dog": 3})
    rows = ["path,label,split"]
    rows += [f"pictures/{kind}/{i:03}.png,{kind},train" for kind in ("cat", "dog") for i in range(3)]
    (tmp_path / "list.csv").write_text("\n".join([*rows, "pictures/cat/000.png,dog,test"]))
    with refused("DATA-SPLIT", 3, "000.png", "both"):
        load_task(tmp_path / "list.csv")


RULES = [
    ('train = "all"\nval = "all"\ntest = "all"', "both"),
    ('train = "all"\ntest = { per_class = 270 }', "cannot be cut"),
    ('test = "all"\nval = { share = 0.5 }', "no train"),
]


@pytest.mark.parametrize(("rules", "says"), RULES)
def test_rules_that_leak_or_leave_nothing_are_errors(tmp_path, rules, says, refused):
    pictures.folder(tmp_path / "pets", {"cat": 4, "dog": 4})
    write_card(
        tmp_path / "task.toml", f'[reader]\nkind = "folder"\nparts = {{ all = "pets" }}\n[splits]\n{rules}'
    )
    with refused("DATA-SPLIT", 3, says):
        load_task(tmp_path)


@pytest.mark.parametrize("rule", ["{}", "{ share = 0.5, per_class = 1 }"])
def test_a_rule_says_one_thing(tmp_path, rule, refused):
    with refused("DATA-CARD", 3, "per_class"):
        read_card(write_card(tmp_path / "c.toml", f'[splits]\ntrain = "a"\nval = {rule}'))


def test_cards_of_strangers_cannot_crash_the_reader(tmp_path, refused):
    for text in ("a = " + "[" * 100_000, "epochs = " + "9" * 5000, "\0"):
        with refused("DATA-CARD", 3):
            read_card(write_card(tmp_path / "bad.toml", text))


@pytest.mark.parametrize(
    "names", [("pets-train-0.parquet", "pets-val-0.parquet"), ("x.train.parquet", "x.val.parquet")]
)
def test_shards_named_after_their_data_set_keep_their_parts(tmp_path, names):
    for name, first in zip(names, (0, 50), strict=True):
        pictures.parquet(tmp_path, "part", [0, 1, 0, 1], first)
        (tmp_path / "part.parquet").rename(tmp_path / name)
        _keys(tmp_path / name, first)
    pictures.card(tmp_path, ["a", "b"])
    task = load_task(tmp_path)
    assert {role: len(split) for role, split in task.splits.items()} == {"train": 4, "val": 4}


def _keys(path, first):
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    pq.write_table(table.set_column(2, "key", [[f"{first + i}" for i in range(len(table))]]), path)


def test_tables_of_a_configuration_are_found_in_its_folder(tmp_path):
    pictures.card(pictures.parquet(tmp_path / "plain_text", "train", [0, 1] * 10), ["a", "b"])
    assert len(load_task(tmp_path).train) == 18


def test_a_folder_does_not_stand_in_for_a_known_task(tmp_path, monkeypatch, refused):
    pictures.folder(tmp_path / "eurosat", {"x": 5, "y": 5})
    monkeypatch.chdir(tmp_path)
    with refused("DATA-MISSING", 3, "aniso task fetch eurosat"):
        load_task("eurosat")
    assert len(load_task("./eurosat").classes) == 2


@pytest.mark.parametrize("ref", ["", "x" * 5000, "~nobody-of-that-name/x", "a\0b"])
def test_names_that_are_none_are_refused(ref, refused):
    with pytest.raises(AnisoError) as caught:
        load_task(ref)
    assert caught.value.code == "DATA-MISSING" and caught.value.fix


def test_data_that_must_be_fetched_by_hand_say_how(tmp_path, refused):
    with refused("DATA-MISSING", 3, "image-net.org"):
        load_task("imagenet", tmp_path)


@pytest.mark.parametrize("policy", ["eror", -1, True, None])
def test_a_policy_that_is_none_is_refused(damaged, policy, refused):
    with refused("USAGE", 2):
        load_task(damaged, on_bad_image=policy)


def test_tables_are_fetched_from_the_hub_as_a_data_set(tmp_path, monkeypatch, refused):
    import huggingface_hub

    from aniso.data.fetch import fetch_task

    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        pictures.card(pictures.parquet(options["local_dir"], "train", [0, 1] * 10), ["a", "b"])
        return str(options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    place = fetch_task("owner/pets@v1", tmp_path)
    assert (asked["repo"], asked["revision"], asked["repo_type"]) == ("owner/pets", "v1", "dataset")
    assert not any(pattern.endswith((".py", "*")) for pattern in asked["allow_patterns"])
    assert place == str(tmp_path / "pets") and len(load_task(place).train) == 18
    with refused("DATA-MISSING", 2, "aniso task ls"):
        fetch_task("no such thing", tmp_path)
