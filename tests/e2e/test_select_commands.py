"""Choosing vectors from the command line, learning with what was chosen, and learning without gradients."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import runs
import tiny
import torch
from safetensors.torch import load_file, save_file
from watch import contents

from aniso.compose import Coefficients
from aniso.data import load_task
from aniso.experiments.record import rounded
from aniso.experiments.strict_yaml import as_yaml
from aniso.learn import CrossEntropy, gradient, selection
from aniso.learn.selection import gradient as by_gradient
from aniso.models import load_model
from aniso.vectors import Bank, TaskVector
from aniso.weights import save_safetensors

Aniso = Callable[..., Any]
Done = Callable[..., Any]

STRATEGIES = ("random", "features", "gradient", "blockwise-gradient", "pursuit")
OTHERS = ("cars", "dtd", "signs")  # than the task's own
BLOCKS = 32
SMALL = ("--evaluations", 4, "--partition", "whole")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    """With a bank that knows what its tasks look like."""
    made = runs.shelf(tmp_path_factory.mktemp("shelf"))
    g = torch.Generator().manual_seed(4)
    Bank.load(made.bank).with_features({name: torch.randn(tiny.EMBED, generator=g) for name in runs.VECTORS})
    return made


def select(shelf: runs.Shelf, *more: object, task: bool = True) -> tuple[object, ...]:
    """From the bank, for photos."""
    return ("select", *shelf.base, *(("--task", shelf.data / "photos", "--shots", 3) if task else ()), *more)


def from_shelf(shelf: runs.Shelf, place: Path, *more: object) -> tuple[object, ...]:
    given = ("--model", shelf.model, "--from", place, "--task", shelf.data / "photos", "--shots", 3)
    return ("select", *given, *more)


def adapter(place: Path, seed: int, width: int = tiny.WIDTH) -> Path:
    """A LoRA of queries and of the first layer of perceptrons, as PEFT writes it."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(tiny.LAYERS):
        for name, rows in (("self_attn.q_proj", width), ("mlp.fc1", 4 * width)):
            key = f"base_model.model.vision_model.encoder.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(2, width, generator=g) * 0.1
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 2, generator=g) * 0.1
    place.mkdir(parents=True)
    save_safetensors(place / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "fc1"]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A directory with four."""
    for seed, name in enumerate(("ant", "bee", "cat", "dog")):
        adapter(tmp_path / "adapters" / name, seed)
    return tmp_path / "adapters"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def cells_of(bank: Bank) -> set[tuple[str, str]]:
    return {(name, block.name) for name in bank for block in bank[name].blocks}


# from a bank


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_shows_what_it_keeps_as_a_table_and_as_data(
    aniso: Aniso, done: Done, shelf: runs.Shelf, strategy: str
) -> None:
    before = contents(shelf.root)
    given = select(shelf, "--strategy", strategy, "--budget", 2)
    ran = aniso(*given)
    assert ran.code == 0, ran.err
    assert f"{strategy}, budget 2" in ran.out and "blocks kept" in ran.out
    said = done(*given)
    assert (said["strategy"], said["budget"], said["path"]) == (strategy, "2", None)
    rows = {row["vector"]: row for row in said["chosen"]}
    assert set(rows) <= set(OTHERS), "the task's own vector would give the answer away"
    assert said["cells"] == 2 * BLOCKS == sum(said["vectors"].values())
    assert {name: len(row["blocks"]) for name, row in rows.items()} == said["vectors"]
    if strategy in ("random", "features", "gradient"):
        assert set(said["vectors"].values()) == {BLOCKS} and len(rows) == 2
    for name, row in rows.items():
        line = next(text for text in ran.out.splitlines() if text.startswith(f"{name} "))
        assert line.split() == [name, f"{len(row['blocks'])}/{BLOCKS}", f"{row['score']:.4g}"]
    assert f"{len(rows)} of 3 vectors, " in ran.out and "written" not in ran.out
    assert contents(shelf.root) == before


def test_the_command_chooses_what_the_library_chooses(done: Done, shelf: runs.Shelf) -> None:
    said = done(*select(shelf, "--budget", 1, "--seed", 3))
    shots = load_task(shelf.data / "photos").train.shots(3, 3)
    strategy = selection.BlockwiseGradient(load_model(shelf.model), CrossEntropy(shots), 1, seed=3)
    expected = strategy.choose(Bank.load(shelf.bank).only(*OTHERS))
    assert {row["vector"]: tuple(row["blocks"]) for row in said["chosen"]} == expected.cells


def test_a_budget_in_bytes_is_kept_to(done: Done, shelf: runs.Shelf) -> None:
    for strategy in ("random", "blockwise-gradient", "pursuit"):
        said = done(*select(shelf, "--strategy", strategy, "--budget", "150kB"))
        assert 0 < said["bytes"] <= 150_000 and said["budget"] == "150 kB"


def test_chance_needs_no_task_and_then_no_vector_is_left_out(done: Done, shelf: runs.Shelf) -> None:
    given = ("--strategy", "random", "--budget", 4)
    assert set(done(*select(shelf, *given, task=False))["vectors"]) == set(runs.VECTORS)
    kept = [
        set(done(*select(shelf, *given[:-1], 2, "--seed", s, task=False))["vectors"]) for s in (0, 0, 1, 2, 3)
    ]
    assert kept[0] == kept[1] and any(other != kept[0] for other in kept[2:])


def test_vectors_can_be_left_out(aniso: Aniso, done: Done, shelf: runs.Shelf) -> None:
    said = done(*select(shelf, "--budget", 1, "--leave-out", "cars", "--leave-out", "dtd"))
    assert said["vectors"] == {"signs": BLOCKS}
    ran = aniso(*select(shelf, "--budget", 1, "--leave-out", "bikes"))
    assert ran.code == 2 and "BANK-NAME" in ran.err and "'bikes'" in ran.err
    every = [word for name in OTHERS for word in ("--leave-out", name)]
    ran = aniso(*select(shelf, "--budget", 1, *every))
    assert ran.code == 2 and "no vector is left" in ran.err


def test_the_smaller_bank_is_a_bank_like_any_other(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    ran = aniso(*select(shelf, "--budget", 1, "-o", small))
    assert ran.code == 0 and f"written to {small}" in ran.out, ran.err
    said = done(*select(shelf, "--budget", 1, "-o", small, "--overwrite"))
    assert said["path"] == str(small)
    whole, bank = Bank.load(shelf.bank), Bank.load(small)
    assert {name: len(bank[name].blocks) for name in bank} == said["vectors"]
    assert len(cells_of(bank)) == BLOCKS
    for name, block in cells_of(bank):
        assert torch.equal(bank[name][block].dense(), whole[name][block].dense())
    assert set(bank.features) == set(bank.names), "what tasks look like is kept, too"
    listed = done("bank", "ls", small)
    assert {row["name"]: row["blocks"] for row in listed["vectors"]} == said["vectors"]
    assert aniso("bank", "check", small).code == 0
    # and learning with it is learning with what would have been chosen
    out = [tmp_path / "a", tmp_path / "b"]
    done(*shelf.few_shot("--bank", small, "-o", out[0]))
    done(*shelf.few_shot("--select", "blockwise-gradient", "--budget", 1, "-o", out[1]))
    one, two = (Coefficients.load(place / "coefficients.safetensors") for place in out)
    assert {(v, b) for v, b, _, _ in one.items()} == cells_of(bank)
    assert one.values.shape == two.values.shape


def test_the_smaller_bank_may_be_stored_in_fewer_bits(done: Done, shelf: runs.Shelf, tmp_path: Path) -> None:
    done(*select(shelf, "--strategy", "gradient", "--budget", 1, "--storage", "int8", "-o", tmp_path / "b"))
    bank = Bank.load(tmp_path / "b")
    assert len(bank) == 1 and bank.storage == "int8"


def test_a_bank_may_be_replaced_by_a_part_of_itself(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    shutil.copytree(shelf.bank, tmp_path / "bank")
    given = select(shelf, "--bank", tmp_path / "bank", "--budget", 1, "-o", tmp_path / "bank", "--overwrite")
    said = done(*given)
    assert {name: len(Bank.load(tmp_path / "bank")[name].blocks) for name in said["vectors"]} == said[
        "vectors"
    ]
    assert aniso("bank", "check", tmp_path / "bank").code == 0


def test_more_than_there_is_keeps_everything_and_says_so(aniso: Aniso, shelf: runs.Shelf) -> None:
    ran = aniso(*select(shelf, "--budget", 9))
    assert ran.code == 0 and "a budget of 9 is more than the bank's 3 vectors" in ran.err
    assert f"{BLOCKS}/{BLOCKS}" in ran.out


def test_what_is_worth_knowing_of_a_choice_is_said_beside_data_too(aniso: Aniso, shelf: runs.Shelf) -> None:
    ran = aniso(*select(shelf, "--budget", 9, "--json"))
    assert ran.code == 0 and "a budget of 9 is more than the bank's 3 vectors" in ran.err


# features


def test_what_tasks_look_like_is_kept_in_the_bank_and_chosen_by(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    bank = tmp_path / "bank"
    Bank.load(shelf.bank).only("cars", "dtd", "photos").save(bank)
    other = runs.coloured(tmp_path / "other", 4, 300)
    given = ("bank", "features", bank, "--model", shelf.model)
    said = done(*given, "--task", shelf.data / "cars", "--task", f"photos={other}")
    assert set(said["features"]) >= {"cars", "photos"}
    encoder = load_model(shelf.model)
    expected = selection.mean_feature(encoder, load_task(shelf.data / "cars").train)
    torch.testing.assert_close(torch.tensor(said["features"]["cars"]), expected, rtol=1e-5, atol=1e-6)
    ran = aniso(*given, "--task", f"dtd={shelf.data / 'cars'}", "--split", "test")
    assert ran.code == 0 and "mean features of 3 of 3 vectors" in ran.out
    chosen = ("select", "--model", shelf.model, "--bank", bank, "--strategy", "features", "--budget", 1)
    said = done(*chosen, "--task", shelf.data / "dtd", "--leave-out", "photos")
    assert set(said["vectors"]) == {"cars"}
    assert 0 < said["chosen"][0]["score"] <= 2


def test_features_that_nobody_wrote_down_are_asked_for(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    state = tiny.hf_clip_state(shelf.model)
    tuned = {name: tiny.tuned_vision(state, tiny.is_hf_vision, i) for i, name in enumerate(OTHERS, 1)}
    Bank.build(shelf.model, tuned, to=tmp_path / "bank")
    for given in (
        select(shelf, "--bank", tmp_path / "bank", "--strategy", "features", "--budget", 1),
        shelf.few_shot("--bank", tmp_path / "bank", "--select", "features", "--budget", 1),
    ):
        ran = aniso(*given)
        assert ran.code == 3 and "BANK-FEATURES" in ran.err and "aniso bank features" in ran.err


@pytest.mark.parametrize(
    ("given", "code", "mentions"),
    [
        (("--task", "bikes=cars"), "BANK-NAME", "bikes"),
        (("--task", "cars", "--split", "best"), "DATA-SPLIT", "best"),
        (("--task", "nowhere"), "", "nowhere"),
    ],
    ids=str,
)
def test_features_of_what_is_not_there_are_refused(
    aniso: Aniso, shelf: runs.Shelf, given: tuple[str, ...], code: str, mentions: str
) -> None:
    before = contents(shelf.bank)
    said = [word.replace("cars", str(shelf.data / "cars")) for word in given]
    ran = aniso("bank", "features", shelf.bank, "--model", shelf.model, *said)
    assert ran.code in (2, 3) and code in ran.err and mentions in ran.err, ran.err
    assert contents(shelf.bank) == before


def test_features_are_of_the_banks_own_model(aniso: Aniso, shelf: runs.Shelf, tmp_path: Path) -> None:
    other = tiny.hf_clip_directory(tmp_path / "model", seed=5)
    before = contents(shelf.bank)
    ran = aniso("bank", "features", shelf.bank, "--model", other, "--task", shelf.data / "cars")
    assert ran.code == 3 and "BANK-BASE" in ran.err, ran.err
    assert contents(shelf.bank) == before


# from a directory of adapters


@pytest.mark.parametrize("strategy", ["random", "gradient", "blockwise-gradient"])
def test_adapters_that_are_no_bank_yet_are_chosen_from_and_become_one(
    aniso: Aniso, done: Done, shelf: runs.Shelf, adapters: Path, tmp_path: Path, strategy: str
) -> None:
    before = contents(adapters)
    given = from_shelf(shelf, adapters, "--strategy", strategy, "--budget", 2, "-o", tmp_path / "bank")
    ran = aniso(*given)
    assert ran.code == 0, ran.err
    assert "of 4 vectors" in ran.out and "/32" in ran.out
    bank = Bank.load(tmp_path / "bank")
    assert set(bank) <= {"ant", "bee", "cat", "dog"} and len(cells_of(bank)) == 2 * 4
    assert aniso("bank", "check", tmp_path / "bank").code == 0
    done(*shelf.few_shot("--bank", tmp_path / "bank"))
    assert contents(adapters) == before


def test_adapters_are_chosen_as_from_the_bank_of_them(
    aniso: Aniso, done: Done, shelf: runs.Shelf, adapters: Path, tmp_path: Path
) -> None:
    tuned = [f"{path.name}={path}" for path in sorted(adapters.iterdir())]
    assert aniso("bank", "build", *tuned, "--base", shelf.model, "-o", tmp_path / "bank").code == 0
    one = done(*from_shelf(shelf, adapters, "--budget", 2))
    two = done(*select(shelf, "--bank", tmp_path / "bank", "--budget", 2))
    assert [(r["vector"], r["blocks"]) for r in one["chosen"]] == [
        (r["vector"], r["blocks"]) for r in two["chosen"]
    ]


def test_an_adapter_of_another_model_is_named_or_left_out(
    aniso: Aniso, shelf: runs.Shelf, adapters: Path, tmp_path: Path
) -> None:
    adapter(adapters / "wide", 9, width=2 * tiny.WIDTH)
    (adapters / "empty").mkdir()
    (adapters / ".hidden").mkdir()
    (adapters / "README.md").write_text("by hand")
    given = from_shelf(shelf, adapters, "--budget", 1, "-o", tmp_path / "bank")
    ran = aniso(*given)
    assert ran.code == 3 and "BANK-BASE" in ran.err and "2 of 6" in ran.err, ran.err
    assert "wide: " in ran.err and "empty: " in ran.err and "--skip-unfit" in ran.err
    assert "hidden" not in ran.err and "README" not in ran.err and not (tmp_path / "bank").exists()
    ran = aniso(*given, "--skip-unfit")
    assert ran.code == 0, ran.err
    assert "note: left out: wide: " in ran.err and "note: left out: empty: " in ran.err
    assert "of 4 vectors" in ran.out and "wide" not in Bank.load(tmp_path / "bank")


class Counted:
    """How often something was looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.passes = 0
        getitem, passed = TaskVector.__getitem__, gradient.weight_gradient

        def cell(vector: TaskVector, block: str) -> Any:
            self.read.append(vector.name)
            return getitem(vector, block)

        def weight_gradient(*args: Any, **how: Any) -> Any:
            self.passes += 1
            return passed(*args, **how)

        monkeypatch.setattr(TaskVector, "__getitem__", cell)
        monkeypatch.setattr(by_gradient, "weight_gradient", weight_gradient)


def test_gradients_in_a_file_are_gone_on_with_and_serve_other_budgets(
    aniso: Aniso, done: Done, shelf: runs.Shelf, adapters: Path, tmp_path: Path, monkeypatch
) -> None:
    file = tmp_path / "new" / "gradients.jsonl"
    plain = done(*from_shelf(shelf, adapters, "--budget", 1))
    given = from_shelf(shelf, adapters, "--gradients", file, "--budget")
    assert done(*given, 1) == plain
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 4
    file.write_text("".join(lines[:3]) + lines[3][:20])  # as it was ended in the middle
    counted = Counted(monkeypatch)
    again = done(*given, 1)
    assert again == plain and set(counted.read[: 2 * 4]) == {"cat", "dog"} and counted.passes == 1
    assert file.read_text() == "".join(lines)
    adapter(adapters / "eel", 7)
    counted.read.clear()
    done(*given, 2, "--strategy", "gradient")
    assert counted.passes == 2 and counted.read[:4] == ["eel"] * 4
    done(*given, 2)
    assert counted.passes == 2
    assert len(file.read_text().splitlines()) == 1 + 5


@pytest.mark.parametrize(
    "more",
    [("--seed", 1), ("--shots", 2), ("--task", "dtd")],
    ids=lambda more: more[0],
)
def test_gradients_of_something_else_are_not_taken(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path, more: tuple[Any, ...]
) -> None:
    file = tmp_path / "gradients"
    assert aniso(*select(shelf, "--budget", 1, "--gradients", file)).code == 0
    before = contents(tmp_path)
    said = [shelf.data / word if word == "dtd" else word for word in more]
    ran = aniso(*select(shelf, "--budget", 1, "--gradients", file, "-o", tmp_path / "bank", *said))
    assert ran.code == 3 and "RUN-CHANGED" in ran.err, ran.err
    assert contents(tmp_path) == before


def test_gradients_of_another_text_tower_are_not_taken(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    """The image encoder is the same; class weights, and so gradients, are not."""
    file, other = tmp_path / "gradients", tmp_path / "other"
    assert aniso(*select(shelf, "--budget", 1, "--gradients", file)).code == 0
    shutil.copytree(shelf.model, other)
    tensors = load_file(other / "model.safetensors")
    key = next(k for k in tensors if k.startswith("text_model") and k.endswith("fc1.weight"))
    save_file({**tensors, key: tensors[key] + 0.1}, other / "model.safetensors", {"format": "pt"})
    given = ("--bank", shelf.bank, "--task", shelf.data / "photos", "--shots", 3, "--budget", 1)
    ran = aniso("select", "--model", other, *given, "--gradients", file)
    assert ran.code == 3 and "RUN-CHANGED" in ran.err, ran.err


def test_features_are_those_of_the_banks_base(aniso: Aniso, shelf: runs.Shelf, tmp_path: Path) -> None:
    shutil.copytree(shelf.model, tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    key = next(k for k in tensors if k.startswith("vision_model") and k.endswith("fc1.weight"))
    changed = {**tensors, key: tensors[key] + 0.1}
    save_file(changed, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    given = ("--bank", shelf.bank, "--task", shelf.data / "photos", "--budget", 1, "--strategy", "features")
    ran = aniso("select", "--model", tmp_path / "other", *given)
    assert ran.code == 3 and "BANK-BASE" in ran.err, ran.err


# learning with what is chosen


@pytest.fixture(scope="module")
def chosen(shelf: runs.Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that chose two cells of each block; not to be changed."""
    from aniso.cli import main

    out = tmp_path_factory.mktemp("chosen") / "run"
    given = shelf.few_shot("--select", "blockwise-gradient", "--budget", 2, "--lr", 1.0, "-o", out)
    assert main(list(given)) == 0
    return out


def test_a_run_says_what_it_chose_and_its_coefficients_are_those_of_the_chosen_cells(
    done: Done, shelf: runs.Shelf, chosen: Path
) -> None:
    record = read(chosen / "record.json")
    found = record["metrics"]["selection"]
    same = done(*select(shelf, "--budget", 2))
    assert (found["strategy"], found["budget"], found["cells"]) == ("blockwise-gradient", "2", 64)
    assert set(found) == {"strategy", "budget", "vectors", "cells", "bytes"}
    assert (record["spec"]["select"], record["spec"]["budget"]) == ("blockwise-gradient", 2)
    assert record["metrics"]["trainable"] == 64
    learned = Coefficients.load(chosen / "coefficients.safetensors")
    cells = {(vector, block) for vector, block, _, _ in learned.items()}
    assert len(cells) == len(learned) == 64
    counts = {name: sum(v == name for v, _ in cells) for name in learned.vectors}
    assert counts == found["vectors"] and set(counts) <= set(same["vectors"])
    assert learned.values.all()


def test_what_was_learned_of_some_cells_measures_the_same_on_the_whole_bank(
    aniso: Aniso, done: Done, shelf: runs.Shelf, chosen: Path, tmp_path: Path
) -> None:
    accuracy = read(chosen / "record.json")["metrics"]["accuracy"]["photos"]
    file = chosen / "coefficients.safetensors"
    photos = ("--task", shelf.data / "photos")
    (again,) = done("eval", shelf.model, *photos, "--bank", shelf.bank, "--coefficients", file)
    assert (again["correct"], again["total"]) == (accuracy["correct"], accuracy["total"])
    baked = tmp_path / "model.safetensors"
    ran = aniso("bake", file, "--bank", shelf.bank, "--base", shelf.model, "-o", baked)
    assert ran.code == 0, ran.err
    (again,) = done("eval", shelf.model, "--weights", baked, *photos)
    assert (again["correct"], again["total"]) == (accuracy["correct"], accuracy["total"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_learned_with_and_planned_for(
    done: Done, shelf: runs.Shelf, strategy: str
) -> None:
    given = shelf.few_shot("--select", strategy, "--budget", 1)
    plan = done(*given, "--plan")
    made = done(*given)
    assert made["metrics"]["selection"] == plan["selection"]
    assert made["metrics"]["trainable"] == plan["trainable"] == BLOCKS
    assert made["inputs"]["vectors"] == plan["vectors"] == list(plan["selection"]["vectors"])


def test_a_plan_with_a_choice_is_printed(aniso: Aniso, shelf: runs.Shelf) -> None:
    ran = aniso(*shelf.few_shot("--select", "blockwise-gradient", "--budget", 2, "--plan"))
    assert ran.code == 0, ran.err
    assert "trainable      64" in ran.out and "memory" in ran.out
    line = next(text for text in ran.out.splitlines() if text.startswith("selection"))
    assert "blockwise-gradient" in line and "64" in line and "pictures" not in line


def test_choosing_more_than_there_is_is_learning_with_all(
    done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    made = done(*shelf.few_shot("--select", "gradient", "--budget", 9, "-o", tmp_path / "a"))
    assert any("a budget of 9 is more than the bank's 3 vectors" in note for note in made["notes"])
    done(*shelf.few_shot("-o", tmp_path / "b"))
    chosen, all_ = (Coefficients.load(tmp_path / n / "coefficients.safetensors") for n in "ab")
    assert torch.equal(chosen.values, all_.values)
    assert (chosen.selection, all_.selection) == ("gradient, budget 9", "")


def test_a_choice_counts_in_what_a_run_is(done: Done, shelf: runs.Shelf) -> None:
    ids = [
        done(*shelf.few_shot(*more, "--plan"))["spec"]
        for more in ((), ("--select", "random", "--budget", 1), ("--select", "random", "--budget", "1"))
    ]
    assert ids[1] == ids[2] != ids[0]


@pytest.mark.parametrize("strategy", ["random", "features"])
def test_vectors_can_be_chosen_without_labels(
    done: Done, shelf: runs.Shelf, tmp_path: Path, strategy: str
) -> None:
    given = ("--select", strategy, "--budget", 1, "--epochs", 1, "--batch-size", 8, "-o", tmp_path / "run")
    made = done("fit", "test-time", *shelf.base, "--task", shelf.data / "cars", *given)
    assert made["metrics"]["selection"]["strategy"] == strategy
    learned = Coefficients.load(tmp_path / "run" / "coefficients.safetensors")
    assert len(learned.vectors) == 1 and "cars" not in learned.vectors


# what is refused


TASK = ("--task", "photos")
REFUSED_CHOICES: Sequence[tuple[tuple[Any, ...], int, tuple[str, ...]]] = [
    (("--bank", "bank", *TASK, "--budget", 0), 2, ("USAGE", "budget of 0")),
    (("--bank", "bank", *TASK, "--budget", "-2"), 2, ("USAGE", "-2")),
    (("--bank", "bank", *TASK, "--budget", "lots"), 2, ("USAGE", "lots")),
    (("--bank", "bank", *TASK, "--budget", "3B"), 3, ("USAGE", "no vector fits into a budget of 3 B")),
    (("--bank", "bank", *TASK), 2, ("USAGE", "--budget")),
    (("--bank", "bank", *TASK, "--budget", 1, "--strategy", "best"), 2, ("USAGE", "'best'", "pursuit")),
    (("--bank", "bank", "--budget", 1), 2, ("USAGE", "--task")),
    (("--bank", "bank", "--budget", 1, "--strategy", "features"), 2, ("USAGE", "--task")),
    ((*TASK, "--budget", 1), 2, ("USAGE", "--bank BANK, or --from DIRECTORY")),
    (("--bank", "bank", "--from", "bank", *TASK, "--budget", 1), 2, ("USAGE", "--bank BANK, or --from")),
    (
        ("--from", "bank", *TASK, "--budget", 1, "--strategy", "pursuit"),
        2,
        ("USAGE", "pursuit", "bank build"),
    ),
    (("--from", "nowhere", *TASK, "--budget", 1), 3, ("FILE-MISSING", "nowhere")),
    (("--bank", "nowhere", *TASK, "--budget", 1), 3, ("nowhere",)),
    (("--bank", "bank", "--task", "nowhere", "--budget", 1), 3, ("nowhere",)),
    (("--bank", "bank", *TASK, "--budget", 1, "--storage", "int3"), 2, ("USAGE", "int3")),
    (("--bank", "bank", *TASK, "--budget", 1, "--shots", 100), 3, ("DATA-SHOTS",)),
]


@pytest.mark.parametrize(("given", "code", "mentions"), REFUSED_CHOICES, ids=lambda x: str(x)[:60])
def test_choices_that_cannot_be_made_are_refused_and_leave_nothing(
    aniso: Aniso,
    shelf: runs.Shelf,
    tmp_path: Path,
    given: tuple[Any, ...],
    code: int,
    mentions: tuple[str, ...],
) -> None:
    places = {"bank": shelf.bank, "photos": shelf.data / "photos", "nowhere": tmp_path / "nowhere"}
    before = contents(shelf.root)
    said = [places.get(word, word) for word in given]
    ran = aniso("select", "--model", shelf.model, *said, "-o", tmp_path / "out")
    assert ran.code == code, ran.err
    for text in mentions:
        assert text in ran.err, ran.err
    assert "BUG" not in ran.err and not ran.out
    assert list(tmp_path.iterdir()) == [] and contents(shelf.root) == before


def test_what_is_there_is_not_replaced_unless_asked_for(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    out = tmp_path / "bank"
    given = select(shelf, "--strategy", "random", "--budget", 1, "-o", out)
    assert aniso(*given).code == 0
    before = contents(tmp_path)
    ran = aniso(*given)
    assert ran.code == 2 and "OUT-EXISTS" in ran.err and "--overwrite" in ran.err
    assert contents(tmp_path) == before
    assert aniso(*given[:-3], 2, "-o", out, "--overwrite").code == 0
    assert len(Bank.load(out)) == 2
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    ran = aniso(*given[:-1], mine, "--overwrite")
    assert ran.code == 2 and "OUT-EXISTS" in ran.err and (mine / "thesis.txt").exists()


@pytest.mark.parametrize("more", [(), ("--storage", "int3")], ids=["there already", "no such storage"])
def test_what_would_fail_in_the_end_fails_before_anything_is_computed(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path, more: tuple[str, ...]
) -> None:
    out = tmp_path / ("new" if more else "bank")
    if not more:
        shutil.copytree(shelf.bank, out)
    before = contents(tmp_path)
    ran = aniso(*select(shelf, "--budget", 1, "-o", out, "--gradients", tmp_path / "gradients", *more))
    assert ran.code == 2 and ("OUT-EXISTS" in ran.err or "int3" in ran.err), ran.err
    assert contents(tmp_path) == before


REFUSED_RUNS: Sequence[tuple[tuple[Any, ...], tuple[str, ...]]] = [
    (("--select", "gradient"), ("SPEC", "select and budget go together")),
    (("--budget", 2), ("SPEC", "select and budget go together")),
    (("--select", "gradient", "--budget", 0), ("USAGE", "budget of 0")),
    (("--select", "gradient", "--budget", "lots"), ("USAGE", "lots")),
    (("--select", "best", "--budget", 2), ("USAGE", "'best'", "pursuit")),
    (("--select", "random", "--budget", 1, "--method", "none"), ("SPEC", "no vectors to select from")),
    (("--select", "random", "--budget", 1, "--method", "weights"), ("SPEC", "no vectors to select from")),
    (("--bank", "random:0"), ("BANK-NAME", "random:15")),
    (("--method", "gradient-free", "--evaluations", 0), ("SPEC", "evaluations")),
    (("--method", "gradient-free", "--parallel", 0), ("SPEC", "parallel")),
]


@pytest.mark.parametrize(("given", "mentions"), REFUSED_RUNS, ids=lambda x: str(x)[:60])
def test_runs_that_make_no_sense_are_refused_and_leave_nothing(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path, given: tuple[Any, ...], mentions: tuple[str, ...]
) -> None:
    ran = aniso(*shelf.few_shot(*given, "-o", tmp_path / "run"))
    assert ran.code == 2, ran.err
    for text in mentions:
        assert text in ran.err, ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_choice_that_nothing_fits_into_leaves_nothing(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    ran = aniso(*shelf.few_shot("--select", "gradient", "--budget", "3B", "-o", tmp_path / "run"))
    assert ran.code == 3 and "no vector fits into a budget of 3 B" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["gradient", "blockwise-gradient", "pursuit"])
def test_without_labels_there_is_no_gradient_to_choose_by(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path, strategy: str
) -> None:
    given = ("--task", shelf.data / "cars", "--select", strategy, "--budget", 1, "-o", tmp_path / "run")
    ran = aniso("fit", "test-time", *shelf.base, *given)
    assert ran.code == 2 and f"'{strategy}'" in ran.err and "random, or features" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_labels_are_needed_to_learn_without_gradients(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    given = ("--task", shelf.data / "cars", "--method", "gradient-free", "-o", tmp_path / "run")
    ran = aniso("fit", "test-time", *shelf.base, *given)
    assert ran.code == 2 and "SPEC" in ran.err, ran.err
    assert "gradient-free" in ran.err and "coefficients, layernorm, or none" in ran.err
    assert list(tmp_path.iterdir()) == []


# random bases


def test_vectors_that_nobody_trained_are_drawn_by_the_seed(
    aniso: Aniso, done: Done, shelf: runs.Shelf, tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        done(*shelf.few_shot("--bank", "random:3", "--seed", seed, "-o", tmp_path / name))
    one, two, other = (read(tmp_path / name / "record.json") for name in "abc")
    for made in (one, two):
        for key in ("seconds", "peak_memory_bytes"):
            made.pop(key)
    assert one == two and one["spec"]["bank"] == "random:3"
    assert one["inputs"]["vectors"] == ["random-0", "random-1", "random-2"]
    assert one["inputs"]["bank"] != other["inputs"]["bank"]
    files = [(tmp_path / name / "coefficients.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert one["metrics"]["trainable"] == 3 * BLOCKS
    learned = ("--coefficients", tmp_path / "c" / "coefficients.safetensors", "--task", shelf.data / "photos")
    again = done("eval", shelf.model, "--bank", "random:3:1", *learned)
    assert [row["accuracy"] for row in again] == [
        v["accuracy"] for v in other["metrics"]["accuracy"].values()
    ]
    refused = aniso("eval", shelf.model, "--bank", "random:3", *learned)  # of another seed
    assert refused.code == 3 and "COEF-BANK" in refused.err


def test_of_vectors_that_nobody_trained_some_may_be_chosen(done: Done, shelf: runs.Shelf) -> None:
    made = done(*shelf.few_shot("--bank", "random:3", "--select", "gradient", "--budget", 1))
    assert made["metrics"]["selection"]["cells"] == BLOCKS and len(made["inputs"]["vectors"]) == 1


# without gradients


def test_what_is_learned_without_gradients_cannot_be_gone_on_with(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    ran = aniso(*shelf.few_shot("--method", "gradient-free", *SMALL, "-o", tmp_path / "run", "--resume"))
    assert ran.code == 2 and "without --resume" in ran.err
    assert not (tmp_path / "run").exists()


def test_coefficients_are_learned_without_gradients(done: Done, shelf: runs.Shelf, tmp_path: Path) -> None:
    out = tmp_path / "run"
    progress = mock.patch.object(torch.Tensor, "backward", lambda *_: pytest.fail("a gradient was taken"))
    with progress:
        made = done(*shelf.few_shot("--method", "gradient-free", *SMALL, "--keep", "best", "-o", out))
    assert sorted(path.name for path in out.iterdir()) == [
        "classes.json",
        "coefficients.safetensors",
        "images",
        "predictions.csv",
        "predictions.csv.meta.json",
        "record.json",
        "spec.yaml",
    ]
    record = read(out / "record.json")
    assert rounded(made) == record
    metrics = record["metrics"]
    assert (metrics["evaluations"], metrics["trainable"], len(metrics["history"])) == (4, 3, 5)
    assert metrics["history"][metrics["kept_look"]]["kept"]
    assert all(set(row["accuracy"]) == {"photos val"} for row in metrics["history"])
    learned = Coefficients.load(out / "coefficients.safetensors")
    assert learned.vectors == OTHERS and len(learned) == 3 and bool((learned.values.abs() <= 1.5).all())
    composed = ("--bank", shelf.bank, "--coefficients", out / "coefficients.safetensors")
    (again,) = done("eval", shelf.model, "--task", shelf.data / "photos", *composed)
    assert again["correct"] == metrics["accuracy"]["photos"]["correct"]


def test_what_was_learned_without_gradients_is_printed(
    aniso: Aniso, shelf: runs.Shelf, tmp_path: Path
) -> None:
    ran = aniso(*shelf.few_shot("--method", "gradient-free", *SMALL, "-o", tmp_path / "run"))
    assert ran.code == 0, ran.err
    assert "photos" in ran.out and "learned" in ran.out and "3 trained" in ran.out
    assert "wrote " in ran.out and "coefficients.safetensors" in ran.out


def test_nothing_is_said_of_the_optimisers_own_worries(aniso: Aniso, shelf: runs.Shelf) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran = aniso(*shelf.few_shot("--method", "gradient-free", *SMALL, "--json"))
    assert ran.code == 0, ran.err
    assert not [str(one.message) for one in caught if "scipy" in one.filename]


def test_as_many_tries_as_are_usual_can_be_made(done: Done, shelf: runs.Shelf) -> None:
    given = ("--method", "gradient-free", "--partition", "whole", "--evaluations", 60, "--parallel", 2)
    assert done(*shelf.few_shot(*given))["metrics"]["evaluations"] == 60


def test_what_is_chosen_can_be_learned_without_gradients_from_a_share_of_pictures(
    done: Done, shelf: runs.Shelf
) -> None:
    given = ("--task", shelf.data / "cars", "--fraction", 0.5, "--select", "gradient", "--budget", 2)
    made = done("fit", "peft", *shelf.base, *given, "--method", "gradient-free", *SMALL)
    assert made["metrics"]["trainable"] == 2 and made["metrics"]["evaluations"] == 4


def test_several_tries_are_made_at_once(done: Done, shelf: runs.Shelf, tmp_path: Path) -> None:
    given = ("--method", "gradient-free", "--evaluations", 3, "--partition", "whole", "--parallel", 2)
    made = done(*shelf.few_shot(*given, "-o", tmp_path / "run"))
    assert [row["evaluations"] for row in made["metrics"]["history"]] == [0, 2, 3]
    assert made["spec"]["parallel"] == 2
    assert Coefficients.load(tmp_path / "run" / "coefficients.safetensors").vectors == OTHERS


def test_vectors_that_nobody_trained_are_tried_at_once_too(done: Done, shelf: runs.Shelf) -> None:
    given = ("--bank", "random:2", "--method", "gradient-free", *SMALL, "--parallel", 2)
    assert done(*shelf.few_shot(*given))["metrics"]["trainable"] == 2


# experiments


def test_an_experiment_tries_strategies_and_budgets(aniso: Aniso, shelf: runs.Shelf, tmp_path: Path) -> None:
    base: dict[str, Any] = {"setting": "few-shot", "model": str(shelf.model), "bank": str(shelf.bank)}
    base |= {"task": "./photos", "shots": 2, "compare": False, "select": "random"}
    base |= {"schedule": {"epochs": 1, "batch_size": 2}}
    evolved = {"bank": "random:2", "method": "gradient-free", "evaluations": 2, "partition": "whole"}
    variants = [
        {"label": "chosen", "grid": {"select": ["blockwise-gradient"], "budget": [1, "100kB"]}},
        {"label": "evolved", "base": {**evolved, "budget": 1}},
    ]
    spec = tmp_path / "spec.yaml"
    spec.write_text(as_yaml({"schema": 1, "name": "try", "base": base, "variants": variants}))
    ran = aniso("run", spec, "--data", shelf.data, "--jobs", 2)
    assert ran.code == 0, ran.err
    records = runs.recorded(tmp_path / "records")
    found = {(r["label"], r["spec"]["select"], r["spec"]["budget"]): r for r in records}
    assert set(found) == {
        ("chosen", "blockwise-gradient", 1),
        ("chosen", "blockwise-gradient", "100kB"),
        ("evolved", "random", 1),
    }
    for (label, strategy, budget), record in found.items():
        said = record["metrics"]["selection"]
        assert said["strategy"] == strategy and record["status"] == "ok"
        assert said["bytes"] <= 100_000 if budget == "100kB" else said["cells"] == BLOCKS, label
    assert found["evolved", "random", 1]["metrics"]["evaluations"] == 2
    assert len(list((tmp_path / "records" / "coefficients").iterdir())) == 3
