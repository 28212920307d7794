"""Banks: build, open, add, select, check, quantise."""

from __future__ import annotations

import hashlib
import json
import multiprocessing

import pytest
import tiny
import torch

from aniso.vectors import Bank, BlockSource, Dense, LowRank, Provenance, TaskVector
from aniso.vectors._files.manifest import manifest_checksum
from aniso.vectors.delta import Term
from aniso.weights import TensorMap, open_weights, save_safetensors
from aniso.weights.atomic import locked


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def models(tmp_path):
    base = tiny.plain()
    save_safetensors(tmp_path / "base.safetensors", base)
    tuned = {name: tiny.tuned(base, i + 1) for i, name in enumerate(("cars", "dtd", "svhn"))}
    for name, state in tuned.items():
        save_safetensors(tmp_path / f"{name}.safetensors", state)
    return base, tuned


@pytest.fixture
def bank(models, tmp_path):
    refs = {name: tmp_path / f"{name}.safetensors" for name in models[1]}
    return Bank.build(tmp_path / "base.safetensors", refs, to=tmp_path / "bank")


def test_a_bank_on_disk_gives_back_every_model_bit_for_bit(bank, models):
    base, tuned = models
    assert bank.names == tuple(tuned)
    for name, state in tuned.items():
        assert equal(bank[name].apply(base), state)
    assert bank.check() == []


def test_a_bank_in_memory_is_the_same_table(models, bank, tmp_path):
    base, tuned = models
    view = Bank.build(base, tuned)
    for block in bank.layout.blocks:
        ours, theirs = view.read_block(block.name), bank.read_block(block.name)
        assert list(ours) == list(theirs) == list(tuned)
        assert all(torch.equal(ours[n].dense(), theirs[n].dense()) for n in ours)


def test_one_block_of_all_vectors_is_one_read(bank, monkeypatch):
    from aniso.weights.files import RawFile

    reads = []
    original = RawFile.read_tensor

    def counted(self, offset, nbytes):
        reads.append(nbytes)
        return original(self, offset, nbytes)

    monkeypatch.setattr(RawFile, "read_tensor", counted)
    row = bank.read_block("layers.0.fc.bias")
    assert len(row) == 3
    assert max(reads) == 3 * 96 * 4
    assert len(reads) <= 3  # the stack, and exact values where there are any


def test_selecting_gives_a_smaller_bank_over_the_same_files(bank, refused):
    smaller = bank.without("dtd")
    assert smaller.names == ("cars", "svhn")
    assert list(smaller.read_block("layers.0.fc.weight")) == ["cars", "svhn"]
    assert bank.only("svhn", "cars").names == ("cars", "svhn")
    assert smaller.content_hash != bank.content_hash
    with refused("BANK-NAME", 2, "'sun397'"):
        bank.without("sun397")
    with refused("BANK-NAME", 2):
        bank.without("cars", "dtd", "svhn")


def test_adding_a_vector_leaves_the_others_untouched(bank, models, tmp_path):
    base, tuned = models
    before = (tmp_path / "bank/vectors-000.safetensors").read_bytes()
    new = tiny.tuned(base, 9)
    larger = bank.add(base, {"mnist": new})
    assert larger.names == ("cars", "dtd", "svhn", "mnist")
    assert (tmp_path / "bank/vectors-000.safetensors").read_bytes() == before
    assert equal(larger["mnist"].apply(base), new)
    assert equal(larger["dtd"].apply(base), tuned["dtd"])
    assert list(larger.read_block("layers.2.fc.weight")) == list(larger.names)
    assert larger.check() == []


def test_a_selection_cannot_be_added_to_and_is_checked_whole(bank, models, refused):
    base, _ = models
    larger = bank.add(base, {"mnist": tiny.tuned(base, 9)})
    assert larger.only("cars").check() == []
    with refused("BANK-NAME", 2, "selection"):
        larger.without("cars").add(base, {"extra": tiny.tuned(base, 10)})
    with refused("USAGE", 2, "residual4"):
        larger.add(base, {"extra": tiny.tuned(base, 10)}, storage="residual4")
    with refused("USAGE", 2, "int3"):
        larger.save(bank.path / "x", storage="int3")


def test_vectors_made_before_join_a_bank(models, tmp_path, refused):
    base, tuned = models
    made = TaskVector.between(base, tuned["dtd"], name="made")
    made.save(tmp_path / "made.vector")
    refs = {"cars": tuned["cars"], "dtd": made, "file": tmp_path / "made.vector", "twice": 2 * made}
    bank = Bank.build(base, refs, to=tmp_path / "bank")
    assert equal(bank["dtd"].apply(base), tuned["dtd"])
    assert equal(bank["file"].apply(base), tuned["dtd"])
    assert bank["twice"].norm() == pytest.approx(2 * made.norm())
    other = tiny.plain(3)
    with refused("BANK-BASE", 3):
        Bank.build(other, {"dtd": made})


def test_vectors_over_different_bases_make_no_bank(models, refused, tmp_path):
    base, tuned = models
    other = tiny.plain(3)
    with refused("BANK-BASE", 3, "different bases"):
        Bank(
            {"a": TaskVector.between(base, tuned["cars"]), "b": TaskVector.between(other, tiny.tuned(other))}
        )


def test_one_bank_has_one_activation(models, tmp_path, refused):
    """A file that does not say its activation goes with either, but not with both."""
    base, tuned = models
    sources = {a: BlockSource(TensorMap(base, activation=a)) for a in (None, "quick_gelu", "gelu")}
    vectors = {str(a): TaskVector.between(s, tuned["cars"]) for a, s in sources.items()}
    bank = Bank({"a": vectors["None"], "b": vectors["gelu"]}).save(tmp_path / "bank")
    assert bank.base.activation == "gelu"
    with refused("BANK-BASE", 3, "gelu", "quick_gelu"):
        Bank({"a": vectors["None"], "b": vectors["gelu"], "c": vectors["quick_gelu"]})
    with refused("CKPT-ACTIVATION", 3, "--activation gelu"):
        bank.add(sources["quick_gelu"], {"d": tuned["dtd"]})
    assert bank.add(sources[None], {"d": tuned["dtd"]}).base.activation == "gelu"


def test_what_is_computed_is_told_apart_from_what_it_was_computed_from(models):
    base, tuned = models
    v = TaskVector.between(base, tuned["cars"], name="v")
    assert Bank({"a": v}).content_hash != Bank({"a": 3 * v}).content_hash
    assert not [note for note in Bank({"a": v, "b": 3 * v}).notes if "same file" in note]


def test_overwriting_replaces_a_bank_and_nothing_else(models, tmp_path, aniso):
    """A directory with anything but a bank's files in it is never replaced."""
    refs = ("--base", tmp_path / "base.safetensors", tmp_path / "cars.safetensors", "--overwrite")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    for out in (tmp_path, tmp_path / "."):
        ran = aniso("bank", "build", *refs, "-o", out)
        assert ran.code == 2
        assert "OUT-EXISTS" in ran.err
        assert "base.safetensors" in ran.err
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert aniso("bank", "build", *refs, "-o", tmp_path / "bank").code == 0
    assert aniso("bank", "build", *refs, "-o", tmp_path / "bank").code == 0


def test_adding_over_another_base_or_under_a_taken_name_is_refused(bank, models, refused):
    base, tuned = models
    other = tiny.plain(3)
    with refused("BANK-BASE", 3, "not the bank's base"):
        bank.add(other, {"mnist": tiny.tuned(other)})
    with refused("BANK-NAME", 2, "cars"):
        bank.add(base, {"cars": tuned["dtd"]})
    assert Bank.load(bank.path).names == ("cars", "dtd", "svhn")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "a" * 101, ".hidden", "é"])
def test_names_that_could_be_anything_else_are_refused(models, name, refused):
    with refused("BANK-NAME", 2):
        Bank.build(models[0], {name: models[1]["cars"]})


@pytest.mark.parametrize("storage", ["bf16", "int8", "int4", "residual4", "residual2"])
def test_quantised_banks_say_what_they_lost(bank, tmp_path, storage):
    packed = bank.save(tmp_path / storage, storage=storage)
    assert packed.check() == []
    for name in bank:
        true = (packed[name] - bank[name]).norm() / bank[name].norm()
        assert packed[name].relative_error == pytest.approx(true, rel=1e-3)
    sizes = [sum(p.stat().st_size for p in b.path.glob("*.safetensors")) for b in (bank, packed)]
    assert sizes[1] < sizes[0]


def test_a_shared_mean_helps_when_vectors_are_alike(models, tmp_path):
    base, _ = models
    common = tiny.tuned(base, 1, scale=0.05)
    near = {
        f"v{i}": {k: common[k] + (tiny.tuned(base, i, 0.005)[k] - base[k]) if k != "steps" else common[k]
                  for k in base}
        for i in range(2, 6)
    }  # fmt: skip
    bank = Bank.build(base, near)
    plain = bank.save(tmp_path / "int4", storage="int4")
    shared = bank.save(tmp_path / "residual4", storage="residual4")
    assert shared["v2"].relative_error < 0.5 * plain["v2"].relative_error


@pytest.mark.parametrize("storage", ["residual4", "residual2"])
def test_a_mean_of_nothing_is_not_stored(tmp_path, storage):
    """One block is the same in all models, in another the changes cancel."""
    base = {"same": torch.randn(128, 64), "cancels": torch.randn(128, 64), "moves": torch.randn(128, 64)}
    step = torch.randn(128, 64) * 0.01
    tuned = {
        "a": base | {"cancels": base["cancels"] + step, "moves": base["moves"] + step},
        "b": base | {"cancels": base["cancels"] - step, "moves": base["moves"] + 0.5 * step},
    }
    bank = Bank.build(base, tuned, to=tmp_path / "bank", storage=storage)
    assert bank.check() == []
    assert "same" not in bank["a"]
    assert bank.read_block("same") == {}
    assert (bank["b"]["cancels"].dense() + step).norm() < 0.4 * step.norm()


def test_quantising_twice_adds_the_errors_up(bank, tmp_path):
    twice = bank.save(tmp_path / "a", storage="int8").save(tmp_path / "b", storage="int4")
    true = (twice["cars"] - bank["cars"]).norm() / bank["cars"].norm()
    assert twice["cars"].relative_error == pytest.approx(true, rel=0.05)


def test_building_twice_gives_the_same_bytes(models, tmp_path):
    base, tuned = models
    for i in range(2):
        Bank.build(base, tuned, to=tmp_path / f"b{i}", storage="int8")
    for name in ("manifest.json", "vectors-000.safetensors"):
        assert (tmp_path / "b0" / name).read_bytes() == (tmp_path / "b1" / name).read_bytes()
    assert Bank.load(tmp_path / "b0").content_hash == Bank.load(tmp_path / "b1").content_hash


def test_existing_output_is_kept_unless_asked(bank, models, refused):
    base, tuned = models
    before = (bank.path / "manifest.json").read_bytes()
    with refused("OUT-EXISTS", 2, "--overwrite"):
        Bank.build(base, tuned, to=bank.path)
    assert (bank.path / "manifest.json").read_bytes() == before
    smaller = Bank.build(base, {"cars": tuned["cars"]}, to=bank.path, overwrite=True)
    assert smaller.names == ("cars",)


def test_a_build_that_fails_leaves_nothing_behind(models, tmp_path, refused):
    base, tuned = models
    broken = dict(tuned["dtd"])
    broken["layers.2.fc.weight"] = broken["layers.2.fc.weight"].clone()
    broken["layers.2.fc.weight"][3, 5] = float("nan")
    with refused("WEIGHT-NONFINITE", 3, "layers.2.fc.weight", "element 197"):
        Bank.build(base, {"cars": tuned["cars"], "dtd": broken}, to=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("where", [0.2, 0.5, 0.99])
def test_a9_one_flipped_bit_is_found(bank, where, refused, aniso):
    file = bank.path / "vectors-000.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(where * 0.9 * (len(data) - start))] ^= 0x10
    file.write_bytes(data)
    ran = aniso("bank", "check", bank.path)
    assert ran.code == 3
    assert "FILE-HASH" in ran.err or "VECTOR-FILE" in ran.err


@pytest.mark.parametrize(
    "damage",
    [
        {"schema_version": 99},
        {"extra": 1},
        {"vectors": ["cars", "dtd"]},
        {"vectors": ["cars", "dtd", "svhn", "svhn"]},
        {"base": "0" * 64},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(bank, damage, aniso):
    manifest = json.loads((bank.path / "manifest.json").read_text())
    (bank.path / "manifest.json").write_text(json.dumps(manifest | damage))
    ran = aniso("bank", "ls", bank.path)
    assert ran.code == 3
    assert "BANK-" in ran.err or "FILE-HASH" in ran.err
    # and with a checksum that fits, as a program that writes its own manifests would have it
    damaged = manifest | damage
    sealed = damaged | {"checksum": manifest_checksum(damaged)}
    (bank.path / "manifest.json").write_text(json.dumps(sealed))
    ran = aniso("bank", "ls", bank.path)
    assert ran.code == 3
    assert "BANK-" in ran.err


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "../a/vectors-000.safetensors", "/tmp/vectors-000.safetensors",
     "s/vectors-000.safetensors", "vectors-000.safetensors.pt", "vectors-0.safetensors"],
)  # fmt: skip
def test_a_manifest_cannot_point_anywhere_else(bank, aniso, name):
    manifest = json.loads((bank.path / "manifest.json").read_text())
    manifest["files"][0]["file"] = name
    (bank.path / "manifest.json").write_text(json.dumps(manifest))
    for command in ("ls", "check"):
        ran = aniso("bank", command, bank.path)
        assert ran.code == 4
        assert "DIR-PATH" in ran.err


def test_a_damaged_index_is_refused_not_believed(bank, refused):
    """The last tensor is the index; say that it points somewhere else."""
    file = bank.path / "vectors-000.safetensors"
    data = file.read_bytes()
    assert b'"dense":[0,1,2]' in data
    file.write_bytes(data.replace(b'"dense":[0,1,2]', b'"dense":[0,1,7]'))
    with refused("FILE-HASH", 3):
        Bank.load(bank.path)
    with refused("VECTOR-FILE", 3):  # also where the hash was made to fit
        TaskVector.load(reindexed(file, "dense", [0, 1, 7]))


def reindexed(path, key, value):
    """The file with one entry of its first cell changed, and the index's hash made to fit."""
    source = open_weights(path)
    index = json.loads(bytes(source.read("aniso.index").tolist()))
    next(iter(index["cells"].values()))[key] = value
    text = json.dumps(index).encode()
    tensors = {name: source.read(name) for name in source.tensors if name != "aniso.index"}
    tensors["aniso.index"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    out = path.with_name("reindexed.safetensors")
    save_safetensors(out, tensors, {**source.metadata, "index": hashlib.sha256(text).hexdigest()})
    return out


def test_an_ordinary_safetensors_file_is_not_a_vector(models, tmp_path, refused):
    with refused("VECTOR-FILE", 3, "aniso vector make"):
        TaskVector.load(tmp_path / "base.safetensors")


def test_the_same_file_twice_is_said(models, tmp_path):
    bank = Bank.build(models[0], {"a": tmp_path / "cars.safetensors", "b": tmp_path / "cars.safetensors"})
    assert any("same file" in note for note in bank.notes)


def _hold(path, ready, done):
    with locked(path):
        ready.set()
        done.wait(20)


def test_two_processes_do_not_change_a_bank_at_once(bank, models, refused):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(bank.path, ready, done))
    holder.start()
    try:
        assert ready.wait(60)
        with refused("OUT-LOCKED", 8):
            bank.add(models[0], {"mnist": tiny.tuned(models[0], 9)})
    finally:
        done.set()
        holder.join()
    assert len(bank.add(models[0], {"mnist": tiny.tuned(models[0], 9)})) == 4


def test_five_hundred_vectors_and_one_element_blocks(tmp_path):
    base = {"w": torch.randn(4, 4), "s": torch.tensor(1.5), "one": torch.tensor([2.0])}
    tuned = {f"v{i}": {k: v + 0.01 * (i + 1) for k, v in base.items()} for i in range(500)}
    bank = Bank.build(base, tuned, to=tmp_path / "bank", allow_distant=True)
    assert len(bank) == 500
    assert bank.check() == []
    assert equal(bank["v499"].apply(base), tuned["v499"])


def test_facts_about_vectors_stay_with_them(bank, models, tmp_path, aniso, refused):
    assert bank.facts == {"cars": {}, "dtd": {}, "svhn": {}}
    content = bank.content_hash
    bank = bank.annotate({"cars": {"zero_shot": 0.25, "tuned": 0.5}})
    bank = bank.annotate({"cars": {"tuned": 0.75}, "dtd": {"task": "textures"}})
    assert bank.facts["cars"] == {"zero_shot": 0.25, "tuned": 0.75}
    assert bank.content_hash == content  # what is known of vectors is no part of them
    assert bank.check() == []
    assert Bank.load(bank.path).only("dtd").facts == {"dtd": {"task": "textures"}}
    packed = bank.only("cars").save(tmp_path / "packed", storage="int8")
    assert packed.facts == {"cars": {"zero_shot": 0.25, "tuned": 0.75}}
    added = bank.add(tmp_path / "base.safetensors", {"new": tiny.tuned(models[0], 9)})
    assert added.facts["cars"]["tuned"] == 0.75 and added.facts["new"] == {}
    assert "25.0% to 75.0%" in aniso("bank", "ls", bank.path).out
    with refused("BANK-NAME", 2, "nobody"):
        bank.annotate({"nobody": {"tuned": 1.0}})
    for value in (float("nan"), float("inf"), None, [1], torch.tensor(1.0)):
        with refused("BANK-MANIFEST", 2, "tuned"):
            bank.annotate({"cars": {"tuned": value}})
    assert Bank.load(bank.path).facts["cars"]["tuned"] == 0.75


def test_room_on_a_disk_is_asked_for_what_adapters_take_not_for_what_they_stand_for(monkeypatch, tmp_path):
    base = {"w": torch.zeros(2000, 3000)}
    terms = (Term(torch.ones(2000, 2), torch.ones(2, 3000), 1.0),)
    blocks = BlockSource(TensorMap(base))
    cells = {"w": lambda: LowRank((2000, 3000), terms)}
    vectors = {
        f"v{i}": TaskVector(f"v{i}", blocks.layout, blocks.identity, cells, Provenance("v", "peft"))
        for i in range(5)
    }
    asked = []
    monkeypatch.setattr("aniso.vectors.bank.require_space", lambda path, size: asked.append(size))
    written = Bank(vectors).save(tmp_path / "bank")
    taken = sum(record.nbytes for record in written.manifest.files)
    assert asked == [5 * 4 * 2 * 5000]
    assert asked[0] <= taken < 1.2 * asked[0]
    asked.clear()
    whole = {"w": lambda: Dense(torch.ones(2000, 3000))}
    dense = TaskVector("v", blocks.layout, blocks.identity, whole, Provenance("v", "x"))
    Bank({"v": dense}).save(tmp_path / "dense", storage="int8")
    assert 6e6 <= asked[0] < 7e6
