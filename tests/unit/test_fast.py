"""Compiled loops against sums in double precision, for more vectors than are worked on together."""

import pytest
import torch

from aniso.compose._kernels import dispatch
from aniso.vectors import Packing
from aniso.vectors.packing import GROUP

pytest.importorskip("numba")

ELEMENTS = 40_000 + 7  # more than a piece, and a last group that is not full
FORMS = (torch.float32, torch.float16, torch.bfloat16, 8, 4, 2)


def stored_numbers(form, rows, generator):
    """What is stored, its packing and scales, and the numbers it stands for."""
    if not isinstance(form, int):
        values = torch.randn(rows, ELEMENTS, generator=generator).to(form)
        return (values, None, None), values.double()
    packing = Packing(form)
    groups = packing.groups(ELEMENTS)
    codes = torch.randint(
        0, 256, (rows, packing.code_bytes(ELEMENTS)), dtype=torch.uint8, generator=generator
    )
    scales = torch.rand(rows, groups, generator=generator).to(torch.bfloat16)
    shifts = torch.arange(0, 8, form, dtype=torch.uint8)
    numbers = ((codes.unsqueeze(-1) >> shifts) & (2**form - 1)).double() - packing.middle
    scaled = numbers.view(rows, groups, GROUP) * scales.double().unsqueeze(-1)
    return (codes, packing, scales), scaled.flatten(1)[:, :ELEMENTS]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 6, 7, 13, 21])
@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
def test_sums_and_products_are_those_of_double_precision(form, rows, in_place):
    g = torch.Generator().manual_seed(rows)
    (stored, packing, scales), exact = stored_numbers(form, rows, g)
    base, gradient = torch.randn(2, ELEMENTS, generator=g)
    coefficients = torch.randn(rows, generator=g)

    out = base.clone() if in_place else torch.empty_like(base)
    dispatch.add(out, out if in_place else base, stored, coefficients, packing, scales)
    expected = base.double() + coefficients.double() @ exact
    assert (out - expected).abs().max() < 1e-6 * expected.abs().max()

    if not in_place:
        dispatch.add(out.fill_(7), None, stored, coefficients, packing, scales)
        assert (out - (expected - base.double())).abs().max() < 1e-6 * expected.abs().max()
        dispatch.add(out, base, stored, coefficients, packing, scales)

    found = dispatch.dots(stored, gradient, packing, scales)[:, 0]
    products = exact @ gradient.double()
    size = exact.norm(dim=1) * gradient.double().norm()
    assert ((found - products).abs() <= 1e-7 * size).all()

    again = base.clone() if in_place else torch.empty_like(base)
    at_once = dispatch.add_and_dots(
        again, again if in_place else base, stored, coefficients, gradient, packing, scales
    )
    assert torch.equal(again, out) and torch.equal(at_once[:, 0], found)


@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
def test_a_sum_rounds_against_the_base_once(in_place):
    """The base is far larger than what is added, and would swallow it six vectors at a time."""
    g = torch.Generator().manual_seed(0)
    stored = torch.randn(21, ELEMENTS, generator=g) * 1e-3
    base = torch.randn(ELEMENTS, generator=g) * 1e3
    ones = torch.ones(21)
    out = base.clone() if in_place else torch.empty_like(base)
    dispatch.add(out, out if in_place else base, stored, ones)
    once = base + (stored.double().sum(0)).float()
    assert (out != once).double().mean() < 1e-3  # only where the sum itself was about to round otherwise
