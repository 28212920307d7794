"""``aniso catalogue`` and ``aniso select --from`` an address, with other workers, over real connections."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import language
import loopback
import pytest
import runs
import stored_adapters as stored
from watch import contents

from aniso.vectors import Bank, Catalogue
from aniso.weights import object_store

Aniso = Callable[..., Any]
Done = Callable[..., Any]
NAMES = ("ant", "bee", "cat", "dog")
ROOT = "memory://shelf"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def memory() -> Iterator[type[stored.Faulty]]:
    with stored.faulty_memory() as system:
        for seed, name in enumerate(NAMES):
            stored.put(f"{ROOT}/{name}", stored.adapter(seed))
        yield system


def select(shelf: runs.Shelf, *more: object, source: object = ROOT, task: bool = True) -> tuple[object, ...]:
    given = ("--task", shelf.data / "photos", "--shots", 3) if task else ()
    return ("select", "--model", shelf.model, "--from", source, *given, *more)


def test_an_address_gives_what_its_directory_gives(
    done: Done, aniso: Aniso, shelf: runs.Shelf, memory: type[stored.Faulty], tmp_path: Path
) -> None:
    for seed, name in enumerate(NAMES):
        stored.put(str(tmp_path / "disk" / name), stored.adapter(seed))
    remote = done(*select(shelf, "--budget", 2, "-o", tmp_path / "remote"))
    local = done(*select(shelf, "--budget", 2, source=tmp_path / "disk"))
    same = ("strategy", "budget", "vectors", "cells", "bytes", "chosen")
    assert {key: remote[key] for key in same} == {key: local[key] for key in same}
    assert (remote["adapters"], remote["left_out"]) == (4, {}) and remote["read"]["requests"] > 12
    bank = Bank.load(tmp_path / "remote")
    assert {n: len(bank[n].blocks) for n in bank} == remote["vectors"]
    ran = aniso(*select(shelf, "--strategy", "gradient", "--budget", 1, "--leave-out", "ant"))
    assert ran.code == 0 and "1 of 3 vectors" in ran.out and "4/32" in ran.out and "ant" not in ran.out


def test_a_catalogue_is_built_refreshed_and_used(
    done: Done, aniso: Aniso, shelf: runs.Shelf, memory: type[stored.Faulty], tmp_path: Path
) -> None:
    file, mark = tmp_path / "adapters.parquet", tmp_path / "it-ran"
    stored.put(f"{ROOT}/evil", stored.unusable(mark)["pickle"][0])
    stored.put(f"{ROOT}/nan", stored.unusable(mark)["nan"][0])
    command = ("catalogue", ROOT, "--model", shelf.model, "-o", file)
    first = done(*command)
    assert (first["adapters"], first["usable"], first["reasons"]) == (6, 5, {"FILE-FORMAT": 1})
    assert [row["uri"] for row in first["unusable"]] == [f"{ROOT}/evil"] and first["read"]["requests"] == 12
    ran = aniso(*command)
    assert ran.code == 0 and "5 of 6 adapters can be used" in ran.out and "FILE-FORMAT" in ran.out
    assert len(memory.reads) == 12, "nothing has changed"
    said = done(*select(shelf, "--budget", 1, "--catalogue", file))
    assert said["read"]["requests"] == 5, "tensors alone"
    assert set(said["left_out"]) == {f"{ROOT}/evil", f"{ROOT}/nan"} and not mark.exists()
    rows = {row.name: row for row in Catalogue.load(file).rows}
    assert rows["nan"].code == "WEIGHT-NONFINITE" and rows["ant"].norm
    stored.put(f"{ROOT}/new", stored.adapter(9))
    said = done(*select(shelf, "--budget", 1, "--catalogue", file, "--no-refresh"))
    assert said["adapters"] == 6 and said["read"]["requests"] == 4, "as it was; the NaN is known"
    said = done(*select(shelf, "--budget", 1, "--catalogue", file))
    assert said["adapters"] == 7 and said["read"]["requests"] == 2 + 5
    other = aniso(*select(shelf, "--budget", 1, "--catalogue", file, "--no-refresh", source="memory://other"))
    assert other.code == 3 and "no adapter" in other.err, "no row leads away from the address that was given"


def test_workers_write_scores_that_are_merged(
    done: Done, aniso: Aniso, shelf: runs.Shelf, memory: type[stored.Faulty], tmp_path: Path
) -> None:
    file, scores = tmp_path / "adapters.parquet", tmp_path / "scores"
    done("catalogue", ROOT, "--model", shelf.model, "-o", file)
    shared = ("--catalogue", file, "--no-refresh", "--scores", scores)
    first = done(*select(shelf, *shared, "--shard", "1/2"))
    early = aniso(*select(shelf, *shared, "--merge", "--budget", 1, task=False))
    assert early.code == 3 and "have no scores yet" in early.err
    second = done(*select(shelf, *shared, "--shard", "2/2", task=False))  # without the task and its images
    assert first["scored"] + second["scored"] == len(NAMES)
    before = contents(scores)
    memory.reads.clear()
    merged = done(*select(shelf, *shared, "--merge", "--budget", 2, task=False))
    assert memory.reads == [] and contents(scores) == before
    alone = done(*select(shelf, "--budget", 2))
    assert merged["chosen"] == alone["chosen"] and merged["bytes"] == alone["bytes"]


def test_adapters_of_a_language_model(done: Done, memory: type[stored.Faulty], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from adapters import random_adapter
    from transformers import AutoModelForCausalLM

    model, texts = tmp_path / "gpt2", tmp_path / "texts.jsonl"
    language.save("gpt2", model)
    how = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    for seed, name in enumerate(("one", "two", "three")):
        random_adapter(AutoModelForCausalLM.from_pretrained(model), tmp_path / "disk" / name, seed, **how)
        for file in (tmp_path / "disk" / name).iterdir():
            stored.put(f"memory://texts/{name}", {file.name: file.read_bytes()})
    language.write_lines(texts, [{"prompt": "the cat", "completion": " sat on a mat"}] * 3)
    given = ("select", "--model", model, "--budget", 1)
    local = done(*given, "--from", tmp_path / "disk", "--texts", texts)
    remote = done(*given, "--from", "memory://texts", "--texts", texts, "--scores", tmp_path / "scores")
    assert remote["chosen"] == local["chosen"] and remote["adapters"] == 3
    again = done(*given, "--from", "memory://texts", "--scores", tmp_path / "scores", "--merge")
    assert again["chosen"] == local["chosen"]


@pytest.mark.parametrize(
    ("given", "code", "mentions"),
    [
        (("--from", "ftp://x/y"), 2, ("REMOTE-URI", "s3://")),
        (("--from", "simplecache::s3://b/x"), 2, ("REMOTE-URI",)),
        (("--from", ROOT, "--shard", "1/2"), 2, ("--shard and --merge need --scores",)),
        (("--from", ROOT, "--shard", "3/2", "--scores", "new"), 2, ("3/2", "i/N")),
        (("--from", ROOT, "--merge"), 2, ("--scores",)),
        (("--from", ROOT, "--merge", "--shard", "1/1", "--scores", "new"), 2, ("--merge reads them",)),
        (("--from", ROOT, "--no-refresh"), 2, ("--no-refresh needs --catalogue",)),
        (("--from", ROOT, "--no-refresh", "--catalogue", "new"), 3, ("FILE-MISSING", "new")),
        (("--from", ROOT, "--strategy", "pursuit"), 2, ("needs a bank",)),
        (("--from", ROOT, "--strategy", "random"), 2, ("needs a bank",)),
        (("--from", ROOT, "--gradients", "new"), 2, ("--gradients and --skip-unfit",)),
        (("--from", "nowhere", "--scores", "new"), 3, ("FILE-MISSING", "nowhere")),
        (("--bank", "bank", "--scores", "new"), 2, ("need --from",)),
        (("--from", "memory://empty"), 3, ("no adapter",)),
    ],
    ids=lambda x: str(x)[:60],
)
def test_mistakes_are_reported_and_leave_nothing(
    aniso: Aniso, shelf: runs.Shelf, memory, tmp_path, given, code, mentions
) -> None:
    places = {"bank": shelf.bank, "nowhere": tmp_path / "nowhere", "new": tmp_path / "new"}
    words = [places.get(word, word) for word in given]
    base = ("--model", shelf.model, "--task", shelf.data / "photos", "--shots", 3)
    budget = () if "1/2" in given else ("--budget", 1)
    ran = aniso("select", *base, *budget, *words, "-o", tmp_path / "out")
    assert ran.code == code, ran.err
    assert all(text in ran.err for text in mentions), ran.err
    assert "BUG" not in ran.err and not ran.out and list(tmp_path.iterdir()) == []


def test_without_a_task_there_must_be_a_gradient(
    aniso: Aniso, shelf: runs.Shelf, memory, tmp_path: Path
) -> None:
    ran = aniso(*select(shelf, "--budget", 1, "--scores", tmp_path / "none", task=False))
    assert ran.code == 2 and "--task TASK" in ran.err


# real connections


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to loopback are allowed, and requests repeated at once, by aniso and by clients."""
    from huggingface_hub import constants

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("ANISO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def served(mark: Path) -> dict[str, bytes]:
    files = {name: stored.adapter(seed) for seed, name in enumerate(NAMES)}
    files |= {
        name: own for name, (own, _) in stored.unusable(mark).items() if name in ("bomb", "pickle", "wide")
    }
    out = {f"many/{name}/{file}": data for name, own in files.items() for file, data in own.items()}
    return {**out, "many/ant/optimizer.pt": b"\0" * 3_000_000, "many/README.md": b"# adapters"}


def faults(path: str, times: int) -> int | None:
    """The first request for a file is refused, the second ends early; one file is never delivered."""
    if path.startswith("many/dog/") and path.endswith(".safetensors"):
        return 503
    return {1: 503, 2: 11}.get(times)


def check_served(server: loopback.FileServer, done: Done, given: tuple[object, ...], mark: Path) -> None:
    said = done(*given)
    root = str(given[given.index("--from") + 1])
    reasons = {uri.removeprefix(f"{root}/"): reason for uri, reason in said["left_out"].items()}
    assert set(reasons) == {"dog", "bomb", "pickle", "wide"} and "cannot be read" in reasons["dog"]
    assert set(said["vectors"]) <= {"ant", "bee", "cat"} and said["adapters"] == 7
    assert not any(name.endswith((".pt", ".md")) for kind, name in server.asked if kind == "GET")
    assert server.sent < 500_000, "the optimizer's 3 MB are not downloaded"
    assert not mark.exists()


def test_the_hub_by_ranges_with_refused_and_short_answers(
    done: Done, shelf: runs.Shelf, tmp_path: Path, online: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "it-ran"
    monkeypatch.setattr(object_store.Retry, "__init__", _twice)
    with loopback.serving(served(mark)) as server:
        server.faults = faults
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.address, "token": False})
        root = f"hf://{loopback.REPOSITORY}/many"
        check_served(server, done, select(shelf, "--budget", 1, source=root), mark)


def _twice(self: object_store.Retry, attempts: int = 2, pause: float = 0) -> None:
    """Two tries of ours: the hub's client has five of its own for each."""
    object.__setattr__(self, "attempts", attempts)
    object.__setattr__(self, "pause", pause)


def test_index_pages_of_a_web_server_by_ranges(
    done: Done, shelf: runs.Shelf, tmp_path: Path, online: None
) -> None:
    pytest.importorskip("aiohttp", reason="https:// needs aniso[remote]")
    mark = tmp_path / "it-ran"
    with loopback.serving(served(mark)) as server:
        server.faults = faults
        check_served(server, done, select(shelf, "--budget", 1, source=f"{server.address}/many"), mark)


def test_a_bucket_by_ranges(
    done: Done, shelf: runs.Shelf, tmp_path: Path, online: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against moto's server: pip install 'aniso[remote]' 'moto[server]'."""
    pytest.importorskip("s3fs", reason="s3:// needs aniso[remote]")
    threaded = pytest.importorskip("moto.server", reason="a bucket on loopback needs moto[server]")
    mark, file = tmp_path / "it-ran", tmp_path / "adapters.parquet"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = threaded.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://{host}:{port}"})
        system = fsspec.filesystem("s3")
        system.mkdir("shelf")
        for path, data in served(mark).items():
            system.pipe_file(f"shelf/{path}", data)
        command = ("catalogue", "s3://shelf/many", "--model", shelf.model, "-o", file)
        first = done(*command)
        assert (first["adapters"], first["usable"]) == (7, 4) and first["read"]["requests"] == 14
        assert done(*command)["read"]["requests"] == 0
        system.pipe_file(
            "shelf/many/ant/adapter_config.json", stored.adapter(0, lora_alpha=8)["adapter_config.json"]
        )
        assert done(*command)["read"]["requests"] == 2
        given = ("--budget", 1, "--catalogue", file, "-o", tmp_path / "bank")
        said = done(*select(shelf, *given, source="s3://shelf/many"))
        assert set(said["vectors"]) <= set(NAMES) and len(said["left_out"]) == 3
        assert set(Bank.load(tmp_path / "bank")) == set(said["vectors"]) and not mark.exists()
        assert done(*select(shelf, "--budget", 1, source="s3://shelf/many"))["chosen"] == said["chosen"]
    finally:
        server.stop()


def test_a_protocol_without_its_package_says_what_to_install(
    aniso: Aniso, shelf: runs.Shelf, online: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    ran = aniso(*select(shelf, "--budget", 1, source="s3://bucket/x"))
    assert ran.code == 5 and "REMOTE-PACKAGE" in ran.err and "aniso[remote]" in ran.err
