"""Predictions from the command line: equal for every form of a model, continued exactly, mistakes named."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import sentences

from aniso.cli import main
from aniso.data import load_task
from aniso.errors import InputError
from aniso.experiments.prediction import output, run
from aniso.learn import evaluate
from aniso.models import load_model
from aniso.prediction_files import PredictedItem, PredictionFile, meta_path, meta_text
from aniso.weights.append import AppendedFile

Aniso = Callable[..., Any]
Done = Callable[..., Any]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def learned(shelf: runs.Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a head, on a task with splits of its own."""
    out = tmp_path_factory.mktemp("learned") / "run"
    quick = ("--epochs", 2, "--batch-size", 3, "--min-steps-per-epoch", 2, "--shots", 3, "--head", "lpp")
    given = ("fit", "few-shot", *shelf.base, "--task", shelf.data / "cars", *quick, "-o", out)
    assert main([str(word) for word in given]) == 0
    return out


@pytest.fixture
def photos(shelf: runs.Shelf) -> Path:
    return shelf.data / "cars" / "test"


def rows(path: Path) -> list[PredictedItem]:
    return list(PredictionFile.open(path).items())


def predicted(path: Path) -> dict[str, tuple[str, float]]:
    return {Path(item.id).name + item.id.split("/")[-2]: item.ranked[0] for item in rows(path)}


# every form of a model


def test_a_run_predicts_what_it_was_measured_by(
    done: Done, learned: Path, photos: Path, tmp_path: Path
) -> None:
    made = done("predict", learned, photos, "-o", tmp_path / "p.csv", "--no-calibrate")
    assert (made["items"], made["continued_from"], made["unreadable"]) == (12, 0, 0)
    found, own = predicted(tmp_path / "p.csv"), predicted(learned / "predictions.csv")
    assert {name: ranked[0] for name, ranked in found.items()} == {n: r[0] for n, r in own.items()}
    assert all(share == pytest.approx(own[name][1], rel=1e-4) for name, (_, share) in found.items())
    record = json.loads((learned / "record.json").read_text())
    right = sum(item.label == item.prediction for item in rows(learned / "predictions.csv"))
    assert right == record["metrics"]["accuracy"]["cars"]["correct"]
    assert sum(made["counts"].values()) == 12


def test_a_run_a_baked_directory_and_a_base_with_coefficients_agree(
    done: Done, shelf: runs.Shelf, learned: Path, photos: Path, tmp_path: Path
) -> None:
    head, coefficients = learned / "head.safetensors", learned / "coefficients.safetensors"
    done(
        *("bake", coefficients, "--bank", shelf.bank, "--base", shelf.model, "--to", "huggingface"),
        *("--head", head, "-o", tmp_path / "baked"),
    )
    forms: dict[str, tuple[object, ...]] = {
        "run": (learned,),
        "baked": (tmp_path / "baked",),
        "base": (shelf.model, "--bank", shelf.bank, "--coefficients", coefficients, "--head", head),
    }
    found = {}
    for name, (model, *more) in forms.items():
        done("predict", model, photos, *more, "-o", tmp_path / f"{name}.csv", "--no-calibrate")
        found[name] = rows(tmp_path / f"{name}.csv")
    for name in ("baked", "base"):
        for mine, theirs in zip(found["run"], found[name], strict=True):
            assert (mine.id, mine.prediction) == (theirs.id, theirs.prediction)
            assert mine.probability == pytest.approx(theirs.probability, abs=1e-4)


def test_classes_of_a_run_are_baked_with_its_coefficients(
    done: Done, shelf: runs.Shelf, learned: Path, photos: Path, tmp_path: Path
) -> None:
    given = ("--bank", shelf.bank, "--base", shelf.model, "--to", "huggingface", "-o", tmp_path / "baked")
    done("bake", learned / "coefficients.safetensors", *given)
    assert (tmp_path / "baked" / "classes.json").read_text() == (learned / "classes.json").read_text()
    assert "`classes.json` lists the classes" in (tmp_path / "baked" / "README.md").read_text()
    made = done("predict", tmp_path / "baked", photos, "-o", tmp_path / "p.csv")
    assert made["calibration"] == "not calibrated: no validation data are known"
    assert {*made["counts"]} <= {"red", "blue"}


@pytest.mark.parametrize(
    "method", [("--method", "weights"), ("--method", "weights", "--lora", 2), ("--method", "none")]
)
def test_runs_of_other_methods_predict_what_they_were_measured_by(
    done: Done, shelf: runs.Shelf, photos: Path, tmp_path: Path, method: tuple[object, ...]
) -> None:
    pytest.importorskip("peft")
    quick = () if "none" in method else ("--epochs", 1, "--batch-size", 3, "--min-steps-per-epoch", 1)
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2, *quick)
    done("fit", "few-shot", *given, *method, "-o", tmp_path / "run")
    done("predict", tmp_path / "run", photos, "-o", tmp_path / "p.csv", "--no-calibrate")
    found, own = predicted(tmp_path / "p.csv"), predicted(tmp_path / "run" / "predictions.csv")
    assert found.keys() == own.keys()
    for name, (prediction, share) in found.items():
        assert prediction == own[name][0] and share == pytest.approx(own[name][1], abs=1e-4)


def test_of_several_tasks_one_is_named_and_needs_no_data(
    aniso: Aniso, done: Done, shelf: runs.Shelf, photos: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(shelf.data, data)
    (data / "dtd").rename(data / "signs")  # no known task
    quick = ("--epochs", 1, "--min-steps-per-epoch", 1)
    tasks = ("--task", data / "cars", "--task", data / "signs")
    done("fit", "addition", *shelf.base, *tasks, *quick, "-o", tmp_path / "run")
    assert {item.task for item in rows(tmp_path / "run" / "predictions.csv")} == {"cars", "signs"}
    shutil.rmtree(data)
    ran = aniso("predict", tmp_path / "run", photos)
    assert (ran.code, "--task cars" in ran.err) == (2, True)
    assert (
        done("predict", tmp_path / "run", photos, "--task", "signs", "-o", tmp_path / "p.csv")["items"] == 12
    )


def test_a_base_predicts_named_classes_like_eval(
    done: Done, shelf: runs.Shelf, photos: Path, tmp_path: Path
) -> None:
    task = load_task(shelf.data / "cars")
    (tmp_path / "names.txt").write_text("blue\nred\n")
    done("predict", shelf.model, photos, "--classes", tmp_path / "names.txt", "-o", tmp_path / "a.csv")
    done("predict", shelf.model, photos, "--task", shelf.data / "cars", "-o", tmp_path / "b.csv")
    assert rows(tmp_path / "a.csv") == rows(tmp_path / "b.csv")
    right = sum(item.prediction == item.id.split("/")[-2] for item in rows(tmp_path / "a.csv"))
    assert right == evaluate(load_model(str(shelf.model)), task.test).correct


def test_prompts_replace_those_of_classes_and_of_a_task(
    aniso: Aniso, shelf: runs.Shelf, learned: Path, photos: Path
) -> None:
    prompt = ("--prompt", "a school bus and {}", "--format", "csv")
    usual = aniso("predict", shelf.model, photos, "--task", shelf.data / "cars").out.splitlines()
    task = aniso("predict", shelf.model, photos, "--task", shelf.data / "cars", *prompt).out.splitlines()
    names = ("--classes", "blue", "--classes", "red")
    named = aniso("predict", shelf.model, photos, *names, *prompt).out.splitlines()
    assert named == task != usual and len(task) == 13
    ran = aniso("predict", learned, photos, *prompt)
    assert ran.code == 2 and "no effect with a head" in ran.err


# calibration


def test_probabilities_of_a_run_are_calibrated_on_its_validation_split(
    done: Done, shelf: runs.Shelf, photos: Path, tmp_path: Path
) -> None:
    """Zero-shot, whose predictions on validation images are neither all right nor all wrong."""
    given = ("--model", shelf.model, "--task", shelf.data / "cars", "--shots", 2, "--method", "none")
    done("fit", "few-shot", *given, "-o", tmp_path / "run")
    made = done("predict", tmp_path / "run", photos, "-o", tmp_path / "p.csv")
    assert made["calibration"].startswith("temperature ") and "8 items of cars val" in made["calibration"]
    assert PredictionFile.open(tmp_path / "p.csv").header.calibration == made["calibration"]
    off = done("predict", tmp_path / "run", photos, "-o", tmp_path / "q.csv", "--no-calibrate")
    assert off["calibration"] == "not calibrated"
    temperature = float(made["calibration"].split()[1].rstrip(","))
    for a, b in zip(rows(tmp_path / "p.csv"), rows(tmp_path / "q.csv"), strict=True):
        odds = [item.probability / (1 - item.probability) for item in (a, b)]
        assert a.prediction == b.prediction
        assert odds[0] == pytest.approx(odds[1] ** (1 / temperature), rel=1e-2)
    other = ("--calibrate", shelf.data / "dtd")
    dtd = done("predict", tmp_path / "run", photos, "-o", tmp_path / "r.csv", *other)
    assert "items of dtd val" in dtd["calibration"]


def test_a_run_whose_data_are_gone_says_that_it_is_not_calibrated(
    done: Done, shelf: runs.Shelf, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(shelf.data / "cars", tmp_path / "cars")
    given = ("--model", shelf.model, "--task", tmp_path / "cars", "--shots", 2, "--method", "none")
    done("fit", "few-shot", *given, "-o", tmp_path / "run")
    shutil.rmtree(tmp_path / "cars")
    made = done("predict", tmp_path / "run", photos, "-o", tmp_path / "p.csv")
    assert made["calibration"].startswith("not calibrated: the run's validation data cannot be read")


# output


def test_lines_on_standard_output_are_csv_or_json(aniso: Aniso, learned: Path, photos: Path) -> None:
    ran = aniso("predict", learned, photos / "red", "--top", 2)
    assert ran.code == 0 and "probabilities: " in ran.err
    found = list(csv.DictReader(io.StringIO(ran.out), strict=True))
    assert len(found) == 6 and {row["prediction"] for row in found} <= {"red", "blue"}
    for row in found:
        assert float(row["probability"]) + float(row["probability_2"]) == pytest.approx(1, abs=1e-5)
    ran = aniso("predict", learned, photos / "red", "--json")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["prediction"] for line in lines] == [row["prediction"] for row in found]


def test_more_classes_than_there_are_are_all_of_them(aniso: Aniso, learned: Path, photos: Path) -> None:
    ran = aniso("predict", learned, photos / "red" / "0.png", "--top", 9, "--json")
    assert len(json.loads(ran.out)["predictions"]) == 2


def test_a_terminal_gets_a_table_that_fits(learned: Path, photos: Path) -> None:
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "aniso", "predict", str(learned), str(photos / "red")]
    env = {**os.environ, "COLUMNS": "60"}
    run = subprocess.run(words, stdout=follower, stderr=subprocess.PIPE, env=env, check=False)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode().splitlines()
    os.close(leader)
    assert run.returncode == 0, run.stderr
    assert len(shown) == 6 and all(len(line) <= 60 for line in shown)
    assert all("red/" in line and "%" in line for line in shown)


# continued


class Killed(BaseException):
    """Ends a command where the process would have died."""


def test_an_interrupted_call_is_continued_to_the_same_bytes(
    done: Done,
    aniso: Aniso,
    learned: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut anywhere: after any row, within a row, within the header."""
    monkeypatch.setitem(run._CHUNK, "images", 5)
    monkeypatch.setattr(output, "_ROWS", 1)
    out = tmp_path / "p.csv"
    given = ("predict", learned, photos, "-o", out)
    done(*given)
    whole, meta = out.read_bytes(), meta_path(out).read_text()
    partial = tmp_path / "p.csv.partial"
    header = PredictionFile.open(out).header
    for path in (out, meta_path(out)):
        path.unlink()
    start = whole.index(b"probability\n") + len(b"probability\n")
    for size in (0, 10, start - 1, start, start + 5, len(whole) // 2, len(whole) - 1, len(whole)):
        partial.write_bytes(whole[:size])
        if size >= start:  # it is written before the first byte
            meta_path(partial).write_text(meta_text(header, "csv"))
        complete = whole[start:size].count(b"\n")
        assert done(*given)["continued_from"] == complete
        assert (out.read_bytes(), meta_path(out).read_text()) == (whole, meta)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "p.csv.meta.json"]
        out.unlink()
    real = output.FileOutput.write

    def dies(self: output.FileOutput, item: PredictedItem) -> None:
        if self.done == 7:
            raise Killed
        real(self, item)

    monkeypatch.setattr(output.FileOutput, "write", dies)
    with pytest.raises(Killed):
        main([str(word) for word in given])
    assert not out.exists() and partial.read_bytes() == whole[: len(partial.read_bytes())]
    monkeypatch.setattr(output.FileOutput, "write", real)
    assert done(*given)["continued_from"] == 7
    assert out.read_bytes() == whole


def test_a_kill_between_header_and_file_is_mended_by_the_same_command(
    done: Done,
    aniso: Aniso,
    shelf: runs.Shelf,
    learned: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new header is there, and the old rows: they are not taken for rows of the new model."""
    out = tmp_path / "p.csv"
    done("predict", learned, photos, "-o", out)
    given = ("predict", shelf.model, photos, "--task", shelf.data / "cars", "-o", out)

    def dies(_: AppendedFile) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(AppendedFile, "finish", dies)
        main([str(word) for word in (*given, "--overwrite")])
    with pytest.raises(InputError, match="another content"):
        PredictionFile.open(out)
    assert done(*given)["continued_from"] == 12
    assert len(rows(out)) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "p.csv.meta.json"]


def test_predictions_that_were_edited_are_not_continued(
    done: Done, aniso: Aniso, learned: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    done("predict", learned, photos, "-o", out)
    out.write_text(out.read_text().replace("red,", "blue,"))
    ran = aniso("predict", learned, photos, "-o", out)
    assert (ran.code, "OUT-EXISTS" in ran.err, "--overwrite" in ran.err) == (2, True, True)


def test_a_complete_file_is_left_as_it_is_and_grows_with_its_folder(
    done: Done, aniso: Aniso, learned: Path, photos: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "folder", tmp_path / "p.jsonl"
    shutil.copytree(photos / "red", folder)
    given = ("predict", learned, folder, "-o", out)
    done(*given)
    before = (out.read_bytes(), out.stat().st_mtime_ns)
    assert done(*given)["continued_from"] == 6
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before
    shutil.copy(photos / "blue" / "0.png", folder / "9.png")
    assert done(*given)["continued_from"] == 6
    assert out.read_bytes().startswith(before[0]) and len(rows(out)) == 7
    shutil.copy(photos / "blue" / "0.png", folder / "00.png")
    ran = aniso(*given)
    assert ran.code == 3 and "RUN-CHANGED" in ran.err and "--overwrite" in ran.err
    assert len(rows(out)) == 7 and not (tmp_path / "p.jsonl.partial").exists()
    assert done(*given, "--overwrite")["items"] == 8


def test_predictions_of_another_model_are_not_continued(
    aniso: Aniso, done: Done, shelf: runs.Shelf, learned: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    done("predict", learned, photos, "-o", out)
    before = out.read_bytes()
    other = ("predict", shelf.model, photos, "--task", shelf.data / "cars", "-o", out)
    for more in ((), ("--format", "jsonl"), ("--top", 2)):
        ran = aniso(*other, *more)
        assert (ran.code, "RUN-CHANGED" in ran.err) == (3, True), ran.err
        assert out.read_bytes() == before
    (tmp_path / "notes.csv").write_text("mine\n")
    ran = aniso("predict", learned, photos, "-o", tmp_path / "notes.csv")
    assert (ran.code, "OUT-EXISTS" in ran.err) == (2, True)
    assert (tmp_path / "notes.csv").read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.csv", "p.csv", "p.csv.meta.json"]


# unreadable images


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(photos / "red", folder)
    (folder / "2.png").write_bytes(b"not an image")
    (folder / "4.png").write_bytes((folder / "4.png").read_bytes()[:60])
    return folder


def test_an_unreadable_image_is_an_error_that_names_it_and_can_be_skipped(
    aniso: Aniso, done: Done, learned: Path, damaged: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    given = ("predict", learned, damaged, "-o", out, "--batch", 2)
    ran = aniso(*given)
    assert ran.code == 3 and "IMAGE-READ" in ran.err and "2.png" in ran.err
    assert not out.exists()
    ran = aniso(*given, "--on-bad-image", 1)
    assert ran.code == 3 and "more than 1 images" in ran.err and "2.png" in ran.err and "4.png" in ran.err
    ran = aniso(*given, "--on-bad-image", "skip")
    assert ran.code == 0 and "2 images cannot be read" in ran.err
    found = {Path(item.id).name: item.prediction for item in rows(out)}
    assert [name for name, prediction in found.items() if not prediction] == ["2.png", "4.png"]
    assert len(found) == 6
    lines = aniso("predict", learned, damaged, "--json", "--on-bad-image", "skip", "--workers", 1).out
    errors = [json.loads(line).get("error") for line in lines.splitlines()]
    assert [error is not None for error in errors] == [False, False, True, False, True, False]
    again = [json.loads(line).get("prediction") for line in lines.splitlines()]
    assert [name or "" for name in again] == list(found.values())


def test_a_missing_file_of_a_list_counts_as_unreadable(
    aniso: Aniso, learned: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text(f"{photos}/red/0.png\n{photos}/red/nope.png\n")
    ran = aniso("predict", learned, tmp_path / "list.txt")
    assert ran.code == 3 and "nope.png" in ran.err
    ran = aniso("predict", learned, tmp_path / "list.txt", "--on-bad-image", "skip")
    assert ran.code == 0 and ran.out.count("\n") == 3


# texts


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directory of a run on texts, and its task."""
    root = tmp_path_factory.mktemp("reviews")
    sentences.save(root / "model")
    sentences.write_task(root / "reviews.csv", 20)
    given = ("--model", root / "model", "--task", root / "reviews.csv", "--shots", 3)
    words = ("fit", "few-shot", *given, "--method", "none", "--head", "linear", "-o", root / "run")
    assert main([str(word) for word in words]) == 0
    return root / "run", root / "reviews.csv"


def test_texts_of_tables_lines_and_standard_input_give_the_same_predictions(
    done: Done,
    aniso: Aniso,
    reviews: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned, _ = reviews
    texts = [*sentences.TEXTS, "=rain, over hills", "a bird"]
    (tmp_path / "t.txt").write_text("\n".join(texts) + "\n")
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("n", "text"), *enumerate(texts)])
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = {}
    for name in ("t.txt", "t.csv", "t.jsonl"):
        done("predict", learned, tmp_path / name, "-o", tmp_path / f"{name}.out.jsonl", "--top", 2)
        found[name] = rows(tmp_path / f"{name}.out.jsonl")
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=(tmp_path / "t.txt").open("rb")))
    done("predict", learned, "-", "-o", tmp_path / "stdin.jsonl", "--top", 2)
    found["-"] = rows(tmp_path / "stdin.jsonl")
    assert [item.text for item in found["-"]] == texts
    for items in found.values():
        assert [(item.text, item.ranked) for item in items] == [
            (item.text, item.ranked) for item in found["-"]
        ]


def test_chunks_and_their_order_by_length_change_nothing(
    done: Done, reviews: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, task = reviews
    done("predict", learned, task, "-o", tmp_path / "a.csv")
    monkeypatch.setitem(run._CHUNK, "texts", 3)
    done("predict", learned, task, "-o", tmp_path / "b.csv", "--batch", 2)
    a, b = rows(tmp_path / "a.csv"), rows(tmp_path / "b.csv")
    assert [(item.id, item.text, item.prediction) for item in a] == [
        (item.id, item.text, item.prediction) for item in b
    ]
    assert [x.probability for x in a] == pytest.approx([x.probability for x in b], abs=1e-5)


def test_images_and_texts_are_not_mistaken_for_each_other(
    aniso: Aniso, learned: Path, reviews: tuple[Path, Path], photos: Path
) -> None:
    ran = aniso("predict", learned, reviews[1])
    assert ran.code == 3 and "DATA-ITEM" in ran.err and "takes images" in ran.err
    ran = aniso("predict", reviews[0], photos)
    assert ran.code == 3 and "DATA-ITEM" in ran.err and "takes texts" in ran.err


# mistakes, before torch is imported


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("mini", "PHOTOS"), 2, "--classes FILE"),
        (("SHELF/model", "PHOTOS"), 2, "--classes FILE"),
        (("mini", "nowhere", "--classes", "a", "--classes", "b"), 3, "nowhere"),
        (("mini", "EMPTY", "--classes", "a", "--classes", "b"), 3, "no images and no texts"),
        (("mini", "PHOTOS", "--classes", "a"), 2, "leaves nothing to choose"),
        (
            ("mini", "PHOTOS", "--classes", "a", "--classes", "b", "--task", "mnist"),
            2,
            "--classes and --task",
        ),
        (("mini", "PHOTOS", "--task", "mnits"), 3, "you meant mnist"),
        (("mini", "PHOTOS", "--coefficients", "SHELF/x"), 3, "does not exist"),
        (("mini", "PHOTOS", "--bank", "mini", "--task", "mnist"), 2, "--bank needs --coefficients"),
        (("mini", "PHOTOS", "--task", "mnist", "-o", "p.txt"), 2, "--format csv"),
        (("mini", "PHOTOS", "--task", "mnist", "--format", "xml"), 2, "csv, jsonl or table"),
        (("mini", "PHOTOS", "--task", "mnist", "--on-bad-image", "x"), 2, "--on-bad-image"),
        (("mini", "TABLE", "--classes", "a", "--classes", "b"), 3, "--column number"),
        (("LEARNED", "PHOTOS", "--coefficients", "LEARNED/coefficients.safetensors"), 2, "--coefficients"),
        (("LEARNED", "PHOTOS", "--calibrate", "x", "--no-calibrate"), 2, "exclude each other"),
        (("UNFINISHED", "PHOTOS"), 3, "--resume"),
    ],
)
def test_mistakes_are_named_before_torch_is_imported(
    shelf: runs.Shelf,
    learned: Path,
    photos: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text("number\n1\n")
    (tmp_path / "unfinished").mkdir()
    shutil.copy(learned / "spec.yaml", tmp_path / "unfinished")
    places = {
        "SHELF": shelf.root,
        "PHOTOS": photos,
        "EMPTY": tmp_path / "empty",
        "TABLE": tmp_path / "table.csv",
        "LEARNED": learned,
        "UNFINISHED": tmp_path / "unfinished",
    }
    for name, place in places.items():
        words = tuple(word.replace(name, str(place)) for word in words)
    script = (
        "import sys; from aniso.cli import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "predict", *words], capture_output=True, text=True, check=False
    )
    assert run.returncode == code, run.stderr
    assert message in run.stderr and "  fix " in run.stderr
    assert run.stderr.splitlines()[-1] == "False"


def test_a_base_that_was_moved_is_named_and_can_be_replaced(
    aniso: Aniso, done: Done, shelf: runs.Shelf, learned: Path, photos: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(learned, copy)
    spec = (copy / "spec.yaml").read_text().replace(str(shelf.root), "/nowhere")
    (copy / "spec.yaml").write_text(spec)
    ran = aniso("predict", copy, photos)
    assert ran.code == 3 and "--base PATH" in ran.err
    ran = aniso("predict", copy, photos, "--base", shelf.model)
    assert ran.code == 3 and "--bank PATH" in ran.err
    moved = ("--base", shelf.model, "--bank", shelf.bank)
    assert done("predict", copy, photos, *moved, "-o", tmp_path / "p.csv")["items"] == 12


def test_a_directory_without_a_run_or_a_model_is_named(aniso: Aniso, photos: Path, tmp_path: Path) -> None:
    ran = aniso("predict", tmp_path, photos, "--classes", "a", "--classes", "b")
    assert ran.code == 3 and "MODEL-NAME" in ran.err


def test_empty_standard_input_is_named(
    aniso: Aniso, learned: Path, reviews: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"\n\n")))
    ran = aniso("predict", reviews[0], "-", "-o", tmp_path / "p.csv")
    assert ran.code == 3 and "DATA-EMPTY" in ran.err
    assert not (tmp_path / "p.csv").exists()


# eval and test-time


def test_eval_writes_the_predictions_it_counts(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    given = ("eval", shelf.model, "--task", shelf.data / "cars", "--predictions", out)
    (made,) = done(*given)
    found = rows(out)
    assert sum(item.label == item.prediction for item in found) == made["correct"]
    assert [item.id for item in found] == list(load_task(shelf.data / "cars").test.ids)
    assert all(0.5 <= item.probability <= 1 for item in found)
    ran = aniso(*given)
    assert ran.code == 2 and "OUT-EXISTS" in ran.err
    done(*given, "--task", shelf.data / "dtd", "--overwrite")
    assert {item.task for item in rows(out)} == {"cars", "dtd"}


def test_test_time_writes_predictions_of_unsorted_images_by_name(
    done: Done, shelf: runs.Shelf, photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "holiday"
    shutil.copytree(photos, folder)
    quick = ("--epochs", 1, "--batch-size", 4, "--classes", "red", "--classes", "blue")
    made = done("fit", "test-time", *shelf.base, "--images", folder, *quick, "-o", tmp_path / "run")
    file = PredictionFile.open(tmp_path / "run" / "predictions.csv")
    assert file.header.columns == ["id", "prediction", "probability"]
    assert (file.header.record, file.header.calibration) == (made["id"], "not calibrated")
    found = list(file.items())
    assert sorted(item.id for item in found) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*.png")
    )
    counts = made["metrics"]["answers"]["counts"]
    assert {name: sum(item.prediction == name for item in found) for name in counts} == counts
    again = done("predict", tmp_path / "run", folder, "-o", tmp_path / "p.csv")
    assert again["calibration"] == "not calibrated: no validation data are known"
    assert [item.prediction for item in rows(tmp_path / "p.csv")] == [
        {item.id: item.prediction for item in found}[str(Path(item.id).relative_to(folder))]
        for item in rows(tmp_path / "p.csv")
    ]


def test_tasks_are_listed_in_the_columns_of_a_terminal() -> None:
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "aniso", "task", "ls"]
    run = subprocess.run(words, stdout=follower, env={**os.environ, "COLUMNS": "80"}, check=False)
    os.close(follower)
    shown = os.read(leader, 1 << 20).decode()
    os.close(leader)
    assert run.returncode == 0
    lines = [line.rstrip() for line in shown.splitlines() if "\x1b" not in line]
    assert len(lines) > 20 and max(map(len, lines)) <= 80
    assert any(line.startswith("imagenet_sketch ") and "1,000" in line for line in lines)
