"""Directories of adapters and models seen as a bank, and gradients of vectors that are written down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from watch import contents

from aniso.classes import ClassList
from aniso.data import Labelled
from aniso.data.images import ArrayImages
from aniso.errors import AnisoError, InputError
from aniso.learn import CrossEntropy
from aniso.learn.selection import BlockwiseGradient, GradientCache, Pursuit, WholeGradient, gradient
from aniso.models.encoder import Encoder, Family
from aniso.models.transforms import Pixels
from aniso.vectors import Bank, BlockSource, Dense, LowRank, TaskVector, load_adapter_directory
from aniso.weights import save_safetensors

Refused = Callable[..., AbstractContextManager[Any]]

CLASSES = ("red", "green", "blue")
WHAT = {"model": "m", "objective": [{"loss": "l", "weight": 1.0}], "seed": 0}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    g = torch.Generator().manual_seed(7)
    head = torch.randn(len(CLASSES), tiny.EMBED, generator=g)
    family = Family(
        lambda m, x: m.visual_projection(m.vision_model(x).pooler_output),
        own_head=lambda _: (head, None),
        own_classes=CLASSES,
    )
    return Encoder("small", tiny.hf_clip(), family, Pixels(16))


@pytest.fixture(scope="module")
def base(encoder: Encoder) -> dict[str, Tensor]:
    return encoder.state_dict()


@pytest.fixture(scope="module")
def loss() -> CrossEntropy:
    drawn = np.random.default_rng(3).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    return CrossEntropy(Labelled("made", ClassList(CLASSES), ArrayImages(drawn, "made"), (0, 1, 2)), "eval")


def adapter(place: Path, seed: int = 0, width: int = tiny.WIDTH, **config: Any) -> Path:
    """A LoRA of queries and of the first layer of perceptrons, as PEFT writes it."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(tiny.LAYERS):
        for name, rows in (("self_attn.q_proj", width), ("mlp.fc1", 4 * width)):
            key = f"base_model.model.vision_model.encoder.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(2, width, generator=g) * 0.1
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 2, generator=g) * 0.1
    place.mkdir(parents=True)
    save_safetensors(place / "adapter_model.safetensors", tensors)
    usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "fc1"]}
    (place / "adapter_config.json").write_text(json.dumps({**usual, **config}))
    return place


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for seed, name in enumerate(("ant", "bee", "cat")):
        adapter(tmp_path / "adapters" / name, seed)
    return tmp_path / "adapters"


# shelves


def test_adapters_and_models_in_a_directory_are_vectors_by_name(
    base: dict[str, Tensor], encoder: Encoder, adapters: Path
) -> None:
    save_safetensors(adapters / "dog v2.safetensors", tiny.tuned_vision(base, tiny.is_hf_vision, 4))
    torch.save(tiny.tuned_vision(base, tiny.is_hf_vision, 5), adapters / "eel.pt")
    before, said = contents(adapters), []
    bank, notes = load_adapter_directory(
        encoder.weight_source(), adapters, progress=lambda *words: said.append(words)
    )
    assert bank.names == ("ant", "bee", "cat", "dog-v2", "eel") and notes == ()
    assert said == [("reading adapters", i, 5) for i in range(1, 6)]
    assert {type(bank["bee"][b.name]) for b in bank["bee"].blocks} == {LowRank}
    assert len(bank["bee"].blocks) == 2 * tiny.LAYERS
    assert {type(bank["eel"][b.name]) for b in bank["eel"].blocks} == {Dense}
    # and it is the bank that would be built of them
    tuned = {name: adapters / name for name in ("ant", "bee")}
    built = Bank.build(encoder.weight_source(), tuned, allow_distant=True)
    assert bank.only("ant", "bee").content_hash == built.content_hash
    assert contents(adapters) == before


def test_no_delta_is_read_before_it_is_asked_for(
    encoder: Encoder, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskVector, "__getitem__", lambda *_: pytest.fail("a cell was read"))
    assert len(load_adapter_directory(encoder.weight_source(), adapters)[0]) == 3


@pytest.mark.parametrize("as_blocks", [False, True])
def test_the_base_may_be_given_in_any_way(base: dict[str, Tensor], adapters: Path, as_blocks: bool) -> None:
    given = BlockSource.of(base) if as_blocks else base
    assert load_adapter_directory(given, str(adapters))[0].names == ("ant", "bee", "cat")


def test_all_that_do_not_fit_are_listed_or_left_out(
    encoder: Encoder, base: dict[str, Tensor], adapters: Path, refused: Refused
) -> None:
    adapter(adapters / "wide", width=2 * tiny.WIDTH)
    adapter(adapters / "odd", peft_type="LOHA")
    (adapters / "empty").mkdir()
    (adapters / "cut.safetensors").write_bytes(b"\0" * 5)
    save_safetensors(adapters / "other.safetensors", tiny.plain())
    names = ("wide", "odd", "empty", "cut.safetensors", "other.safetensors")
    with refused("BANK-BASE", 3, "5 of 8", "--skip-unfit", *(f"{name}: " for name in names)):
        load_adapter_directory(encoder.weight_source(), adapters)
    bank, notes = load_adapter_directory(encoder.weight_source(), adapters, skip_unfit=True)
    assert bank.names == ("ant", "bee", "cat") and len(notes) == 5
    for name in names:
        assert sum(note.startswith(f"left out: {name}: ") for note in notes) == 1


def test_of_very_many_that_do_not_fit_the_first_are_listed(
    encoder: Encoder, adapters: Path, refused: Refused
) -> None:
    for i in range(15):
        (adapters / f"empty-{i:02}").mkdir()
    with refused("BANK-BASE", 3, "15 of 18", "empty-11", "3 more") as refusal:
        load_adapter_directory(encoder.weight_source(), adapters)
    assert "empty-12" not in str(refusal.error)
    assert len(load_adapter_directory(encoder.weight_source(), adapters, skip_unfit=True)[1]) == 15


@pytest.mark.parametrize("skip", [False, True])
def test_a_directory_without_anything_that_fits_is_refused(
    encoder: Encoder, tmp_path: Path, skip: bool, refused: Refused
) -> None:
    root = encoder.weight_source()
    with refused("FILE-MISSING", 3, "nowhere"):
        load_adapter_directory(root, tmp_path / "nowhere", skip_unfit=skip)
    (tmp_path / "file").write_text("")
    with refused("FILE-MISSING", 3, "no directory", "file"):
        load_adapter_directory(root, tmp_path / "file", skip_unfit=skip)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing here yet")
    with refused("FILE-MISSING", 3, "no adapter"):
        load_adapter_directory(root, tmp_path / "empty", skip_unfit=skip)
    (tmp_path / "empty" / "logs").mkdir()
    with refused("FILE-MISSING" if skip else "BANK-BASE", 3, "logs: "):
        load_adapter_directory(root, tmp_path / "empty", skip_unfit=skip)


def test_two_of_one_name_are_not_mixed_up(
    encoder: Encoder, base: dict[str, Tensor], adapters: Path, refused: Refused
) -> None:
    save_safetensors(adapters / "bee.safetensors", tiny.tuned_vision(base, tiny.is_hf_vision, 4))
    with refused("BANK-BASE", 3, "1 of 4", "bee.safetensors: ", "'bee'"):
        load_adapter_directory(encoder.weight_source(), adapters)
    bank, notes = load_adapter_directory(encoder.weight_source(), adapters, skip_unfit=True)
    assert len(bank) == 3 and len(notes) == 1
    assert {type(bank["bee"][b.name]) for b in bank["bee"].blocks} == {LowRank}  # the first by name


def test_what_is_hidden_or_no_model_is_passed_over(encoder: Encoder, adapters: Path) -> None:
    adapter(adapters / ".cache", width=64)
    (adapters / ".DS_Store").write_bytes(b"\0")
    (adapters / ".x.safetensors").write_bytes(b"\0")
    (adapters / "notes.txt").write_text("by hand")
    assert load_adapter_directory(encoder.weight_source(), adapters)[0].names == ("ant", "bee", "cat")


def test_names_are_such_as_a_bank_can_have(encoder: Encoder, tmp_path: Path) -> None:
    for i, name in enumerate(("my adapter (1)", "-x-", "\u65e5\u672c", "a" * 120)):
        adapter(tmp_path / "shelf" / name, i)
    bank, _ = load_adapter_directory(encoder.weight_source(), tmp_path / "shelf")
    assert set(bank) == {"my-adapter-1", "x", "vector", "a" * 100}
    assert bank.save(tmp_path / "bank").names == bank.names


# what is remembered


@pytest.fixture
def bank(encoder: Encoder, adapters: Path) -> Bank:
    return load_adapter_directory(encoder.weight_source(), adapters)[0]


def gradients(bank: Bank, name: str, first: float = 0.5) -> dict[str, float]:
    return {block.name: first + i for i, block in enumerate(bank[name].blocks)}


def test_what_was_written_is_read_again(bank: Bank, tmp_path: Path) -> None:
    file = tmp_path / "new" / "place" / "file"
    one = GradientCache(file, WHAT)
    assert len(one) == 0 and one.get(bank["ant"]) is None and not file.parent.exists()
    one.put(bank["ant"], gradients(bank, "ant"))
    one.put(bank["bee"], dict.fromkeys(gradients(bank, "bee"), 1e-300))
    two = GradientCache(str(file), WHAT)
    assert len(two) == len(one) == 2 and two.get(bank["cat"]) is None
    assert two.get(bank["ant"]) == one.get(bank["ant"]) == gradients(bank, "ant")
    before = file.read_bytes()
    two.put(bank["cat"], gradients(bank, "cat"))
    assert file.read_bytes().startswith(before) and len(GradientCache(file, WHAT)) == 3
    assert two.get(bank["ant"].renamed("other")) == gradients(bank, "ant")  # a name is no content


def test_numbers_come_back_to_the_last_bit(bank: Bank, tmp_path: Path) -> None:
    values = {block: math.pi * 10.0**-i for i, block in enumerate(gradients(bank, "ant"))}
    GradientCache(tmp_path / "file", WHAT).put(bank["ant"], values)
    assert GradientCache(tmp_path / "file", WHAT).get(bank["ant"]) == values


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_file_is_begun(bank: Bank, tmp_path: Path, empty: bool) -> None:
    file = tmp_path / "file"
    if empty:
        file.touch()
    GradientCache(file, WHAT).put(bank["ant"], gradients(bank, "ant"))
    assert len(file.read_text().splitlines()) == 2 and len(GradientCache(file, WHAT)) == 1


def test_a_last_line_that_was_cut_off_is_dropped_and_written_anew(bank: Bank, tmp_path: Path) -> None:
    file = tmp_path / "file"
    one = GradientCache(file, WHAT)
    for name in bank:
        one.put(bank[name], gradients(bank, name))
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        again = GradientCache(file, WHAT)
        assert len(again) == 2 and again.get(bank["cat"]) is None
        assert file.read_bytes() == whole[:last]
        again.put(bank["cat"], gradients(bank, "cat"))
        assert file.read_bytes() == whole


def test_a_first_line_that_was_cut_off_is_written_anew(bank: Bank, tmp_path: Path) -> None:
    file = tmp_path / "file"
    GradientCache(file, WHAT).put(bank["ant"], gradients(bank, "ant"))
    whole = file.read_bytes()
    for cut in (1, whole.find(b"\n") // 2, whole.find(b"\n")):
        file.write_bytes(whole[:cut])
        again = GradientCache(file, WHAT)
        assert len(again) == 0
        again.put(bank["ant"], gradients(bank, "ant"))
        assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({**WHAT, "seed": 1}, "seed"),
        ({**WHAT, "model": "n"}, "model"),
        ({**WHAT, "objective": []}, "objective"),
        ({**WHAT, "more": 1}, "more"),
        ({"model": "m", "seed": 0}, "objective"),
        ({**WHAT, "format": "aniso gradients 2"}, "format"),
    ],
)
def test_gradients_of_something_else_are_refused_and_stay(
    bank: Bank, tmp_path: Path, other: dict[str, Any], named: str, refused: Refused
) -> None:
    file = tmp_path / "file"
    GradientCache(file, WHAT).put(bank["ant"], gradients(bank, "ant"))
    with file.open("a") as out:
        out.write("{cut")
    before = file.read_bytes()
    with refused("RUN-CHANGED", 3, named, "another file"):
        GradientCache(file, other)
    assert file.read_bytes() == before


STRANGE = [
    b"hello\n",
    b"hello",
    b"\n",
    b"\xff\xfe\n\x00",
    b"{}\n{}\n",
    b'{"format": "aniso gradients 1"}\n[]\n',
    b'{"format": "aniso gradients 1"}\n{"key": "k", "vector": "v"}\n',
    b'{"format": "aniso gradients 1"}\n{"key": "k", "vector": "v", "gradients": [1]}\n',
    b'{"format": "aniso gradients 1"}\n{"key": "k", "vector": "v", "gradients": {"b": "x"}}\n',
]
MORE = [b"5\n", b"null\n", b"[1, 2]\n", b'"text"\n', b'[["a", 1]]\n']


@pytest.mark.parametrize("text", [*STRANGE, *MORE])
def test_another_file_is_refused_and_stays(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(text)
    with pytest.raises(InputError) as caught:
        GradientCache(file, WHAT)
    assert caught.value.code in ("FILE-FORMAT", "RUN-CHANGED") and "another file" in str(caught.value)
    assert file.read_bytes() == text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_gradients_that_are_no_numbers_are_refused(
    bank: Bank, tmp_path: Path, value: str, refused: Refused
) -> None:
    file = tmp_path / "file"
    GradientCache(file, WHAT).put(bank["ant"], gradients(bank, "ant"))
    file.write_text(file.read_text().replace(": 0.5", f": {value}"))
    with refused("FILE-FORMAT", 3, "ant", "not finite"):
        GradientCache(file, WHAT)


def test_another_storage_or_other_blocks_are_not_the_same(
    encoder: Encoder, base: dict[str, Tensor], tmp_path: Path
) -> None:
    save_safetensors(tmp_path / "tuned.safetensors", tiny.tuned_vision(base, tiny.is_hf_vision, 4))
    plain = Bank.build(encoder.weight_source(), {"tuned": tmp_path / "tuned.safetensors"})["tuned"]
    known = GradientCache(tmp_path / "file", WHAT)
    known.put(plain, {block.name: 1.0 for block in plain.blocks})
    banks = {
        kind: Bank({"tuned": plain}).save(tmp_path / kind, storage=kind)["tuned"]
        for kind in ("fp32", "bf16", "int8", "int4")
    }
    assert known.get(banks["fp32"]) is not None  # the same wherever it lies
    for kind in ("bf16", "int8", "int4"):
        assert banks[kind].provenance.sha256 == plain.provenance.sha256
        assert known.get(banks[kind]) is None
        known.put(banks[kind], {block.name: 2.0 for block in plain.blocks})
    assert len(known) == 4
    some = plain.within({block.name for block in plain.blocks[:3]})
    split = BlockSource(encoder.weight_source(), split=True)
    divided = Bank.build(split, {"tuned": tmp_path / "tuned.safetensors"})["tuned"]
    other = Bank.build(encoder.weight_source(), {"tuned": tiny.tuned_vision(base, tiny.is_hf_vision, 5)})[
        "tuned"
    ]
    assert [known.get(one) for one in (some, divided, other, 2.0 * plain, -plain)] == [None] * 5


def test_a_line_without_some_of_its_blocks_is_not_taken(
    encoder: Encoder, loss: CrossEntropy, bank: Bank, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    known = GradientCache(file, WHAT)
    expected = BlockwiseGradient(encoder, loss, 1, gradients=known).choose(bank)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[2]["gradients"][next(iter(lines[2]["gradients"]))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = BlockwiseGradient(encoder, loss, 1, gradients=GradientCache(file, WHAT)).choose(bank)
    assert again.scores == expected.scores


# strategies that remember


class Counted:
    """Which cells were read, and how often the gradient of the weights was taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[str, str]] = []
        self.passes = 0
        getitem, really = TaskVector.__getitem__, gradient.weight_gradient

        def cell(vector: TaskVector, block: str) -> Any:
            self.read.append((vector.name, block))
            return getitem(vector, block)

        def weight_gradient(*args: Any, **how: Any) -> Any:
            self.passes += 1
            return really(*args, **how)

        monkeypatch.setattr(TaskVector, "__getitem__", cell)
        monkeypatch.setattr(gradient, "weight_gradient", weight_gradient)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def cells_of(bank: Bank, *names: str) -> list[tuple[str, str]]:
    return [(name, block.name) for name in names or bank.names for block in bank[name].blocks]


@pytest.mark.parametrize("kind", [WholeGradient, BlockwiseGradient])
def test_each_adapter_is_read_once_whatever_is_asked_of_it_later(
    encoder: Encoder, loss: CrossEntropy, bank: Bank, tmp_path: Path, counted: Counted, kind: Any
) -> None:
    file = tmp_path / "file"
    first = kind(encoder, loss, 1, gradients=GradientCache(file, WHAT)).choose(bank)
    assert counted.read == cells_of(bank) and counted.passes == 1
    before = file.read_bytes()
    for budget in (1, 2, 5):
        for other in (WholeGradient, BlockwiseGradient):
            again = other(encoder, loss, budget, gradients=GradientCache(file, WHAT)).choose(bank)
            assert again.scores == first.scores
    assert len(counted.read) == len(cells_of(bank)) and counted.passes == 1
    assert file.read_bytes() == before
    plain = kind(encoder, loss, 2).choose(bank)
    assert plain.cells == kind(encoder, loss, 2, gradients=GradientCache(file, WHAT)).choose(bank).cells


def test_what_was_interrupted_reads_the_rest(
    encoder: Encoder,
    loss: CrossEntropy,
    bank: Bank,
    tmp_path: Path,
    counted: Counted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"

    def progress(what: str, done: int, total: int) -> None:
        if (what, done) == ("gradients of vectors", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BlockwiseGradient(encoder, loss, 1, gradients=GradientCache(file, WHAT), progress=progress).choose(
            bank
        )
    assert counted.read == cells_of(bank, "ant", "bee")
    counted.read.clear()
    found = BlockwiseGradient(encoder, loss, 1, gradients=GradientCache(file, WHAT)).choose(bank)
    assert counted.read == cells_of(bank, "cat") and counted.passes == 2
    assert found.scores == BlockwiseGradient(encoder, loss, 1).choose(bank).scores
    assert [json.loads(line)["vector"] for line in file.read_text().splitlines()[1:]] == list(bank)


def test_a_new_adapter_is_all_that_is_read(
    encoder: Encoder, loss: CrossEntropy, adapters: Path, bank: Bank, tmp_path: Path, counted: Counted
) -> None:
    WholeGradient(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT)).choose(bank)
    adapter(adapters / "dog", 8)
    more = load_adapter_directory(encoder.weight_source(), adapters)[0]
    counted.read.clear()
    WholeGradient(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT)).choose(more)
    assert counted.read == cells_of(more, "dog")


def test_an_adapter_that_was_trained_further_is_read_again(
    encoder: Encoder, loss: CrossEntropy, adapters: Path, bank: Bank, tmp_path: Path, counted: Counted
) -> None:
    WholeGradient(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT)).choose(bank)
    for path in (adapters / "bee").iterdir():
        path.unlink()
    (adapters / "bee").rmdir()
    adapter(adapters / "bee", 9)
    config = adapters / "cat" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    changed = load_adapter_directory(encoder.weight_source(), adapters)[0]
    counted.read.clear()
    found = WholeGradient(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT)).choose(changed)
    assert counted.read == cells_of(changed, "bee", "cat")
    assert found.scores == WholeGradient(encoder, loss, 1).choose(changed).scores


def test_vectors_that_come_from_no_file_are_computed_each_time(
    encoder: Encoder, loss: CrossEntropy, bank: Bank, tmp_path: Path, counted: Counted
) -> None:
    mixed = Bank({"ant": bank["ant"], "sum": bank["bee"] + 0.5 * bank["cat"]})
    for _ in range(2):
        counted.read.clear()
        found = WholeGradient(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT)).choose(
            mixed
        )
        assert {block for name, block in counted.read if name == "sum"} == {
            b.name for b in mixed["sum"].blocks
        }
    assert not [name for name, _ in counted.read if name == "ant"]
    assert len(GradientCache(tmp_path / "file", WHAT)) == 1
    assert found.scores == WholeGradient(encoder, loss, 1).choose(mixed).scores


def test_pursuit_remembers_gradients_too(
    encoder: Encoder, loss: CrossEntropy, bank: Bank, tmp_path: Path, counted: Counted
) -> None:
    found = []
    for _ in range(2):
        strategy = Pursuit(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT))
        found.append(strategy.choose(bank).cells)
    assert found[0] == found[1] and counted.passes == 1


def test_a_vector_that_is_not_finite_is_not_written_down(
    encoder: Encoder, loss: CrossEntropy, adapters: Path, tmp_path: Path
) -> None:
    adapter(adapters / "bad", 3)
    tensors = {
        "base_model.model.vision_model.encoder.layers.0.mlp.fc1.lora_A.weight": torch.full((2, 32), math.inf)
    }
    key = next(iter(tensors)).replace("lora_A", "lora_B")
    save_safetensors(
        adapters / "bad" / "adapter_model.safetensors", {**tensors, key: torch.ones(128, 2)}, overwrite=True
    )
    bank = load_adapter_directory(encoder.weight_source(), adapters)[0]
    with pytest.raises(AnisoError, match="bad"):
        WholeGradient(encoder, loss, 1, gradients=GradientCache(tmp_path / "file", WHAT)).choose(bank)
    known = GradientCache(tmp_path / "file", WHAT)
    assert known.get(bank["bad"]) is None and known.get(bank["ant"]) is not None
