"""Vectors that nobody trained, and what is written down of the pictures of a bank's vectors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from torch import Tensor, nn

from aniso.compose import Coefficients, Composition, Partition
from aniso.vectors import Bank, random_bases
from aniso.vectors._files import bank_directory, bank_features
from aniso.weights import TensorMap
from aniso.weights.atomic import disk

Refused = Callable[..., AbstractContextManager[Any]]

PINNED = "a69621eeb0696480087b1bcbe266637c06b2448e93ad82da4257b500f6561e34"


def large() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    wide = 0.3 + 2.0 * torch.rand(300, 200, generator=g)
    return {"wide.weight": wide, "thin.weight": 1e-3 * wide - 0.05, "gate": torch.tensor(0.7)}


def equal(one: Bank, two: Bank) -> bool:
    return one.names == two.names and all(
        torch.equal(one[n][b.name].dense(), two[n][b.name].dense()) for n in one for b in one.layout.blocks
    )


# random bases


def test_numbers_have_the_mean_and_deviation_of_the_bases_block_and_are_normal() -> None:
    base = large()
    bank = random_bases(base, 3)
    for name in bank:
        for block in ("wide.weight", "thin.weight"):
            values, like = bank[name][block].dense().double(), base[block].double()
            count, deviation = values.numel(), float(like.std(correction=0))
            assert values.shape == like.shape
            assert abs(float(values.mean() - like.mean())) < 5 * deviation / math.sqrt(count)
            assert float(values.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * count))
            z = (values - values.mean()) / values.std()
            assert abs(float((z**3).mean())) < 5 * math.sqrt(6 / count)
            assert abs(float((z**4).mean()) - 3) < 5 * math.sqrt(24 / count)


def test_a_block_of_one_number_is_that_number() -> None:
    assert float(random_bases(large(), 1)["random-0"]["gate"].dense()) == pytest.approx(0.7)


def test_vectors_and_blocks_are_drawn_apart_from_each_other() -> None:
    base = large()
    base["same.weight"] = base["wide.weight"].clone()
    bank = random_bases(base, 3)
    drawn = [
        bank[n][b].dense().reshape(-1).double() - base["wide.weight"].double().mean()
        for n in bank
        for b in ("wide.weight", "same.weight")
    ]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert abs(float(torch.cosine_similarity(one, other, dim=0))) < 5 / math.sqrt(one.numel())


def test_the_same_seed_gives_the_same_numbers_and_another_seed_or_base_others() -> None:
    base = large()
    bank = random_bases(base, 2, seed=3)
    assert equal(bank, random_bases({k: v.clone() for k, v in base.items()}, 2, seed=3))
    assert torch.equal(bank["random-1"]["wide.weight"].dense(), bank["random-1"]["wide.weight"].dense())
    moved = {**base, "wide.weight": base["wide.weight"].flip(0)}  # with the same moments
    for other in (random_bases(base, 2, seed=4), random_bases(moved, 2, seed=3)):
        for name in bank:
            assert not torch.equal(bank[name]["wide.weight"].dense(), other[name]["wide.weight"].dense())
        assert other.content_hash != bank.content_hash


def test_numbers_are_those_that_were_always_drawn() -> None:
    """They are kept nowhere: should they ever change, all that was learned with them is lost."""
    base = {"a.weight": torch.tensor([[-1.0, 1.0], [1.0, -1.0]])}
    values = random_bases(base, 1)["random-0"]["a.weight"].dense()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == PINNED


def test_fewer_are_the_first_of_more() -> None:
    base = large()
    few, more = random_bases(base, 2), random_bases(base, 5)
    assert more.names == tuple(f"random-{i}" for i in range(5))
    assert equal(few, more.only(*few.names))
    assert few.content_hash == more.only(*few.names).content_hash != more.content_hash


def test_nothing_is_stored_until_it_is_saved(tmp_path: Path, refused: Refused) -> None:
    bank = random_bases(large(), 2)
    assert bank.path is None and not list(tmp_path.iterdir())
    with refused("BANK-MANIFEST", 2, "not on disk"):
        bank.check()
    written = bank.save(tmp_path / "bank")
    assert equal(written, bank) and written.check() == []
    assert [bank[n].provenance.sha256 for n in bank] == [written[n].provenance.sha256 for n in bank]


@pytest.mark.parametrize("count", [0, -1, 100_001])
def test_there_is_no_bank_of_none(count: int, refused: Refused) -> None:
    with refused("BANK-NAME", 2, str(count), "1 to 100,000"):
        random_bases(large(), count)


def test_both_namings_of_a_model_have_the_same_random_vectors() -> None:
    from aniso.vectors.convert import renamed

    state = tiny.hf_clip().state_dict()
    other = {k: read() for k, read in renamed(TensorMap(state), "open_clip").tensors.items()}
    assert equal(random_bases(state, 1), random_bases(other, 1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


@pytest.mark.parametrize("partition", [Partition.blocks(), Partition.whole(), Partition.rows()], ids=str)
def test_what_is_learned_on_them_is_found_again_on_a_bank_made_anew(
    partition: Partition, tmp_path: Path
) -> None:
    base = model()
    composition = Composition(base, random_bases(base.state_dict(), 3), partition)
    naive.randomise(composition)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        expected = composition(x)
        naive_ = naive.run(composition, base, lambda m, x: m(x), x, composition.values)
    assert naive.close(expected, naive_)
    composition.coefficients.save(tmp_path / "coefficients")
    loaded = Coefficients.load(tmp_path / "coefficients")
    for count in (3, 7):
        again = Composition.of(model(), random_bases(model().state_dict(), count), loaded)
        with torch.no_grad():
            assert torch.equal(again(x), expected)


def test_coefficients_of_another_seed_do_not_fit(refused: Refused) -> None:
    base = model()
    learned = Composition(base, random_bases(base.state_dict(), 2)).coefficients
    with refused("COEF-BANK", 3, "random-0"):
        Composition.of(base, random_bases(base.state_dict(), 2, seed=1), learned)


def test_gradients_flow_to_coefficients_of_random_vectors() -> None:
    base = model()
    composition = Composition(base, random_bases(base.state_dict(), 4))
    naive.randomise(composition)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    naive.probe(composition(x)).backward()
    expected = naive.gradient(composition, base, lambda m, x: m(x), x)[1]
    assert composition.values.grad is not None and naive.close(composition.values.grad, expected)


# what the vectors' own pictures look like


@pytest.fixture
def base() -> dict[str, Tensor]:
    return {k: v[:8] if v.ndim else v for k, v in tiny.plain().items()}


@pytest.fixture
def bank(base: dict[str, Tensor], tmp_path: Path) -> Bank:
    tuned = {name: tiny.tuned(base, i) for i, name in enumerate(("cars", "dtd", "svhn"), 1)}
    return Bank.build(base, tuned, to=tmp_path / "bank")


def rows(*names: str, width: int = 5, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(width, generator=g) for name in names}


def alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def files(bank: Bank) -> list[str]:
    assert bank.path is not None
    return sorted(p.name for p in bank.path.glob("features-*"))


def test_features_are_found_again_as_they_were_written(bank: Bank) -> None:
    assert bank.features == {} and not files(bank)
    before, manifest = bank.content_hash, (bank.path / "manifest.json").read_bytes()
    assert b"features" not in manifest, "a bank without features is what it was before there were any"
    written = rows("cars", "svhn")
    more = bank.with_features(written)
    assert alike(more.features, written) and alike(Bank.load(bank.path).features, written)
    assert list(more.features) == ["cars", "svhn"]
    assert more.content_hash == before
    assert bank.features == {}, "a bank never changes"
    assert more.check() == []


def test_features_are_added_to_those_that_are_known_and_replace_them(bank: Bank) -> None:
    first, second = rows("cars", "dtd"), rows("dtd", "svhn", seed=1)
    found = bank.with_features(first).with_features(second)
    assert alike(found.features, {**first, **second})
    # who holds an older view of the directory takes nothing away
    assert alike(bank.with_features(rows("cars", seed=2)).features, {**second, **rows("cars", seed=2)})


def test_the_old_file_goes_when_the_new_one_counts(bank: Bank) -> None:
    assert files(bank.with_features(rows("cars"))) == ["features-000.safetensors"]
    assert files(bank.with_features(rows("dtd"))) == ["features-001.safetensors"]
    assert files(bank.with_features(rows("dtd"))) == ["features-002.safetensors"]
    assert Bank.load(bank.path).check() == []


def test_features_stay_through_everything_that_is_done_to_a_bank(
    bank: Bank, base: dict[str, Tensor], tmp_path: Path
) -> None:
    known = rows("cars", "dtd")
    bank = bank.with_features(known)
    assert alike(bank.only("dtd", "svhn").features, {"dtd": known["dtd"]})
    assert alike(bank.only_cells({"cars": ["layers.0.gate"]}).features, {"cars": known["cars"]})
    assert alike(bank.annotate({"cars": {"accuracy": 0.5}}).features, known)
    larger = bank.add(base, {"mnist": tiny.tuned(base, 9)})
    assert alike(larger.features, known) and larger.check() == []
    assert alike(larger.with_features(rows("mnist")).features, {**known, **rows("mnist")})
    bank = Bank.load(bank.path).without("mnist")
    packed = bank.save(tmp_path / "packed", storage="int8")
    assert alike(packed.features, known) and files(packed) == ["features-000.safetensors"]
    few = bank.without("cars").save(tmp_path / "few")
    assert alike(few.features, {"dtd": known["dtd"]}) and few.check() == []
    assert files(bank.only("svhn").save(tmp_path / "none")) == []


def test_a_bank_with_features_can_be_replaced(bank: Bank, tmp_path: Path) -> None:
    bank = bank.with_features(rows("cars"))
    again = bank.without("dtd").save(bank.path, overwrite=True)
    assert again.names == ("cars", "svhn") and alike(again.features, rows("cars"))


def test_numbers_of_any_format_are_kept_as_floats(bank: Bank) -> None:
    found = bank.with_features({"cars": torch.arange(5), "dtd": torch.ones(10, dtype=torch.float64)[::2]})
    assert {t.dtype for t in found.features.values()} == {torch.float32}
    assert found.features["cars"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "odd",
    [
        torch.tensor([1.0, math.nan]),
        torch.tensor([math.inf, 1.0]),
        torch.ones(2, 2),
        torch.tensor(1.0),
        torch.ones(0),
        pytest.param(torch.tensor([1e300, 1.0], dtype=torch.float64)),
    ],
    ids=["nan", "inf", "matrix", "scalar", "empty", "too large"],
)
def test_what_is_no_mean_feature_is_refused_and_nothing_is_written(
    bank: Bank, odd: Tensor, refused: Refused
) -> None:
    bank = bank.with_features(rows("dtd", width=2))
    with refused("BANK-FEATURES", 2, "'cars'", "finite"):
        bank.with_features({"cars": odd})
    assert files(bank) == ["features-000.safetensors"]
    assert alike(Bank.load(bank.path).features, rows("dtd", width=2))


def test_features_of_two_models_are_refused(bank: Bank, refused: Refused) -> None:
    with refused("BANK-FEATURES", 2, "2 different widths", "4, 5"):
        bank.with_features({**rows("cars"), **rows("dtd", width=4)})
    bank = bank.with_features(rows("cars"))
    with refused("BANK-FEATURES", 2, "4, 5"):
        bank.with_features(rows("dtd", width=4))
    assert alike(Bank.load(bank.path).features, rows("cars"))


def test_features_of_vectors_that_are_not_there_are_refused(bank: Bank, refused: Refused) -> None:
    with refused("BANK-NAME", 2, "'mnist'"):
        bank.with_features(rows("mnist"))
    with refused("BANK-NAME", 2, "'cars'"):
        bank.without("cars").with_features(rows("cars"))
    with refused("BANK-MANIFEST", 2, "not on disk"):
        random_bases(large(), 1).with_features(rows("random-0"))
    assert not files(bank)


def damaged(bank: Bank) -> Bank:
    path = bank.path / files(bank)[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return Bank.load(bank.path)


def test_a_changed_byte_is_found_wherever_features_are_read(
    bank: Bank, tmp_path: Path, refused: Refused
) -> None:
    bank = damaged(bank.with_features(rows("cars", "dtd", "svhn")))
    with refused("FILE-HASH", 3, "features-000", "aniso bank features"):
        bank.features  # noqa: B018
    with refused("FILE-HASH", 3, "features-000"):
        bank.check()
    with refused("FILE-HASH", 3, "features-000"):
        bank.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert bank["cars"].norm() > 0, "vectors can be used without them"


def test_damaged_features_can_be_computed_anew_as_the_refusal_says(bank: Bank) -> None:
    bank = damaged(bank.with_features(rows("cars", "dtd", "svhn")))
    again = bank.with_features(rows("cars", "dtd", "svhn", seed=1))
    assert alike(again.features, rows("cars", "dtd", "svhn", seed=1))


def test_a_bank_that_was_opened_before_is_usable_after_features_are_replaced(
    bank: Bank, tmp_path: Path
) -> None:
    before = bank.with_features(rows("cars", "dtd"))
    before.with_features(rows("svhn"))
    assert before.features.keys() >= {"cars", "dtd"}
    assert before.save(tmp_path / "copy").names == before.names


def test_features_that_are_gone_are_named(bank: Bank, refused: Refused) -> None:
    bank = bank.with_features(rows("cars"))
    (bank.path / files(bank)[0]).unlink()
    with refused("FILE-MISSING", 3, "features-000"):
        Bank.load(bank.path).features  # noqa: B018


@pytest.mark.parametrize("name", ["../features-000.safetensors", "vectors-000.safetensors", "/etc/passwd"])
def test_features_lie_in_the_bank_and_nowhere_else(bank: Bank, name: str, refused: Refused) -> None:
    bank = bank.with_features(rows("cars"))
    said = json.loads((bank.path / "manifest.json").read_text())
    said["features"]["file"] = name
    (bank.path / "manifest.json").write_text(json.dumps(said))
    with refused("DIR-PATH", 4, name):
        Bank.load(bank.path)


def test_check_says_what_is_no_part_of_the_bank_and_knows_its_features(bank: Bank) -> None:
    bank = bank.with_features(rows("cars"))
    assert bank.check() == []
    (bank.path / "features-007.safetensors").write_bytes(b"stray")
    assert bank.check() == ["not part of the bank: features-007.safetensors"]
    after = bank.with_features(rows("dtd"))  # what a killed writer left goes
    assert "features-007.safetensors" not in files(after)
    assert after.check() == []


class Stopped(BaseException):
    pass


def stop(*_: Any, **__: Any) -> Any:
    raise Stopped


def test_whoever_is_stopped_before_the_manifest_is_written_leaves_the_old_features(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = rows("cars", "dtd"), rows("cars", seed=1)
    bank = bank.with_features(old)
    for where, name in ((bank_features, "save_safetensors"), (bank_directory, "write_text")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, stop)
            with pytest.raises(Stopped):
                bank.with_features(new)
        assert alike(Bank.load(bank.path).features, old)
    assert Bank.load(bank.path).check() == ["not part of the bank: features-001.safetensors"]
    assert alike(bank.with_features(new).features, {**old, **new})


def test_whoever_is_stopped_after_the_manifest_is_written_leaves_the_new_features(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = rows("cars", "dtd"), rows("cars", seed=1)
    bank = bank.with_features(old)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "remove", stop)
        with pytest.raises(Stopped):
            bank.with_features(new)
    assert alike(Bank.load(bank.path).features, {**old, **new})


@pytest.mark.parametrize("step", range(12))
def test_whatever_change_to_the_disk_fails_features_are_old_or_new(
    bank: Bank, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = rows("cars", "dtd"), rows("cars", seed=1)
    bank = bank.with_features(old)
    count = 0

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == step + 1:
                raise Stopped
            return call(*args)

        return run

    with monkeypatch.context() as patched:
        for name in ("create", "pwrite", "fsync", "replace"):
            patched.setattr(disk, name, failing(getattr(disk, name)))
        stopped = False
        try:
            bank.with_features(new)
        except Stopped:
            stopped = True
    found = Bank.load(bank.path).features
    assert alike(found, {**old, **new}) or (stopped and alike(found, old))
    assert stopped == (count == step + 1)
