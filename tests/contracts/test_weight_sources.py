"""What every source of weights promises, whatever its format; a new format is a new line in FORMS."""

from __future__ import annotations

import hashlib
import json

import pytest
import tiny
import torch

from aniso.vectors import BlockSource, TaskVector
from aniso.weights import TensorMap, open_weights, save_safetensors
from aniso.weights.files import RawFile


def safetensors_file(state, path):
    save_safetensors(path / "w", state)
    return path / "w"


def torch_zip(state, path):
    torch.save(state, path / "w")
    return path / "w"


def torch_legacy(state, path):
    torch.save(state, path / "w", _use_new_zipfile_serialization=False)
    return path / "w"


def wrapped_pickle(state, path):
    torch.save({"epoch": 1, "model": {f"module.{k}": v for k, v in state.items()}}, path / "w")
    return path / "w"


def pickled_module(state, path):
    root = torch.nn.Module()
    for key, value in state.items():
        *owners, name = key.split(".")
        module = root
        for owner in owners:
            if owner not in dict(module.named_children()):
                module.add_module(owner, torch.nn.Module())
            module = module.get_submodule(owner)
        if value.is_floating_point():
            module.register_parameter(name, torch.nn.Parameter(value.clone()))
        else:
            module.register_buffer(name, value.clone())
    torch.save(root, path / "w")
    return path / "w"


def model_directory(state, path):
    save_safetensors(path / "model.safetensors", state)
    (path / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_act": "gelu"}))
    return path


def sharded_directory(state, path):
    halves = [dict(list(state.items())[i::2]) for i in range(2)]
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, half in zip(names, halves, strict=True):
        save_safetensors(path / name, half)
    places = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def pickled_directory(state, path):
    torch.save(state, path / "pytorch_model.bin")
    return path


def open_clip_directory(state, path):
    save_safetensors(path / "open_clip_model.safetensors", state)
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"quick_gelu": True}}))
    return path


def in_memory(state, path):
    return TensorMap(state)


FORMS = [safetensors_file, torch_zip, torch_legacy, wrapped_pickle, pickled_module, model_directory,
         sharded_directory, pickled_directory, open_clip_directory, in_memory]  # fmt: skip
ON_DISK = [form for form in FORMS if form is not in_memory]


@pytest.fixture
def state():
    out = tiny.plain()
    out["as_half"] = torch.randn(8, 4).half()
    out["as_brain"] = torch.randn(8, 4).bfloat16()
    out["as_double"] = torch.randn(3, 3).double()
    out["as_flag"] = torch.tensor([True, False])
    return out


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def source(request, state, tmp_path):
    return open_weights(request.param(state, tmp_path))


def test_names_shapes_dtypes_and_bits_are_kept(source, state):
    assert set(source.tensors) == set(state)
    for name, value in state.items():
        assert source.tensors[name].shape == tuple(value.shape)
        found = source.read(name)
        assert found.dtype == value.dtype
        assert torch.equal(found, value), name
        assert found.is_contiguous()


def test_what_was_read_belongs_to_the_reader(source, state):
    source.read("layers.0.fc.weight").zero_()
    assert torch.equal(source.read("layers.0.fc.weight"), state["layers.0.fc.weight"])


def test_an_unknown_name_is_an_error_that_says_how_to_look(source, refused):
    with refused("WEIGHT-NAME", 3, "no.such.tensor", "aniso inspect"):
        source.read("no.such.tensor")


def test_the_hash_is_of_the_content(request, source, state, tmp_path):
    first = source.sha256()
    assert first == source.sha256()
    done = []
    source.sha256(done.append)
    assert sum(done) >= sum(v.numel() * v.element_size() for v in state.values())


@pytest.mark.parametrize("form", ON_DISK, ids=lambda form: form.__name__)
def test_one_tensor_is_read_without_the_others(form, state, tmp_path, monkeypatch):
    state["large"] = torch.randn(512, 512)
    source = open_weights(form(state, tmp_path))
    read = []
    original = RawFile.read_into
    monkeypatch.setattr(
        RawFile, "read_into", lambda self, b, o: (read.append(len(b)), original(self, b, o))[1]
    )
    source.read("layers.0.fc.bias")
    assert sum(read) < 10_000


@pytest.mark.parametrize("form", ON_DISK, ids=lambda form: form.__name__)
def test_opening_and_reading_change_nothing_on_disk(form, state, tmp_path):
    ref = form(state, tmp_path)
    before = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.rglob("*") if p.is_file()}
    source = open_weights(ref)
    for name in source.tensors:
        source.read(name)
    after = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.rglob("*") if p.is_file()}
    assert before == after


def test_every_form_is_the_same_base_and_gives_the_same_vector(source, state):
    tuned = tiny.tuned(state)
    expected = TaskVector.between(state, tuned, name="v")
    vector = TaskVector.between(source, tuned, name="v")
    assert dict(vector.norms) == dict(expected.norms)
    activation = source.info.config.activation
    same = BlockSource(TensorMap(state, activation=activation)).identity().content
    assert vector.base.content == same
