"""Linear layers that leave out rows without a gradient, against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import naive
from aniso.compose import Composition
from aniso.compose.linear import KeptLayer, Rows
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
    y = KeptLayer(weight)(x, own)
    assert torch.equal(y, F.linear(x, weight, own))
    found = torch.autograd.grad(y, tensors, grad * kept)
    expected = torch.autograd.grad(F.linear(x, weight, own), tensors, grad * kept)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("which", ROWS)
def test_only_a_minority_is_picked_out(which):
    (x, _), _, grad = layer()
    kept = torch.zeros(9, 1, dtype=torch.float64)
    kept[list(ROWS[which])] = 1
    rows = Rows.of(x, grad * kept)
    expected = None if which in ("all", "most") else list(ROWS[which])
    assert (None if rows.chosen is None else rows.chosen.tolist()) == expected


def test_a_column_of_zeros_is_not_a_row_of_zeros():
    (x, _), _, grad = layer()
    grad[:, 0] = 0
    assert Rows.of(x, grad).chosen is None
    grad[3:] = 0
    assert Rows.of(x, grad).chosen.tolist() == [0, 1, 2]


def test_numbers_that_are_none_are_not_lost():
    (x, _), _, grad = layer()
    grad = torch.zeros_like(grad)
    grad[2, 4] = float("nan")
    assert Rows.of(x, grad).chosen.tolist() == [2]


@pytest.mark.parametrize("rows", [9, 1])
def test_second_derivatives(rows):
    """Of a penalty on the gradient of the input."""
    (x, weight), own, _ = layer()

    def penalty(run):
        y = run(x)[:rows].square().sum()
        (of_input,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(of_input.square().sum(), [x, weight, own])

    found = penalty(lambda x: KeptLayer(weight)(x, own))
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
    sizes, of = [], Rows.of.__func__
    monkeypatch.setattr(Rows, "of", classmethod(lambda cls, *a: sizes.append(len((r := of(cls, *a)).x)) or r))
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
