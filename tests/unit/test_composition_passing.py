"""Weights that are composed when their layer runs: what holds for these alone."""

from concurrent.futures import ThreadPoolExecutor

import naive
import pytest
import torch
from torch import nn

from aniso.compose import Composition, Runtime, plan
from aniso.compose._engine.delta_store import DeltaStore
from aniso.vectors import Bank

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def bank_of(model, count=2, **kwargs):
    base, g = model.state_dict(), torch.Generator().manual_seed(1)

    def tuned():
        return {k: v + 0.05 * torch.randn(v.shape, generator=g) for k, v in base.items()}

    return Bank.build(base, {f"v{i}": tuned() for i in range(count)}, **kwargs)


@pytest.fixture(autouse=True)
def in_passing(monkeypatch):
    naive.compose_in_passing(monkeypatch)


def test_nothing_composed_is_left_after_a_step():
    model = small()
    comp = Composition(naive.double(model), bank_of(model))
    naive.randomise(comp)
    assert comp.plan.recomputed
    assert "in memory; 2 weights recomputed in every pass" in comp.plan.strategy
    comp(X.double()).sum().backward()
    comp.weights()
    recomputed = [b for b in comp._installer.buffers if b.blocks[0].entry.block.name in comp.plan.recomputed]
    naive.randomise(comp, 4)
    comp(X.double()).sum().backward()
    assert recomputed and all(buffer._buffer is None for buffer in recomputed)


def test_second_derivatives_are_refused_not_wrong(refused):
    model = small()
    comp = Composition(naive.double(model), bank_of(model))
    naive.randomise(comp)
    x = X.double().requires_grad_()
    with refused("USAGE", 2, "create_graph"):
        torch.autograd.grad(comp(x).sum(), x, create_graph=True)


def test_formats_that_differ_are_refused_as_they_are_by_torch():
    model = small()
    comp = Composition(model, bank_of(model))
    naive.randomise(comp)
    with pytest.raises(RuntimeError):
        comp(X.double())


def test_vectors_from_disk_are_kept_composed_for_answers_if_there_is_room(tmp_path, monkeypatch):
    model = small()
    bank = bank_of(model, to=tmp_path / "bank")
    reads = []
    monkeypatch.setattr(
        DeltaStore, "_read", lambda self, key, read=DeltaStore._read: reads.append(key) or read(self, key)
    )
    monkeypatch.setattr(plan, "_composed_bytes", lambda *_: (1000, 0))
    comp = Composition(naive.double(model), bank, runtime=Runtime(stream=True))
    naive.randomise(comp)
    assert comp.plan.recomputed and not comp.plan.recomputed_in_evaluation and comp.plan.composed == 1000
    assert "all from disk twice a step; 2 weights recomputed in every training step" in comp.plan.strategy
    with torch.no_grad():
        y = comp(X.double())
        count = len(reads)
        assert torch.equal(comp(X.double()), y)
    assert count and len(reads) == count
    tight = Composition(small().double(), bank, runtime=Runtime(stream=True, memory=comp.plan.buffers + 999))
    assert tight.plan.recomputed_in_evaluation and tight.plan.composed == 0


def test_threads_may_answer_from_disk_at_once(tmp_path):
    model = small()
    bank = bank_of(model, 3, to=tmp_path / "bank")
    comp = Composition(naive.double(model), bank, runtime=Runtime(stream=True))
    naive.randomise(comp)
    inputs = [torch.randn(7, 6, dtype=torch.float64) for _ in range(8)]
    with torch.no_grad():
        expected = [comp(x) for x in inputs]

    def answer(x):
        with torch.no_grad():
            return comp(x)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(pool.map(answer, inputs), expected, strict=True))
