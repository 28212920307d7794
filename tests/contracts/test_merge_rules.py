"""What holds for every registered merge rule, whoever adds it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import merges
import pytest
import torch

from aniso.errors import UsageError
from aniso.merge import MergeRule, merge, new_merge_rule, parsed_options, plan_merge
from aniso.registry import MERGE_RULES

SHAPES = {"fc.weight": (40, 48), "fc.bias": (40,), "conv.weight": (4, 3, 2, 2), "gate": ()}


def test_every_rule_has_its_name() -> None:
    assert set(MERGE_RULES.names) == {
        *("mean", "task-arithmetic", "ties", "dare", "tsv", "iso-c", "iso-cts", "cart", "aswudi", "swudi")
    }


def test_names_and_summaries_need_no_torch() -> None:
    code = (
        "import sys; from aniso.registry import MERGE_RULES; "
        "assert all(len(MERGE_RULES.summary(n)) > 20 for n in MERGE_RULES.names); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", MERGE_RULES.names)
def test_every_rule_is_a_frozen_value_whose_fields_are_options_with_defaults(name: str) -> None:
    rule = new_merge_rule(name)
    assert isinstance(rule, MergeRule) and rule.kind == name and rule == new_merge_rule(name)
    assert MERGE_RULES.summary(name).endswith(".")
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(rule))
    text = [f"{key}={value}" for key, value in rule.options().items()]
    assert new_merge_rule(name, parsed_options(name, text)) == rule
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.scale = 2.0  # type: ignore[misc]
    with pytest.raises(UsageError, match=r"no option 'x'"):
        parsed_options(name, ["x=1"])


@pytest.mark.parametrize("name", MERGE_RULES.names)
def test_every_rule_gives_finite_blocks_of_every_shape_and_the_same_again(name: str) -> None:
    bank = merges.random_bank(SHAPES, ("a", "b", "c"))
    rule = new_merge_rule(name)
    one, two = merge(bank, rule), merge(bank, rule)
    assert {block.name for block in one.blocks} <= set(SHAPES)
    for block in one.blocks:
        values = one[block.name].dense()
        assert values.shape == SHAPES[block.name] and bool(values.isfinite().all())
        assert torch.equal(values, two[block.name].dense())


@pytest.mark.parametrize("name", MERGE_RULES.names)
def test_every_rule_has_a_plan(name: str) -> None:
    plan = plan_merge(merges.random_bank(SHAPES, ("a", "b", "c")), new_merge_rule(name))
    assert plan.largest == "fc.weight" and plan.memory_bytes >= 8 * 40 * 48
    assert (plan.blocks, plan.matrices) == (4, 1)
    assert plan.read_bytes % plan.written_bytes == 0
