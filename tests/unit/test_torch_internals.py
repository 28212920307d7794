"""The private parts of torch that compositions use still do what compositions need."""

from __future__ import annotations

import ast
import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import aniso.compose
from aniso.compose._engine import torch_internals

COMPOSE = Path(aniso.compose.__file__).parent
PRIVATE = re.compile(r"(torch|nn|forward_ad)(\.\w+)*\._[a-zA-Z]|torch\.ops\.")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("path", sorted(COMPOSE.rglob("*.py")), ids=lambda p: str(p.relative_to(COMPOSE)))
def test_no_other_module_uses_private_parts_of_torch(path):
    if path.name == "torch_internals.py":
        return
    tree = ast.parse(path.read_text())
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [name for name in used if PRIVATE.match(name)] == []
    private = {"_version", "_set_sequence_nr", "_parameters", "_flat_weights"}
    assert private.isdisjoint(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def test_torch_func_transforms_are_noticed():
    seen = []

    def f(x):
        seen.append(torch_internals.functorch_active())
        return x.sum()

    f(numbers(3))
    torch.func.vmap(f)(numbers(2, 3))
    torch.func.grad(f)(numbers(3))
    torch.func.jvp(f, (numbers(3),), (numbers(3),))
    assert seen == [False, True, True, True]
    assert not torch_internals.functorch_active()


def test_dual_levels_are_noticed():
    assert not torch_internals.forward_ad_active()
    with forward_ad.dual_level():
        assert torch_internals.forward_ad_active()
    assert not torch_internals.forward_ad_active()


def test_batched_gradients_are_noticed():
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_internals.is_batched_by_vmap(grad))
            return grad

    x = numbers(3).requires_grad_()
    torch.autograd.grad(Identity.apply(x), x, numbers(3))
    torch.autograd.grad(Identity.apply(x), x, numbers(2, 3), is_grads_batched=True)
    assert seen == [False, True]


def test_subclasses_are_plain_tensors_without_torch_function():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    x = numbers(2, 3).as_subclass(Loud)
    with torch_internals.without_torch_function():
        assert x.size() == (2, 3)
    with pytest.raises(AssertionError, match="called"):
        x.size()


def test_versions_count_writes_in_place_but_not_through_data():
    x = numbers(3)
    before = torch_internals.version(x)
    x.data.add_(1)
    assert torch_internals.version(x) == before
    x.add_(1)
    assert torch_internals.version(x) > before
    between = torch_internals.version(x)
    torch.autograd.graph.increment_version(x)
    assert torch_internals.version(x) > between


@pytest.mark.parametrize("first", [False, True])
def test_a_node_made_before_the_forward_pass_runs_as_soon_as_it_is_ready(first):
    order = []
    weight, x = numbers(3).requires_grad_(), numbers(3).requires_grad_()
    early = weight * 1.0
    early.grad_fn.register_hook(lambda *_: order.append("weight"))
    if first:
        torch_internals.run_first_in_backward(early)
    y = x * 2.0
    y.grad_fn.register_hook(lambda *_: order.append("input"))
    (y * early).sum().backward()
    assert order == (["weight", "input"] if first else ["input", "weight"])


def test_a_tensor_without_a_graph_has_no_node_to_run_first():
    torch_internals.run_first_in_backward(numbers(3))


def test_batch_norms_are_found_by_their_base_class():
    norms = (
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2),
        nn.BatchNorm3d(2),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm1d(2),
    )
    assert all(isinstance(norm, torch_internals.NormBase) for norm in norms)
    assert not isinstance(nn.LayerNorm(2), torch_internals.NormBase)


def test_a_modules_own_tensors_are_listed():
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert torch_internals.named_tensors(module) == []
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [name for name, _ in torch_internals.named_tensors(module[0])] == names
    assert [name for name, _ in torch_internals.named_tensors(nn.Linear(2, 2, bias=False))] == ["weight"]
    assert set(torch_internals.MODULE_DICTIONARIES) <= set(vars(module))


def test_a_shadowed_tensor_is_used_and_the_parameter_stays():
    module = nn.Linear(3, 2, dtype=torch.float64)
    parameter, other, x = module.weight, numbers(2, 3), numbers(4, 3)
    torch_internals.shadow(module, "weight", other)
    assert module.weight is other
    assert torch.equal(module(x), F.linear(x, other, module.bias))
    assert dict(module.named_parameters())["weight"] is parameter
    assert torch.equal(module.state_dict()["weight"], parameter)
    torch_internals.unshadow(module, "weight")
    assert module.weight is parameter


def test_recurrent_layers_use_shadowed_tensors_too():
    torch.manual_seed(0)
    one, other = nn.GRU(3, 3).double(), nn.GRU(3, 3).double()
    x = numbers(4, 1, 3)
    own, expected = one(x)[0], other(x)[0]
    for name, tensor in torch_internals.named_tensors(other):
        torch_internals.shadow(one, name, tensor.detach())
    assert torch.equal(one(x)[0], expected)
    for name, _ in torch_internals.named_tensors(other):
        torch_internals.unshadow(one, name)
    assert torch.equal(one(x)[0], own)


def test_moving_a_module_goes_through_the_method_that_compositions_override():
    """``Composition._apply`` drops composed weights whenever the module moves or changes its dtype."""
    calls = []

    class Module(nn.Module):
        def _apply(self, fn, recurse=True):
            calls.append(fn)
            return super()._apply(fn, recurse)

    Module().double().half().to("cpu").float()
    assert len(calls) == 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_module_of_forward_derivatives_exists():
    torch_internals.load_jvp_decompositions()
    assert "torch._decomp.decompositions_for_jvp" in sys.modules


def test_layer_norm_and_its_gradients_are_those_of_autograd():
    x, weight, bias = (t.requires_grad_() for t in (numbers(4, 5), numbers(5, seed=1), numbers(5, seed=2)))
    y, mean, rstd = torch_internals.layer_norm(x, [5], weight, bias, 1e-5)
    expected = F.layer_norm(x, (5,), weight, bias, 1e-5)
    torch.testing.assert_close(y, expected)
    grad = numbers(4, 5, seed=3)
    wanted = [True, True, True]
    with torch.no_grad():
        found = torch_internals.layer_norm_backward(grad, x, [5], mean, rstd, weight, bias, wanted)
    for one, other in zip(found, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():  # without weight and bias, as a derivative forward
        one = torch_internals.layer_norm_backward(grad, x, [5], mean, rstd, None, None, [True, False, False])
    plain = torch.autograd.functional.jvp(lambda z: F.layer_norm(z, (5,)), x.detach(), grad)[1]
    torch.testing.assert_close(one[0], plain)


def test_the_gradient_of_softmax_is_that_of_autograd():
    x = numbers(4, 5).requires_grad_()
    probabilities, grad = torch.softmax(x, -1), numbers(4, 5, seed=1)
    (expected,) = torch.autograd.grad(probabilities, x, grad)
    torch.testing.assert_close(torch_internals.softmax_backward(grad, probabilities.detach()), expected)


def test_torchs_openmp_libraries_can_be_loaded():
    libraries = torch_internals.openmp_libraries()
    if torch.backends.openmp.is_available() and libraries:
        assert any(hasattr(ctypes.CDLL(str(file)), "GOMP_parallel") for file in libraries)
