"""Linear layers that leave out rows without a gradient, against torch's own."""

import naive
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from aniso.compose import Composition
from aniso.compose._layers.cached_linear import CachedLinear, GradientRows
from aniso.vectors import Bank

ROWS = {
    "all": range(9),
    "most": range(8),
    "few": [4],
    "half": range(0, 8, 2),
    "one of two": range(1, 9, 2),
    "none": [],
}


def layer(bias=True):
    g = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*s, generator=g).double() for s in ((9, 6), (5, 6), (9, 5)))
    own = torch.randn(5, generator=g).double().requires_grad_() if bias else None
    return [t.requires_grad_() for t in (x, weight)], own, grad


@pytest.mark.parametrize("which", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_torchs(which, bias):
    (x, weight), own, grad = layer(bias)
    kept = torch.zeros(9, 1, dtype=torch.float64)
    kept[list(ROWS[which])] = 1
    tensors = [x, weight, *([own] if bias else [])]
    y = CachedLinear(lambda: weight)(x, own)
    assert torch.equal(y, F.linear(x, weight, own))
    found = torch.autograd.grad(y, tensors, grad * kept)
    expected = torch.autograd.grad(F.linear(x, weight, own), tensors, grad * kept)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("which", ROWS)
@torch.no_grad()
def test_only_a_minority_is_picked_out(which):
    (x, _), _, grad = layer()
    kept = torch.zeros(9, 1, dtype=torch.float64)
    kept[list(ROWS[which])] = 1
    rows = GradientRows.of(x, grad * kept)
    expected = None if which in ("all", "most") else list(ROWS[which])
    assert (None if rows.chosen is None else rows.chosen.tolist()) == expected


@torch.no_grad()
def test_a_column_of_zeros_is_not_a_row_of_zeros():
    (x, _), _, grad = layer()
    grad[:, 0] = 0
    assert GradientRows.of(x, grad).chosen is None
    grad[3:] = 0
    assert GradientRows.of(x, grad).chosen.tolist() == [0, 1, 2]


@torch.no_grad()
def test_numbers_that_are_none_are_not_lost():
    (x, _), _, grad = layer()
    grad = torch.zeros_like(grad)
    grad[2, 4] = float("nan")
    assert GradientRows.of(x, grad).chosen.tolist() == [2]


@pytest.mark.parametrize("rows", [9, 1])
def test_second_derivatives(rows):
    """Of a penalty on the gradient of the input."""
    (x, weight), own, _ = layer()

    def penalty(run):
        y = run(x)[:rows].square().sum()
        (of_input,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(of_input.square().sum(), [x, weight, own])

    found = penalty(lambda x: CachedLinear(lambda: weight)(x, own))
    expected = penalty(lambda x: F.linear(x, weight, own))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


class Pooled(nn.Module):
    """Only the first token of a sequence gets to the end."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))[:, 0]


@pytest.mark.parametrize("passing", [False, True])
def test_only_the_tokens_that_count_are_multiplied(passing, monkeypatch):
    if passing:
        naive.compose_in_passing(monkeypatch)
    torch.manual_seed(0)
    model = Pooled()
    base = model.state_dict()
    tuned = {n: {k: v + 0.1 * torch.randn_like(v) for k, v in base.items()} for n in "ab"}
    comp = Composition(naive.double(model), Bank.build(base, tuned))
    naive.randomise(comp)
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    sizes, of = [], GradientRows.of.__func__
    monkeypatch.setattr(
        GradientRows, "of", classmethod(lambda cls, *a: sizes.append(len((r := of(cls, *a)).x)) or r)
    )
    y = comp(x)
    naive.probe(y).backward()
    expected, gradient = naive.gradient(comp, model, lambda m, x: m(x), x)
    assert naive.close(y.detach(), expected) and naive.close(comp.values.grad, gradient)
    assert sizes == [3, 3]  # of 21, in either layer


def test_transforms_of_functions_go_through():
    torch.manual_seed(0)
    model = Pooled()
    base = model.state_dict()
    comp = Composition(model, Bank.build(base, {"a": {k: v + 0.1 for k, v in base.items()}}))
    naive.randomise(comp)
    x = torch.randn(3, 7, 6)

    def run(one):
        return comp.model(one.unsqueeze(0)).sum()

    with comp.composed():
        found = torch.func.vmap(torch.func.grad(run))(x)
        own = x.clone().requires_grad_()
        comp.model(own).sum().backward()
    assert torch.allclose(found, own.grad, atol=1e-6)


def test_a_gradient_that_is_zero_by_chance_has_derivatives():
    """Behind a gate that begins at zero, say."""
    (x, weight), _, _ = layer(bias=False)
    gate = torch.zeros((), dtype=torch.float64, requires_grad=True)
    y = CachedLinear(lambda: weight)(x, None)
    (of_input,) = torch.autograd.grad((gate * y).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(of_input.sum(), gate)
    assert torch.allclose(found, len(x) * weight.detach().sum())


class Doubled(torch.autograd.Function):
    """Of a kind that does not ask its arguments how they want to be treated."""

    @staticmethod
    def forward(ctx, weight):
        return 2 * weight

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Custom(nn.Linear):
    def forward(self, x):
        return F.linear(x, Doubled.apply(self.weight), self.bias)


def composed(model):
    base = model.state_dict()
    tuned = {n: {k: v + 0.1 * torch.randn_like(v) for k, v in base.items()} for n in "ab"}
    comp = Composition(naive.double(model), Bank.build(base, tuned))
    naive.randomise(comp)
    return comp


def test_custom_functions_of_a_weight_have_its_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(Custom(6, 4))
    comp, x = composed(model), torch.randn(3, 6, dtype=torch.float64)
    y = comp(x)
    naive.probe(y).backward()
    expected, gradient = naive.gradient(comp, model, lambda m, x: m(x), x)
    assert naive.close(y.detach(), expected) and naive.close(comp.values.grad, gradient)


@pytest.mark.parametrize("passing", [False, True])
def test_other_ways_of_differentiating_go_through(passing, monkeypatch, refused):
    if passing:
        naive.compose_in_passing(monkeypatch)
    torch.manual_seed(0)
    comp, x = composed(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))), torch.randn(6).double()
    expected = torch.stack([torch.autograd.functional.jacobian(comp, x)[i] for i in range(4)])
    with comp.composed() as m:
        if passing:
            with refused("USAGE", 2, "memory"):
                torch.func.jacrev(m)(x)
        else:
            assert torch.allclose(torch.func.jacrev(m)(x), expected)
            assert torch.allclose(torch.func.jacfwd(m)(x), expected)
        with torch.autograd.forward_ad.dual_level():
            y = m(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            moved = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert torch.allclose(moved, expected.sum(1))
    if not passing:
        assert torch.allclose(torch.autograd.functional.jacobian(comp, x, vectorize=True), expected)
