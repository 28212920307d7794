"""Files that earlier versions wrote are read for ever, and give the numbers they gave."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from aniso.vectors import Bank, Storage
from aniso.weights import open_weights

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "tests/golden").iterdir())


@pytest.fixture(scope="module")
def made():
    """The script that wrote the files, for the numbers it put in."""
    spec = importlib.util.spec_from_file_location("make_golden", ROOT / "scripts/make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("version", GOLDEN, ids=lambda path: path.name)
def test_a_golden_bank_is_read_as_it_was_written(version, storage, made):
    bank = Bank.load(version / storage)
    assert bank.names == ("a", "b", "lora")
    assert bank.check() == []
    base = made.base()
    for i, name in enumerate("ab"):
        applied = bank[name].apply(base)
        for key, value in made.tuned(i).items():
            moved = (value - base[key]).norm()
            error = (applied[key] - value).norm() / moved
            assert error <= max(1.5 * bank[name].relative_error, 1e-6), (name, key)
            if storage == "fp32":
                assert torch.equal(applied[key], value)
    product = (made.wave(66, 2) / 64) @ made.wave(2, 64) * 2.0
    assert torch.allclose(bank["lora"]["fc.weight"].dense(), product, atol=1e-6)


def test_the_newest_golden_files_are_what_this_version_writes(made, tmp_path):
    """A change of the format shows here: raise the schema, and add files beside the old ones."""
    made.main(tmp_path / "now")
    for storage in Storage:
        assert structure(tmp_path / "now" / storage) == structure(GOLDEN[-1] / storage), storage


def structure(bank):
    """Tensors and index of a bank's file; numbers to four digits, since sums differ between machines."""
    source = open_weights(bank / "vectors-000.safetensors")
    index = json.loads(bytes(source.read("aniso.index").tolist()))
    tensors = {name: info for name, info in source.tensors.items() if name != "aniso.index"}
    # sums differ between machines, and so do checksums of them; how many there are does not
    checksums = {name: len(text) for name, text in index.pop("checksums").items()}
    metadata = {key: value for key, value in source.metadata.items() if key != "index"}
    return metadata, list(tensors.items()), rounded(index), checksums


def rounded(node):
    if isinstance(node, dict):
        return {key: rounded(value) for key, value in node.items()}
    if isinstance(node, list):
        return [rounded(value) for value in node]
    return float(f"{node:.4g}") if isinstance(node, float) else node
