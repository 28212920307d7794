"""Deltas of embeddings in which few rows changed: exact, small in memory and on disk."""

from __future__ import annotations

import pytest
import torch

from aniso.compose import Baked, Composition, Partition
from aniso.compose._engine.stacking import stack_deltas
from aniso.vectors import Bank, Dense, SparseRows, TaskVector
from aniso.vectors.delta import difference
from aniso.vectors.sparse_rows import sparse_rows
from aniso.weights import TensorMap

ROWS, WIDTH = 300, 8


def states(seed: int = 0, changed: int = 20):
    """A base with an embedding and a matrix, and a tuned copy with a few changed rows."""
    rng = torch.Generator().manual_seed(seed)
    base = {
        "embeddings.word_embeddings.weight": torch.randn(
            ROWS, WIDTH, generator=torch.Generator().manual_seed(99)
        ),
        "encoder.layer.0.output.dense.weight": torch.randn(
            WIDTH, WIDTH, generator=torch.Generator().manual_seed(98)
        ),
    }
    base["embeddings.word_embeddings.weight"][5] = -0.0
    tuned = {name: value.clone() for name, value in base.items()}
    rows = torch.randperm(ROWS, generator=rng)[:changed]
    tuned["embeddings.word_embeddings.weight"][rows] += 0.01 * torch.randn(changed, WIDTH, generator=rng)
    tuned["embeddings.word_embeddings.weight"][7, :3] = 1e-30  # base + difference misses these by a rounding
    tuned["encoder.layer.0.output.dense.weight"] += 0.01
    return base, tuned


def source(state):
    return TensorMap(state, "x")


class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = torch.nn.Module()
        self.embeddings.word_embeddings = torch.nn.Embedding(ROWS, WIDTH)
        self.encoder = torch.nn.Module()
        layer = torch.nn.Module()
        layer.output = torch.nn.Module()
        layer.output.dense = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.encoder.layer = torch.nn.ModuleList([layer])
        self.load_state_dict(states()[0])

    def forward(self, ids):
        return self.encoder.layer[0].output.dense(self.embeddings.word_embeddings(ids))


def bits(tensor):
    return tensor.view(torch.int32)


def test_only_changed_rows_are_held_and_the_tuned_values_come_back_bit_for_bit():
    base, tuned = states()
    name = "embeddings.word_embeddings.weight"
    whole = difference(base[name], tuned[name].clone())
    delta = sparse_rows(whole)
    assert isinstance(delta, SparseRows) and len(delta.rows) == 22  # 20, one missed, one of -0.0
    assert delta.nbytes < 0.15 * whole.nbytes
    assert torch.equal(delta.dense(), whole.dense())
    assert torch.equal(bits(delta.applied_to(base[name], 1.0)), bits(tuned[name]))
    assert torch.equal(bits(delta.applied_to(base[name], 0.0)), bits(base[name]))
    for other in (delta, whole, sparse_rows(difference(base[name], states(1)[1][name]))):
        assert delta.dot(other) == pytest.approx(whole.dot(Dense(other.dense())), rel=1e-6)
        assert torch.allclose(delta.plus(other).dense(), whole.dense() + other.dense())
    assert delta.norm() == pytest.approx(whole.norm(), rel=1e-6)
    assert torch.equal(delta.scaled(0.5).dense(), whole.dense() * 0.5)


def test_many_changed_rows_stay_dense():
    base, tuned = states(changed=200)
    name = "embeddings.word_embeddings.weight"
    assert isinstance(sparse_rows(difference(base[name], tuned[name])), Dense)


@pytest.mark.parametrize("storage", ["fp32", "int8", "residual4"])
def test_a_bank_on_disk_holds_rows_and_gives_them_back(tmp_path, storage):
    base = source(states()[0])
    bank = Bank.build(base, {f"v{i}": source(states(i)[1]) for i in range(3)}, allow_distant=True)
    saved = bank.save(tmp_path / "bank", storage=storage)
    again = Bank.load(tmp_path / "bank")
    for name in bank.names:
        before = bank[name]["embeddings.word_embeddings.weight"]
        for found in (saved, again):
            delta = found[name]["embeddings.word_embeddings.weight"]
            assert isinstance(delta, SparseRows)
            assert torch.equal(delta.dense(), before.dense())
    size = sum(path.stat().st_size for path in (tmp_path / "bank").rglob("*") if path.is_file())
    assert size < 3 * 4 * ROWS * WIDTH


def test_a_vector_file_round_trip_is_exact(tmp_path):
    base, tuned = states()
    vector = TaskVector.between(source(base), source(tuned), allow_distant=True)
    vector.save(tmp_path / "v.safetensors")
    state = TaskVector.load(tmp_path / "v.safetensors").apply(source(base), 1.0)
    assert all(torch.equal(bits(state[name]), bits(tuned[name])) for name in tuned)


@pytest.mark.parametrize(
    "partition",
    [
        Partition.whole(),
        Partition.blocks(),
        Partition.random(3, seed=0),
        Partition.rows(),
        Partition.columns(),
    ],
)
def test_stacks_compose_as_dense_ones_do(partition):
    base = source(states()[0])
    bank = Bank.build(base, {f"v{i}": source(states(i)[1]) for i in range(3)}, allow_distant=True)

    model = Both()
    composition = Composition(model, bank, partition)
    values = torch.linspace(-0.3, 0.9, composition.values.numel()).view_as(composition.values)
    with torch.no_grad():
        composition.values.copy_(values)
    ids = torch.arange(ROWS)
    found = composition(ids)
    found.square().sum().backward()
    gradient = composition.values.grad.clone()
    entry = next(e for e in composition.index.blocks if "word" in e.block.name)
    own = composition.index.divided(values)[composition.index.blocks.index(entry)]
    rows = {v: i for i, v in enumerate(entry.vectors)}
    for kind in ("sparse", "dense"):
        deltas = {v: bank[v][entry.block.name] for v in entry.vectors}
        if kind == "dense":
            deltas = {v: Dense(d.dense()) for v, d in deltas.items()}
        (stack,) = stack_deltas(entry, deltas, rows)
        out = states()[0][entry.block.name].reshape(-1).clone()
        stack.add_to(out, own.float(), entry.partition)
        products = stack.dots(torch.linspace(-1, 1, out.numel()), entry.partition)
        if kind == "sparse":
            first = (out, products)
    assert torch.allclose(first[0], out, atol=1e-7) and torch.allclose(
        first[1], products, rtol=1e-4, atol=1e-5
    )
    assert bool(gradient.any())


def test_baking_with_one_gives_the_tuned_embedding_bit_for_bit():
    base, tuned = states()
    bank = Bank.build(source(base), {"a": source(tuned)}, allow_distant=True)
    model = Both()
    composition = Composition(model, bank, Partition.whole())
    with torch.no_grad():
        composition.values.fill_(1.0)
    baked = Baked(source(base), bank, composition.coefficients)
    assert all(torch.equal(bits(baked.read(name)), bits(tuned[name])) for name in tuned)
