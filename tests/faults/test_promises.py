"""Smaller promises: few descriptors, memory limits, requests to end, missing directories, warnings."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import language
import pictures
import pytest
import runs
import tiny
import torch
from runs import child, until

from aniso.cli import _user_error
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.vectors import Bank
from aniso.vectors._files import segment_writer
from aniso.weights import save_safetensors
from aniso.weights.files import RawFile

ADAPTERS, DESCRIPTORS = 150, 64


# open files


def adapter(directory, names, generator):
    """A LoRA of rank 2 as PEFT saves one."""
    tensors = {}
    for name in names:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(2, 8, generator=generator) * 0.1
        tensors[f"{module}.lora_B.weight"] = torch.randn(16, 2, generator=generator) * 0.1
    directory.mkdir()
    save_safetensors(directory / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["fc"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def few_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + DESCRIPTORS, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_bank_of_more_adapters_than_descriptors_is_built_and_read(tmp_path, few_descriptors):
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.fc.weight": torch.randn(16, 8, generator=generator) for i in range(2)}
    save_safetensors(tmp_path / "base.safetensors", base)
    tuned = {f"v{i}": adapter(tmp_path / f"a{i}", base, generator) for i in range(ADAPTERS)}
    built = Bank.build(tmp_path / "base.safetensors", tuned, to=tmp_path / "bank")
    view = Bank.build(tmp_path / "base.safetensors", tuned)  # one that reads the adapters themselves
    for block in built.layout.blocks:
        stored, live = built.read_block(block.name), view.read_block(block.name)
        assert len(stored) == len(live) == ADAPTERS
        torch.testing.assert_close(stored["v7"].dense(), live["v7"].dense())


@pytest.fixture
def files(tmp_path):
    """More files than may be open, each with its own content."""
    paths = [tmp_path / f"{i}.bin" for i in range(3 * DESCRIPTORS)]
    for i, path in enumerate(paths):
        path.write_bytes(f"{i:08}".encode() * 16)
    return paths


def test_files_that_were_closed_meanwhile_are_read_as_before(tmp_path, monkeypatch, files, few_descriptors):
    monkeypatch.chdir(tmp_path)
    opened = [RawFile(path.relative_to(tmp_path)) for path in files]
    monkeypatch.chdir("/")  # they are the files that were named, wherever we are now
    for _ in range(2):
        assert all(file.read(0, 8) == f"{i:08}".encode() for i, file in enumerate(opened))


@pytest.mark.parametrize("damage", ["replaced", "changed", "removed"])
def test_a12_a_file_that_was_closed_and_is_another_one_now_is_refused(
    files, few_descriptors, refused, damage
):
    opened = [RawFile(path) for path in files]
    first = files[0]
    if damage == "replaced":  # by one of the same size and time
        status = first.stat()
        files[1].replace(first)
        os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif damage == "changed":
        first.write_bytes(b"x" * 128)
        os.utime(first, (1, 1))
    else:
        first.unlink()
    with refused("FILE-CHANGED", 3, first.name):
        opened[0].read(0, 8)


def test_threads_and_forked_processes_share_few_descriptors(files, few_descriptors):
    opened = [RawFile(path) for path in files]
    wrong: list[int] = []

    def read(step: int) -> None:
        for i in range(0, 4 * len(opened), step):
            if opened[i % len(opened)].read(0, 8) != f"{i % len(opened):08}".encode():
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    pid = os.fork()  # while the others read
    if pid == 0:
        read(1)
        os._exit(len(wrong) > 0)
    for thread in threads:
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not wrong


# memory


def test_h11_under_a_memory_limit_the_exit_code_is_5():
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    ran = subprocess.run(
        [sys.executable, "-m", "aniso", "bank", "ls", "mini"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert ran.returncode == 5, ran.stderr
    assert "OUT-MEMORY" in ran.stderr and "ulimit" in ran.stderr and "Traceback" not in ran.stderr


def _caused() -> Exception:
    try:
        try:
            raise MemoryError
        except MemoryError as e:
            raise RuntimeError("a library's own words") from e
    except RuntimeError as e:
        return e


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 1 bytes"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        _caused(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_h11_memory_that_ran_out_is_known_in_all_its_words(error):
    ours = _user_error(error)
    assert ours is not None and (ours.code, ours.exit_code) == ("OUT-MEMORY", 5) and ours.fix


def test_h11_other_errors_are_not_blamed_on_memory():
    assert _user_error(RuntimeError("an illegal memory access was encountered")) is None
    assert _user_error(ImportError("No module named 'memory'")) is None


# requests to end, outside of training


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_h6_a_run_that_is_asked_to_end_before_training_leaves_nothing(shelf, tmp_path, number, code):
    def wait(*_):
        os.write(2, b"loading\n")
        time.sleep(60)

    def first() -> None:
        ImageSetting.load_model = wait

    out = tmp_path / "new" / "run"
    with child(*shelf.few_shot("-o", out), log=tmp_path / "log", first=first) as run:
        until(lambda: "loading" in run.said, what=run)
        assert (out / "spec.yaml").exists()
        os.kill(run.pid, number)
        assert run.wait(10) == code, run.said
    assert "Traceback" not in run.said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_h6_a_bank_that_is_being_built_is_cleaned_up(shelf, tmp_path, number, code):
    tuned = tmp_path / "tuned.safetensors"
    state = tiny.hf_clip_state(shelf.model)
    save_safetensors(tuned, tiny.tuned_vision(state, tiny.is_hf_vision, 9))

    def first() -> None:
        real = segment_writer.write_segment

        def waiting(stream, *rest, **more):
            os.write(2, b"writing\n")
            time.sleep(60)
            return real(stream, *rest, **more)

        sys.modules["aniso.vectors._files.bank_directory"].write_segment = waiting

    given = ("bank", "build", "--base", shelf.model, f"a={tuned}", "-o", tmp_path / "new" / "bank")
    with child(*given, log=tmp_path / "log", first=first) as run:
        until(lambda: "writing" in run.said, what=run)
        assert list(tmp_path.glob("new/bank.partial-*"))
        os.kill(run.pid, number)
        assert run.wait(10) == code, run.said
    assert "STOPPED" in run.said and "Traceback" not in run.said
    assert not (tmp_path / "new").exists()


def test_h6_an_ignored_signal_stays_ignored(shelf, tmp_path):
    def first() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        ImageSetting.load_model = lambda *_: os.kill(os.getpid(), signal.SIGHUP) or sys.exit(33)

    with child(*shelf.few_shot("-o", tmp_path / "run"), log=tmp_path / "log", first=first) as run:
        assert run.wait(20) == 33, run.said


# outputs below directories that are not there yet


def test_h4_every_command_makes_the_directories_above_its_output(aniso, shelf, tmp_path):
    out = tmp_path / "a" / "b"
    tuned = tmp_path / "tuned.safetensors"
    save_safetensors(tuned, tiny.tuned_vision(tiny.hf_clip_state(shelf.model), tiny.is_hf_vision, 9))
    record = {"schema": 1, "status": "ok", "id": "1", "experiment": "few-shot", "label": "learned",
              "spec": {"setting": "few-shot", "model": "m", "method": "none", "task": "a", "shots": 4},
              "metrics": {"accuracy": {"a": {"correct": 1, "total": 2, "accuracy": 0.5}}},
              "inputs": {"model": "m", "data": {"a": "d"}}}  # fmt: skip
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "1.json").write_text(json.dumps(record))
    made = out / "c" / "c.safetensors"
    base = ("--bank", shelf.bank, "--base", shelf.model)
    for given in (
        ("coefficients", "make", "cars=1", "--bank", shelf.bank, "-o", made),
        ("bake", made, *base, "-o", out / "1" / "model.safetensors"),
        ("bake", made, *base, "-o", out / "2" / "model", "--to", "huggingface"),
        ("vector", "make", "--base", shelf.model, tuned, "-o", out / "3" / "v.safetensors"),
        ("bank", "build", "--base", shelf.model, f"a={tuned}", "-o", out / "4" / "bank"),
        ("bank", "quantise", shelf.bank, "-o", out / "5" / "bank"),
        ("convert", tuned, "-o", out / "6" / "t.safetensors"),
        ("report", tmp_path / "r", "-o", out / "7" / "report", "--no-figures"),
    ):
        ran = aniso(*given)
        assert ran.code == 0, (given, ran.err)
        assert given[given.index("-o") + 1].exists()


def test_h4_a_command_that_fails_takes_the_directories_back(aniso, shelf, tmp_path):
    broken = tmp_path / "tuned.safetensors"
    state = tiny.tuned_vision(tiny.hf_clip_state(shelf.model), tiny.is_hf_vision, 9)
    next(v for k, v in state.items() if tiny.is_hf_vision(k)).view(-1)[0] = float("nan")
    save_safetensors(broken, state)
    ran = aniso("bank", "build", "--base", shelf.model, f"a={broken}", "-o", tmp_path / "a" / "b" / "bank")
    assert ran.code == 3, ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuned.safetensors"]


# warnings


def test_a_task_with_one_class_is_a_warning(aniso, shelf, tmp_path):
    pictures.folder(tmp_path / "one" / "test", {"red": 3})
    pictures.folder(tmp_path / "two" / "test", {"red": 3, "blue": 3})
    for command in (("task", "show"), ("eval", shelf.model, "--task")):
        ran = aniso(*command, tmp_path / "one")
        assert ran.code == 0, ran.err
        assert "warning: " in ran.err and "only one class" in ran.err
        assert "only one class" not in aniso(*command, tmp_path / "two").err


def test_f11_fit_says_that_prompts_were_truncated(aniso, shelf, tmp_path):
    for prompt, cut in (
        ("a {}.", False),
        ("a photo of a thing that is a {} and of many other things.", True),
    ):
        task = shutil.copytree(shelf.data / "photos", tmp_path / f"task {cut}")
        (task / "task.toml").write_text(f"prompts = ['{prompt}']\n")
        ran = aniso(*shelf.few_shot("--task", task, "-o", tmp_path / str(cut)))
        assert ran.code == 0, ran.err
        assert ("prompts were too long and cut" in ran.err) is cut
        record = json.loads((tmp_path / str(cut) / "record.json").read_text())
        assert any("too long" in note for note in record["notes"]) is cut


def test_f11_fit_lm_says_that_prompts_were_truncated(aniso, tmp_path):
    language.save("gpt2", tmp_path / "base")
    long = {"prompt": "the cat sat on a mat while two dogs ran over green hills", "completion": " and so on"}
    short = {"prompt": "the cat", "completion": " sat"}
    texts = language.write_lines(tmp_path / "texts.jsonl", [long, short])
    given = ("fit", "lm", "--model", tmp_path / "base", "--train", texts, "--method", "none", "--length", 8)
    ran = aniso(*given)
    assert ran.code == 0, ran.err
    assert "1 example is longer than 8 tokens and cut, first: texts.jsonl" in ran.err
