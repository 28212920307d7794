"""Linearised models: the derivative is right, also through attention."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from aniso import Bank, Composition, Linearised, Partition
from aniso.weights import TensorMap


def _encoder(name):
    if name == "open_clip":
        return tiny.open_clip_vit().visual.double()
    if name == "resnet":
        return tiny.open_clip_resnet().visual.double()
    return tiny.hf_clip().vision_model.double()


def _bank(encoder) -> Bank:
    base = {k: v.float() if v.is_floating_point() else v for k, v in encoder.state_dict().items()}
    return Bank.build(base, {f"v{i}": TensorMap(tiny.tuned(base, seed=i + 1)) for i in range(2)})


def _features(out):
    return out if isinstance(out, torch.Tensor) else out.pooler_output


def _images(encoder_name, n=2):
    size = 64 if encoder_name == "resnet" else 16
    return torch.randn(n, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _moved(composition, seed=5):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        composition.values.copy_(torch.randn(composition.values.shape, generator=g, dtype=torch.float64))
    return composition


@pytest.mark.parametrize("name", ["open_clip", "hf", "resnet"])
@pytest.mark.parametrize("partition", ["blocks", "whole", "random:3"])
def test_outputs_and_gradients_are_those_of_the_derivative(name, partition):
    encoder, images = _encoder(name), _images(name)
    bank = _bank(encoder)
    composition = _moved(Composition(Linearised(encoder), bank, Partition.parse(partition)))
    y = _features(composition(images))
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    (y * weights).sum().backward()

    values = composition.values.detach().clone().requires_grad_()
    tangents = _tangents(composition, values)
    base = {k: v.detach() for k, v in encoder.named_parameters() if k in tangents}
    tangents = {k: tangents[k] for k in base}
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            primal, tangent = torch.func.jvp(
                lambda p: _features(torch.func.functional_call(encoder, p, (images,))), (base,), (tangents,)
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    expected = primal.detach() + tangent
    (expected * weights).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(composition.values.grad, values.grad, rtol=1e-9, atol=1e-12)


def _tangents(composition, values):
    """The sum of scaled deltas by the model's names, as a Python sum."""
    out = {}
    for slot, own in zip(composition.index.blocks, composition.index.divided(values), strict=True):
        part_of = slot.partition.part_of()
        deltas = [composition.bank[v][slot.block.name].dense().double().reshape(-1) for v in slot.vectors]
        total = sum(row[part_of] * delta for row, delta in zip(own, deltas, strict=True))
        total = total.view(slot.block.shape)
        for part in composition.layout.by_name[slot.block.name].parts:
            rows = total[part.start : part.stop] if total.ndim else total
            out[part.key] = rows.T if part.transposed else rows
    return out


def test_it_is_linear_in_the_coefficients():
    encoder = _encoder("open_clip")
    composition = Composition(Linearised(encoder), _bank(encoder))
    images = _images("open_clip")
    with torch.no_grad():
        zero = composition(images)
        one = _moved(composition, 1)(images) - zero
        other = _moved(composition, 2)(images) - zero
        g1, g2 = (torch.Generator().manual_seed(s) for s in (1, 2))
        shape = composition.values.shape
        both = torch.randn(shape, generator=g1, dtype=torch.float64)
        both += torch.randn(shape, generator=g2, dtype=torch.float64)
        composition.values.copy_(both)
        torch.testing.assert_close(composition(images) - zero, one + other)


def test_zero_is_the_base_up_to_rounding_and_the_model_is_not_changed():
    encoder = _encoder("hf")
    composition = Composition(Linearised(encoder), _bank(encoder))
    images = _images("hf")
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    torch.testing.assert_close(_features(composition(images)), _features(encoder(images)))
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())


def test_a_linearised_model_has_no_weights_to_bake(refused):
    encoder = _encoder("open_clip")
    composition = Composition(Linearised(encoder), _bank(encoder))
    with refused("USAGE", 2, "derivative"):
        composition.bake()
    with refused("USAGE", 2, "derivative"), composition.composed():
        pass
