"""Numbers that cannot be: coefficients that are NaN, weights that 16 bits cannot hold (D6, D16)."""

from __future__ import annotations

import pytest
import tiny
import torch

from aniso import Bank, Composition
from aniso.weights import TensorMap


def _composition(dtype: torch.dtype = torch.float32) -> Composition:
    model = tiny.open_clip_vit().visual
    base = model.state_dict()
    bank = Bank.build(TensorMap(base), {"cars": TensorMap(tiny.tuned(base))})
    return Composition(model.to(dtype), bank, any_base=True)


def test_a_coefficient_that_is_nan_is_named_and_nothing_is_composed(refused):
    composition = _composition()
    with torch.no_grad():
        composition.values[3] = float("nan")
    with refused("COEF-VALUES", 6, composition.index.blocks[3].block.name, "cars"):
        composition(torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize("value", [1e8, -1e8])
def test_a_coefficient_of_1e8_does_not_make_infinite_half_precision_weights(refused, value):
    composition = _composition(torch.float16)
    with torch.no_grad():
        composition.values.fill_(value)
    with refused("VECTOR-RANGE", 6, "float16"):
        composition.weights()
    with torch.no_grad():
        composition.values.zero_()  # and the composition is as good as before
    expected = tiny.open_clip_vit().visual.half().state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in composition.weights().items())


def test_a_baked_half_precision_checkpoint_is_refused_as_well(refused, tmp_path):
    composition = _composition()
    with torch.no_grad():
        composition.values.fill_(1e8)
    from aniso.compose import Baked

    base = tiny.open_clip_vit().visual.state_dict()
    baked = Baked(base, composition.bank, composition.coefficients, dtype=torch.float16)
    with refused("VECTOR-RANGE", 6, "float16"):
        baked.save(tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())
