"""Corners that a stranger walked into: each was once silently wrong, or failed for no good reason."""

from __future__ import annotations

import dataclasses
import os
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from aniso import Bank, Composition, Linearised, Partition, Runtime
from aniso.compose import composition
from aniso.compose._kernels import dispatch
from aniso.vectors import BlockSource, LowRank, Provenance, TaskVector
from aniso.vectors.delta import Term
from aniso.weights import TensorMap


def _bank(model: nn.Module, *, low_rank: bool = False, n: int = 2) -> Bank:
    """Random vectors over a model's matrices."""
    blocks = BlockSource(TensorMap(model.state_dict()))
    vectors = {}
    for i in range(n):
        g = torch.Generator().manual_seed(i)
        if low_rank:
            cells = {}
            for block in (b for b in blocks.layout.blocks if len(b.shape) == 2):
                b = torch.randn(block.shape[0], 2, generator=g)
                a = torch.randn(2, block.shape[1], generator=g)
                cells[block.name] = partial(LowRank, block.shape, (Term(b, a, 0.1),))
            origin = Provenance(f"v{i}", "random", f"hash{i}")
            vectors[f"v{i}"] = TaskVector(f"v{i}", blocks.layout, blocks.identity, cells, origin)
        else:
            tuned = {
                k: v + 0.01 * torch.randn(v.shape, generator=g) if v.is_floating_point() else v
                for k, v in model.state_dict().items()
            }
            vectors[f"v{i}"] = TaskVector.between(blocks, tuned, name=f"v{i}")
    return Bank(vectors)


def _net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))))


def _set(composition: Composition, value: float) -> None:
    with torch.no_grad():
        composition.values.fill_(value)


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(9))


def test_layers_that_write_in_place_follow_low_rank_weights():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    bank = _bank(plain, low_rank=True)
    torch.manual_seed(0)
    inplace = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    grads = []
    for model in (plain, inplace):
        composition = Composition(model, bank)
        _set(composition, 0.3)
        composition(X).square().sum().backward()
        grads.append(composition.values.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("low_rank", [False, True])
def test_an_older_graph_goes_backward_after_values_changed(low_rank):
    model = _net()
    bank = _bank(model, low_rank=low_rank)
    composition = Composition(model, bank)
    expected = torch.zeros_like(composition.values)
    for value in (0.2, 0.5):
        _set(composition, value)
        composition.values.grad = None
        composition(X).square().sum().backward()
        expected += composition.values.grad
    composition.values.grad = None
    _set(composition, 0.2)
    first = composition(X).square().sum()
    _set(composition, 0.5)
    second = composition(X).square().sum()
    (first + second).backward()
    torch.testing.assert_close(composition.values.grad, expected)


def test_second_derivatives_through_low_rank_vectors_are_refused_not_wrong(refused):
    model = _net()
    composition = Composition(model, _bank(model, low_rank=True))
    _set(composition, 0.3)
    with refused("USAGE", 2, "second derivatives"):
        torch.autograd.grad(composition(X).square().sum(), composition.values, create_graph=True)


def test_a_loop_inside_composed_sees_new_values():
    model = _net()
    composition = Composition(model, _bank(model))
    optimiser = torch.optim.SGD([composition.values], lr=0.1)
    losses = []
    with composition.composed() as composed:
        for _ in range(3):
            optimiser.zero_grad()
            loss = composed(X).square().mean()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]


def test_writing_to_the_model_that_was_given_is_noticed(refused):
    model = _net()
    composition = Composition(model, _bank(model))
    _set(composition, 0.3)
    model.load_state_dict(composition.weights(), strict=False)
    with refused("BANK-BASE", 2, "modified"):
        composition(X)


def test_weights_in_a_plain_list_are_refused(refused):
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6))
            self.ws = [self.w]

        def forward(self, x):
            return x @ self.ws[0].T

    model = Listed()
    with refused("MODEL-COPY", 3, "ws"):
        Composition(model, _bank(model))


def test_an_embedding_with_sparse_gradients_learns():
    torch.manual_seed(0)
    model = nn.Embedding(7, 3, sparse=True)
    composition = Composition(model, _bank(model))
    composition(torch.tensor([1, 1, 4])).sum().backward()
    delta = composition.bank["v0"]["weight"].dense()
    torch.testing.assert_close(composition.values.grad[0], 2 * delta[1].sum() + delta[4].sum())


def test_inputs_of_a_linearised_model_take_gradients():
    model = _net()
    composition = Composition(Linearised(model), _bank(model))
    x = X.clone().requires_grad_()
    composition(x).sum().backward()
    expected = X.clone().requires_grad_()
    model(expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_outputs_of_a_linearised_model_may_be_dataclasses_but_not_anything(refused):
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor

    class Wrapped(nn.Module):
        def __init__(self, make) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.make = nn.Linear(6, 4), make

        def forward(self, x):
            return self.make(self.net(x))

    model = Wrapped(Output)
    composition = Composition(Linearised(model), _bank(model))
    composition(X).logits.sum().backward()
    assert bool(composition.values.grad.any())
    strange = Wrapped(lambda y: iter([y]))
    with refused("USAGE", 2, "iterator"):
        Composition(Linearised(strange), _bank(strange))(X)


def test_without_a_working_numba_the_plain_path_is_taken(monkeypatch, tmp_path):
    model = _net(nn.Linear(96, 64))
    bank = _bank(model).save(tmp_path / "bank", storage="int8")
    x = torch.randn(3, 96)
    expected = Composition(model, bank, runtime=Runtime(fast=False))
    _set(expected, 0.5)
    monkeypatch.setattr(dispatch, "_kernels", lambda: None)
    found = Composition(model, bank)
    _set(found, 0.5)
    assert torch.equal(found(x), expected(x))


def test_a_streaming_composition_works_after_a_fork(tmp_path):
    model = _net()
    bank = _bank(model).save(tmp_path / "bank")
    composition = Composition(model, bank, runtime=Runtime(stream=True))
    for value in (0.1, 0.2, 0.3):
        _set(composition, value)
        expected = composition(X).detach()
    _set(composition, 0.4)
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                composition(X)
                _set(composition, 0.3)
                os._exit(0 if torch.equal(composition(X), expected) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_composition_pickled_with_a_relative_path_opens_elsewhere(tmp_path, monkeypatch):
    model = _net()
    monkeypatch.chdir(tmp_path)
    _bank(model).save("bank")
    composition = Composition(model, Bank.load("bank"), Partition.whole())
    _set(composition, 0.5)
    data = pickle.dumps(composition)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert torch.equal(pickle.loads(data)(X), composition(X))


def test_a_half_precision_composition_bakes():
    model = _net()
    composition = Composition(model, _bank(model)).half()
    _set(composition, 0.5)
    baked, weights = composition.bake(), composition.weights()
    for key, value in weights.items():
        torch.testing.assert_close(baked.read(key), value, rtol=1e-3, atol=1e-4)


def test_free_memory_heeds_a_containers_limit(tmp_path):
    from aniso.compose.runtime import _free_of_container

    assert _free_of_container(tmp_path) > 2**60
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert _free_of_container(tmp_path) > 2**60
    (tmp_path / "memory.max").write_text("1000\n")
    assert _free_of_container(tmp_path) == 900
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("500\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600\n")
    assert _free_of_container(tmp_path) == 0


@pytest.mark.parametrize("asked", [False, True])
def test_freed_memory_is_kept_only_if_asked_for(asked, monkeypatch):
    """It changes the allocator of the whole process."""
    calls = []
    monkeypatch.setattr(composition, "keep_freed_memory", lambda: calls.append(1))
    model = _net()
    Composition(model, _bank(model), runtime=Runtime(keep_freed=True) if asked else None)(X)
    assert bool(calls) is asked
