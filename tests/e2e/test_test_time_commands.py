"""Adapting from the command line: to a task's test pictures, or to a folder that nobody has sorted."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from safetensors.torch import load_file, save_file
from watch import contents

from aniso.compose import Coefficients
from aniso.data import load_task, unlabelled_images
from aniso.errors import InputError
from aniso.experiments.input_files import read_names
from aniso.experiments.record import rounded
from aniso.experiments.strict_yaml import as_yaml, parse_yaml
from aniso.learn import evaluate
from aniso.learn._training.loop import Loop
from aniso.models import load_model

Aniso = Callable[..., Any]
Done = Callable[..., Any]

OBJECTIVES = ("fixmatch", "sar", "entropy", "contrastive")
QUICK = ("--epochs", 2, "--batch-size", 8, "--lr", 0.1)
MANY = ("red", "blue", "grey", "a b c", "school bus", "zebra")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    """With a model that is surer of its answers than one that nobody trained."""
    made = runs.shelf(tmp_path_factory.mktemp("shelf"))
    weights = load_file(made.model / "model.safetensors")
    weights["logit_scale"] = torch.tensor(math.log(38.0))
    save_file(weights, made.model / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def unsorted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures, some of them in a folder within; not to be changed."""
    root = tmp_path_factory.mktemp("unsorted")
    coloured = runs.coloured(root / "coloured", 6)
    (root / "holiday" / "more").mkdir(parents=True)
    for i, path in enumerate(sorted(coloured.rglob("*.png"))):
        shutil.copy(path, root / "holiday" / ("more" if i % 3 else ".") / f"{i}.png")
    return root / "holiday"


def on_task(shelf: runs.Shelf, *more: object) -> tuple[object, ...]:
    return ("fit", "test-time", *shelf.base, "--task", shelf.data / "cars", *QUICK, *more)


def on_images(shelf: runs.Shelf, images: Path, *more: object) -> tuple[object, ...]:
    quick = () if "none" in more else QUICK
    return ("fit", "test-time", *shelf.base, "--images", images, *quick, *more)


def named(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--classes", name))


# a task's test pictures


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_task_is_adapted_to_and_what_was_learned_measures_the_same_afterwards(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path, objective: str
) -> None:
    out = tmp_path / "run"
    ran = aniso(*on_task(shelf, "--objective", objective, "-o", out))
    assert ran.code == 0, ran.err
    assert (
        "zero-shot" in ran.out
        and "learned" in ran.out
        and "kept epoch 2 of 2; 96 trained parameters" in ran.out
    )
    assert "same prediction as zero-shot: " in ran.out and "mean confidence" in ran.out
    assert sorted(path.name for path in out.iterdir()) == [
        "classes.json",
        "coefficients.safetensors",
        "images",
        "metrics.jsonl",
        "predictions.csv",
        "predictions.csv.meta.json",
        "record.json",
        "spec.yaml",
    ]
    record = json.loads((out / "record.json").read_text())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert record["metrics"]["history"] == rounded(rows)
    assert all(row["accuracy"] == {} for row in rows)  # no label is looked at on the way
    assert ("trusted" in rows[-1]) == (objective == "fixmatch")
    assert ("forgotten" in rows[-1]) == (objective == "sar")
    assert record["spec"]["objective"] == objective
    assert record["spec"]["schedule"]["optimiser"] == "adamw"
    learned = Coefficients.load(out / "coefficients.safetensors")
    assert learned.vectors == ("dtd", "signs", "photos")  # all but its own
    composed = ("--bank", shelf.bank, "--coefficients", out / "coefficients.safetensors")
    (again,) = done("eval", shelf.model, "--task", shelf.data / "cars", *composed)
    accuracy = record["metrics"]["accuracy"]["cars"]
    assert (again["correct"], again["total"]) == (accuracy["correct"], accuracy["total"])


def test_layer_norms_are_trained_without_a_bank_and_load_back(
    done: Done, aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("fit", "test-time", "--model", shelf.model, "--task", shelf.data / "cars", *QUICK)
    ran = aniso(*given, "--method", "layernorm", "-o", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "layer norms" in ran.out and "128 trained" in ran.out  # those before and after all layers
    names = {path.name for path in (tmp_path / "run").iterdir()}
    own = {"classes.json", "predictions.csv", "predictions.csv.meta.json"}
    assert names == {"weights.safetensors", "metrics.jsonl", "record.json", "spec.yaml", "images"} | own
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["coefficients"] is None and "bank" not in record["inputs"]
    weights = tmp_path / "run" / "weights.safetensors"
    (again,) = done("eval", shelf.model, "--weights", weights, "--task", shelf.data / "cars")
    assert again["correct"] == record["metrics"]["accuracy"]["cars"]["correct"]
    tuned, base = load_file(weights), load_model(shelf.model).state_dict()
    changed = {name for name, tensor in base.items() if not torch.equal(tuned[name], tensor)}
    assert len(changed) == 4 and all("layernorm" in name or "layrnorm" in name for name in changed)


def test_online_answers_are_measured_beside_those_afterwards(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    ran = aniso(*on_task(shelf, "--online", "--batch-size", 12, "-o", tmp_path / "run"))
    assert ran.code == 0, ran.err
    assert "cars, predicted before learning from each batch: " in ran.out and "kept epoch 1 of 1" in ran.out
    metrics = json.loads((tmp_path / "run" / "record.json").read_text())["metrics"]
    test = load_task(shelf.data / "cars").split("test")
    # a single batch: all was answered by the base
    assert metrics["online"]["cars"]["correct"] == evaluate(load_model(shelf.model), test).correct
    assert metrics["online"]["cars"]["total"] == metrics["accuracy"]["cars"]["total"] == 12


def test_zero_shot_is_a_method_too(done: Done, shelf: runs.Shelf) -> None:
    said = done("fit", "test-time", "--model", shelf.model, "--task", shelf.data / "cars", "--method", "none")
    assert said["metrics"]["answers"]["agreement"] == 1.0
    assert "zero_shot" not in said["metrics"] and said["coefficients"] is None


def test_json_is_the_record_and_a_finished_run_gives_it_again(
    done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    said = done(*on_task(shelf, "-o", tmp_path / "run"))
    written = json.loads((tmp_path / "run" / "record.json").read_text())
    assert rounded(said) == written
    assert set(said["metrics"]["answers"]) == {"agreement", "confidence", "counts"}
    assert sum(said["metrics"]["answers"]["counts"].values()) == 12
    assert done(*on_task(shelf, "-o", tmp_path / "run", "--resume")) == written


# pictures of one's own


def test_a_folder_and_a_list_of_classes_are_enough(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "classes.txt"
    listed.write_bytes("\ufeffred\r\n\r\n  blue  \nsch\u00f6ner Bus\n".encode())
    before = contents(unsorted)
    ran = aniso(*on_images(shelf, unsorted, "--classes", listed, "-o", tmp_path / "run"))
    assert ran.code == 0, ran.err
    assert "accuracy" not in ran.out and "95 %" not in ran.out
    assert (
        "same prediction as zero-shot: " in ran.out
        and "mean confidence" in ran.out
        and "predictions: " in ran.out
    )
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["spec"]["classes"] == ["red", "blue", "sch\u00f6ner Bus"]
    assert record["spec"]["images"] == "holiday"  # where it lies is nobody's business
    metrics = record["metrics"]
    assert metrics["accuracy"] == {}
    assert list(metrics["answers"]["counts"]) == sorted(record["spec"]["classes"])
    assert sum(metrics["answers"]["counts"].values()) == 12
    assert 0 <= metrics["answers"]["agreement"] <= 1 and len(metrics["answers"]["confidence"]) == 2
    assert list(record["inputs"]["data"]) == ["holiday"]
    assert Coefficients.load(tmp_path / "run" / "coefficients.safetensors").values.any()
    assert contents(unsorted) == before


def test_classes_may_be_said_one_by_one_and_in_other_prompts(
    done: Done, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    (tmp_path / "classes.txt").write_text("red\nblue\n")
    first = done(*on_images(shelf, unsorted, "--classes", tmp_path / "classes.txt"))
    second = done(*on_images(shelf, unsorted, *named("red", "blue")))
    assert second["id"] == first["id"] and second["metrics"] == first["metrics"]
    other = done(*on_images(shelf, unsorted, *named("red", "blue"), "--prompt", "{} it is."))
    assert other["id"] != first["id"]
    assert other["metrics"]["answers"]["confidence"] != first["metrics"]["answers"]["confidence"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_from_unsorted_pictures(
    done: Done, shelf: runs.Shelf, unsorted: Path, tmp_path: Path, objective: str
) -> None:
    given = on_images(shelf, unsorted, *named(*MANY), "--objective", objective, "--threshold", 0.3)
    said = done(*given, "--online", "-o", tmp_path / "run")
    assert said["metrics"]["epochs"] == 1
    assert Coefficients.load(tmp_path / "run" / "coefficients.safetensors").values.any()
    before, after = said["metrics"]["answers"]["confidence"]
    assert before != after


def test_online_answers_to_unsorted_pictures_are_in_the_record(
    done: Done, shelf: runs.Shelf, unsorted: Path
) -> None:
    metrics = done(*on_images(shelf, unsorted, *named(*MANY), "--online"))["metrics"]
    assert metrics["online"]


def test_layer_norms_learn_from_unsorted_pictures_too(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    given = ("fit", "test-time", "--model", shelf.model, "--images", unsorted, *named(*MANY), *QUICK)
    ran = aniso(*given, "--method", "layernorm", "-o", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert load_model(shelf.model, tmp_path / "run" / "weights.safetensors")


# what is said about it


def test_a_collapse_into_one_class_is_warned_of(
    aniso: Aniso, done: Done, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    given = on_images(shelf, unsorted, *named(*MANY), "--objective", "entropy")
    base = on_images(shelf, unsorted, *named(*MANY), "--method", "none")
    zero_shot = done(*base)["metrics"]["answers"]
    assert max(zero_shot["counts"].values()) < 8
    good = aniso(*given, "--lr", 1e-4)
    assert good.code == 0 and "collapsed" not in good.err, good.err
    bad = aniso(*given, "--lr", 1000, "-o", tmp_path / "run")
    assert bad.code == 0, bad.err
    assert "warning: " in bad.err and "collapsed" in bad.err and "lower learning rate" in bad.err
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert any("collapsed" in note for note in record["notes"])
    found = record["metrics"]["answers"]
    assert max(found["counts"].values()) > 8
    assert found["confidence"][0] == pytest.approx(zero_shot["confidence"][0], rel=1e-5)
    assert found["agreement"] < 1


def test_fewer_pictures_than_classes_are_said(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    names = named(*(f"thing {i}" for i in range(13)))
    ran = aniso(*on_images(shelf, unsorted, *names, "-o", tmp_path / "run"))
    assert ran.code == 0, ran.err
    assert "note: 12 images for 13 classes" in ran.err
    assert "1 more classes" in ran.out  # only the first twelve are printed
    notes = json.loads((tmp_path / "run" / "record.json").read_text())["notes"]
    assert any("13 classes" in note for note in notes)
    enough = aniso(*on_images(shelf, unsorted, *names[:-2]))
    assert enough.code == 0 and "pictures for" not in enough.err


def test_files_that_are_no_pictures_are_said(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    shutil.copytree(unsorted, tmp_path / "mine")
    (tmp_path / "mine" / "notes.txt").write_text("by hand")
    (tmp_path / "mine" / ".hidden.png").write_bytes(b"")
    ran = aniso(*on_images(shelf, tmp_path / "mine", *named("red", "blue")))
    assert ran.code == 0, ran.err
    assert "notes.txt" in ran.err and "hidden" not in ran.err


# pictures that cannot be read


@pytest.fixture
def damaged(unsorted: Path, tmp_path: Path) -> Path:
    shutil.copytree(unsorted, tmp_path / "damaged")
    (tmp_path / "damaged" / "bad.png").write_bytes(b"no picture at all")
    return tmp_path / "damaged"


def test_a_picture_that_cannot_be_read_is_named_and_once_replaced_the_run_goes_on(
    aniso: Aniso, shelf: runs.Shelf, damaged: Path, unsorted: Path, tmp_path: Path
) -> None:
    given = on_images(shelf, damaged, *named("red", "blue"), "-o", tmp_path / "run")
    ran = aniso(*given)
    assert ran.code == 3, ran.err
    assert "IMAGE-READ" in ran.err and "bad.png" in ran.err and "--on-bad-image skip" in ran.err
    assert not (tmp_path / "run" / "record.json").exists()
    assert aniso(*given, "--on-bad-image", "skip").code == 0  # into the same directory
    shutil.copy(unsorted / "0.png", damaged / "bad.png")
    assert aniso(*given[:-1], tmp_path / "whole", "--resume").code == 0
    assert (tmp_path / "run" / "record.json").exists()


def test_pictures_that_cannot_be_read_are_left_out_if_asked_for(
    aniso: Aniso, shelf: runs.Shelf, damaged: Path, tmp_path: Path
) -> None:
    given = on_images(shelf, damaged, *named("red", "blue"), "--on-bad-image")
    ran = aniso(*given, "skip", "-o", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "note: " in ran.err and "left out 1 unreadable images" in ran.err and "bad.png" in ran.err
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert sum(record["metrics"]["answers"]["counts"].values()) == 12
    assert aniso(*given, 1).code == 0
    too_many = aniso(*given, 0)
    assert too_many.code == 3 and "more than 0 images" in too_many.err


def test_a_folder_that_cannot_be_looked_into_is_not_passed_over(
    unsorted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.scandir

    def refusing(path):
        if Path(path).name == "more":
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr("os.scandir", refusing)
    with pytest.raises(InputError, match="more") as refused:
        unlabelled_images(unsorted, ["red", "blue"])
    assert "Permission denied" in str(refused.value)


# what is refused


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        ((), ("a task", "images")),
        (("--task", "cars", "--images", "unsorted", *named("red", "blue")), ("a task", "images")),
        (("--images", "unsorted"), ("classes",)),
        (("--task", "cars", *named("red", "blue")), ("classes",)),
        (("--task", "cars", "--prompt", "a {}."), ("prompts",)),
        (("--task", "cars", "--objective", "simclr"), ("objective", "contrastive")),
        (("--task", "cars", "--method", "weights"), ("weights", "layernorm")),
        (("--task", "cars", "--method", "weights"), ("method",)),
        (("--task", "cars", "--method", "search"), ("method",)),
        (("--task", "cars", "--power", 0), ("power",)),
        (("--task", "cars", "--threshold", 1.5), ("threshold",)),
        (("--task", "cars", "--optimiser", "lbfgs"), ("optimiser", "sgd")),
        (
            ("--task", "cars", "--objective", "contrastive", "--micro-batch", 4),
            ("micro-batches",),
        ),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    aniso: Aniso,
    shelf: runs.Shelf,
    unsorted: Path,
    tmp_path: Path,
    more: tuple[object, ...],
    mentions: tuple[str, ...],
) -> None:
    places = {"cars": shelf.data / "cars", "unsorted": unsorted}
    given = [places.get(str(word), word) for word in more]
    ran = aniso("fit", "test-time", *shelf.base, *QUICK, *given, "-o", tmp_path / "run")
    assert ran.code == 2, ran.err
    for text in mentions:
        assert text in ran.err, ran.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "code", "mentions"),
    [
        (b"red\nblue\nred\n", 2, ("DATA-CLASS", "same name", "red")),
        (b"\n  \n", 2, ("classes",)),
        (b"", 2, ("classes",)),
        (b"\xff\xfe\x00r", 3, ("DATA-CLASS", "classes.txt", "UTF-8")),
    ],
)
def test_lists_of_classes_that_cannot_be_used_are_refused_and_leave_nothing(
    aniso: Aniso,
    shelf: runs.Shelf,
    unsorted: Path,
    tmp_path: Path,
    names: bytes,
    code: int,
    mentions: tuple[str, ...],
) -> None:
    (tmp_path / "classes.txt").write_bytes(names)
    given = on_images(shelf, unsorted, "--classes", tmp_path / "classes.txt", "-o", tmp_path / "run")
    ran = aniso(*given)
    assert ran.code == code, ran.err
    for text in mentions:
        assert text in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_a_list_of_classes_that_is_not_there_is_no_class(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    ran = aniso(*on_images(shelf, unsorted, "--classes", tmp_path / "clases.txt"))
    assert ran.code in (2, 3) and "clases.txt" in ran.err


def test_a_class_may_have_a_long_name() -> None:
    assert read_names(["x" * 300]) == ["x" * 300]


@pytest.mark.parametrize("count", [None, 0, 1])
def test_folders_without_enough_pictures_are_refused_and_leave_nothing(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path, count: int | None
) -> None:
    mine = tmp_path / "mine"
    if count is not None:
        mine.mkdir()
        (mine / "readme.txt").write_text("none here")
        for i in range(count):
            shutil.copy(unsorted / "0.png", mine / f"{i}.png")
    ran = aniso(*on_images(shelf, mine, *named("red", "blue"), "-o", tmp_path / "run"))
    assert ran.code == 3, ran.err
    assert "DATA-MISSING" in ran.err and "mine" in ran.err
    assert not (tmp_path / "run").exists()


def test_a_weight_decay_that_was_said_holds_for_sar_as_well(done: Done, shelf: runs.Shelf) -> None:
    facts = done(*on_task(shelf, "--objective", "sar", "--weight-decay", 0.3, "--plan"))
    assert facts["spec"]["schedule"]["weight_decay"] == 0.3


# plans and specs


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("--online",)),
        ("--online", "--objective", "sar"),
        ("--method", "layernorm"),
        ("--objective", "entropy", "--epochs", 3),
    ],
)
def test_a_plan_says_what_will_be_done_and_does_nothing(
    done: Done, shelf: runs.Shelf, tmp_path: Path, more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = on_task(shelf, "--batch-size", 12, *more, "-o", tmp_path / "run")
    facts = done(*given, "--plan")
    assert not (tmp_path / "run").exists()
    assert facts["tests"] == {"cars": 12} and facts["chosen_by"] == {}
    assert facts["learned_from"] == {"cars test": 12}
    assert ("vectors" in facts) == ("layernorm" not in more)
    steps, take = [], Loop._take_step
    monkeypatch.setattr(
        Loop, "_take_step", lambda self, batches: steps.append(len(batches[0])) or take(self, batches)
    )
    said = done(*given)
    assert facts["steps"] == len(steps) and facts["trainable"] == said["metrics"]["trainable"]
    assert sorted(facts["writes"]) == sorted(path.name for path in (tmp_path / "run").iterdir())


def test_a_plan_for_a_folder_names_it(
    aniso: Aniso, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    ran = aniso(*on_images(shelf, unsorted, *named("red", "blue"), "--plan"))
    assert ran.code == 0 and "holiday (12 images)" in ran.out, ran.err
    (tmp_path / "empty").mkdir()
    assert aniso(*on_images(shelf, tmp_path / "empty", *named("red", "blue"), "--plan")).code == 3


def test_a_printed_spec_as_an_experiment_gives_the_same_record(
    aniso: Aniso, done: Done, shelf: runs.Shelf, unsorted: Path, tmp_path: Path
) -> None:
    given = on_images(shelf, unsorted, *named(*MANY), "--objective", "sar", "--online")
    base = parse_yaml(aniso(*given, "--print-spec").out, "printed").data
    whole = {"schema": 1, "name": "try", "base": base, "variants": [{"label": "adapted"}]}
    (tmp_path / "spec.yaml").write_text(as_yaml(whole))
    ran = aniso("run", tmp_path / "spec.yaml")
    assert ran.code == 0, ran.err
    (found,), first = runs.recorded(tmp_path / "records"), done(*given)
    assert found["id"] == first["id"] and found["spec"] == first["spec"]
    answers, expected = found["metrics"]["answers"], first["metrics"]["answers"]
    assert answers["counts"] == expected["counts"]
    assert answers["confidence"] == pytest.approx(expected["confidence"], rel=1e-4)
    assert (found["experiment"], found["label"]) == ("try", "adapted")
