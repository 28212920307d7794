"""Damaged banks and vector files: whatever happens to their bytes, only our errors come out."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from aniso.errors import AnisoError
from aniso.vectors import Bank, TaskVector
from aniso.vectors.delta import LowRank, Term
from aniso.vectors.origin import BaseInfo, Provenance
from aniso.vectors.task_vector import TaskVector as Vector

FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
BASE = {"w": torch.linspace(-1, 1, 70 * 64).reshape(70, 64), "b": torch.linspace(0, 1, 7)}


def low_rank(layout, base):
    """A vector with a cell in one block, in three rows."""
    term = Term(torch.full((3, 2), 0.1), torch.full((2, 64), 0.1), 0.5, 5)
    info = BaseInfo(base.label, base.content, base.activation, base.norms)
    origin = Provenance("lora", "PEFT LoRA")
    return Vector("lora", layout, lambda: info, {"w": lambda: LowRank((70, 64), (term,))}, origin)


@pytest.fixture(scope="module", params=["fp32", "int4", "residual2"])
def file(request, tmp_path_factory):
    """A bank of two dense vectors and a low-rank one; the path of its one file."""
    root = tmp_path_factory.mktemp("fuzz")
    g = torch.Generator().manual_seed(0)
    tuned = {n: {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in BASE.items()} for n in "xy"}
    view = Bank.build(BASE, tuned, allow_distant=True)
    vectors = {name: view[name] for name in view} | {"lora": low_rank(view.layout, view.base)}
    Bank(vectors).save(root / "bank", storage=request.param)
    return root / "bank/vectors-000.safetensors"


def use(path):
    """Everything a reader might do; an error of ours is a good end."""
    try:
        bank = Bank.open(path.parent)
        for block in bank.layout.blocks:
            for delta in bank.read_block(block.name).values():
                delta.dense()
        for name in bank:
            bank[name].apply(BASE)
        bank.check()
    except AnisoError:
        return False
    return True


def test_the_undamaged_bank_is_whole(file):
    assert use(file)


@FUZZ
@given(data=st.data())
def test_flipped_bytes(file, data):
    original = file.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    index = original.rindex(b'{"schema_version"')
    low, high = data.draw(st.sampled_from([(0, header), (header, index), (index, len(original))]))
    damaged = bytearray(original)
    for at in data.draw(st.lists(st.integers(low, high - 1), min_size=1, max_size=3, unique=True)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        file.write_bytes(damaged)
        assert not use(file)
    finally:
        file.write_bytes(original)


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 69, 70, 71, 10**6, 2**31, 2**63, 10**400, 1.5, None, "x", [], {}])


@FUZZ
@given(data=st.data())
def test_an_index_that_lies(file, data, refused):
    """The hashes are made to fit, so that only the index's own checks stand in the way."""
    original, manifest = file.read_bytes(), (file.parent / "manifest.json").read_text()
    start = original.rindex(b'{"schema_version"')
    index = json.loads(original[start:])
    node, path = index, []
    while isinstance(node, dict | list) and node and (not path or data.draw(st.booleans())):
        keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
        path.append(data.draw(st.sampled_from(keys)))
        parent, node = node, node[path[-1]]
    parent[path[-1]] = data.draw(NUMBERS)
    text = json.dumps(index).encode()
    try:
        file.write_bytes(_with_index(original, start, text))
        record = json.loads(manifest)
        record["files"][0]["nbytes"] = file.stat().st_size
        (file.parent / "manifest.json").write_text(json.dumps(record))
        use(file)
    finally:
        file.write_bytes(original)
        (file.parent / "manifest.json").write_text(manifest)


def _with_index(original, start, text):
    """The file with another index tensor, and a header that says so."""
    size = int.from_bytes(original[:8], "little")
    header = json.loads(original[8 : 8 + size])
    begin = header["aniso.index"]["data_offsets"][0]
    header["aniso.index"] = {"dtype": "U8", "shape": [len(text)], "data_offsets": [begin, begin + len(text)]}
    packed = json.dumps(header).encode().ljust(size + 64)
    return len(packed).to_bytes(8, "little") + packed + original[8 + size : start] + text


@FUZZ
@given(st.binary(max_size=300))
def test_any_bytes_as_a_manifest(file, data):
    manifest = (file.parent / "manifest.json").read_bytes()
    try:
        (file.parent / "manifest.json").write_bytes(data)
        assert not use(file)
    finally:
        (file.parent / "manifest.json").write_bytes(manifest)


@FUZZ
@given(st.integers(0, 10**6))
def test_cut_short(file, at):
    original = file.read_bytes()
    try:
        file.write_bytes(original[: at % len(original)])
        assert not use(file)
        with pytest.raises(AnisoError):
            TaskVector.load(file)
    finally:
        file.write_bytes(original)
