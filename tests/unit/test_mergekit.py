"""mergekit's weights as coefficients and back: closed forms for numbers, gradients, filters and methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aniso.compose import Coefficients, Partition
from aniso.experiments.mergekit import export_mergekit, import_mergekit
from aniso.vectors import Bank

LAYERS = 3


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """A language model's names, three layers, two tuned models."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for i in range(LAYERS):
        names += [f"model.layers.{i}.self_attn.q_proj.weight", f"model.layers.{i}.mlp.up_proj.weight"]
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(4, 4, generator=generator) for name in names}
    tuned = {
        n: {k: v + 0.01 * torch.randn(4, 4, generator=generator) for k, v in base.items()}
        for n in ("code", "math")
    }
    return Bank.build(base, tuned, to=tmp_path_factory.mktemp("bank") / "bank")


def coefficients(bank: Bank, tmp_path: Path, text: str, **names: str) -> Coefficients:
    (tmp_path / "merge.yaml").write_text(text)
    return import_mergekit(tmp_path / "merge.yaml", bank, names).coefficients


HEAD = "merge_method: task_arithmetic\nbase_model: org/base\nmodels:\n"


def one(weight: str, more: str = "") -> str:
    return f"{HEAD}  - model: org/code\n    parameters: {{weight: {weight}}}\n{more}"


def of(made: Coefficients, block: str) -> float:
    return float(made.of("code", block))


def test_numbers_are_one_coefficient_per_vector(bank, tmp_path):
    made = coefficients(bank, tmp_path, one("0.4", "  - model: org/math\n    parameters: {weight: -1}\n"))
    assert made.partition == Partition.whole() and made.vectors == ("code", "math")
    assert made.values.tolist() == pytest.approx([0.4, -1.0])


def test_a_gradient_is_interpolated_over_layers_and_ends_at_the_ends(bank, tmp_path):
    made = coefficients(bank, tmp_path, one("[0, 1]"))
    found = [of(made, f"model.layers.{i}.mlp.up_proj.weight") for i in range(LAYERS)]
    assert found == pytest.approx([0, 0.5, 1])
    assert of(made, "model.embed_tokens.weight") == 0
    assert of(made, "model.norm.weight") == of(made, "lm_head.weight") == 1


def test_the_first_filter_that_is_contained_in_a_name_counts(bank, tmp_path):
    weight = "[{filter: self_attn, value: [1, 3]}, {filter: model.layers.1, value: 7}, {value: 0.5}]"
    made = coefficients(bank, tmp_path, one(weight))
    assert of(made, "model.layers.1.self_attn.q_proj.weight") == 2
    assert of(made, "model.layers.1.mlp.up_proj.weight") == 7
    assert of(made, "model.layers.0.mlp.up_proj.weight") == of(made, "lm_head.weight") == 0.5


def test_what_no_filter_covers_has_the_weight_of_all_models_or_is_an_error(bank, tmp_path, refused):
    weight = "[{filter: self_attn, value: 1}]"
    made = coefficients(bank, tmp_path, one(weight, "parameters: {weight: 0.1}\n"))
    assert of(made, "lm_head.weight") == pytest.approx(0.1)
    with refused("MERGEKIT", 3, "org/code", "has no weight"):
        coefficients(bank, tmp_path, one(weight))


def test_a_linear_merge_is_an_average_of_which_the_base_is_a_part(bank, tmp_path):
    text = """
merge_method: linear
base_model: org/base
models:
  - {model: org/base, parameters: {weight: 2}}
  - {model: org/code, parameters: {weight: 1}}
  - {model: org/math, parameters: {weight: 1}}
"""
    assert coefficients(bank, tmp_path, text).values.tolist() == pytest.approx([0.25, 0.25])


def test_a_linear_merge_that_scales_the_base_is_refused(bank, tmp_path, refused):
    text = "merge_method: linear\nmodels:\n  - {model: code, parameters: {weight: 0.4}}\n"
    assert coefficients(bank, tmp_path, text).values.tolist() == pytest.approx([1.0])
    with refused("MERGEKIT", 3, "sum to 0.4"):
        coefficients(bank, tmp_path, text + "parameters: {normalize: false}\n")


def test_normalised_and_scaled_task_arithmetic(bank, tmp_path):
    text = one("1", "  - {model: math, parameters: {weight: 3}}\nparameters: {normalize: true, lambda: 2}\n")
    assert coefficients(bank, tmp_path, text).values.tolist() == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize(
    "key",
    [
        "slices:\n  - sources: []\n",
        "modules: {a: {}}\n",
        "tokenizer: {source: union}\n",
        "tokenizer_source: union\n",
    ],
)
def test_what_coefficients_cannot_express_is_refused_by_name_and_line(bank, tmp_path, refused, key):
    with refused("SPEC", 2, f"'{key.split(':')[0]}' is not supported", "line"):
        coefficients(bank, tmp_path, one("1") + key)


@pytest.mark.parametrize("method", ["ties", "dare_ties", "slerp", "passthrough"])
def test_other_methods_are_refused_by_name(bank, tmp_path, refused, method):
    with refused("SPEC", 2, method, "task_arithmetic"):
        coefficients(bank, tmp_path, one("1").replace("task_arithmetic", method))


@pytest.mark.parametrize("more", ["desity: 0.5\n", "parameters: {density: 0.5}\n"])
def test_unknown_keys_are_refused(bank, tmp_path, refused, more):
    with refused("SPEC", 2, "desity" if "desity" in more else "density"):
        coefficients(bank, tmp_path, one("1") + more)


def test_models_are_found_by_name_or_as_told(bank, tmp_path, refused):
    text = one("0.4").replace("org/code", "./merged/best-7B")
    with refused("BANK-NAME", 3, "best-7B", "--vector"):
        coefficients(bank, tmp_path, text)
    made = coefficients(bank, tmp_path, text, **{"./merged/best-7B": "math"})
    assert made.vectors == ("math",)
    adapter = coefficients(bank, tmp_path, one("0.4").replace("org/code", "org/base+loras/code"))
    assert adapter.vectors == ("code",)


def test_a_data_type_is_noted(bank, tmp_path):
    (tmp_path / "merge.yaml").write_text(one("1", "dtype: bfloat16\ntokenizer_source: base\n"))
    notes = import_mergekit(tmp_path / "merge.yaml", bank).notes
    assert [note.split()[0] for note in notes] == ["dtype", "tokenizer_source"]


# back


def returned(bank: Bank, tmp_path: Path, made: Coefficients) -> Coefficients:
    return coefficients(bank, tmp_path, export_mergekit(made, {"code": "org/code"}, "org/base"))


def test_numbers_stay_numbers_and_name_the_models(bank, tmp_path):
    made = coefficients(bank, tmp_path, one("0.4"))
    text = export_mergekit(made, {"code": "org/code"}, "org/base")
    assert "weight: 0.4" in text and "model: org/code" in text and "base_model: org/base" in text
    assert torch.equal(returned(bank, tmp_path, made).values, made.values)


def test_a_gradient_stays_a_gradient(bank, tmp_path):
    made = coefficients(bank, tmp_path, one("[0.5, 0.25, 2]"))
    assert "filter" not in export_mergekit(made, {})
    assert torch.equal(returned(bank, tmp_path, made).values, made.values)


def test_any_coefficients_by_block_come_back(bank, tmp_path):
    zeros = Coefficients.zeros(bank)
    values = torch.randn(len(zeros), generator=torch.Generator().manual_seed(1))
    made = Coefficients(zeros.index, values, zeros.provenance)
    again = returned(bank, tmp_path, made)
    assert again.vectors == made.vectors and torch.allclose(again.values, values, atol=1e-6)


def test_what_mergekit_cannot_say_is_refused(bank, refused):
    with refused("PARTITION", 2, "random"):
        export_mergekit(Coefficients.zeros(bank, Partition.random(3, seed=0)), {})
