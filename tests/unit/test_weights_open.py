"""The one way in: what is read, when, and from where."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aniso.errors import AnisoError, InputError
from aniso.weights import PeftAdapter, Renamed, SourceInfo, TensorMap, open_weights
from aniso.weights.files import RawFile, ReadBuffer
from aniso.weights.hub import looks_like_hub_id

BIG = torch.arange(100_000.0)
SMALL = torch.arange(5.0)


@pytest.fixture
def reads(monkeypatch):
    """Offset and length of every read of a file's data."""
    made = []
    real = RawFile.read_into

    def read_into(file, buffer, offset):
        made.append((offset, len(buffer)))
        real(file, buffer, offset)

    monkeypatch.setattr(RawFile, "read_into", read_into)
    return made


@pytest.fixture
def no_hang():
    """What blocks is interrupted, so that a failure shows as one."""

    def give_up(*args):
        raise TimeoutError("it would have blocked for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def total(reads) -> int:
    return sum(length for _, length in reads)


def adapter(directory: Path, factors: dict[str, torch.Tensor] | None = None, **config) -> Path:
    directory.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    if factors is None:
        factors = {"m.lora_A.weight": torch.ones(2, 3), "m.lora_B.weight": torch.ones(3, 2)}
    save_file(factors, directory / "adapter_model.safetensors")
    return directory


# laziness


def save_safetensors_file(path: Path) -> None:
    save_file({"big": BIG, "small": SMALL}, path)


def save_torch(path: Path) -> None:
    torch.save({"big": BIG, "small": SMALL}, path)


def save_legacy(path: Path) -> None:
    torch.save({"big": BIG, "small": SMALL}, path, _use_new_zipfile_serialization=False)


WRITERS = {
    "safetensors": save_safetensors_file,
    "torch zip": save_torch,
    "torch legacy": save_legacy,
}
writers = pytest.mark.parametrize("save", WRITERS.values(), ids=WRITERS.keys())


@writers
def test_opening_reads_no_tensor(tmp_path, reads, save):
    save(tmp_path / "file")
    source = open_weights(tmp_path / "file")
    assert set(source.tensors) == {"big", "small"}
    assert source.tensors["big"].shape == (100_000,)
    assert source.tensors["big"].nbytes == 400_000
    assert total(reads) < 20_000


@writers
def test_reading_one_tensor_reads_only_its_bytes(tmp_path, reads, save):
    save(tmp_path / "file")
    source = open_weights(tmp_path / "file")
    reads.clear()
    assert torch.equal(source.read("small"), SMALL)
    assert total(reads) == SMALL.nbytes
    ((offset, length),) = reads
    assert (tmp_path / "file").read_bytes()[offset : offset + length] == SMALL.numpy().tobytes()


def test_a_view_of_a_large_storage_is_read_alone_once_the_storage_is_verified(tmp_path, reads):
    torch.save({"all": BIG, "part": BIG[100:110]}, tmp_path / "file")
    source = open_weights(tmp_path / "file")
    source.read("all")
    reads.clear()
    assert torch.equal(source.read("part"), BIG[100:110])
    assert total(reads) == 40


def test_only_the_shard_of_a_tensor_is_read(tmp_path, reads):
    places = {"big": "s1.safetensors", "small": "s2.safetensors"}
    save_file({"big": BIG}, tmp_path / "s1.safetensors")
    save_file({"small": SMALL}, tmp_path / "s2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    source = open_weights(tmp_path)
    assert total(reads) < 20_000
    reads.clear()
    assert torch.equal(source.read("small"), SMALL)
    assert total(reads) == SMALL.nbytes


def test_rows_are_read_alone(tmp_path, reads):
    matrix = BIG.reshape(1000, 100)
    save_file({"m": matrix, "none": torch.zeros(0, 4)}, tmp_path / "file")
    source = open_weights(tmp_path / "file")
    reads.clear()
    assert torch.equal(source.read_rows("m", 10, 13), matrix[10:13])
    assert total(reads) == 3 * 400
    assert source.read_rows("none", 0, 0).shape == (0, 4)


@writers
def test_what_is_read_belongs_to_the_reader(tmp_path, save):
    save(tmp_path / "file")
    source = open_weights(tmp_path / "file")
    source.read("small").zero_()
    assert torch.equal(source.read("small"), SMALL)
    assert source.read("small").is_contiguous()


@writers
def test_a_name_that_is_not_there_is_refused(tmp_path, refused, save):
    save(tmp_path / "file")
    with refused("WEIGHT-NAME", 3, "file", "smal'", "aniso inspect"):
        open_weights(tmp_path / "file").read("smal")


# FILE::entry


def test_an_entry_of_a_checkpoint_can_be_named(tmp_path, refused):
    states = {"model": {"w": SMALL}, "ema": {"w": SMALL + 1}, "deep": {"er": {"w": SMALL + 2}}}
    torch.save(states, tmp_path / "file.pt")
    with refused("CKPT-AMBIGUOUS", 3, "model", "ema", "::model"):
        open_weights(tmp_path / "file.pt")
    for entry, added in {"model": 0, "ema": 1, "deep.er": 2, "deep": 2}.items():
        source = open_weights(f"{tmp_path}/file.pt::{entry}")
        assert torch.equal(source.read("w"), SMALL + added)


def test_an_entry_that_is_not_there_is_refused(tmp_path, refused):
    torch.save({"model": {"w": SMALL}}, tmp_path / "file.pt")
    for entry in ("modle", "model.w.x", "model.x"):
        with refused("CKPT-NONE", 3, entry, "model"):
            open_weights(f"{tmp_path}/file.pt::{entry}")


def test_an_entry_of_something_without_entries_is_not_ignored(tmp_path):
    save_file({"w": SMALL}, tmp_path / "model.safetensors")
    for ref in (f"{tmp_path}/model.safetensors::ema", f"{tmp_path}::ema"):
        with pytest.raises(AnisoError):
            open_weights(ref)


# content decides


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.bin", "x.jpg", "x", "x.json", "x.txt"])
@writers
def test_the_suffix_plays_no_part(tmp_path, save, name):
    save(tmp_path / name)
    source = open_weights(tmp_path / name)
    assert source.info.format == next(form for form, writer in WRITERS.items() if writer is save)
    assert torch.equal(source.read("small"), SMALL)


def test_a_file_may_be_named_by_text_or_path_and_by_the_home_directory(tmp_path, monkeypatch):
    save_file({"w": SMALL}, tmp_path / "x.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    for ref in (tmp_path / "x.safetensors", f"{tmp_path}/x.safetensors", "~/x.safetensors"):
        assert torch.equal(open_weights(ref).read("w"), SMALL)


def test_a_link_is_followed(tmp_path):
    save_file({"w": SMALL}, tmp_path / "x")
    (tmp_path / "link").symlink_to("x")
    assert torch.equal(open_weights(tmp_path / "link").read("w"), SMALL)


# state dicts


def test_a_source_is_itself():
    source = TensorMap({"w": SMALL})
    assert open_weights(source) is source


def test_a_state_dict_is_a_source():
    state = {"w": SMALL.half(), "n": torch.tensor(3), "t": torch.arange(6.0).reshape(2, 3).T}
    source = open_weights(state)
    assert isinstance(source, TensorMap)
    assert {n: (i.dtype, i.shape) for n, i in source.tensors.items()} == {
        "w": ("F16", (5,)),
        "n": ("I64", ()),
        "t": ("F32", (3, 2)),
    }
    assert all(torch.equal(source.read(name), tensor) for name, tensor in state.items())
    assert source.read("t").is_contiguous()
    assert source.files == ()
    assert source.nbytes == 10 + 8 + 24


def test_a_state_dict_is_copied_when_read():
    tensor = SMALL.clone().requires_grad_()
    source = TensorMap({"w": tensor})
    source.read("w").zero_()
    assert torch.equal(source.read("w"), SMALL)
    assert not source.read("w").requires_grad


def test_shared_tensors_of_a_state_dict_are_aliases():
    state = {"a": SMALL, "b": SMALL, "part": SMALL[1:], "same": SMALL.clone(), "view": SMALL.view(5)}
    assert TensorMap(state).aliases == {"b": "a", "view": "a"}


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e5m2)],
    ids=["complex", "sparse", "float8"],
)
def test_unusual_tensors_of_a_state_dict_are_refused_by_name(refused, tensor):
    with refused("WEIGHT-DTYPE", 3, "odd"):
        TensorMap({"fine": SMALL, "odd": tensor})


def test_the_hash_of_a_state_dict_is_of_its_content():
    state = {"a": SMALL, "b": SMALL.half()}
    same = TensorMap(dict(reversed(state.items()))).sha256()
    assert TensorMap(state).sha256() == same
    changes = [
        {"a": SMALL + 1},
        {"a": SMALL.double()},
        {"a": SMALL.reshape(5, 1)},
        {"c": SMALL},
        {"b": SMALL.bfloat16()},
    ]
    assert len({same, *(TensorMap({**state, **change}).sha256() for change in changes)}) == 6


def test_shared_tensors_of_a_checkpoint_are_aliases(tmp_path):
    torch.save({"a": SMALL, "b": SMALL, "part": SMALL[1:]}, tmp_path / "file")
    assert open_weights(tmp_path / "file").aliases == {"b": "a"}


# renaming


def renamed(state: dict[str, torch.Tensor], names: dict[str, str]) -> Renamed:
    return Renamed(TensorMap(state, "here"), names, SourceInfo("other"))


def test_a_renamed_source_has_the_new_names_only(refused):
    source = renamed({"a": SMALL, "b": SMALL + 1, "c": SMALL + 2}, {"y": "b", "x": "a"})
    assert list(source.tensors) == ["y", "x"]
    assert torch.equal(source.read("y"), SMALL + 1)
    assert (source.label, source.info.format) == ("here", "other")
    with refused("WEIGHT-NAME", 3, "'a'"):
        source.read("a")


def test_names_may_be_exchanged():
    source = renamed({"a": SMALL, "b": SMALL + 1}, {"a": "b", "b": "a"})
    assert torch.equal(source.read("a"), SMALL + 1)
    assert torch.equal(source.read("b"), SMALL)


def test_a_renamed_source_is_as_lazy_as_its_source(tmp_path, reads):
    save_safetensors_file(tmp_path / "file")
    inner = open_weights(tmp_path / "file")
    source = Renamed(inner, {"s": "small", "b": "big"}, inner.info)
    reads.clear()
    assert torch.equal(source.read("s"), SMALL)
    assert total(reads) == SMALL.nbytes
    assert source.files == inner.files
    assert source.sha256() == inner.sha256()


def test_aliases_follow_the_new_names():
    state = {"a": SMALL, "b": SMALL, "c": SMALL + 1}
    assert renamed(state, {"x": "a", "y": "b", "z": "c"}).aliases == {"y": "x"}
    assert renamed(state, {"y": "b", "z": "c"}).aliases == {}


# paths and hub ids


@pytest.mark.parametrize(
    ("ref", "is_id"),
    [
        ("owner/name", True),
        ("owner/name@main", True),
        ("owner/name@refs/pr/1", True),
        ("hub:owner/name", True),
        ("openai/clip-vit-base-patch32", True),
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K@v1.0", True),
        ("name", False),
        ("./owner/name", False),
        ("../owner/name", False),
        ("/owner/name", False),
        ("~/name", False),
        ("~owner/name", False),
        ("owner/name/", False),
        ("owner/name/file", False),
        ("owner/name@", False),
        ("owner/na me", False),
        ("owner\\name", False),
        ("C:/name", False),
        ("https://hub/owner/name", False),
        ("", False),
    ],
)
def test_what_looks_like_a_hub_id(ref, is_id):
    assert looks_like_hub_id(ref) is is_id


def test_a_directory_that_exists_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner/name").mkdir(parents=True)
    save_file({"w": SMALL}, "owner/name/model.safetensors")
    source = open_weights("owner/name")
    assert torch.equal(source.read("w"), SMALL)
    assert source.info.revision is None


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_hub_id_that_is_no_path_is_looked_for_on_the_hub(tmp_path, empty_cache, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    with refused("HUB-OFFLINE", 3, "owner/name"):
        open_weights("owner/name")


@pytest.mark.parametrize(
    "ref",
    ["missing.safetensors", "./owner/name", "/missing/x.pt", "a\0b", "~/missing", "loras/missing/"],
    ids=repr,
)
def test_a_path_that_does_not_exist_is_said_to_be_missing(tmp_path, monkeypatch, refused, ref):
    monkeypatch.chdir(tmp_path)
    with refused("FILE-MISSING", 3, "does not exist", "owner/name"):
        open_weights(ref)


def test_a_file_missing_from_a_directory_is_not_looked_for_on_the_hub(
    tmp_path, monkeypatch, empty_cache, refused
):
    monkeypatch.chdir(tmp_path)
    Path("legacy").mkdir()
    with refused("FILE-MISSING", 3, "legacy/dtd.pt"):
        open_weights("legacy/dtd.pt")


def test_a_path_longer_than_the_system_allows_is_an_error_of_ours():
    for ref in ("x" * 300, "/".join(["x" * 200] * 30)):
        with pytest.raises(InputError):
            open_weights(ref)


# hashes


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@writers
def test_the_hash_of_a_file_is_its_sha256(tmp_path, save):
    save(tmp_path / "file")
    source = open_weights(tmp_path / "file")
    done = []
    assert source.sha256(done.append) == sha256(tmp_path / "file")
    assert sum(done) == source.nbytes == (tmp_path / "file").stat().st_size


def test_a_file_longer_than_the_buffer_is_hashed_whole(tmp_path, monkeypatch):
    from aniso.weights import files

    monkeypatch.setattr(files.ByteFile, "piece", 1000)
    save_file({"w": BIG}, tmp_path / "file")
    done = []
    assert open_weights(tmp_path / "file").sha256(done.append) == sha256(tmp_path / "file")
    assert len(done) > 400


def test_a_read_buffer_grows_to_what_is_read_and_is_used_again(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(200)))
    file, buffer, places = RawFile(tmp_path / "file"), ReadBuffer(), []
    for _ in range(3):
        with buffer.in_use():
            found = [file.read_tensor(offset, 70) for offset in (0, 100)]
        assert [t.tolist() for t in found] == [list(range(70)), list(range(100, 170))]
        assert all(t.data_ptr() % 64 == 0 for t in found)
        places.append([t.data_ptr() for t in found])
    assert places[1] == places[2]
    assert file.read_tensor(0, 70).data_ptr() not in places[2]


def test_the_hash_of_shards_covers_names_and_contents(tmp_path):
    names = ["s2.safetensors", "s1.safetensors"]
    for i, name in enumerate(names):
        save_file({str(i): SMALL + i}, tmp_path / name)
    places = {str(i): name for i, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    lines = "".join(f"{name}\0{sha256(tmp_path / name)}\n" for name in sorted(names))
    assert open_weights(tmp_path).sha256() == hashlib.sha256(lines.encode()).hexdigest()


# files that change


def save_two(path: Path) -> int:
    """Two tensors; returns how long the file is up to the second."""
    save_file({"a": torch.zeros(1000), "b": torch.ones(1000)}, path)
    return path.stat().st_size - 4000


def test_a_file_rewritten_while_open_is_noticed(tmp_path, refused):
    path = tmp_path / "file"
    save_two(path)
    source = open_weights(path)
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(data[:-1] + b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with refused("FILE-CHANGED", 3, "file"):
        source.read("a")
    with refused("FILE-CHANGED", 3, "file"):
        source.sha256()


@pytest.mark.parametrize("left", [0, -1, None], ids=["empty", "one byte less", "no second tensor"])
def test_a_file_truncated_while_open_is_noticed(tmp_path, refused, no_hang, left):
    path = tmp_path / "file"
    end = save_two(path)
    source = open_weights(path)
    status = path.stat()
    os.truncate(path, {0: 0, -1: status.st_size - 1, None: end}[left])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for name in ("a", "b"):
        with refused("FILE-CHANGED", 3, "file"):
            source.read(name)


def test_a_file_that_grows_while_open_is_noticed(tmp_path, refused):
    path = tmp_path / "file"
    save_two(path)
    source = open_weights(path)
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with refused("FILE-CHANGED", 3, "file"):
        source.read("a")


def test_a_file_replaced_by_another_is_still_the_one_that_was_opened(tmp_path):
    save_file({"w": SMALL}, tmp_path / "file")
    digest = sha256(tmp_path / "file")
    source = open_weights(tmp_path / "file")
    save_file({"w": SMALL + 1}, tmp_path / "new")
    (tmp_path / "new").replace(tmp_path / "file")
    assert torch.equal(source.read("w"), SMALL)
    assert source.sha256() == digest


@pytest.mark.parametrize("save", [save_torch, save_legacy])
def test_checkpoints_that_change_are_noticed_too(tmp_path, refused, no_hang, save):
    save(tmp_path / "file")
    source = open_weights(tmp_path / "file")
    os.truncate(tmp_path / "file", 100)
    with refused("FILE-CHANGED", 3, "file"):
        source.read("big")


# what is not a file


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path, refused, no_hang):
    os.mkfifo(tmp_path / "fifo")
    with refused("FILE-KIND", 3, "fifo"):
        open_weights(tmp_path / "fifo")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_fifo_in_a_model_directory_is_refused_too(tmp_path, refused, no_hang, name):
    save_file({"w": SMALL}, tmp_path / "model.safetensors")
    if name != "config.json":
        (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / name)
    with refused("FILE-KIND", 3, name):
        open_weights(tmp_path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_refused(refused, no_hang, device):
    with refused("FILE-KIND", 3, device):
        open_weights(device)


def test_a_socket_is_refused(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with refused("FILE-ACCESS", 3, "socket"):
            open_weights("./socket")


def test_a_dangling_link_is_refused(tmp_path, refused):
    (tmp_path / "link").symlink_to("nowhere")
    with refused("FILE-MISSING", 3, "link"):
        open_weights(tmp_path / "link")


def test_a_directory_in_place_of_a_file_is_refused(tmp_path, refused):
    (tmp_path / "model.safetensors").mkdir()
    with refused("FILE-KIND", 3, "model.safetensors"):
        open_weights(tmp_path)


def as_ordinary_user(work) -> str:
    """The code of the error that ``work`` raises in a process that may not read everything."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "no error"
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            work()
        except AnisoError as e:
            said = e.code
        except BaseException:
            said = traceback.format_exc(limit=-1)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_file_that_may_not_be_read_is_an_error_of_ours(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    save_file({"w": SMALL}, "file")
    Path("file").chmod(0)
    assert as_ordinary_user(lambda: open_weights("file")) == "FILE-ACCESS"


def test_a_directory_that_may_not_be_entered_is_an_error_of_ours(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    Path("closed").mkdir()
    save_file({"w": SMALL}, "closed/model.safetensors")
    Path("closed").chmod(0)
    assert as_ordinary_user(lambda: open_weights("closed/model.safetensors")) == "FILE-ACCESS"
    assert as_ordinary_user(lambda: open_weights("closed")) == "FILE-ACCESS"
    Path("closed").chmod(0o755)


# adapters


def test_an_adapter_file_is_opened_with_the_configuration_beside_it(tmp_path):
    directory = adapter(tmp_path / "adapter")
    for ref in (directory, directory / "adapter_model.safetensors"):
        source = open_weights(ref)
        assert isinstance(source, PeftAdapter)
        assert [update.scale for update in source.updates] == [2.0]


def test_an_adapter_file_alone_is_refused(tmp_path, refused):
    adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with refused("LORA-CONFIG", 3, "m.lora_A.weight", "adapter_config.json"):
        open_weights(tmp_path / "adapter_model.safetensors")


def test_a_kohya_adapter_is_refused(tmp_path, refused):
    factors = {"lora_unet_x.lora_down.weight": SMALL, "lora_unet_x.lora_up.weight": SMALL + 1}
    save_file(factors, tmp_path / "kohya.safetensors")
    with refused("LORA-CONFIG", 3, "kohya.safetensors", "kohya"):
        open_weights(tmp_path / "kohya.safetensors")


@pytest.mark.parametrize("key", ["m.lora_embedding_A", "m.lora_embedding_B", "m.lora_B.weight"], ids=str)
def test_any_factor_marks_a_file_as_an_adapter(tmp_path, refused, key):
    save_file({key: torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with refused("LORA-CONFIG", 3, "x.safetensors", key):
        open_weights(tmp_path / "x.safetensors")


def test_the_adapter_file_that_is_named_is_the_one_that_is_opened(tmp_path):
    """Or it is refused; another file is never taken in its place."""
    adapter(tmp_path)
    other = {"m.lora_A.weight": torch.zeros(2, 3), "m.lora_B.weight": torch.zeros(3, 2)}
    save_file(other, tmp_path / "epoch-1.safetensors")
    try:
        source = open_weights(tmp_path / "epoch-1.safetensors")
    except AnisoError:
        return
    assert [file.path.name for file in source.files] == ["epoch-1.safetensors", "adapter_config.json"]
    assert not source.read("m.lora_A.weight").any()


def test_an_adapter_directory_without_weights_is_refused(tmp_path, refused):
    adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with refused("DIR-EMPTY", 3, "adapter_model.safetensors", "adapter_model.bin"):
        open_weights(tmp_path)
