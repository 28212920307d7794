"""Forward derivatives by hand, and the way back through them, against torch's own."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from aniso.compose.linearised.jvp_rules import jvp_rule


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# a function, how it is called, and the shapes of its tensors
CASES = {
    "linear": (F.linear, lambda f, x, w, b: f(x, w, b), [(4, 3), (5, 3), (5,)]),
    "linear on sequences": (F.linear, lambda f, x, w, b: f(x, w, b), [(2, 4, 3), (5, 3), (5,)]),
    "linear without bias": (F.linear, lambda f, x, w: f(x, w), [(4, 3), (5, 3)]),
    "linear by names": (F.linear, lambda f, x, w: f(x, weight=w, bias=None), [(4, 3), (5, 3)]),
    "one token of many": (F.linear, lambda f, x, w: f(x, w), [(2, 9, 3), (5, 3)]),
    "norm": (F.layer_norm, lambda f, x, w, b: f(x, (3,), w, b, 1e-5), [(2, 4, 3), (3,), (3,)]),
    "norm of two": (F.layer_norm, lambda f, x, w, b: f(x, (4, 3), w, b, 0.1), [(2, 4, 3), (4, 3), (4, 3)]),
    "turned norm": (F.layer_norm, lambda f, x, w, b: f(x.mT, (3,), w, b), [(2, 3, 4), (3,), (3,)]),
    "attention": (F.scaled_dot_product_attention, lambda f, q, k, v: f(q, k, v), [(2, 3, 4, 5)] * 3),
    "scaled attention": (
        F.scaled_dot_product_attention,
        lambda f, q, k, v: f(q, k, v, scale=0.7),
        [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)],
    ),
    "turned attention": (
        F.scaled_dot_product_attention,
        lambda f, q, k, v: f(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        [(2, 4, 3, 5)] * 3,
    ),
}
CONVOLUTION = (F.conv2d, lambda f, x, w, b: f(x, w, b, stride=2), [(2, 3, 6, 6), (4, 3, 2, 2), (4,)])


def results(function, call, tensors, tangents, which):
    """Output, derivative, and the gradients of all derivatives that go in."""
    own = [t.clone().requires_grad_() if i in which else None for i, t in enumerate(tangents)]
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        pairs = zip(tensors, own, strict=True)
        duals = [t if d is None else forward_ad.make_dual(t, d) for t, d in pairs]
        y = call(function, *duals)
        if y is None:
            return None
        value, moved = forward_ad.unpack_dual(y)
    one = torch.zeros_like(moved)
    one[..., :1, :] = numbers(*moved[..., :1, :].shape, seed=9)  # most rows have no gradient
    every = numbers(*moved.shape, seed=8)
    own = [t for t in own if t is not None]
    grads = [torch.autograd.grad(moved, own, g, retain_graph=True) for g in (one, every)]
    return [value, moved, *grads[0], *grads[1]]


def compare(function, call, shapes, which):
    tensors = [numbers(*s, seed=i) for i, s in enumerate(shapes)]
    tangents = [numbers(*s, seed=100 + i) for i, s in enumerate(shapes)]
    found = results(lambda *a, **k: jvp_rule(function, a, k), call, tensors, tangents, which)
    expected = results(function, call, tensors, tangents, which)
    if found is not None:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    return found is not None


@pytest.mark.parametrize("name", CASES)
def test_everything_moves(name):
    function, call, shapes = CASES[name]
    assert compare(function, call, shapes, range(len(shapes)))


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
def test_linear_layers_of_which_some_tensors_move(which):
    assert compare(*CASES["linear"], which)


@pytest.mark.parametrize("which", [(1, 2), (1,), (0, 1, 2)], ids=str)
def test_pictures_do_not_move(which):
    """A convolution over something that does is left to torch, as is one of which half has a derivative."""
    assert compare(*CONVOLUTION, which) == (which == (1, 2))


@pytest.mark.parametrize("name", ["norm", "attention"])
def test_what_moves_in_part_is_left_to_torch(name):
    function, call, shapes = CASES[name]
    for which in [(0,), (1,), (0, 2)]:
        assert not compare(function, call, shapes, which)


@pytest.mark.parametrize(
    "more", [{"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, {"is_causal": True}, {"dropout_p": 0.1}]
)
def test_attention_that_is_not_plain_is_left_to_torch(more):
    q = numbers(2, 3, 4, 5, seed=0)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        assert jvp_rule(F.scaled_dot_product_attention, (dual, dual, dual), more) is None


def test_inputs_that_take_gradients_are_left_to_torch():
    """The derivative depends on them in a second way, which nothing here knows."""
    x, w = numbers(4, 3, seed=0).requires_grad_(), numbers(5, 3, seed=1)
    with forward_ad.dual_level():
        assert jvp_rule(F.linear, (x, forward_ad.make_dual(w, w)), {}) is None


def test_functions_without_a_derivative_by_hand_are_left_to_torch():
    assert jvp_rule(F.gelu, (numbers(3, seed=0),), {}) is None


def test_autocast_is_left_to_torch():
    x, w = numbers(4, 3, seed=0).float(), numbers(5, 3, seed=1).float()
    with forward_ad.dual_level(), torch.autocast("cpu", torch.bfloat16):
        assert jvp_rule(F.linear, (x, forward_ad.make_dual(w, w)), {}) is None
