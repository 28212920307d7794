"""Deltas: closed forms, and the three kinds against each other."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from aniso.vectors.delta import Dense, LowRank, Packed, Term, difference
from aniso.vectors.packing import GROUP, Packing, Storage, pack, unpack

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


def bits(tensor):
    return tensor.view(torch.int32)


@given(arrays("float32", 40, elements=FLOATS), arrays("float32", 40, elements=FLOATS))
@settings(deadline=None, max_examples=200)
def test_a_difference_added_back_is_the_tuned_value_bit_for_bit(base, tuned):
    b, t = torch.from_numpy(base.copy()), torch.from_numpy(tuned.copy())
    delta = difference(b, t.clone())
    assert torch.equal(bits(delta.applied_to(b, 1.0)), bits(t))
    assert torch.equal(bits(delta.applied_to(b, 0.0)), bits(b))


def test_exact_values_are_few_for_differences_of_fine_tuning_size():
    g = torch.Generator().manual_seed(0)
    base = torch.randn(200_000, generator=g) * 0.02
    tuned = base
    for _ in range(10):  # steps of training, each with its own rounding
        tuned = tuned + torch.randn(200_000, generator=g) * 0.00015
    delta = difference(base, tuned.clone())
    assert 0 < delta.exact.index.numel() < 2000


def test_nan_is_not_zero():
    for delta in (
        Dense(torch.tensor([float("nan"), 1.0])),
        LowRank((1, 1), (Term(torch.tensor([[float("nan")]]), torch.ones(1, 1), 1.0),)),
    ):
        assert delta.norm() != delta.norm()
        assert not delta.vanishes(delta.norm())


def low_rank(seed, shape=(12, 10), terms=((0, 12, 3), (4, 4, 2))):
    g = torch.Generator().manual_seed(seed)
    made = (
        Term(torch.randn(rows, r, generator=g), torch.randn(r, shape[1], generator=g), 0.5 * r, start)
        for start, rows, r in terms
    )
    return LowRank(shape, tuple(made))


def test_low_rank_is_the_sum_of_its_terms_in_their_rows():
    delta = low_rank(0)
    expected = torch.zeros(12, 10)
    expected += delta.terms[0].b @ delta.terms[0].a * 1.5
    expected[4:8] += delta.terms[1].b @ delta.terms[1].a * 1.0
    assert torch.allclose(delta.dense(), expected)


@pytest.mark.parametrize("terms", [((0, 12, 3),), ((0, 4, 1), (8, 4, 2)), ((0, 12, 3), (4, 4, 2))])
def test_products_of_factored_deltas_equal_dense_ones(terms):
    x, y = low_rank(1, terms=terms), low_rank(2)
    dense_x, dense_y = Dense(x.dense()), Dense(y.dense())
    expected = float((x.dense().double() * y.dense().double()).sum())
    for a, b in ((x, y), (dense_x, y), (x, dense_y), (dense_x, dense_y)):
        assert a.dot(b) == pytest.approx(expected, rel=1e-5)
    assert x.norm() == pytest.approx(float(x.dense().norm()), rel=1e-5)
    total = x.plus(y)
    assert isinstance(total, LowRank)
    assert torch.allclose(total.dense(), x.dense() + y.dense(), atol=1e-5)
    assert torch.allclose(x.scaled(-2.5).dense(), -2.5 * x.dense(), atol=1e-5)
    assert torch.allclose(x.plus(dense_y).dense(), x.dense() + y.dense(), atol=1e-5)


@pytest.mark.parametrize(("storage", "worst"), [("int8", 0.007), ("int4", 0.12), ("residual2", 0.36)])
@pytest.mark.parametrize("numel", [1, GROUP - 1, GROUP, 1000, 4097])
def test_packing_keeps_normal_numbers_to_the_expected_error(storage, worst, numel):
    packing = Storage(storage).packing
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-4
    codes, scales = pack(x, packing)
    assert codes.numel() == packing.code_bytes(numel)
    assert scales.numel() == packing.groups(numel)
    back = unpack(codes, scales, packing, numel)
    assert back.shape == x.shape
    if numel >= GROUP:
        assert float((back - x).norm() / x.norm()) < worst


def test_packing_by_hand():
    """Steps of 1/7 of the largest number, eight bits of mantissa for the scale."""
    x = torch.tensor([7.0, -7.0, 3.0, 0.0, 0.4, 0.6] + [0.0] * 58)
    codes, scales = pack(x, Packing(4))
    assert scales.tolist() == [1.0]
    assert unpack(codes, scales, Packing(4), 6).tolist() == [7, -7, 3, 0, 0, 1]
    assert codes[0].item() == (7 + 8) | ((-7 + 8) << 4)


def test_a_group_of_zeros_stays_zero_and_a_packed_code_is_never_out_of_range():
    for bits_ in (8, 4, 2):
        codes, scales = pack(torch.zeros(GROUP), Packing(bits_))
        assert unpack(codes, scales, Packing(bits_), GROUP).abs().max() == 0
        x = torch.linspace(-1, 1, GROUP)
        codes, scales = pack(x, Packing(bits_))
        assert unpack(codes, scales, Packing(bits_), GROUP).abs().max() <= 1.01


def test_packed_delta_adds_its_mean_and_scales():
    x = torch.randn(2, GROUP)
    mean = torch.randn(2, GROUP).bfloat16()
    codes, scales = pack(x, Packing(8))
    delta = Packed((2, GROUP), Packing(8), codes, scales, mean)
    assert torch.allclose(delta.dense(), x + mean.float(), atol=0.03)
    assert torch.allclose(delta.scaled(3.0).dense(), 3 * delta.dense())
