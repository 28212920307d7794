"""Compositions of adapters written as one adapter, run by PEFT, against the composition itself."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from adapters import language_models, random_adapter
from torch import nn

from aniso.compose import Coefficients, Composition, Partition, merge_adapters
from aniso.compose.lora.merged_adapter import _CONV1D_LAYERS, _CONV1D_MODELS
from aniso.vectors import Bank, LowRank
from aniso.weights import SafetensorsFile
from aniso.weights.files import RawFile

peft = pytest.importorskip("peft")

VISION = r"vision_model.*\.(q_proj|v_proj|fc1|fc2|out_proj)"
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": dict(r=2, lora_alpha=8, target_modules=VISION),
    "two": dict(r=4, lora_alpha=2, use_rslora=True, target_modules=r"vision_model.*\.(q_proj|k_proj|fc1)"),
    "three": dict(r=3, lora_alpha=3, rank_pattern={"fc1": 5}, target_modules=r"vision_model.*\.(v_proj|fc1)"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP, and three adapters of different ranks, scales and targets."""
    root = tmp_path_factory.mktemp("adapters")
    tiny.hf_clip().save_pretrained(root / "base")
    for i, (name, config) in enumerate(ADAPTERS.items()):
        random_adapter(tiny.hf_clip(), root / name, seed=i, **config)
    return root


def bank_of(home: Path) -> Bank:
    return Bank.build(home / "base", {name: home / name for name in ADAPTERS})


def drawn(bank: Bank, partition: Partition) -> Coefficients:
    """Of both signs."""
    zero = Coefficients.zeros(bank, partition)
    values = torch.randn(len(zero), generator=torch.Generator().manual_seed(0))
    assert bool((values < 0).any()) and bool((values > 0).any())
    return Coefficients(zero.index, values, zero.provenance)


def features(model: nn.Module) -> torch.Tensor:
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    size = model.config.vision_config.image_size  # type: ignore[union-attr]
    pictures = nn.functional.interpolate(pictures, size)
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pictures)  # type: ignore[operator]
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def loaded(home: Path, adapter: Path) -> nn.Module:
    return peft.PeftModel.from_pretrained(tiny.hf_clip(), adapter).eval()


@pytest.mark.parametrize(
    "partition", [Partition.blocks(), Partition.whole(), Partition.rows(), Partition.columns()], ids=str
)
def test_peft_gives_what_the_composition_gives(home: Path, tmp_path: Path, partition: Partition) -> None:
    bank = bank_of(home)
    coefficients = drawn(bank, partition)
    made = merge_adapters(home / "base", bank, coefficients)
    made.save(tmp_path / "one")
    model = tiny.hf_clip().eval()
    with Composition.of(model, bank, coefficients).composed() as composed:
        expected = features(composed)
    found = features(loaded(home, tmp_path / "one"))
    assert float((expected - features(model)).abs().max()) > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert made.error == 0 and set(made.ranks.values()) > {2, 4}


def test_memory_is_planned_for_what_adapters_take(home: Path, tmp_path: Path) -> None:
    view = bank_of(home)
    stored = view.save(tmp_path / "bank")
    for block in view.layout.blocks:
        assert view.block_bytes(block.name) == pytest.approx(stored.block_bytes(block.name), abs=64)


def test_what_is_written_is_read_back_as_the_same_vector(home: Path, tmp_path: Path) -> None:
    bank = bank_of(home)
    coefficients = drawn(bank, Partition.blocks())
    merge_adapters(home / "base", bank, coefficients).save(tmp_path / "one")
    again = Bank.build(home / "base", {"one": tmp_path / "one"})["one"]
    for slot, values in zip(
        coefficients.index.blocks, coefficients.index.divided(coefficients.values), strict=True
    ):
        deltas = bank.read_block(slot.block.name)
        expected = sum(float(x) * deltas[v].dense() for v, x in zip(slot.vectors, values[:, 0], strict=True))
        torch.testing.assert_close(again[slot.block.name].dense(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 100])
def test_fewer_ranks_are_the_best_there_are_and_what_they_miss_is_said(
    home: Path, tmp_path: Path, rank: int
) -> None:
    bank = bank_of(home)
    coefficients = drawn(bank, Partition.blocks())
    whole = merge_adapters(home / "base", bank, coefficients)
    small = merge_adapters(home / "base", bank, coefficients, rank=rank)
    lost = total = 0.0
    for module, update in whole.updates.items():
        product = update.b @ update.a
        values = torch.linalg.svdvals(product)
        best = float(values[rank:].square().sum())
        own = float((product - small.updates[module].b @ small.updates[module].a).square().sum())
        assert own == pytest.approx(best, rel=1e-3, abs=1e-9)
        lost, total = lost + best, total + float(values.square().sum())
        assert small.ranks[module] <= rank
    assert small.error == pytest.approx((lost / total) ** 0.5, rel=1e-3, abs=1e-6)
    small.save(tmp_path / "small")
    assert features(loaded(home, tmp_path / "small")).isfinite().all()


def test_dense_vectors_and_random_parts_need_a_rank(home: Path, tmp_path: Path, refused) -> None:
    torch.manual_seed(3)
    tuned = tiny.hf_clip()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if name.startswith("vision_model") and name.endswith("fc1.weight"):
                parameter.add_(0.05 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "tuned")
    bank = Bank.build(home / "base", {"one": home / "one", "dense": tmp_path / "tuned"})
    coefficients = drawn(bank, Partition.blocks())
    with refused("LORA-KIND", 3, "dense", "--rank"):
        merge_adapters(home / "base", bank, coefficients)
    made = merge_adapters(home / "base", bank, coefficients, rank=64)
    made.save(tmp_path / "one")
    model = tiny.hf_clip().eval()
    with Composition.of(model, bank, coefficients).composed() as composed:
        torch.testing.assert_close(
            features(loaded(home, tmp_path / "one")), features(composed), rtol=1e-4, atol=1e-4
        )
    scattered = drawn(bank_of(home), Partition.random(3, 0))
    with refused("LORA-KIND", 3, "3 parts"):
        merge_adapters(home / "base", bank_of(home), scattered)


def test_biases_norms_and_fused_attention_are_refused_by_name(home: Path, tmp_path: Path, refused) -> None:
    random_adapter(
        tiny.hf_clip(), tmp_path / "saved", r=2, modules_to_save=["post_layernorm"], target_modules=VISION
    )
    bank = Bank.build(home / "base", {"saved": tmp_path / "saved"})
    with refused("LORA-KIND", 3, "post_layernorm"):
        merge_adapters(home / "base", bank, drawn(bank, Partition.blocks()), rank=4)
    matrices = drawn(bank, Partition.parse("blocks@weight"))
    assert merge_adapters(home / "base", bank, matrices).ranks


def test_nothing_is_written_for_coefficients_that_are_all_zero(home: Path, refused) -> None:
    bank = bank_of(home)
    with refused("COEF-VALUES", 3, "zero"):
        merge_adapters(home / "base", bank, Coefficients.zeros(bank))


@pytest.mark.parametrize("family", ["gpt2", "gpt", "llama", "t5"])
def test_language_models_get_one_adapter_of_several(family: str, tmp_path: Path) -> None:
    make, config = language_models()[family]
    if family == "gpt2":
        config = {**config, "target_modules": ["c_attn", "c_proj", "c_fc"]}  # no embedding: no linear layer
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path / "base")
    fresh = lambda: type(model).from_pretrained(tmp_path / "base").eval()  # noqa: E731
    for i, rank in enumerate((2, 5)):
        random_adapter(fresh(), tmp_path / f"a{i}", seed=i, r=rank, lora_alpha=4, **config)
    bank = Bank.build(tmp_path / "base", {"a0": tmp_path / "a0", "a1": tmp_path / "a1"})
    coefficients = drawn(bank, Partition.blocks())
    merge_adapters(tmp_path / "base", bank, coefficients).save(tmp_path / "one")
    given: dict[str, Any] = {"input_ids": torch.arange(8)[None]}
    if family == "t5":
        given["decoder_input_ids"] = torch.arange(3)[None]
    with torch.no_grad():
        expected = Composition.of(fresh(), bank, coefficients)(**given).logits
        found = peft.PeftModel.from_pretrained(fresh(), tmp_path / "one").eval()(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "one" / "adapter_config.json").read_text())["fan_in_fan_out"] == (
        family in ("gpt2", "gpt")
    )


def test_every_architecture_whose_layers_keep_inputs_first_is_known() -> None:
    """No file says it, so the list has to be right: it is compared with the installed transformers."""
    models = Path(str(importlib.util.find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
    found = {path: path.read_text() for path in models.glob("*/modeling_*.py")}
    using = [text for text in found.values() if re.search(r"= Conv1D\(", text)]
    assert len(using) > 3
    for text in using:
        architectures = re.findall(r"^class (\w+)\(\w*PreTrainedModel\)", text, re.M)
        assert architectures and all(a.lower().startswith(_CONV1D_MODELS) for a in architectures)
        assert set(re.findall(r"self\.(\w+) = Conv1D\(", text)) <= set(_CONV1D_LAYERS)


def test_an_output_layer_keeps_outputs_first_and_its_update_low_rank(tmp_path: Path) -> None:
    """PEFT saves the layer itself, too; it has not changed."""
    make, config = language_models()["gpt2"]
    torch.manual_seed(0)
    model = make().eval()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
    model.save_pretrained(tmp_path / "base")
    fresh = lambda: type(model).from_pretrained(tmp_path / "base").eval()  # noqa: E731
    config = {**config, "target_modules": ["c_attn", "lm_head"]}
    random_adapter(fresh(), tmp_path / "a", r=2, lora_alpha=4, **config)
    saved = SafetensorsFile(RawFile(tmp_path / "a" / "adapter_model.safetensors"))
    assert any("lm_head" in key and "lora_" not in key for key in saved.tensors)
    bank = Bank.build(tmp_path / "base", {"a": tmp_path / "a"})
    assert isinstance(bank["a"]["lm_head.weight"], LowRank)
    coefficients = drawn(bank, Partition.blocks())
    merge_adapters(tmp_path / "base", bank, coefficients).save(tmp_path / "one")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = Composition.of(fresh(), bank, coefficients)(tokens).logits
        found = peft.PeftModel.from_pretrained(fresh(), tmp_path / "one").eval()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Nested(nn.Module):
    """The name of one layer is the end of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.inner = nn.ModuleDict({"proj": nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.inner["proj"](x))


def test_ranks_belong_to_layers_whose_names_end_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Nested()
    state = model.state_dict()
    one = naive.low_rank(state, {"proj.weight": 2, "inner.proj.weight": 2}, name="one")
    two = naive.low_rank(state, {"inner.proj.weight": 3}, name="two", seed=1)
    bank = Bank.build(state, {"one": one, "two": two})
    coefficients = drawn(bank, Partition.blocks())
    made = merge_adapters(state, bank, coefficients)
    made.save(tmp_path / "adapter")
    x = torch.randn(2, 6)
    found = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")(x)
    torch.testing.assert_close(found, Composition.of(model, bank, coefficients)(x), rtol=1e-5, atol=1e-5)
    assert Bank.build(state, {"again": tmp_path / "adapter"})["again"].blocks


@pytest.mark.parametrize(
    ("partition", "shape"), [(Partition.random(1000, 0), (5, 6)), (Partition.rows(), (5, 1))], ids=str
)
def test_parts_of_one_element_each_are_no_columns(
    partition: Partition, shape: tuple[int, int], refused
) -> None:
    torch.manual_seed(0)
    state = {"layer.weight": torch.randn(shape)}
    bank = Bank.build(state, {"one": naive.low_rank(state, {"layer.weight": 1}, name="one")})
    coefficients = drawn(bank, partition)
    with refused("LORA-KIND", 3, "parts are no product"):
        merge_adapters(state, bank, coefficients)
    (made,) = merge_adapters(state, bank, coefficients, rank=5).updates.values()
    own = coefficients.values[coefficients.index.blocks[0].partition.part_of()].view(shape)
    expected = own * bank["one"]["layer.weight"].dense()
    torch.testing.assert_close(made.b @ made.a, expected, rtol=1e-4, atol=1e-6)


def test_the_command_writes_it_and_says_what_is_lost(home: Path, tmp_path: Path, aniso) -> None:
    bank = bank_of(home).save(tmp_path / "bank")
    drawn(bank, Partition.blocks()).save(tmp_path / "c.safetensors")
    given = (
        "bake",
        tmp_path / "c.safetensors",
        "--bank",
        tmp_path / "bank",
        "--base",
        home / "base",
        "--to",
        "peft",
    )
    ran = aniso(*given, "-o", tmp_path / "whole")
    assert ran.code == 0, ran.err
    assert "exact" in ran.out
    small = aniso(*given, "-o", tmp_path / "small", "--rank", 2, "--json")
    found = json.loads(small.out)
    assert found["error"] > 0 and set(found["ranks"].values()) == {2}
    again = aniso(*given, "-o", tmp_path / "small", "--rank", 2)
    assert again.code == 2 and "--overwrite" in again.err
    assert aniso(*given, "-o", tmp_path / "none", "--rank", 0).code == 2
    assert aniso(*given[:-1], "safetensors", "-o", tmp_path / "none", "--rank", 2).code == 2
    assert aniso(*given, "-o", tmp_path / "none", "--dtype", "fp16").code == 2
    assert not (tmp_path / "none").exists()
