"""One hash for one thing: base, bank and coefficients, wherever they are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
import torch

from aniso import Bank, load_model
from aniso.compose import Coefficients, Partition
from aniso.record_files import read_record
from aniso.vectors import BlockSource
from aniso.weights import SafetensorsFile, open_weights
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import tensor_hash

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("hashes"))


def test_a_selection_names_the_bank_it_was_made_from(shelf: runs.Shelf) -> None:
    bank = Bank.load(shelf.bank)
    block = bank["cars"].blocks[0].name
    for smaller in (bank.only("cars"), bank.without("cars").only("dtd"), bank.only_cells({"cars": [block]})):
        assert smaller.whole_hash == bank.content_hash == bank.whole_hash
        assert smaller.content_hash != bank.content_hash
        assert Coefficients.zeros(smaller, Partition.blocks()).provenance.bank == bank.content_hash


def test_coefficients_of_earlier_versions_name_the_selection_and_still_fit(shelf: runs.Shelf) -> None:
    from dataclasses import replace

    bank = Bank.load(shelf.bank).only("cars", "dtd")
    made = Coefficients.zeros(bank)
    old = replace(made.provenance, bank=bank.content_hash, sources=dict.fromkeys(bank, ""))
    again = Coefficients(made.index, made.values, old).for_bank(bank)
    assert again.provenance.bank == bank.whole_hash


def test_all_commands_and_files_name_base_bank_and_coefficients_alike(
    shelf: runs.Shelf, tmp_path: Path, aniso
) -> None:
    run = tmp_path / "run"
    assert aniso(*shelf.few_shot("-o", str(run), "--leave-out", "signs")).code == 0
    record, made = read_record(run / "record.json"), Coefficients.load(run / "coefficients.safetensors")
    base = BlockSource(open_weights(shelf.model)).identity().content
    bank = Bank.load(shelf.bank).content_hash
    listed = json.loads(aniso("bank", "ls", str(shelf.bank), "--json").out)
    shown = json.loads(aniso("coefficients", "show", str(run), "--json").out)
    seen = json.loads(aniso("inspect", str(shelf.model), "--hash", "--json").out)
    assert {base} == {
        load_model(shelf.model).fingerprint, record.inputs.model, made.provenance.base.content,
        listed["base"]["fingerprint"], shown["base"]["content"], seen["fingerprint"],
    }  # fmt: skip
    assert {bank} == {record.inputs.bank, made.provenance.bank, listed["content_hash"], shown["bank"]}
    assert record.coefficients is not None
    assert {tensor_hash(made.values)} == {record.coefficients.sha256, made.content_hash}
    out = tmp_path / "baked"
    given = ("bake", str(run), "--bank", str(shelf.bank), "--base", str(shelf.model), "-o", str(out))
    assert aniso(*given, "--to", "huggingface").code == 0
    card = (out / "README.md").read_text()
    meta = SafetensorsFile(RawFile(out / "model.safetensors")).metadata
    for name, value in (("base", base), ("bank", bank), ("coefficients", made.content_hash)):
        assert value in card and meta[f"aniso.{name}"] == value
    for name, source in made.provenance.sources.items():
        assert name in card and source in card
    assert torch.equal(Coefficients.load(out / "coefficients.safetensors").values, made.values)
