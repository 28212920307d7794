"""Adapters composed factor by factor, against the same written down once more, and against PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from adapters import language_models, random_adapter
from torch import Tensor, nn

from aniso.compose import Composition, FactorComposition, Partition
from aniso.vectors import Bank
from aniso.vectors.convert import renamed
from aniso.weights import TensorMap

peft = pytest.importorskip("peft")
CLIPModel = pytest.importorskip("transformers").CLIPModel

VISION = r"vision_model.*\.(q_proj|k_proj|v_proj|out_proj|fc1)"
SAME: dict[str, Any] = dict(r=3, lora_alpha=6, target_modules=VISION)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("factors")
    tiny.hf_clip().save_pretrained(root / "base")
    for i, name in enumerate("abc"):
        random_adapter(tiny.hf_clip(), root / name, seed=i, **SAME)
    return root


def bank_of(home: Path, *names: str) -> Bank:
    return Bank.build(home / "base", {name: home / name for name in names or "abc"})


def pictures() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def by_hand(
    model: nn.Module, bank: Bank, values: dict[tuple[str, str], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """W + (sum of b B)(sum of a A) under the model's own names; a and b by vector and block."""
    layout = bank.over(TensorMap(model.state_dict())).layout.by_name
    base = dict(model.named_parameters())
    out = {}
    for block in bank.layout.blocks:
        own = {name: bank[name][block.name] for name in bank if block.name in bank[name]}
        if not own:
            continue
        rows = []
        terms = {n: sorted(d.terms, key=lambda term: term.start) for n, d in own.items()}
        for t in range(len(next(iter(terms.values())))):
            a = sum(values[n, block.name][0] * d[t].a for n, d in terms.items())
            b = sum(values[n, block.name][1] * d[t].scale * d[t].b for n, d in terms.items())
            rows.append(b @ a)
        update = torch.cat(rows)
        for part in layout[block.name].parts:
            change = update[part.start : part.stop]
            out[part.key] = base[part.key] + (change.T if part.transposed else change)
    return out


def test_outputs_and_gradients_are_those_of_the_formula(home: Path) -> None:
    bank = bank_of(home)
    model = tiny.hf_clip().eval()
    made = FactorComposition.of(model, bank)
    composition = made.composition
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        composition.values.copy_(torch.randn(composition.values.shape, generator=g))
    leaves: dict[tuple[str, str], list[Tensor]] = {}
    for slot in composition.index.blocks:
        which, name = slot.block.name.split("/", 1)
        for k, vector in enumerate(slot.vectors):
            leaf = composition.values.detach()[slot.start + k].clone().requires_grad_()
            leaves.setdefault((vector, name.replace("/", ".")), [leaf, leaf])["AB".index(which)] = leaf
    x = pictures()
    tokens = torch.arange(4)[None]
    found = composition(pixel_values=x, input_ids=tokens).image_embeds
    weights = by_hand(model, bank, {k: (v[0], v[1]) for k, v in leaves.items()})
    expected = torch.func.functional_call(
        model, weights, (), {"pixel_values": x, "input_ids": tokens}
    ).image_embeds
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (own,) = torch.autograd.grad(found.square().sum(), composition.values)
    others = torch.autograd.grad(expected.square().sum(), [leaf for pair in leaves.values() for leaf in pair])
    by_leaf = dict(zip([(key, i) for key in leaves for i in (0, 1)], others, strict=True))
    for slot in composition.index.blocks:
        which, name = slot.block.name.split("/", 1)
        for k, vector in enumerate(slot.vectors):
            expected_one = by_leaf[(vector, name.replace("/", ".")), "AB".index(which)]
            torch.testing.assert_close(own[slot.start + k], expected_one, rtol=1e-4, atol=1e-6)


def test_it_begins_at_the_base_and_can_leave_it(home: Path) -> None:
    model = tiny.hf_clip().eval()
    composition = FactorComposition.of(model, bank_of(home)).composition
    given = {"pixel_values": pictures(), "input_ids": torch.arange(4)[None]}
    found = composition(**given).image_embeds
    torch.testing.assert_close(found, model(**given).image_embeds, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(found.square().sum(), composition.values)
    moved = {
        s.block.name[0]: gradient[s.start : s.start + s.size].abs().sum() for s in composition.index.blocks
    }
    assert moved["B"] > 0 and moved["A"] == 0  # without B there is nothing that A could change


def test_there_are_two_coefficients_for_each_adapter_and_weight(home: Path) -> None:
    bank = bank_of(home)
    touched = [b.name for b in bank.layout.blocks if b.name in bank["a"]]
    composition = FactorComposition.of(tiny.hf_clip(), bank).composition
    assert composition.values.numel() == 2 * 3 * len(touched)


def test_peft_gives_the_same_with_one_adapter_of_the_same_rank(home: Path, tmp_path: Path) -> None:
    model = tiny.hf_clip().eval()
    made = FactorComposition.of(model, bank_of(home))
    with torch.no_grad():
        made.composition.values.normal_(generator=torch.Generator().manual_seed(2))
    adapter = made.adapter()
    assert set(adapter.ranks.values()) == {3}
    adapter.save(tmp_path / "one")
    said = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == made.bank.base.label
    assert not (tmp_path / "one" / "coefficients.safetensors").exists()
    assert "factor by factor" in (tmp_path / "one" / "README.md").read_text()
    given = {"pixel_values": pictures(), "input_ids": torch.arange(4)[None]}
    with torch.no_grad():
        expected = made.composition(**given).image_embeds
        loaded = peft.PeftModel.from_pretrained(tiny.hf_clip().eval(), tmp_path / "one").eval()
        torch.testing.assert_close(loaded(**given).image_embeds, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_language_models_work_the_same_way(family: str, tmp_path: Path) -> None:
    make, config = language_models()[family]
    if family == "gpt2":
        config = {**config, "target_modules": ["c_attn", "c_proj", "c_fc"]}
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path / "base")
    fresh = lambda: type(model).from_pretrained(tmp_path / "base").eval()  # noqa: E731
    for i in range(2):
        random_adapter(fresh(), tmp_path / f"a{i}", seed=i, r=2, lora_alpha=4, **config)
    bank = Bank.build(tmp_path / "base", {"a0": tmp_path / "a0", "a1": tmp_path / "a1"})
    made = FactorComposition.of(fresh(), bank)
    with torch.no_grad():
        made.composition.values.normal_(generator=torch.Generator().manual_seed(2))
    made.adapter().save(tmp_path / "one")
    given: dict[str, Any] = {"input_ids": torch.arange(8)[None]}
    if family == "t5":
        given["decoder_input_ids"] = torch.arange(3)[None]
    with torch.no_grad():
        expected = made.composition(**given).logits
        found = peft.PeftModel.from_pretrained(fresh(), tmp_path / "one").eval()(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_it_is_another_method_than_composing_updates(home: Path) -> None:
    model, bank = tiny.hf_clip().eval(), bank_of(home)
    factors = FactorComposition.of(model, bank).composition
    updates = Composition(model, bank)
    with torch.no_grad():
        factors.values.fill_(1.0)
        updates.values.fill_(1.0)
        given = {"pixel_values": pictures(), "input_ids": torch.arange(4)[None]}
        apart = factors(**given).image_embeds - updates(**given).image_embeds
    assert float(apart.abs().max()) > 1e-4
    one = bank_of(home, "a")
    alone, update = FactorComposition.of(model, one).composition, Composition(model, one)
    with torch.no_grad():
        alone.values.fill_(1.0)
        update.values.fill_(1.0)
        torch.testing.assert_close(
            alone(**given).image_embeds, update(**given).image_embeds, rtol=1e-5, atol=1e-6
        )


def test_adapters_that_differ_and_whole_weights_are_refused_by_name(
    home: Path, tmp_path: Path, refused
) -> None:
    random_adapter(tiny.hf_clip(), tmp_path / "large", seed=7, **{**SAME, "r": 4})
    bank = Bank.build(home / "base", {"a": home / "a", "large": tmp_path / "large"})
    with refused("LORA-KIND", 3, "rank 3", "rank 4", "--factors"):
        FactorComposition.of(tiny.hf_clip(), bank)
    tuned = tiny.hf_clip()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "vision_model" in name and name.endswith("fc1.weight"):
                parameter.add_(0.01 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "tuned")
    bank = Bank.build(home / "base", {"a": home / "a", "whole": tmp_path / "tuned"})
    with refused("LORA-KIND", 3, "whole"):
        FactorComposition.of(tiny.hf_clip(), bank)


def test_few_shots_give_one_adapter_that_answers_like_the_composition(tmp_path: Path, aniso: Any) -> None:
    shelf = runs.shelf(tmp_path / "shelf")
    for i, name in enumerate(("cars", "dtd")):
        random_adapter(CLIPModel.from_pretrained(shelf.model), tmp_path / name, seed=i, **SAME)
    Bank.build(shelf.model, {n: tmp_path / n for n in ("cars", "dtd")}, to=tmp_path / "loras")
    given = ("--model", shelf.model, "--bank", tmp_path / "loras", "--task", shelf.data / "photos")
    quick = ("--shots", 3, "--epochs", 2, "--batch-size", 3, "--lr", 0.5, "--factors")
    planned = aniso("fit", "few-shot", *given, *quick, "--plan", "-o", tmp_path / "run")
    assert planned.code == 0 and "adapter" in planned.out, planned.err
    ran = aniso("fit", "few-shot", *given, *quick, "-o", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["metrics"]["accuracy"]["photos"]
    assert not (tmp_path / "run" / "coefficients.safetensors").exists()
    written = ("bank", "build", "--base", shelf.model, f"one={tmp_path / 'run' / 'adapter'}")
    assert aniso(*written, "-o", tmp_path / "one").code == 0
    whole = ("--bank", tmp_path / "one", "--vector", "one", "--task", shelf.data / "photos", "--json")
    again = aniso("eval", shelf.model, *whole)
    assert again.code == 0, again.err
    (score,) = json.loads(again.out)
    assert score["correct"] == found["correct"], again.out


def test_random_parts_of_a_and_b_have_coefficients_of_their_own(home: Path) -> None:
    """Against masks of A and B, found one coefficient at a time; any rank of composition stays an adapter."""
    bank, model = bank_of(home, "a", "b"), tiny.hf_clip().eval()
    made = FactorComposition.of(model, bank, Partition.random(3, seed=4))
    whole = FactorComposition.of(model, bank)
    values = made.composition.values
    assert values.numel() == 3 * whole.composition.values.numel()
    with torch.no_grad():
        start = {name: t.clone() for name, t in made.composition.weights().items()}
        for name, tensor in whole.composition.weights().items():  # the same start
            torch.testing.assert_close(start[name], tensor, rtol=1e-6, atol=1e-7)
        vectors = {n: made.composition.bank[n] for n in "ab"}
        factors = {n: {b.name: v[b.name].dense() for b in v.blocks} for n, v in vectors.items()}
        masks = dict.fromkeys(factors["a"], 0)
        for i in range(values.numel()):
            values.zero_()
            values[i] = 1.0
            moved = {n: t for n, t in made.composition.weights().items() if bool(t.any())}
            assert len(moved) <= 1
            for name, tensor in moved.items():
                (vector,) = [n for n in "ab" if bool(((tensor == 0) | (tensor == factors[n][name])).all())]
                masks[name] = masks[name] + (tensor == factors[vector][name]).int()
        assert all(bool((mask == 2).all()) for mask in masks.values())  # once for each vector
        values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(3)))
    given = {"pixel_values": pictures(), "input_ids": torch.arange(4)[None]}
    one = Bank.build(home / "base", {"one": _saved(made, home / "one-random")})
    again = Composition(model, one, Partition.whole())
    with torch.no_grad():
        again.values.fill_(1.0)
        expected = made.composition(**given).image_embeds
        torch.testing.assert_close(again(**given).image_embeds, expected, rtol=1e-4, atol=1e-5)


def _saved(made: FactorComposition, directory: Path) -> Path:
    made.adapter().save(directory)
    return directory


@pytest.mark.parametrize(
    "more",
    [
        ("--partition", "random:3"),
        ("--head", "lpp"),
        ("--head", "tip", "--joint"),
        ("--partition", "random:2", "--head", "tip"),
    ],
)
def test_factors_go_with_random_parts_and_heads(tmp_path: Path, aniso: Any, more: tuple[str, ...]) -> None:
    shelf = runs.shelf(tmp_path / "shelf")
    for i, name in enumerate(("cars", "dtd")):
        random_adapter(CLIPModel.from_pretrained(shelf.model), tmp_path / name, seed=i, **SAME)
    Bank.build(shelf.model, {n: tmp_path / n for n in ("cars", "dtd")}, to=tmp_path / "loras")
    given = ("--model", shelf.model, "--bank", tmp_path / "loras", "--task", shelf.data / "photos")
    quick = ("--shots", 3, "--epochs", 1, "--batch-size", 3, "--lr", 0.5, "--factors")
    ran = aniso("fit", "few-shot", *given, *quick, *more, "-o", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    assert (tmp_path / "run" / "adapter").exists()
    assert (tmp_path / "run" / "head.safetensors").exists() is ("--head" in more)


@pytest.mark.parametrize("more", [("--partition", "whole"), ("--method", "none")])
def test_factors_have_coefficients_of_their_own(tmp_path: Path, aniso: Any, more: tuple[str, str]) -> None:
    ran = aniso("fit", "few-shot", "--model", "m", "--bank", "b", "--task", "t", "--factors", *more)
    assert ran.code == 2 and "factors" in ran.err


def test_what_cannot_be_written_is_refused_before_anything_is_learned(home: Path, refused) -> None:
    pytest.importorskip("open_clip")
    state = renamed(TensorMap(tiny.hf_clip().state_dict()), "open_clip").tensors
    model = tiny.open_clip_vit()
    model.load_state_dict({key: read() for key, read in state.items()}, strict=False)
    with refused("LORA-KIND", 3, "in_proj_weight"):  # PEFT has no name for a third of it
        FactorComposition.of(model, Bank.build(TensorMap(model.state_dict()), {"a": home / "a"}))


def test_an_adapter_without_a_block_has_no_coefficient_there(home: Path, tmp_path: Path) -> None:
    random_adapter(
        tiny.hf_clip(), tmp_path / "few", seed=8, **{**SAME, "target_modules": r"vision_model.*fc1"}
    )
    bank = Bank.build(home / "base", {"a": home / "a", "few": tmp_path / "few"})
    composition = FactorComposition.of(tiny.hf_clip(), bank).composition
    counts = {slot.block.name: len(slot.vectors) for slot in composition.index.blocks}
    assert set(counts.values()) == {1, 2}
    for slot in composition.index.blocks:
        if slot.block.name.startswith("A/"):
            own = composition.values[slot.start : slot.start + slot.size]
            assert torch.equal(own, torch.full_like(own, 1 / len(slot.vectors)))
