"""Composed adapters loaded by PEFT's automatic classes, and swapped while a model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import language
import pytest
import tiny
import torch
from adapters import random_adapter

from aniso import Bank, Composition
from aniso.compose import Coefficients, Partition, merge_adapters
from aniso.compose.lora.adapter_base import task_type

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "t5": ["q", "v"]}
TYPES = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}


def given(family: str) -> dict[str, Any]:
    more = {"decoder_input_ids": torch.arange(3)[None]} if family == "t5" else {}
    return {"input_ids": torch.arange(8)[None], **more}


def bank_of(family: str, root: Path, *ranks: int) -> Bank:
    network = language.save(family, root / "base")
    for seed, rank in enumerate(ranks):
        random_adapter(
            type(network).from_pretrained(root / "base"),
            root / f"a{seed}",
            seed,
            r=rank,
            target_modules=TARGETS[family],
            fan_in_fan_out=family == "gpt2",
        )
    return Bank.build(root / "base", {f"a{seed}": root / f"a{seed}" for seed in range(len(ranks))})


def drawn(bank: Bank, seed: int = 0) -> Coefficients:
    zero = Coefficients.zeros(bank, Partition.blocks())
    values = torch.randn(len(zero), generator=torch.Generator().manual_seed(seed))
    return Coefficients(zero.index, values, zero.provenance)


@pytest.mark.parametrize("family", list(TARGETS))
def test_the_automatic_class_of_the_task_loads_a_composed_adapter(family: str, tmp_path: Path) -> None:
    bank = bank_of(family, tmp_path, 2, 3)
    coefficients = drawn(bank)
    merge_adapters(tmp_path / "base", bank, coefficients).save(tmp_path / "one")
    stored = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert (stored["task_type"], stored["base_model_name_or_path"]) == (TYPES[family], str(tmp_path / "base"))
    kind = peft.AutoPeftModelForSeq2SeqLM if family == "t5" else peft.AutoPeftModelForCausalLM
    found = kind.from_pretrained(tmp_path / "one").eval()
    whole = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    base = whole.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        expected = Composition.of(base, bank, coefficients)(**given(family)).logits
        torch.testing.assert_close(found(**given(family)).logits, expected, rtol=1e-5, atol=1e-5)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "one")


def test_a_clip_without_a_task_type_is_loaded_by_its_class(tmp_path: Path) -> None:
    tiny.hf_clip_directory(tmp_path / "base")
    fresh = transformers.CLIPModel.from_pretrained(tmp_path / "base")
    random_adapter(fresh, tmp_path / "a", r=2, target_modules=r"vision_model.*\.(q_proj|fc1)")
    bank = Bank.build(tmp_path / "base", {"a": tmp_path / "a"})
    coefficients = drawn(bank)
    merge_adapters(tmp_path / "base", bank, coefficients).save(tmp_path / "one")
    found = peft.AutoPeftModel.from_pretrained(tmp_path / "one").eval()
    base = transformers.CLIPModel.from_pretrained(tmp_path / "base").eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Composition.of(base, bank, coefficients).composed() as whole:
        expected = whole.get_image_features(pixel_values=images).pooler_output
        logits = found.get_image_features(pixel_values=images).pooler_output
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_padded_adapters_are_swapped_while_the_model_stays(tmp_path: Path) -> None:
    from peft.utils.hotswap import hotswap_adapter

    bank = bank_of("gpt2", tmp_path, 2, 3)
    both, one = drawn(bank, 1), drawn(bank.only("a1"), 2)
    for name, coefficients in (("both", both), ("one", one)):
        made = merge_adapters(tmp_path / "base", bank, coefficients)
        made.padded(8).save(tmp_path / name)
        stored = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (stored["r"], stored["lora_alpha"], stored["rank_pattern"]) == (8, 8, {})
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "both").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        expected = Composition.of(base, bank, both)(**given("gpt2")).logits
        torch.testing.assert_close(model(**given("gpt2")).logits, expected, rtol=1e-5, atol=1e-5)
        hotswap_adapter(model, str(tmp_path / "one"), adapter_name="default")
        expected = Composition.of(base, bank.only("a1"), one)(**given("gpt2")).logits
        torch.testing.assert_close(model(**given("gpt2")).logits, expected, rtol=1e-5, atol=1e-5)


def test_padding_below_the_rank_is_refused(tmp_path: Path, refused) -> None:
    bank = bank_of("gpt2", tmp_path, 2, 3)
    made = merge_adapters(tmp_path / "base", bank, drawn(bank))
    with refused("USAGE", 2, "rank 5", "--pad-rank 5"):
        made.padded(4)


def test_task_types_are_those_that_peft_knows() -> None:
    known = {kind.value for kind in peft.TaskType}
    names = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration",
             "BertForSequenceClassification",
             "BertForTokenClassification", "BertForQuestionAnswering")  # fmt: skip
    assert {task_type(name) for name in names} <= known
    assert task_type("CLIPModel") is None and task_type(None) is None
