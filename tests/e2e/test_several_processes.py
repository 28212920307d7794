"""One run shared by several processes gives what one process gives, and they end together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
import torch
from adapters import random_adapter
from transformers import CLIPModel

from aniso.cli import main
from aniso.compose import Coefficients
from aniso.learn import TrainingCheckpoints
from aniso.vectors import Bank


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@contextlib.contextmanager
def together(world: int, *args: object, logs: Path, seconds: float = 0) -> Iterator[list[runs.Child]]:
    """``aniso ARGS`` in several forked processes, started as ``--devices`` starts them."""
    logs.mkdir(parents=True)
    shared = {"ANISO_PROCESS_STORE": f"{logs}/store", "WORLD_SIZE": str(world)}
    shared |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def work(rank: int) -> int:
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        if seconds:
            runs.slowly(seconds)
        return main([str(a) for a in args])

    started = [runs.Child(lambda rank=rank: work(rank), logs / f"log{rank}") for rank in range(world)]
    try:
        yield started
    finally:
        for one in started:
            one.end()


def learned(out: Path) -> torch.Tensor:
    return Coefficients.load(out / "coefficients.safetensors").values


def assert_same(several: Path, one: Path) -> None:
    """The same losses in every epoch, which go somewhere, and the same coefficients."""
    rows = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (several, one)
    ]
    assert rows[0][1:] == pytest.approx(rows[1][1:], rel=1e-5, abs=1e-6) and rows[1][1] != rows[1][2]
    torch.testing.assert_close(learned(several), learned(one), rtol=1e-4, atol=1e-6)


def shared_run(world: int, *args: object, out: Path) -> dict[str, object]:
    with together(world, *args, "-o", out, "--json", logs=out.parent / f"{out.name}-logs") as ranks:
        codes = [rank.wait() for rank in ranks]
    assert codes == [0] * world, "\n".join(rank.said for rank in ranks)
    assert [rank.said for rank in ranks[1:]] == [""] * (world - 1)  # one of them speaks
    return json.loads((out / "record.json").read_text())


VARIANTS = {
    "blocks": (),
    "parts": ("--partition", "random:7"),
    "head": ("--head", "tip", "--joint", "--lr", "0.01"),
    "small pieces": ("--micro-batch", "1"),
    "sharded base": (),
}
OF_SEVERAL = {"sharded base": ("--shard-base",)}
"""Options that one process alone does not have."""


@pytest.mark.parametrize(("world", "variant"), [(2, name) for name in VARIANTS] + [(4, "blocks")])
def test_several_processes_learn_what_one_learns(shelf, tmp_path, aniso, world, variant):
    given = shelf.few_shot(*VARIANTS[variant])
    assert aniso(*given, "-o", tmp_path / "one").code == 0
    record = shared_run(world, *given, *OF_SEVERAL.get(variant, ()), out=tmp_path / "several")
    alone = json.loads((tmp_path / "one" / "record.json").read_text())
    assert record["id"] == alone["id"]
    assert record["metrics"]["accuracy"] == alone["metrics"]["accuracy"]
    assert learned(tmp_path / "one").any()
    assert_same(tmp_path / "several", tmp_path / "one")
    names = {p.name for p in (tmp_path / "one").iterdir()}
    assert {p.name for p in (tmp_path / "several").iterdir()} == names


def test_a_bank_of_adapters_and_a_packed_one(shelf, tmp_path, aniso):
    assert aniso("bank", "quantise", shelf.bank, "--storage", "int4", "-o", tmp_path / "int4").code == 0
    layers = dict(r=2, lora_alpha=4, target_modules=r"vision_model.*(q_proj|fc1)")
    for i, name in enumerate(runs.VECTORS):
        random_adapter(CLIPModel.from_pretrained(shelf.model), tmp_path / name, seed=i, **layers)
    Bank.build(shelf.model, {name: tmp_path / name for name in runs.VECTORS}, to=tmp_path / "lora")
    for name, bank in (("int4", tmp_path / "int4"), ("lora", tmp_path / "lora")):
        given = shelf.few_shot("--bank", bank)
        assert aniso(*given, "-o", tmp_path / f"{name}-one").code == 0
        shared_run(2, *given, out=tmp_path / f"{name}-several")
        assert_same(tmp_path / f"{name}-several", tmp_path / f"{name}-one")


def test_a_loss_over_the_whole_batch_and_labels_of_teachers(shelf, tmp_path, aniso):
    tasks = ("--task", "./cars", "--task", "./dtd", "--data", shelf.data, "--no-compare", "--epochs", 2)
    addition = ("fit", "addition", *shelf.base, *tasks, "--objective", "distil", "--batch-size", 3)
    addition += ("--choose-by", "teachers", "--lr", "0.5")
    waiting = ("fit", "test-time", *shelf.base, "--task", shelf.data / "photos", "--epochs", 2)
    waiting += ("--objective", "contrastive", "--batch-size", 5, "--no-compare", "--lr", "0.1")
    for name, given in (("distil", addition), ("contrastive", waiting)):
        ran = aniso(*given, "-o", tmp_path / f"{name}-one")
        assert ran.code == 0, ran.err
        shared_run(2, *given, out=tmp_path / f"{name}-several")
        assert_same(tmp_path / f"{name}-several", tmp_path / f"{name}-one")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_process_ends_all_after_the_same_step_and_the_run_resumes(shelf, tmp_path, victim):
    given = shelf.few_shot()
    shared_run(2, *given, out=tmp_path / "whole")
    out = tmp_path / "run"
    with together(2, *given, "-o", out, logs=tmp_path / "logs", seconds=0.3) as ranks:
        runs.until(lambda: "a step begins" in ranks[victim].said, what=ranks[victim])
        os.kill(ranks[victim].pid, signal.SIGTERM)
        assert [rank.wait(60) for rank in ranks] == [143, 143], ranks[0].said
    assert "--resume" in ranks[0].said
    assert TrainingCheckpoints(out).files() and not (out / "record.json").exists()
    shared_run(2, *given, "--resume", out=out)
    assert torch.equal(learned(out), learned(tmp_path / "whole"))


def test_a_run_goes_on_with_another_number_of_processes_when_that_is_allowed(shelf, tmp_path, aniso):
    given = shelf.few_shot()
    out = tmp_path / "run"
    with together(2, *given, "-o", out, logs=tmp_path / "logs", seconds=0.3) as ranks:
        runs.until(lambda: "a step begins" in ranks[0].said, what=ranks[0])
        os.kill(ranks[0].pid, signal.SIGTERM)
        assert [rank.wait(60) for rank in ranks] == [143, 143]
    refused = aniso(*given, "-o", out, "--resume")
    assert refused.code == 3 and "processes" in refused.err and "--allow-env-change" in refused.err
    assert aniso(*given, "-o", out, "--resume", "--allow-env-change").code == 0
    assert aniso(*given, "-o", tmp_path / "one").code == 0
    assert_same(out, tmp_path / "one")


def test_a_process_that_is_killed_ends_the_others_with_a_reason(shelf, tmp_path):
    out = tmp_path / "run"
    with together(2, *shelf.few_shot("-o", out), logs=tmp_path / "logs", seconds=0.3) as ranks:
        runs.until(lambda: "a step begins" in ranks[1].said, what=ranks[1])
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert ranks[0].wait(60) == 5, ranks[0].said
    assert "PROCESS-LOST" in ranks[0].said and "--resume" in ranks[0].said


def test_devices_starts_the_processes_and_hands_on_what_the_first_says(shelf, tmp_path):
    command = [sys.executable, "-m", "aniso", *shelf.few_shot("-o", tmp_path / "run", "--devices", 2)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("photos") == 1 and ran.stderr.count("epoch 2: loss") == 1
    assert (tmp_path / "run" / "record.json").is_file()


def test_what_several_processes_cannot_share_is_refused(aniso, shelf, monkeypatch):
    for more in (("--method", "gradient-free"), ("--method", "none"), ("--factors",)):
        ran = aniso(*shelf.few_shot(*more, "--devices", 2))
        assert ran.code == 2 and "--devices" in ran.err, ran.err
    ran = aniso(*shelf.few_shot("--shard-base"))
    assert ran.code == 2 and "--devices N" in ran.err
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for name, value in {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    ran = aniso(*shelf.few_shot())
    assert ran.code == 2 and "RANK=x" in ran.err
