"""Heads from the command line: learned after a composition or with it, saved, measured, in experiments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from PIL import Image

from aniso.cli import main
from aniso.experiments.parsing import parse_setting
from aniso.experiments.record import rounded
from aniso.experiments.settings import Setting
from aniso.experiments.strict_yaml import Document, as_yaml, parse_yaml
from aniso.learn.heads import load_head
from aniso.registry import HEADS

Aniso = Callable[..., Any]
Done = Callable[..., Any]

RECORDS = Path(__file__).parents[2] / "experiments" / "few-shot" / "records"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def learned(shelf: runs.Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run with a head, not to be changed."""
    out = tmp_path_factory.mktemp("learned") / "run"
    assert main([*shelf.few_shot("--head", "tip", "-o", out)]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    yield out
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


def composed(shelf: runs.Shelf, run: Path, head: Path | None = None) -> tuple[object, ...]:
    """What a run learned, for ``aniso eval``."""
    found = ("--bank", shelf.bank, "--coefficients", run / "coefficients.safetensors")
    return (*found, "--head", head or run / "head.safetensors")


# after a composition


@pytest.mark.parametrize("kind", HEADS.names)
def test_a_head_is_saved_and_measures_the_same_afterwards(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "run"
    ran = aniso(*shelf.few_shot("--head", kind, "-o", out))
    assert ran.code == 0, ran.err
    assert f"learned + {kind}" in ran.out and "head: kept step 300 of 300" in ran.out
    assert sorted(path.name for path in out.iterdir()) == [
        "classes.json",
        "coefficients.safetensors",
        "head.safetensors",
        "images",
        "metrics.jsonl",
        "predictions.csv",
        "predictions.csv.meta.json",
        "record.json",
        "spec.yaml",
    ]
    record = json.loads((out / "record.json").read_text())
    head = load_head(out / "head.safetensors").head
    assert (record["spec"]["head"], head.kind, head.names) == (kind, kind, ("blue", "red"))
    facts = record["metrics"]["head"]
    assert (facts["kind"], facts["trainable"], facts["steps"]) == (kind, head.count, 300)
    assert facts["loss"][1] <= facts["loss"][0]
    measured = record["metrics"]["accuracy"]["photos"]
    (again,) = done("eval", shelf.model, "--task", shelf.data / "photos", *composed(shelf, out))
    assert (again["correct"], again["total"]) == (measured["correct"], measured["total"])
    assert f"head {kind}" in again["what"]


def test_coefficients_are_those_that_are_learned_without_a_head(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    for name, more in (("without", ()), ("with", ("--head", "lpp"))):
        assert aniso(*shelf.few_shot(*more, "-o", tmp_path / name)).code == 0
    without, with_head = (tmp_path / name / "coefficients.safetensors" for name in ("without", "with"))
    assert without.read_bytes() == with_head.read_bytes()
    assert not (tmp_path / "without" / "head.safetensors").exists()


def test_a_seed_decides_every_byte_whether_features_are_kept_or_not(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANISO_CACHE", str(tmp_path / "cache"))
    # all pictures are shots, so that nothing but their views is left to be drawn
    given = ("--method", "none", "--head", "lpp", "--shots", 100, "--allow-fewer-shots")
    found = []
    for name, seed in (("cold", 0), ("warm", 0), ("other", 1)):
        ran = aniso(*shelf.few_shot(*given, "--seed", seed, "-o", tmp_path / name))
        assert ran.code == 0, ran.err
        found.append((tmp_path / name / "head.safetensors").read_bytes())
        assert list((tmp_path / "cache" / "features").iterdir())
    assert found[0] == found[1] != found[2]
    monkeypatch.setenv("ANISO_CACHE", "/proc/nowhere")  # where nothing can be kept
    assert aniso(*shelf.few_shot(*given, "-o", tmp_path / "none")).code == 0
    assert (tmp_path / "none" / "head.safetensors").read_bytes() == found[0]


def test_the_step_is_chosen_on_validation_data_as_the_epoch_is(
    done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    said = done(*shelf.few_shot("--head", "lpp", "--keep", "best", "-o", tmp_path / "run"))
    head = said["metrics"]["head"]
    assert head["kept_step"] % 10 == 0 and head["kept_step"] < head["steps"] == 300
    given = ("--split", "val", *composed(shelf, tmp_path / "run"))
    (chosen,) = done("eval", shelf.model, "--task", shelf.data / "photos", *given)
    assert chosen["accuracy"] >= max(
        row["accuracy"]["photos val"] for row in said["metrics"]["history"] if row["kept"]
    )


def test_a_plan_names_the_head_among_what_is_written(
    done: Done, aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = shelf.few_shot("--method", "none", "--head", "lpp", "-o", tmp_path / "run")
    facts = done(*given, "--plan")
    assert not (tmp_path / "run").exists()
    assert aniso(*given).code == 0
    assert sorted(facts["writes"]) == sorted(path.name for path in (tmp_path / "run").iterdir())


@pytest.mark.parametrize("method", ["search", "weights"])
def test_other_methods_can_have_a_head_too(
    done: Done, shelf: runs.Shelf, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "run"
    rate = ("--lr", 1e-3) if method == "weights" else ()
    said = done(*shelf.few_shot("--method", method, *rate, "--head", "lpp", "-o", out))
    given = composed(shelf, out)
    if method == "weights":
        given = ("--weights", out / "weights.safetensors", "--head", out / "head.safetensors")
    (again,) = done("eval", shelf.model, "--task", shelf.data / "photos", *given)
    assert again["correct"] == said["metrics"]["accuracy"]["photos"]["correct"]


@pytest.mark.parametrize("more", ["--head", "--out-of-domain"])
def test_a_tasks_own_vector_can_have_a_head_too(aniso: Aniso, shelf: runs.Shelf, more: str) -> None:
    value = "tip" if more == "--head" else shelf.data / "cars"
    ran = aniso(*shelf.few_shot("--method", "vector", more, value))
    assert ran.code == 0, ran.err


def test_a_head_alone_needs_no_bank(done: Done, aniso: Aniso, shelf: runs.Shelf, tmp_path: Path) -> None:
    out, photos = tmp_path / "run", shelf.data / "photos"
    given = ("--model", shelf.model, "--task", photos, "--shots", 3, "--method", "none", "--head", "lpp")
    said = done("fit", "few-shot", *given, "-o", out)
    assert "bank" not in said["inputs"] and said["coefficients"] is None
    assert sorted(path.name for path in out.iterdir()) == [
        "classes.json", "head.safetensors", "images", "predictions.csv",
        "predictions.csv.meta.json", "record.json", "spec.yaml",
    ]  # fmt: skip
    (again,) = done("eval", shelf.model, "--task", photos, "--head", out / "head.safetensors")
    assert again["correct"] == said["metrics"]["accuracy"]["photos"]["correct"]
    (before,) = done("eval", shelf.model, "--task", photos)
    assert said["metrics"]["zero_shot"]["photos"] == before["accuracy"]
    ran = aniso("fit", "few-shot", *given)
    assert ran.code == 0 and "lpp" in ran.out and "zero-shot" in ran.out


# both at once


def test_coefficients_and_head_are_learned_together(
    aniso: Aniso, done: Done, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    ran = aniso(*shelf.few_shot("--head", "tip", "--joint", "-o", out))
    assert ran.code == 0, ran.err
    record = json.loads((out / "record.json").read_text())
    metrics = record["metrics"]
    assert record["spec"]["joint"] is True
    assert [row["epoch"] for row in metrics["history"]] == [0, 1, 2]
    head = load_head(out / "head.safetensors").head
    assert metrics["trainable"] == 96 + head.count
    assert metrics["head"] == {"kind": "tip", "trainable": head.count}
    (again,) = done("eval", shelf.model, "--task", shelf.data / "photos", *composed(shelf, out))
    assert again["correct"] == metrics["accuracy"]["photos"]["correct"]
    after = load_head(learned / "head.safetensors").head
    assert after.count == head.count
    assert not torch.equal(after.tensors()["keys"], head.tensors()["keys"])


def test_learning_together_takes_twice_the_epochs_unless_said(aniso: Aniso, shelf: runs.Shelf) -> None:
    def epochs(*more: object) -> int:
        ran = aniso("fit", "few-shot", *shelf.base, "--task", "t", "--print-spec", *more)
        assert ran.code == 0, ran.err
        found: int = parse_yaml(ran.out, "printed").data["schedule"]["epochs"]
        return found

    assert epochs() == epochs("--head", "tip") == 10
    assert epochs("--head", "tip", "--joint") == 20
    assert epochs("--head", "tip", "--joint", "--epochs", 3) == 3


@pytest.mark.parametrize(
    "more",
    [
        ("--head", "lpp", "--joint"),
        ("--head", "linear", "--joint"),
        ("--joint",),
        ("--head", "tip", "--joint", "--method", "weights"),
        ("--head", "tip", "--joint", "--method", "none"),
        ("--head", "tipp"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_learned_is_a_usage_error_and_leaves_nothing(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path, more: tuple[str, ...]
) -> None:
    ran = aniso(*shelf.few_shot(*more, "-o", tmp_path / "run"))
    assert ran.code == 2, ran.err
    assert ran.code == 2 and ("tip" in ran.err or "--joint" in ran.err)
    assert not (tmp_path / "run").exists()


# too few pictures


def test_classes_with_fewer_pictures_than_shots_are_listed(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    task = runs.coloured(tmp_path / "few", 12)
    for path in sorted((task / "red").iterdir())[2:]:
        path.unlink()
    given = ("--model", shelf.model, "--task", task, "--shots", 3, "--method", "none", "--head", "tip")
    ran = aniso("fit", "few-shot", *given, "-o", tmp_path / "run")
    assert ran.code == 3, ran.err
    assert "DATA-SHOTS" in ran.err and "red: " in ran.err and "blue" not in ran.err
    assert "--allow-fewer-shots" in ran.err
    assert not (tmp_path / "run").exists()
    ran = aniso("fit", "few-shot", *given, "--allow-fewer-shots", "-o", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "fewer than 3 shots of 1 classes, first: red" in ran.err
    head = load_head(tmp_path / "run" / "head.safetensors").head
    owners = head.tensors()["owners"].tolist()
    assert (owners.count(0), owners.count(1)) == (3, 2)


def test_a_single_class_is_refused_and_leaves_nothing(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    task = runs.coloured(tmp_path / "one", 12)
    shutil.rmtree(task / "red")
    given = ("--model", shelf.model, "--task", task, "--shots", 3, "--method", "none", "--head", "tip")
    ran = aniso("fit", "few-shot", *given, "-o", tmp_path / "run")
    assert ran.code == 3 and "HEAD-CLASS" in ran.err and "'blue'" in ran.err, ran.err
    assert not (tmp_path / "run").exists()


# other data


@pytest.mark.parametrize("more", [(), ("--head", "lpp"), ("--head", "tip", "--joint")], ids=str)
def test_other_data_are_measured_with_what_was_learned(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path, more: tuple[str, ...]
) -> None:
    some = tmp_path / "some" / "test" / "red"
    shutil.copytree(shelf.data / "cars" / "test" / "red", some)
    elsewhere = ("--out-of-domain", shelf.data / "cars", "--out-of-domain", tmp_path / "some")
    out = tmp_path / "run"
    said = done(*shelf.few_shot(*more, *elsewhere, "-o", out))
    found = said["metrics"]["out_of_domain"]
    assert found.keys() == {"cars", "some"} and said["metrics"]["accuracy"].keys() == {"photos"}
    assert found["cars"]["total"] == 12
    assert (found["some"]["correct"], found["some"]["total"]) == (6, 6)  # there is one class to answer with
    given = composed(shelf, out) if more else composed(shelf, out)[:-2]
    (again,) = done("eval", shelf.model, "--task", shelf.data / "cars", *given)
    assert again["correct"] == found["cars"]["correct"]
    if more:
        return
    ran = aniso(*shelf.few_shot(*more, *elsewhere))
    assert ran.code == 0 and "cars, out of domain: " in ran.out


def test_without_a_head_other_data_do_not_change_what_is_learned(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    for name, more in (("plain", ()), ("more", ("--out-of-domain", shelf.data / "cars"))):
        assert aniso(*shelf.few_shot(*more, "-o", tmp_path / name)).code == 0
    found = [(tmp_path / n / "coefficients.safetensors").read_bytes() for n in ("plain", "more")]
    assert found[0] == found[1]


def pink(root: Path) -> Path:
    """A task with a class that nothing was learned for."""
    task = runs.coloured(root / "test", 3)
    (task / "red").rename(task / "pink")
    return root


def test_classes_that_nothing_was_learned_for_are_refused(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--method", "none", "--head", "tip", "--out-of-domain", pink(tmp_path / "odd"))
    ran = aniso(*shelf.few_shot(*given, "-o", tmp_path / "run"))
    assert ran.code == 3 and "DATA-CLASS" in ran.err and "pink" in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_classes_that_nothing_was_learned_for_are_found_out_before_anything_is_learned(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--head", "tip", "--out-of-domain", pink(tmp_path / "odd"))
    for plan in (("--plan",), ()):
        ran = aniso(*shelf.few_shot(*given, *plan, "-o", tmp_path / "run"))
        assert ran.code == 3 and "DATA-CLASS" in ran.err and "epoch" not in ran.err, ran.err
        assert not (tmp_path / "run").exists()


def test_two_tasks_of_one_name_are_both_measured_or_refused(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    places = [runs.coloured(tmp_path / name / "same" / "test", count) for name, count in (("a", 2), ("b", 3))]
    elsewhere = [word for place in places for word in ("--out-of-domain", place.parent)]
    ran = aniso(*shelf.few_shot("--method", "none", *elsewhere, "--json"))
    if ran.code == 0:
        assert len(json.loads(ran.out)["metrics"]["out_of_domain"]) == 2
    else:
        assert ran.code in (2, 3) and "same" in ran.err


# measuring again


def test_a_head_answers_for_no_other_composition(
    aniso: Aniso, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    assert aniso(*shelf.few_shot("--seed", 1, "-o", tmp_path / "other")).code == 0
    head = learned / "head.safetensors"
    asked = {
        "another composition": composed(shelf, tmp_path / "other", head),
        "another bank": ("--head", head),  # of the base alone
    }
    for what, given in asked.items():
        ran = aniso(
            "eval", shelf.model, "--task", shelf.data / "photos", *given, "--record", tmp_path / "records"
        )
        assert ran.code == 3 and "HEAD-FEATURES" in ran.err and what in ran.err, ran.err
    assert not (tmp_path / "records").exists()


def test_a_head_of_the_base_does_not_answer_for_a_composition(
    aniso: Aniso, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    out = tmp_path / "base"
    assert aniso(*shelf.few_shot("--method", "none", "--head", "lpp", "-o", out)).code == 0
    head = out / "head.safetensors"
    photos = ("--task", shelf.data / "photos")
    assert aniso("eval", shelf.model, *photos, "--head", head).code == 0
    ran = aniso("eval", shelf.model, *photos, *composed(shelf, learned, head))
    assert ran.code == 3 and "HEAD-FEATURES" in ran.err
    other_model = tiny.hf_clip_directory(tmp_path / "model", seed=5)
    ran = aniso("eval", other_model, *photos, "--head", head)
    assert ran.code == 3 and "another model" in ran.err


def test_a_head_file_that_is_none_is_an_error(
    aniso: Aniso, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    whole = (learned / "head.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-7])
    for path, code in (
        (learned / "coefficients.safetensors", "HEAD-FILE"),
        (tmp_path / "cut", "FILE-TRUNCATED"),
        (tmp_path / "nowhere", "FILE-MISSING"),
    ):
        given = ("--task", shelf.data / "photos", *composed(shelf, learned, path))
        ran = aniso("eval", shelf.model, *given)
        assert ran.code == 3 and code in ran.err, ran.err


def test_a_head_answers_for_fewer_classes_and_says_so(
    aniso: Aniso, done: Done, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    shutil.copytree(shelf.data / "cars" / "test" / "red", tmp_path / "some" / "test" / "red")
    given = ("--task", tmp_path / "some", *composed(shelf, learned))
    ran = aniso("eval", shelf.model, *given)
    assert ran.code == 0 and "predictions are restricted to 1 of the head's 2 classes" in ran.err, ran.err
    (found,) = done("eval", shelf.model, *given)
    assert found["accuracy"] == 1.0
    ran = aniso("eval", shelf.model, "--task", pink(tmp_path / "odd"), *composed(shelf, learned))
    assert ran.code == 3 and "DATA-CLASS" in ran.err and "pink" in ran.err


def test_records_say_which_head_answered(
    done: Done, aniso: Aniso, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    found = []
    for given in (composed(shelf, learned), composed(shelf, learned)[:-2]):
        (made,) = done("eval", shelf.model, "--task", shelf.data / "cars", *given, "--record", tmp_path / "r")
        found.append(made)
    assert "head" in found[0] and "head" not in found[1]
    assert len(list((tmp_path / "r").iterdir())) == 2
    assert str(tmp_path) not in json.dumps(found)


# experiments


def test_coefficients_of_other_pictures_are_not_taken(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    """A spec says where pictures lie, not which they are."""
    base: dict[str, Any] = {"setting": "few-shot", "model": str(shelf.model), "bank": str(shelf.bank)}
    base |= {
        "task": "./photos",
        "shots": 2,
        "compare": False,
        "schedule": {"epochs": 1, "batch_size": 4, "lr": 0.1},
    }
    variants = [{"label": "learned"}, {"label": "with a head", "base": {"head": "linear"}}]
    spec = tmp_path / "spec.yaml"
    spec.write_text(as_yaml({"schema": 1, "name": "try", "base": base, "variants": variants}))
    other = tmp_path / "other"
    shutil.copytree(shelf.data / "photos", other / "photos")
    sorted((other / "photos").rglob("*.png"))[0].unlink()
    assert aniso("run", spec, "--data", shelf.data, "--jobs", 2, "--only", "learned").code == 0
    ran = aniso("run", spec, "--data", other, "--jobs", 2, "--only", "with a head")
    assert ran.code == 0, ran.err
    (record,) = (r for r in runs.recorded(tmp_path / "records") if r["label"] == "with a head")
    assert "history" in record["metrics"]  # learned anew, from these pictures


def test_a_lora_has_no_head(aniso: Aniso) -> None:
    """Its features would be those of no checkpoint, and the head could not be used again."""
    given = ("--model", "m", "--task", "t", "--method", "weights", "--lora", 2, "--head", "tip")
    ran = aniso("fit", "few-shot", *given)
    assert ran.code == 2 and "leave lora or head out" in ran.err


def test_cells_with_a_head_take_the_coefficients_that_are_kept(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    base: dict[str, Any] = {"setting": "few-shot", "model": str(shelf.model), "bank": str(shelf.bank)}
    base |= {"task": "./photos", "shots": 2, "compare": False}
    base |= {"schedule": {"epochs": 2, "batch_size": 2, "lr": 0.1}}
    variants = [{"label": "learned"}, {"label": "with tip", "base": {"head": "tip"}}]
    spec = tmp_path / "spec.yaml"
    spec.write_text(as_yaml({"schema": 1, "name": "try", "base": base, "variants": variants}))
    for only in (("--only", "learned"), ()):  # two jobs, as then each has one thread like this process
        ran = aniso("run", spec, "--data", shelf.data, "--jobs", 2, *only)
        assert ran.code == 0, ran.err
    found = {record["label"]: record for record in runs.recorded(tmp_path / "records")}
    (kept,) = (tmp_path / "records" / "coefficients").iterdir()  # one file for both
    assert kept.name.startswith(found["learned"]["id"][:16])
    given = ("--data", shelf.data, "--task", "./photos", "--shots", 2, "--no-compare", "--head", "tip")
    quick = ("--epochs", 2, "--batch-size", 2, "--lr", 0.1)
    anew = done("fit", "few-shot", *shelf.base, *given, *quick)
    again = found["with tip"]
    assert again["id"] == anew["id"] and again["inputs"] == anew["inputs"]
    assert again["coefficients"] == found["learned"]["coefficients"]
    assert "history" in anew["metrics"] and "history" in found["learned"]["metrics"]
    assert "history" not in again["metrics"]  # not learned again
    for key in ("accuracy", "trainable"):
        assert again["metrics"][key] == rounded(anew["metrics"][key]), key
    losses = [made["metrics"]["head"]["loss"] for made in (again, anew)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


LATER = ("head", "joint", "out_of_domain")


def few_shot(**more: Any) -> Setting:
    spec = {"setting": "few-shot", "model": "m", "bank": "b", "task": "t", **more}
    return parse_setting(Document("spec", spec, {}))


def test_ids_tell_heads_and_out_of_domain_tasks_apart() -> None:
    said: list[dict[str, Any]] = [
        {},
        {"head": "tip"},
        {"head": "lpp"},
        {"head": "linear"},
        {"head": "tip", "joint": True},
        {"out_of_domain": ["a"]},
        {"out_of_domain": ["b"]},
        {"head": "tip", "out_of_domain": ["a"]},
        {"head": "tip", "method": "none"},
        {"method": "none"},
    ]
    settings = [few_shot(**one) for one in said]
    assert len({setting.id for setting in settings}) == len(said)
    assert {settings[i].coefficients_id for i in (1, 2, 3, 5, 6, 7)} == {settings[0].id}
    assert settings[8].coefficients_id == settings[9].id
    assert settings[4].coefficients_id == settings[4].id


def test_committed_records_have_the_ids_of_their_specs() -> None:
    records = runs.recorded(RECORDS)
    assert len(records) > 300
    for record in records:
        spec = {**record["spec"], "task": f"./{record['spec']['task']}"}
        if "schedule" in spec:  # restarts are younger than these records
            spec["schedule"] = {"restarts": 0, **spec["schedule"]}
        assert parse_setting(Document("record", spec, {})).id == record["id"]


def test_a_picture_that_cannot_be_read_is_named(aniso: Aniso, shelf: runs.Shelf, tmp_path: Path) -> None:
    task = runs.coloured(tmp_path / "bad", 6)
    for path in (task / "red").iterdir():
        image = Image.open(path)
        image.save(path)
        path.write_bytes(path.read_bytes()[:60])
    given = ("--model", shelf.model, "--task", task, "--shots", 1, "--method", "none", "--head", "tip")
    ran = aniso("fit", "few-shot", *given, "-o", tmp_path / "run")
    assert ran.code == 3 and "IMAGE-READ" in ran.err and "red" in ran.err, ran.err
    assert not (tmp_path / "run").exists()


# baked


@pytest.mark.parametrize("to", ["huggingface", "safetensors"])
def test_a_baked_head_answers_on_the_checkpoint_as_on_the_composition(
    aniso: Aniso, done: Done, shelf: runs.Shelf, learned: Path, tmp_path: Path, to: str
) -> None:
    out = tmp_path / ("model" if to == "huggingface" else "model.safetensors")
    head = out / "head.safetensors" if to == "huggingface" else tmp_path / "model.head.safetensors"
    files = (learned / "coefficients.safetensors", "--bank", shelf.bank, "--base", shelf.model)
    given = ("bake", *files, "--head", learned / "head.safetensors", "--to", to, "-o", out)
    assert aniso(*given).code == 0
    model = (out,) if to == "huggingface" else (shelf.model, "--weights", out)
    (again,) = done("eval", *model, "--task", shelf.data / "photos", "--head", head)
    record = json.loads((learned / "record.json").read_text())
    assert again["correct"] == record["metrics"]["accuracy"]["photos"]["correct"]
    # it is the checkpoint's now, and no longer the composition's
    ran = aniso("eval", shelf.model, "--task", shelf.data / "photos", *composed(shelf, learned, head))
    assert ran.code != 0 and "HEAD-FEATURES" in ran.err
    if to == "huggingface":
        assert "`head.safetensors` is a classifier for 2 classes" in (out / "README.md").read_text()
    else:  # neither file is replaced without being asked for
        out.unlink()
        assert aniso(*given).code != 0 and not out.exists()


def test_a_head_of_another_composition_is_not_baked(
    aniso: Aniso, shelf: runs.Shelf, learned: Path, tmp_path: Path
) -> None:
    assert aniso(*shelf.few_shot("--seed", 5, "-o", tmp_path / "other")).code == 0
    files = (tmp_path / "other" / "coefficients.safetensors", "--bank", shelf.bank, "--base", shelf.model)
    ran = aniso("bake", *files, "--head", learned / "head.safetensors", "-o", tmp_path / "model.safetensors")
    assert ran.code != 0 and "HEAD-FEATURES" in ran.err
    assert not (tmp_path / "model.safetensors").exists()
