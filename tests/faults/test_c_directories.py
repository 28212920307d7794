"""Table C: model directories, shards and the hub's cache."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from aniso.errors import AnisoError, printable
from aniso.weights import PeftAdapter, open_weights
from aniso.weights.files import RawFile

INDEX = "model.safetensors.index.json"
A, B = "a" * 40, "b" * 40


def index(directory: Path, places: object, name: str = INDEX) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def model(directory: Path, value: float = 1.0, config: object = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((4,), value)}, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


class WritesAFile:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


# C1


@pytest.mark.parametrize(
    "entry",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "C:\\x.safetensors",
        "\\\\host\\x.safetensors",
        "sub/x.safetensors",
        "./x.safetensors",
        "file:x.safetensors",
        "x.bin",
        "x.safetensors.bin",
        "x\0.safetensors",
        ".x.safetensors",
        "..",
        "",
        7,
        None,
        True,
        ["x.safetensors"],
        {"x.safetensors": "x.safetensors"},
    ],
    ids=repr,
)
def test_C1_an_index_that_points_elsewhere_is_refused(tmp_path, monkeypatch, refused, entry):
    directory = index(tmp_path / "model", {"ok": "good.safetensors", "w": entry})
    # everything it could mean is there, so that only the entry itself is wrong
    (directory / "sub").mkdir()
    save_file({"ok": torch.ones(1)}, directory / "good.safetensors")
    for place in (
        "model/x.bin",
        "model/.x.safetensors",
        "model/sub/x.safetensors",
        "x.safetensors",
    ):
        save_file({"w": torch.ones(1)}, tmp_path / place)
    opened = []
    real = RawFile.__init__
    monkeypatch.setattr(RawFile, "__init__", lambda f, path: opened.append(path) or real(f, path))
    with refused("DIR-PATH", 4) as refusal:
        open_weights(directory)
    assert refusal.error.facts.get("entry", "") == printable(entry)
    assert opened == [directory / INDEX]


@pytest.mark.parametrize("entry", ["../x.bin", "x.safetensors", "/x.bin"])
def test_C1_holds_for_an_index_of_pickles_too(tmp_path, refused, entry):
    index(tmp_path, {"w": entry}, "pytorch_model.bin.index.json")
    with refused("DIR-PATH", 4, entry):
        open_weights(tmp_path)


# C2


def shards(directory: Path, places: dict[str, str], **contents: list[str]) -> Path:
    index(directory, places)
    for name, keys in contents.items():
        tensors = {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}
        save_file(tensors, directory / f"{name}.safetensors")
    return directory


S1, S2 = "s1.safetensors", "s2.safetensors"


def test_C2_shards_that_fit_their_index_are_one_source(tmp_path):
    source = open_weights(shards(tmp_path, {"a": S1, "b": S1, "c": S2}, s1=["a", "b"], s2=["c"]))
    assert list(source.tensors) == ["a", "b", "c"]
    assert torch.equal(source.read("b"), torch.ones(2))
    assert [file.path.name for file in source.files] == [S1, S2]


@pytest.mark.parametrize(
    ("places", "contents", "problems"),
    [
        ({"a": S1, "b": S2}, {"s1": ["a"]}, ["shard s2.safetensors is missing"]),
        ({"a": S1, "b": S1}, {"s1": ["a"]}, ["b is not in s1.safetensors"]),
        (
            {"a": S1, "b": S2},
            {"s1": ["a", "b"], "s2": ["b"]},
            ["b is in s1.safetensors and s2.safetensors"],
        ),
        ({"a": S1}, {"s1": ["a", "b"]}, ["b in s1.safetensors is not in the index"]),
        (
            {"a": S1, "b": S1, "c": S2},
            {"s1": ["a", "x"]},
            [
                "shard s2.safetensors is missing",
                "b is not in s1.safetensors",
                "x in s1.safetensors is not in the index",
            ],
        ),
        (
            {"a": S1, "b": S2},
            {"s1": ["b"], "s2": ["a"]},
            ["a is not in s1.safetensors", "b is not in s2.safetensors"],
        ),
    ],
    ids=["missing shard", "missing key", "key twice", "extra key", "several", "swapped"],
)
def test_C2_every_disagreement_is_listed(tmp_path, refused, places, contents, problems):
    with refused("DIR-INDEX", 3, INDEX, *problems) as refusal:
        open_weights(shards(tmp_path, places, **contents))
    assert sorted(refusal.error.facts["found"]) == sorted(problems)


def test_C2_a_long_list_is_cut_and_counted(tmp_path, refused):
    places = {f"k{i}": S1 for i in range(25)}
    with refused("DIR-INDEX", 3, "15 more") as refusal:
        open_weights(shards(tmp_path, places | {"a": S1}, s1=["a"]))
    assert len(refusal.error.facts["found"]) == 10


def test_C2_a_damaged_shard_stops_the_whole_directory(tmp_path, refused):
    shards(tmp_path, {"a": S1, "b": S2}, s1=["a"], s2=["b"])
    (tmp_path / S2).write_bytes((tmp_path / S2).read_bytes()[:-1])
    with refused("FILE-TRUNCATED", 3, S2):
        open_weights(tmp_path)


@pytest.mark.parametrize("places", [None, {}, [], "s1.safetensors"], ids=repr)
def test_C2_an_index_without_a_map_is_refused(tmp_path, refused, places):
    with refused("DIR-INDEX", 3, "weight_map"):
        open_weights(index(tmp_path, places))


def pickled_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    index(directory, dict.fromkeys(tensors, "s1.bin"), "pytorch_model.bin.index.json")
    return directory


def test_C2_shards_keep_what_is_known_of_shared_tensors(tmp_path):
    shared = torch.ones(3)
    torch.save({"a": shared, "b": shared}, tmp_path / "s1.bin")
    pickled_shards(tmp_path, {"a": shared, "b": shared})
    assert open_weights(tmp_path / "s1.bin").aliases == {"b": "a"}
    assert open_weights(tmp_path).aliases == {"b": "a"}


def test_C2_shards_keep_the_notes_of_their_files(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(3)}, "epoch": 3}, tmp_path / "s1.bin")
    pickled_shards(tmp_path, {"a": torch.ones(3)})
    notes = open_weights(tmp_path).info.notes
    assert any("state_dict" in note for note in notes), notes
    assert any("epoch" in note for note in notes), notes


# C3


def warnings_of(source) -> list[str]:
    return [note for note in source.info.notes if note.startswith("warning: ")]


def test_C3_safetensors_are_used_and_it_says_so(tmp_path):
    model(tmp_path)
    torch.save({"w": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    source = open_weights(tmp_path)
    assert source.info.format == "safetensors"
    assert [file.path.name for file in source.files] == ["model.safetensors"]
    assert "model.safetensors used; pytorch_model.bin not used" in source.info.notes
    assert warnings_of(source) == []


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(4)},
        {"w": torch.ones(4).half()},
        {"w": torch.ones(5)},
        {"v": torch.ones(4)},
        {"w": torch.ones(4), "v": torch.ones(4)},
    ],
    ids=["value", "dtype", "shape", "name", "more"],
)
def test_C3_contents_that_differ_are_warned_of(tmp_path, other):
    model(tmp_path)
    torch.save(other, tmp_path / "pytorch_model.bin")
    source = open_weights(tmp_path)
    assert torch.equal(source.read("w"), torch.ones(4))
    what = "holds other weights" if set(other) == {"w"} else "has tensors of other names and was not compared"
    assert warnings_of(source) == [f"warning: pytorch_model.bin, which is not used, {what}"]


def test_C3_a_large_tensor_that_differs_is_warned_of_too(tmp_path):
    big = torch.zeros(200, 200)
    save_file({"w": big}, tmp_path / "model.safetensors")
    torch.save({"w": big + 1}, tmp_path / "pytorch_model.bin")
    assert len(warnings_of(open_weights(tmp_path))) == 1


def test_C3_an_unsafe_pickle_beside_good_weights_is_named_and_never_run(tmp_path):
    mark = tmp_path / "mark"
    model(tmp_path)
    torch.save({"w": torch.ones(4), "x": WritesAFile(mark)}, tmp_path / "pytorch_model.bin")
    source = open_weights(tmp_path)
    assert torch.equal(source.read("w"), torch.ones(4))
    assert warnings_of(source) == [
        "warning: pytorch_model.bin, which is not used, cannot be read (PICKLE-CALL)"
    ]
    assert not mark.exists()


def test_C3_an_unsafe_pickle_alone_is_refused(tmp_path, refused):
    mark = tmp_path / "mark"
    torch.save({"w": torch.ones(4), "x": WritesAFile(mark)}, tmp_path / "pytorch_model.bin")
    with refused("PICKLE-CALL", 4, "pytorch_model.bin", "system"):
        open_weights(tmp_path)
    assert not mark.exists()


def test_C3_shards_of_safetensors_are_preferred_to_a_pickle(tmp_path):
    shards(tmp_path, {"w": S1}, s1=["w"])
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    source = open_weights(tmp_path)
    assert [file.path.name for file in source.files] == [S1]
    assert f"{INDEX} used; pytorch_model.bin not used" in source.info.notes
    assert warnings_of(source) == []


def test_C3_a_directory_without_weights_lists_what_it_has(tmp_path, refused):
    (tmp_path / "weights.ckpt").write_text("x")
    with refused("DIR-EMPTY", 3, "weights.ckpt", "model.safetensors", "pytorch_model.bin"):
        open_weights(tmp_path)


# C4


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that can be imported and leaves a mark when it is; nobody must."""
    mark = tmp_path / "imported"
    (tmp_path / "c4_trap.py").write_text(f"open({str(mark)!r}, 'w').close()\nrun = Model = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "c4_trap"
    assert "c4_trap" not in sys.modules
    assert not mark.exists()


FIELDS = {
    "auto_map": {"AutoModel": "c4_trap.Model", "AutoConfig": "c4_trap.Config"},
    "trust_remote_code": True,
    "_target_": "c4_trap.run",
    "_attn_implementation_internal": "c4_trap/kernel",
    "custom_pipelines": {"x": {"impl": "c4_trap.run"}},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: value,
        lambda value: {"vision_config": value},
        lambda value: {"a": {"b": {"c": value}}},
        lambda value: {"layers": [{"kind": "x"}, [value]]},
        lambda value: {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": value}}}}}}}}},
    ],
    ids=["top", "nested", "deeper", "in a list", "very deep"],
)
def test_C4_fields_that_ask_for_code_are_listed_and_not_followed(tmp_path, trap, field, wrap):
    config = {"architectures": ["CLIPModel"], **wrap({field: FIELDS[field]})}
    source = open_weights(model(tmp_path / "model", config=config))
    assert torch.equal(source.read("w"), torch.ones(4))
    assert source.info.config.ignored == (field,)
    assert f"config.json fields not followed: {field}" in source.info.notes


def test_C4_several_such_fields_are_one_sorted_note(tmp_path, trap):
    source = open_weights(model(tmp_path / "model", config={**FIELDS, "text_config": FIELDS}))
    assert source.info.config.ignored == tuple(sorted(FIELDS))
    assert f"config.json fields not followed: {', '.join(sorted(FIELDS))}" in source.info.notes


def test_C4_the_code_beside_the_weights_is_never_imported(tmp_path, trap):
    directory = model(tmp_path, config={"model_type": "c4_trap", **FIELDS})
    assert (directory / f"{trap}.py").exists()
    assert open_weights(directory).read("w").shape == (4,)


def test_C4_open_clip_configurations_are_no_different(tmp_path, trap):
    directory = model(tmp_path / "model")
    config = {"model_cfg": {"quick_gelu": True, "_target_": "c4_trap.run"}}
    (directory / "open_clip_config.json").write_text(json.dumps(config))
    source = open_weights(directory)
    assert source.info.config.activation == "quick_gelu"
    assert source.info.config.ignored == ("_target_",)
    assert any("_target_" in note for note in source.info.notes)


def adapter(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    factors = {"m.lora_A.weight": torch.ones(2, 3), "m.lora_B.weight": torch.ones(3, 2)}
    save_file(factors, directory / "adapter_model.safetensors")
    return directory


def test_C4_an_adapter_names_classes_and_none_is_imported(tmp_path, trap):
    mapping = {"base_model_class": "Model", "parent_library": "c4_trap"}
    source = open_weights(adapter(tmp_path / "adapter", auto_mapping=mapping))
    assert isinstance(source, PeftAdapter)


def test_C4_harmless_configurations_leave_no_note(tmp_path):
    config = {"architectures": ["CLIPModel"], "model_type": "clip", "vision_config": {}}
    source = open_weights(model(tmp_path, config=config))
    assert source.info.notes == ()
    assert source.info.config.architecture == "CLIPModel"
    assert source.info.config.activation == "quick_gelu"


@pytest.mark.parametrize("value", [7, None, [], [7], {"a": 1}], ids=repr)
def test_C4_fields_of_the_wrong_type_say_nothing(tmp_path, value):
    config = {"architectures": value, "hidden_act": value, "vision_config": value}
    info = open_weights(model(tmp_path, config=config)).info
    assert (info.config.architecture, info.config.activation) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b"\xff{}",
        b'{"a":' + b"[" * 10**5,
    ],
    ids=["empty", "cut", "list", "number", "twice", "NaN", "not text", "deep"],
)
def test_C4_a_configuration_that_is_no_object_is_refused(tmp_path, refused, text):
    (model(tmp_path) / "config.json").write_bytes(text)
    with refused("DIR-CONFIG", 3, "config.json"):
        open_weights(tmp_path)


# C6


@pytest.fixture
def attempts(monkeypatch):
    """Every attempt to reach the network, all of which fail."""
    made = []

    def fail(*args, **kwargs):
        made.append(args)
        raise OSError("no network in tests")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, fail)
    monkeypatch.setattr(socket.socket, "connect", fail)
    return made


@pytest.fixture
def cache(tmp_path, monkeypatch, attempts):
    directory = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(directory))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("ANISO_OFFLINE", raising=False)
    return directory


def cached(cache: Path, commit: str, files: Path, *refs: str, repo: str = "owner/name") -> Path:
    """Put a directory's files into the cache as the hub's own client does, with links to blobs."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in files.iterdir():
        blob = root / "blobs" / f"{commit}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    for ref in refs:
        (root / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (root / "refs" / ref).write_text(commit)
    return snapshot


def test_C6_a_cold_cache_offline_says_what_is_missing_and_what_to_type(cache, attempts, refused):
    with refused("HUB-OFFLINE", 3, "'owner/name'", "hf download owner/name"):
        open_weights("owner/name")
    with refused("HUB-OFFLINE", 3, "'owner/name@v1'", "hf download owner/name --revision v1"):
        open_weights("owner/name@v1")
    assert attempts == []
    assert not cache.exists()


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "ANISO_OFFLINE"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_C6_either_variable_keeps_the_network_untouched(
    tmp_path, cache, attempts, monkeypatch, refused, variable, warm
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv(variable, "1")
    if warm:
        cached(cache, A, model(tmp_path / "files"), "main")
        assert open_weights("owner/name").info.revision == A
    else:
        with refused("HUB-OFFLINE", 3):
            open_weights("owner/name")
    assert attempts == []


@pytest.mark.parametrize("value", ["", "0"])
def test_C6_the_variables_can_be_switched_off(tmp_path, cache, monkeypatch, value):
    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **options: asked.append(options) or str(model(tmp_path / A)),
    )
    for variable in ("HF_HUB_OFFLINE", "ANISO_OFFLINE"):
        monkeypatch.setenv(variable, value)
    open_weights("owner/name")
    assert [options["local_files_only"] for options in asked] == [False]


@pytest.mark.parametrize("ref", ["owner/name", "hub:owner/name", "owner/name@main", f"owner/name@{A}"])
def test_C6_the_commit_is_recorded_however_it_was_named(tmp_path, cache, ref):
    cached(cache, A, model(tmp_path / "files"), "main")
    source = open_weights(ref)
    assert source.info.revision == A
    assert source.label == f"owner/name@{A[:12]}"
    assert torch.equal(source.read("w"), torch.ones(4))


def test_C6_a_moved_tag_is_another_commit_and_the_old_one_stays(tmp_path, cache):
    cached(cache, A, model(tmp_path / "one", 1.0), "main", "v1")
    first = open_weights("owner/name@v1")
    cached(cache, B, model(tmp_path / "two", 2.0), "v1")
    second = open_weights("owner/name@v1")
    pinned = open_weights(f"owner/name@{first.info.revision}")
    assert (first.info.revision, second.info.revision, pinned.info.revision) == (A, B, A)
    assert [s.read("w")[0].item() for s in (first, second, pinned)] == [1.0, 2.0, 1.0]
    assert open_weights("owner/name").info.revision == A


def test_C6_a_revision_with_a_slash_is_a_branch(tmp_path, cache):
    cached(cache, A, model(tmp_path / "files"), "refs/pr/1")
    assert open_weights("owner/name@refs/pr/1").info.revision == A


def test_C6_a_revision_cannot_leave_the_repository(tmp_path, cache):
    cached(cache, A, model(tmp_path / "files"), "main")
    (tmp_path / "outside").write_text(A)
    with pytest.raises(AnisoError):
        open_weights("owner/name@../../../outside")


def test_C6_adapters_come_from_the_hub_as_well(tmp_path, cache):
    cached(cache, A, adapter(tmp_path / "files"), "main")
    source = open_weights("owner/name")
    assert isinstance(source, PeftAdapter)
    assert source.info.revision == A


def test_C6_a_cached_repository_of_pickles_is_read(tmp_path, cache):
    (tmp_path / "files").mkdir()
    torch.save({"w": torch.ones(4)}, tmp_path / "files" / "pytorch_model.bin")
    cached(cache, A, tmp_path / "files", "main")
    assert torch.equal(open_weights("owner/name").read("w"), torch.ones(4))


def test_C6_a_half_cached_repository_names_the_missing_shard(tmp_path, cache, refused):
    files = shards(tmp_path / "files", {"a": S1, "b": S2}, s1=["a"])
    cached(cache, A, files, "main")
    with refused("DIR-INDEX", 3, f"shard {S2} is missing"):
        open_weights("owner/name")


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_C6_pickles_are_asked_for_only_where_there_is_nothing_better(tmp_path, monkeypatch, has_safetensors):
    directory = tmp_path / A
    model(directory)
    if not has_safetensors:
        (directory / "model.safetensors").rename(tmp_path / "gone")
        torch.save({"w": torch.ones(4)}, directory / "pytorch_model.bin")
    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **options: asked.append(options["allow_patterns"]) or str(directory),
    )
    open_weights("owner/name")
    assert asked[0] == ["*.safetensors", "*.json", "merges.txt", "chat_template.jinja", "README.md"]
    assert [any(".bin" in pattern for pattern in patterns) for patterns in asked] == (
        [False] if has_safetensors else [False, True]
    )
    assert not any(pattern.endswith(".py") for patterns in asked for pattern in patterns)


def _http(kind, status: int):
    library = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0]]
    response = library.Response(status, request=library.Request("GET", "https://hub.invalid/x"))
    return kind(f"{status} for the model\nand a second line", response=response)


def _cut():
    library = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0]]
    return library.ReadError("the connection was cut")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: _http(errors.GatedRepoError, 403), "403 for the model"),
        (lambda: _http(errors.RepositoryNotFoundError, 404), "404 for the model"),
        (lambda: _http(errors.RevisionNotFoundError, 404), "404 for the model"),
        (lambda: _http(errors.HfHubHTTPError, 429), "429 for the model"),
        (lambda: errors.LocalEntryNotFoundError("x"), "no connection"),
        (lambda: errors.HFValidationError("a strange name"), "a strange name"),
        (lambda: ConnectionResetError("reset by peer"), "reset by peer"),
        (_cut, "the connection was cut"),
    ],
    ids=["gated", "unknown", "revision", "429", "offline", "name", "reset", "cut"],
)
def test_C6_what_the_hub_refuses_is_an_error_of_ours(monkeypatch, refused, error, said):
    def snapshot_download(*args, **kwargs):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with refused("HUB-FETCH", 3, "owner/name@v1", said, "hf auth login") as refusal:
        open_weights("owner/name@v1")
    assert "second line" not in str(refusal.error)


# C8


def test_C8_a_name_longer_than_any_file_system_allows_is_refused(tmp_path, refused):
    with refused("DIR-PATH", 4):
        open_weights(index(tmp_path, {"w": "x" * 300 + ".safetensors"}))


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\rb", "a\u202eb"], ids=repr)
def test_C8_control_characters_in_names_are_shown_escaped(tmp_path, name):
    with pytest.raises(AnisoError) as caught:
        open_weights(index(tmp_path, {"w": f"{name}.safetensors"}))
    assert repr(name)[1:-1] in str(caught.value)
    assert name not in str(caught.value)


def test_C8_control_characters_in_keys_are_shown_escaped(tmp_path):
    shards(tmp_path, {"a": S1, "b\n\x1b[2J": S1}, s1=["a"])
    with pytest.raises(AnisoError) as caught:
        open_weights(tmp_path)
    assert "b\\n\\x1b[2J" in str(caught.value)
    assert "\x1b" not in str(caught.value)
