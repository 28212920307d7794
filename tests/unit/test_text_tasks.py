"""Tasks of texts: tables, JSON lines and text files; batches and views of texts."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentences
import torch

from aniso.classes import ClassList
from aniso.data import Batches, by_length, content_hash, load_task
from aniso.data.readers import recognise
from aniso.errors import AnisoError
from aniso.learn import Contrastive, FixMatch, evaluate
from aniso.learn.features import features
from aniso.models import load_model

pytest.importorskip("transformers")

CARD = {
    "classes": ["animal", "place"],
    "descriptions": ["a cat or a bird", "an old town"],
    "prompts": ["a text about {}", "{}"],
}


def table(path, rows, **columns):
    found = {"text": [text for text, _ in rows], "label": [label for _, label in rows], **columns}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(found), path)


def parquet_task(path, card=CARD, **more):
    for part, count in (("train", 6), ("val", 2), ("test", 4)):
        rows = [(f"{part} {word}", i % 2) for i, word in enumerate(sentences.WORDS[:count])]
        table(path / f"{part}.parquet", rows, key=[f"{part}-{i}" for i in range(count)])
    (path / "card.json").write_text(json.dumps({**card, **more}))
    return path


def test_a_parquet_folder_has_splits_classes_descriptions_and_prompts(tmp_path):
    task = load_task(parquet_task(tmp_path / "t"))
    assert {role: len(split) for role, split in task.splits.items()} == {"train": 6, "val": 2, "test": 4}
    assert task.classes == ClassList(("animal", "place"), ("a text about {}", "{}"), CARD["descriptions"])
    assert task.classes.texts()[1] == ["a text about an old town", "an old town"]
    assert task.train.open(0) == f"train {sentences.WORDS[0]}" and task.train.labels[:3] == (0, 1, 0)
    assert task.train.item_kind == "texts" and task.train.ids[0] == "train-0"
    assert "texts" in repr(task.test) and "row 1" in task.test.describe(1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"one, cat",animal\nold town,place\nbird,animal\nriver,place\n'),
        ("a.tsv", "label\ttext\nanimal\tone, cat\nplace\told town\nanimal\tbird\nplace\triver\n"),
        ("a.csv", 'review;category\n"one, cat";animal\nold town;place\nbird;animal\nriver;place\n'),
        (
            "a.jsonl",
            "\n".join(
                json.dumps({"sentence": text, "label": label})
                for text, label in [
                    ("one, cat", "animal"),
                    ("old town", "place"),
                    ("bird", "animal"),
                    ("river", "place"),
                ]
            ),
        ),
    ],
)
def test_tables_with_texts_and_labels_are_read(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert recognise(tmp_path / name) == "text_table"
    task = load_task(tmp_path / name)
    every = {
        split.open(i): split.classes.names[y]
        for split in task.splits.values()
        for i, y in enumerate(split.labels)
    }
    assert every == {"one, cat": "animal", "old town": "place", "bird": "animal", "river": "place"}
    assert task.classes.prompts == ("{}",)


def test_a_split_column_divides_a_table(tmp_path):
    rows = [("a", "x", "train"), ("b", "y", "train"), ("c", "x", "test"), ("d", "y", "validation")]
    lines = [json.dumps({"text": t, "label": y, "split": s}) for t, y, s in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    task = load_task(tmp_path / "a.jsonl")
    assert {role: len(split) for role, split in task.splits.items()} == {"train": 2, "val": 1, "test": 1}


def test_a_text_file_per_class_is_read_line_by_line(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "animal.txt").write_text(f"{part} cat\n\n{part} bird\n")
        (tmp_path / part / "place.txt").write_text(f"{part} town\n{part} river\n")
    task = load_task(tmp_path)
    assert task.classes.names == ("animal", "place")
    assert [task.test.open(i) for i in range(4)] == ["test cat", "test bird", "test town", "test river"]
    assert task.test.labels == (0, 0, 1, 1)


# mistakes


def message_of(tmp_path, name, content, code):
    (tmp_path / name).write_text(content)
    with pytest.raises(AnisoError) as caught:
        load_task(tmp_path / name)
    assert caught.value.code == code, caught.value
    return str(caught.value)


def test_a_missing_column_is_named(tmp_path):
    message = message_of(tmp_path, "a.csv", "words,label\na,b\n", "DATA-FORMAT")
    assert "words,label" in message and "text, sentence, review" in message
    table(tmp_path / "t/train.parquet", [("a", 0)])
    card = tmp_path / "t/task.toml"
    card.write_text('[reader]\nkind = "text_table"\ntext = "body"\n')
    with pytest.raises(AnisoError, match="no column of texts"):
        load_task(tmp_path / "t")


def test_empty_texts_are_named(tmp_path):
    message = message_of(tmp_path, "a.csv", 'text,label\n" ",x\nb,y\n', "DATA-TEXT")
    assert "1 texts are empty" in message and "line 2" in message


def test_one_class_is_a_warning(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,x\nb,x\nc,x\nd,x\ne,x\n")
    assert any(
        note.startswith("warning: there is only one class") for note in load_task(tmp_path / "a.csv").notes
    )


def test_a_label_that_the_card_does_not_list_is_named(tmp_path):
    parquet_task(tmp_path / "t", classes=["animal"], descriptions=["an animal"])
    with pytest.raises(AnisoError) as caught:
        load_task(tmp_path / "t")
    assert caught.value.code == "DATA-LABEL" and "0 to 0" in str(caught.value)
    (tmp_path / "card.json").write_text(json.dumps({"classes": ["x"]}))
    assert "z" in message_of(tmp_path, "a.csv", "text,label\na,x\nb,z\n", "DATA-CLASS")


@pytest.mark.parametrize("descriptions", [["one"], ["same", "same"], ["", "other"], "text"])
def test_descriptions_are_one_phrase_per_class(tmp_path, descriptions):
    with pytest.raises(AnisoError) as caught:
        load_task(parquet_task(tmp_path / "t", descriptions=descriptions))
    assert caught.value.code in ("DATA-FORMAT", "DATA-CLASS")


def test_contradictory_labels_are_refused_and_repeated_texts_read_once(tmp_path):
    assert "x" in message_of(tmp_path, "a.csv", "text,label\na,x\na,y\nb,y\n", "DATA-LABEL")
    (tmp_path / "b.csv").write_text("text,label\na,x\na,x\nb,y\nc,y\n")
    task = load_task(tmp_path / "b.csv")
    assert sum(map(len, task.splits.values())) == 3
    assert any("1 repeated texts ignored" in note for note in task.notes)


def test_texts_in_train_and_test_are_a_warning(tmp_path):
    for part, words in (("train", "ab"), ("test", "bc")):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "".join(f"{w},{w}\n" for w in words))
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    notes = load_task(tmp_path).notes
    assert "warning: 1 texts of test are in train or val, too" in notes


def test_content_changes_with_a_text(tmp_path):
    before = content_hash(load_task(parquet_task(tmp_path / "t")).test)
    table(
        tmp_path / "t/test.parquet",
        [("other", 0), ("b", 1), ("c", 0), ("d", 1)],
        key=[f"test-{i}" for i in range(4)],
    )
    assert content_hash(load_task(tmp_path / "t").test) != before


# batches and views


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("m")
    sentences.save(path, length=20)
    return load_model(path)


def long_task(tmp_path, count=400):
    rng = torch.Generator().manual_seed(0)
    lengths = (2 + 4 * torch.randn(count, generator=rng).exp()).clamp(max=17).int().tolist()
    words = sentences.WORDS
    texts = [
        " ".join(words[(i * 7 + j) % len(words)] for j in range(n)) + f" w{i}" for i, n in enumerate(lengths)
    ]
    table(tmp_path / "test.parquet", [(text, i % 2) for i, text in enumerate(texts)])
    (tmp_path / "card.json").write_text(json.dumps(CARD))
    return load_task(tmp_path)


def test_evaluation_goes_by_length_with_little_padding_and_the_same_results(tmp_path, encoder):
    split = long_task(tmp_path).test
    order = by_length(split, encoder.transforms.eval)
    assert sorted(order) == list(range(len(split)))
    inputs = []
    hook = encoder.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    features(encoder, split)
    hook.remove()
    assert sum(int((rows < 0).sum()) for rows in inputs) < 0.15 * sum(rows.numel() for rows in inputs)
    plain = [encoder(batch.inputs) for batch in Batches(split, encoder.transforms.eval, size=32)]
    with torch.no_grad():
        assert torch.allclose(features(encoder, split, batch_size=32)[0], torch.cat(plain), atol=1e-6)


def test_long_texts_are_counted(tmp_path, encoder):
    (tmp_path / "test.csv").write_text(f"text,label\n{'cat ' * 40},animal\nold town,place\n")
    result = evaluate(encoder, load_task(tmp_path).test)
    assert any("1 of 2 texts are longer than 20 tokens: cut" in note for note in result.notes)


def test_strong_views_depend_on_seed_epoch_sample_and_view_alone(tmp_path, encoder):
    split, strong = long_task(tmp_path, 40).test, encoder.transforms.strong

    def views(seed, epoch, order=None, size=8, workers=0):
        found = {}
        for batch in Batches(
            split, strong, strong, size=size, seed=seed, epoch=epoch, order=order, workers=workers
        ):
            for n, view in enumerate(batch.views):
                found |= {
                    (i, n): tuple(t for t in row if t >= 0)
                    for i, row in zip(batch.indices, view.tolist(), strict=True)
                }
        return found

    first = views(0, 0)
    assert first == views(0, 0, order=list(reversed(range(40))), size=3)
    assert first == views(0, 0, workers=1)
    assert first != views(1, 0) and first != views(0, 1)
    assert any(first[i, 0] != first[i, 1] for i in range(40))
    marks = encoder.family.tokens.tokenise("cat").ids
    mask = encoder.family.tokens.mask_token
    for (i, _), ids in first.items():
        whole = encoder.family.tokens.tokenise(split.open(i)).ids
        assert ids[0] == marks[0] and ids[-1] == marks[-1] and 3 <= len(ids) <= len(whole)
        assert any(t not in (mask, marks[0], marks[-1]) for t in ids)


@pytest.mark.parametrize("term", [FixMatch, Contrastive])
@pytest.mark.parametrize("strong", ["few_shot", "strong", "train"])
def test_self_training_compares_a_whole_text_with_one_whose_tokens_are_dropped(
    tmp_path, encoder, term, strong
):
    split = long_task(tmp_path, 40).test.unlabelled()
    weak, augmented = term(split, strong=strong).views(encoder)
    batches = list(Batches(split, weak, augmented, size=8))
    whole = [encoder.family.tokens.tokenise(split.open(i)).ids for i in range(40)]
    for batch in batches:
        for i, row in zip(batch.indices, batch.views[0].tolist(), strict=True):
            assert tuple(t for t in row if t >= 0) == whole[i]
    dropped = {
        i: tuple(t for t in row if t >= 0)
        for batch in batches
        for i, row in zip(batch.indices, batch.views[1].tolist(), strict=True)
    }
    assert sum(dropped[i] != whole[i] for i in range(40)) > 20
