"""A damaged or exchanged bank file is noticed when a block of it is first read, whatever reads it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import xxhash

from aniso.compose import Coefficients, Composition, Partition, Runtime
from aniso.errors import AnisoError
from aniso.vectors import Bank, TaskVector
from aniso.vectors.delta import LowRank, Term
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile

GOLDEN = Path(__file__).parents[1] / "golden/schema-1"
BASE = {"w": torch.linspace(-1, 1, 70 * 64).reshape(70, 64), "b": torch.linspace(0, 1, 7)}
VECTORS = "vectors-000.safetensors"


def bank_of(path, storage, seed=0):
    """A bank of two dense vectors and a low-rank one."""
    g = torch.Generator().manual_seed(seed)
    tuned = {n: {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in BASE.items()} for n in "xy"}
    view = Bank.build(BASE, tuned, allow_distant=True)
    term = Term(torch.full((3, 2), 0.1), torch.full((2, 64), 0.1), 0.5, 5)
    base = view.base
    info = BaseInfo(base.label, base.content, base.activation, base.norms)
    cells = {"w": lambda: LowRank((70, 64), (term,))}
    lora = TaskVector("lora", view.layout, lambda: info, cells, Provenance("lora", "PEFT LoRA"))
    return Bank({"x": view["x"], "y": view["y"], "lora": lora}).save(path, storage=storage)


@pytest.fixture(params=["fp32", "bf16", "int8", "residual4"])
def bank(request, tmp_path):
    return bank_of(tmp_path / "bank", request.param)


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def data_start(path):
    """Where the header ends and tensors begin."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def read_all(path):
    bank = Bank.load(path)
    for block in bank.layout.blocks:
        bank.read_block(block.name)


def tensor_offsets(path):
    source = SafetensorsFile(RawFile(path))
    return {name: source._offsets[name] for name in source.tensors if name != "aniso.index"}


def test_one_flipped_bit_in_any_tensor_is_an_error_that_names_file_and_block(bank, refused):
    file = bank.path / VECTORS
    for name, offset in tensor_offsets(file).items():
        flip(file, offset)
        with refused("FILE-HASH", 3, VECTORS, f"block '{name.partition('|')[0]}'", name):
            read_all(bank.path)
        flip(file, offset)
    read_all(bank.path)


def test_no_flipped_bit_anywhere_goes_unnoticed(bank):
    """600 places in the file and 200 in the manifest, chosen by a fixed seed."""
    rng = random.Random(0)
    for name, count in ((VECTORS, 600), ("manifest.json", 200)):
        file = bank.path / name
        intact = file.read_bytes()
        for _ in range(count):
            position, bit = rng.randrange(len(intact)), rng.randrange(8)
            flip(file, position, bit)
            with pytest.raises(AnisoError):
                read_all(bank.path)
            file.write_bytes(intact)
    read_all(bank.path)


def test_each_vector_alone_and_streams_are_verified_too(tmp_path, refused):
    bank = bank_of(tmp_path / "bank", "fp32")
    file = bank.path / VECTORS
    row = 70 * 64 * 4
    flip(file, tensor_offsets(file)["w"] + row + 10)  # in the second vector
    damaged = Bank.load(bank.path)
    assert damaged["x"]["w"].norm() > 0  # what is not damaged can still be used
    with refused("FILE-HASH", 3, "block 'w'"):
        damaged["y"]["w"].norm()

    model = torch.nn.Module()
    model.w, model.b = (torch.nn.Parameter(BASE[name].clone()) for name in "wb")
    for runtime in (Runtime(), Runtime(stream=True)):
        with refused("FILE-HASH", 3, "block 'w'"):
            composition = Composition(model, Bank.load(bank.path), Partition.blocks(), runtime=runtime)
            with torch.no_grad():
                composition.values.fill_(0.5)
            composition.bake().save(tmp_path / "baked.safetensors", overwrite=True)


def test_a_block_is_hashed_the_first_time_it_is_read_and_never_again(tmp_path, monkeypatch):
    bank = bank_of(tmp_path / "bank", "int8")
    count = 0
    original = xxhash.xxh3_64_hexdigest

    def counted(data):
        nonlocal count
        count += 1
        return original(data)

    monkeypatch.setattr(xxhash, "xxh3_64_hexdigest", counted)
    opened = Bank.load(bank.path)
    assert count == 0
    for block in opened.layout.blocks:
        opened.read_block(block.name)
    first = count
    assert first > 0
    for block in opened.layout.blocks:
        opened.read_block(block.name)
    opened["y"]["w"].norm()
    assert count == first


def test_a_file_of_another_bank_is_noticed(tmp_path, refused):
    """It is intact and has the same size, base and vectors, but is not what the manifest was written for."""
    ours, other = bank_of(tmp_path / "ours", "int8"), bank_of(tmp_path / "other", "int8", seed=1)
    shutil.copy(other.path / VECTORS, ours.path / VECTORS)
    with refused("FILE-HASH", 3, VECTORS):
        Bank.load(ours.path)


def test_banks_without_checksums_are_compared_with_the_hash_of_the_whole_file(tmp_path, refused):
    for storage in ("fp32", "int4"):
        shutil.copytree(GOLDEN / storage, tmp_path / storage)
        read_all(tmp_path / storage)
        file = tmp_path / storage / VECTORS
        flip(file, data_start(file) + 100)
        with refused("FILE-HASH", 3, VECTORS):
            read_all(tmp_path / storage)


def test_adding_to_a_bank_of_the_first_schema_gives_one_that_is_verified(tmp_path, refused):
    """The old file is compared as a whole, the new one block by block."""
    shutil.copytree(GOLDEN / "fp32", tmp_path / "bank")
    base = {"fc.weight": wave(66, 64), "fc.bias": wave(66)}
    tuned = {name: value * 1.01 for name, value in base.items()}
    bank = Bank.load(tmp_path / "bank").add(base, {"new": tuned})
    read_all(bank.path)
    for name in (VECTORS, "vectors-001.safetensors"):
        flip(bank.path / name, data_start(bank.path / name) + 100)
        with refused("FILE-HASH", 3, name):
            read_all(bank.path)
        flip(bank.path / name, data_start(bank.path / name) + 100)


def wave(*shape):
    """The base of the golden banks, as scripts/make_golden.py makes it."""
    angles = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 0.1
    return (angles.sin() * 1024).round().div(1024).float().reshape(shape)


def test_a_damaged_single_vector_is_noticed(tmp_path, refused):
    bank = bank_of(tmp_path / "bank", "fp32")
    path = tmp_path / "x.safetensors"
    bank["x"].save(path)
    assert TaskVector.load(path)["w"].norm() > 0
    flip(path, data_start(path) + 5)
    with refused("FILE-HASH", 3, "x.safetensors"):
        vector = TaskVector.load(path)
        for block in vector.blocks:
            vector[block.name].norm()


def test_damaged_coefficients_and_their_index_are_noticed(tmp_path):
    bank = bank_of(tmp_path / "bank", "fp32")
    model = torch.nn.Module()
    model.w, model.b = (torch.nn.Parameter(BASE[name].clone()) for name in "wb")
    path = tmp_path / "coefficients.safetensors"
    Composition(model, bank).coefficients.save(path)
    intact = path.read_bytes()
    Coefficients.load(path)
    start = data_start(path)
    for position in (*range(start, len(intact), 3), intact.index(b'"vectors')):
        flip(path, position)
        with pytest.raises(AnisoError):
            Coefficients.load(path)
        path.write_bytes(intact)


@pytest.fixture
def shelf(tmp_path):
    """A model, two tuned from it, a bank and coefficients on disk."""
    base = tiny.plain()
    save_safetensors(tmp_path / "base.safetensors", base)
    for i, name in enumerate(("cars", "dtd")):
        save_safetensors(tmp_path / f"{name}.safetensors", tiny.tuned(base, i + 1))
    names = {name: tmp_path / f"{name}.safetensors" for name in ("cars", "dtd")}
    Bank.build(tmp_path / "base.safetensors", names, to=tmp_path / "bank")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("bake", "mix.safetensors", "--bank", "bank", "--base", "base.safetensors", "-o", "out.safetensors"),
        ("bank", "quantise", "bank", "--storage", "int8", "-o", "small"),
        ("bank", "check", "bank"),
    ],
    ids=["bake", "quantise", "check"],
)
def test_commands_end_with_3_and_write_nothing(shelf, aniso, monkeypatch, command):
    monkeypatch.chdir(shelf)
    assert aniso("coefficients", "make", "cars=0.4", "--bank", "bank", "-o", "mix.safetensors").code == 0
    file = Path("bank") / VECTORS
    name, offset = next(iter(tensor_offsets(file).items()))
    flip(file, offset + 3, 6)  # in the exponent: the weight would be wrong by many orders of magnitude
    before = sorted(p.name for p in shelf.iterdir())
    ran = aniso(*command)
    assert ran.code == 3, ran.err
    assert "FILE-HASH" in ran.err
    assert VECTORS in ran.err
    assert name in ran.err or command[1] == "check"
    assert sorted(p.name for p in shelf.iterdir()) == before


def test_the_manifest_of_an_intact_bank_can_be_read_by_people(bank):
    manifest = json.loads((bank.path / "manifest.json").read_text())
    assert manifest["schema_version"] == 2
    assert len(manifest["checksum"]) == len(manifest["files"][0]["index"]) == 64
