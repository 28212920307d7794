"""Coefficients of singular components: against dense sums of components in float64, and autograd."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import naive
import pytest
import tiny
import torch
from hypothesis import given, settings
from torch import nn

from aniso.compose import Coefficients, Composition, Linearised, Partition, Runtime, merge_adapters
from aniso.compose._engine.block_partition import ComponentParts, WholeBlock
from aniso.compose._engine.delta_store import DeltaStore
from aniso.compose._engine.low_rank_stack import LowRankStack, stacked_factors
from aniso.compose._layers.low_rank_linear import LowRankUpdate
from aniso.vectors import Bank, Block, BlockSource, Kind, LowRank, Provenance, TaskVector
from aniso.vectors.delta import Dense, Term
from aniso.vectors.singular import low_rank_approximation
from aniso.weights import TensorMap

WAYS = {"beside the base": (0, 1, 1), "composed and watched": (1, 0, 1), "ordinary": (1, 1, 0)}
ROWS, COLUMNS = 12, 8


class Net(nn.Module):
    """Matrices, a convolution, an embedding and blocks that are no matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.embed = nn.Embedding(9, COLUMNS)
        self.norm = nn.LayerNorm(COLUMNS)
        self.fc = nn.Linear(COLUMNS, ROWS)
        self.out = nn.Linear(ROWS, 1)

    def forward(self, x):
        images = self.conv(x).flatten(1)[:, :COLUMNS]
        h = self.norm(images + self.embed(torch.arange(len(x)) % 9))
        return torch.tanh(self.fc(h)) + self.out(torch.tanh(self.fc(h)))


IMAGES = torch.randn(5, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return Net().eval()


def components_of(delta):
    """The components of a delta as it is stored, one dense matrix each, the largest first."""
    u, s, vt = torch.linalg.svd(naive.dense(delta).reshape(delta.shape[0], -1), full_matrices=False)
    return [s[r] * torch.outer(u[:, r], vt[r]) for r in range(len(s)) if s[r] > 1e-6 * s[0]]


def linear_bank(deltas):
    """A bank over one linear layer."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(COLUMNS, ROWS))
    source = BlockSource(TensorMap(layer.state_dict()))
    vectors = {
        name: TaskVector(
            name,
            source.layout,
            source.identity,
            {"0.weight": lambda delta=delta: delta},
            Provenance(name, "made by hand"),
        )
        for name, delta in deltas.items()
    }
    return layer, Bank(vectors)


def factors(rank, seed=0, scale=0.7, start=0, rows=ROWS):
    g = torch.Generator().manual_seed(seed)
    return Term(torch.randn(rows, rank, generator=g), torch.randn(rank, COLUMNS, generator=g), scale, start)


def low_rank(rank, seed=0):
    return LowRank((ROWS, COLUMNS), (factors(rank, seed),))


def orthogonal(rank, seed=0):
    """A delta whose factors are its singular components, so that float32 rounds nothing any more."""
    return low_rank_approximation(low_rank(rank, seed))


def force(monkeypatch, way):
    monkeypatch.setattr(LowRankUpdate, "costs", lambda self, tokens: WAYS[way])


@pytest.fixture(scope="module")
def svd_bank(tmp_path_factory):
    """Three vectors in storage svd:4; one does not change the matrix."""
    model = net()
    base = model.state_dict()
    tuned = {f"v{i}": tiny.tuned(base, i + 1) for i in range(3)}
    tuned["v2"]["fc.weight"] = base["fc.weight"]
    root = tmp_path_factory.mktemp("components")
    return model, Bank.build(base, tuned, to=root / "bank", storage="svd:4")


# closed form


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [2, 3, 5, 8, 100])
def test_output_and_gradient_are_those_of_a_sum_of_components(way, k, monkeypatch):
    """y = x (W + sum c s u v^T)^T, and dL/dc = s u^T G v with G = dL/dW; the last c is of all others."""
    force(monkeypatch, way)
    deltas = {"a": orthogonal(5, 1), "b": orthogonal(2, 2)}
    layer, bank = linear_bank(deltas)
    wide = naive.double(layer)
    comp = Composition(wide, bank, Partition.components(k))
    count = min(k, ROWS, COLUMNS)
    assert comp.values.shape == (2 * count,)
    naive.randomise(comp)
    x = torch.randn(7, COLUMNS, dtype=torch.float64)
    naive.probe(comp(x)).backward()

    own = comp.values.detach().clone().view(2, count).requires_grad_()
    weight = wide[0].weight.detach().clone()
    expected_gradient = torch.zeros(2, count, dtype=torch.float64)
    parts = {}
    for i, delta in enumerate(deltas.values()):
        (term,) = delta.terms
        parts[i] = [torch.outer(term.b[:, r].double(), term.a[r].double()) for r in range(term.rank)]
        for r, component in enumerate(parts[i]):
            weight = weight + own[i, min(r, count - 1)] * component
    y = nn.functional.linear(x, weight, wide[0].bias.detach())
    (autograd, gradient_of_weight) = torch.autograd.grad(naive.probe(y), (own, weight))
    for i, of_vector in parts.items():
        for r, component in enumerate(of_vector):
            expected_gradient[i, min(r, count - 1)] += (component * gradient_of_weight).sum()
    with torch.no_grad():
        assert naive.close(comp(x), y.detach(), 1e-12)
    assert naive.close(comp.values.grad.view(2, count), autograd, 1e-12)
    assert naive.close(comp.values.grad.view(2, count), expected_gradient, 1e-12)
    assert not comp.values.grad.view(2, count)[1, 2:].any() or count <= 2  # b has two components


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("k", [2, 3, 4, 9])
def test_a_bank_in_storage_svd_has_the_naive_numbers(svd_bank, k, stream):
    model, bank = svd_bank
    wide, x = naive.double(model), IMAGES.double()
    comp = Composition(wide, bank, Partition.components(k), runtime=Runtime(stream=stream))
    assert torch.equal(comp(x), wide(x))
    naive.randomise(comp)
    y = comp(x)
    naive.probe(y).backward()
    expected, gradient = naive.gradient(comp, model, lambda m, x: m(x), x)
    # stored factors are orthogonal to about 1e-7
    assert naive.close(y.detach(), expected, 1e-5)
    assert naive.close(comp.values.grad, gradient, 1e-5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_components_with_one_value_are_the_block(svd_bank, k, stream):
    model, bank = svd_bank
    x = IMAGES.double()
    plain = Composition(naive.double(model), bank)
    naive.randomise(plain)
    tied = Composition(naive.double(model), bank, Partition.components(k), runtime=Runtime(stream=stream))
    with torch.no_grad():
        for entry in plain.index.blocks:
            for vector in entry.vectors:
                cell = plain.values[plain.index.cell(vector, entry.block.name)]
                tied.values[tied.index.cell(vector, entry.block.name)] = cell
    ys = [plain(x), tied(x)]
    assert naive.close(ys[1].detach(), ys[0].detach(), 1e-13)
    for y in ys:
        naive.probe(y).backward()
    for entry in plain.index.blocks:
        for vector in entry.vectors:
            whole, parts = (c.values.grad[c.index.cell(vector, entry.block.name)] for c in (plain, tied))
            assert float(parts.sum()) == pytest.approx(float(whole), rel=1e-9, abs=1e-12)


def test_zero_is_the_base_bit_for_bit(svd_bank):
    model, bank = svd_bank
    base = {k: v.clone() for k, v in model.state_dict().items()}
    for value in base.values():
        value.view(-1)[::5] = -0.0  # negative zeros are the first to go when zeros are added
    model = net()
    model.load_state_dict(base)
    comp = Composition(model, bank, Partition.components(3), any_base=True)
    with torch.no_grad():
        assert torch.equal(comp(IMAGES), model(IMAGES))
    for key, tensor in comp.weights().items():
        assert torch.equal(tensor.view(torch.int32), base[key].view(torch.int32)), key


def test_a_tangent_has_the_components_too(svd_bank):
    """The derivative along a component is that of the composed model at zero."""
    model, bank = svd_bank
    x = IMAGES.double()
    comp = Composition(Linearised(naive.double(model)), bank, Partition.components(3))
    naive.randomise(comp)
    found = comp(x) - naive.double(model)(x)
    plain = Composition(naive.double(model), bank, Partition.components(3))
    step = 1e-6
    with torch.no_grad():
        plain.values.copy_(step * comp.values)
        forward = plain(x)
        plain.values.copy_(-step * comp.values)
        assert naive.close(found.detach(), (forward - plain(x)) / (2 * step), 1e-6)


# adapters, whose factors are no components


@pytest.mark.parametrize("seed", range(3))
def test_order_sign_and_scale_of_factors_do_not_matter(seed):
    g = torch.Generator().manual_seed(seed)
    (term,) = low_rank(4, seed).terms
    mix = torch.randn(4, 4, generator=g) + 3 * torch.eye(4)
    order = torch.randperm(4, generator=g)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    same = {
        "as it is": term,
        "order": Term(term.b[:, order], term.a[order], term.scale),
        "signs": Term(term.b * signs, signs[:, None] * term.a, term.scale),
        "scale": Term(-4 * term.b, term.a, -term.scale / 4),
        "mixed": Term(term.b @ mix, torch.linalg.inv(mix) @ term.a, term.scale),
    }
    layer, bank = linear_bank({k.replace(" ", "-"): LowRank((ROWS, COLUMNS), (t,)) for k, t in same.items()})
    comp = Composition(naive.double(layer), bank, Partition.components(3))
    values = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
    weights = []
    for vector in bank:
        with torch.no_grad():
            comp.values.zero_()
            comp.values[comp.index.cell(vector, "0.weight")] = values
        weights.append(comp.weights()["0.weight"])
    for weight in weights[1:]:
        assert naive.close(weight, weights[0], 1e-5)


def test_an_adapter_of_query_and_value_has_components_of_the_whole_block():
    third = ROWS // 3
    delta = LowRank((ROWS, COLUMNS), tuple(factors(2, i, 0.5 + i, i * third, third) for i in (0, 2)))
    found = low_rank_approximation(delta)
    (term,) = found.terms
    assert term.rank == 4
    assert not term.b[third : 2 * third].abs().max() > 1e-6
    for r, component in enumerate(components_of(delta)):
        assert naive.close(torch.outer(term.b[:, r], term.a[r]).double(), component, 1e-5)


def test_components_that_are_stored_keep_their_numbers():
    stored = orthogonal(5)
    again = low_rank_approximation(stored)
    assert torch.equal(again.terms[0].b, stored.terms[0].b)
    cut = low_rank_approximation(stored, 2)
    assert torch.equal(cut.terms[0].a, stored.terms[0].a[:2])
    turned = LowRank(stored.shape, (Term(stored.terms[0].b.flip(1), stored.terms[0].a.flip(0), 2.0),))
    assert naive.close(
        naive.dense(low_rank_approximation(turned, 2)), 2 * sum(components_of(stored)[:2]), 1e-6
    )


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    k=st.integers(1, 10),
    tokens=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_vectors_of_any_ranks_have_the_naive_numbers(ranks, k, tokens, seed):
    """Ranks of zero, more ranks than a matrix has, more parts than ranks and fewer."""
    deltas = {f"v{i}": low_rank(rank, seed + i) for i, rank in enumerate(ranks)}
    layer, bank = linear_bank(deltas)
    comp = Composition(naive.double(layer), bank, Partition.components(k))
    naive.randomise(comp, seed)
    x = torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = comp(x)
    naive.probe(y).backward()
    expected, gradient = naive.gradient(comp, layer, lambda m, x: m(x), x)
    # components of nearly equal size are mixed by rounding: stay away from these
    values = [torch.linalg.svdvals(naive.dense(d))[: d.rank] for d in deltas.values() if d.rank]
    if all(bool((s[:-1] - s[1:] > 0.02 * s[0]).all()) for s in values):
        assert naive.close(y.detach(), expected, 1e-4)
        assert naive.close(comp.values.grad, gradient, 1e-4)
    tied = Composition(naive.double(layer), bank)
    with torch.no_grad():
        tied.values.copy_(torch.linspace(-1, 1, len(ranks)))
        comp.values.copy_(tied.values.repeat_interleave(comp.index.count // len(ranks)))
        assert naive.close(comp(x), tied(x), 1e-5)


# corners


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((6, 4), Kind.MLP, ComponentParts(24, 3)),
        ((6, 4), Kind.OTHER, ComponentParts(24, 3)),
        ((6, 2), Kind.MLP, ComponentParts(12, 2)),
        ((6, 3, 2, 2), Kind.CONV, ComponentParts(72, 3)),
        ((2, 9), Kind.ATTENTION, ComponentParts(18, 2)),
        ((1, 9), Kind.MLP, WholeBlock(9)),
        ((9, 1), Kind.MLP, WholeBlock(9)),
        ((0, 9), Kind.MLP, WholeBlock(0)),
        ((6, 4), Kind.EMBEDDING, WholeBlock(24)),
        ((6,), Kind.BIAS, WholeBlock(6)),
        ((6,), Kind.NORM, WholeBlock(6)),
        ((), Kind.OTHER, WholeBlock(1)),
    ],
)
def test_matrices_have_components_and_other_blocks_one_coefficient(shape, kind, expected):
    block = Block("w", shape, kind)
    assert Partition.components(3).for_block(block) == expected
    assert Partition.components(1).for_block(block) == WholeBlock(block.numel)


def test_a_component_is_described():
    assert ComponentParts(24, 3).describe(0) == "singular component 0"
    assert ComponentParts(24, 3).describe(2) == "singular component 2 and all smaller ones"
    assert "8 coefficients per vector and matrix" in str(Partition.components(8))
    assert str(Partition.components(1)) == str(Partition.blocks())


def test_blocks_with_fewer_coefficients_are_noted(svd_bank):
    _, bank = svd_bank
    index = Coefficients.zeros(bank, Partition.components(4)).index
    assert {e.block.name for e in index.capped} == {
        "conv.bias", "embed.weight", "norm.weight", "norm.bias", "fc.bias", "out.weight", "out.bias",
    }  # fmt: skip
    (note,) = index.notes
    assert "7 of 9 blocks are not matrices" in note


def test_a_zero_vector_and_absent_blocks_scale_nothing():
    zero = LowRank((ROWS, COLUMNS), (Term(torch.zeros(ROWS, 2), torch.randn(2, COLUMNS), 1.0),))
    layer, bank = linear_bank({"zero": zero, "none": LowRank((ROWS, COLUMNS), ()), "a": orthogonal(3)})
    wide = naive.double(layer)
    comp = Composition(wide, bank, Partition.components(4))
    with torch.no_grad():
        comp.values[:8] = 5.0
    x = torch.randn(3, COLUMNS, dtype=torch.float64)
    y = comp(x)
    assert torch.equal(y.detach(), wide(x).detach())
    y.sum().backward()
    assert not comp.values.grad[:8].any()
    assert bool(comp.values.grad[8:11].all()) and not comp.values.grad[11:].any()


def test_a_vector_that_is_not_stored_as_factors_is_refused_by_name(refused):
    dense = Dense(torch.randn(ROWS, COLUMNS))
    layer, bank = linear_bank({"a": orthogonal(3), "full": dense})
    comp = Composition(layer, bank, Partition.components(2))
    with refused("PARTITION", 3, "'full'", "0.weight", "svd:K", "aniso bank quantise"):
        comp.prepare()
    assert Composition(layer, bank, Partition.components(1)).prepare()
    values = Coefficients.zeros(bank, Partition.components(2))
    values.values.fill_(1.0)
    with refused("PARTITION", 3, "'full'", "svd:K"):
        Composition(layer, bank, Partition.components(2)).load(values).bake().read("0.weight")


def test_stacks_that_are_cut_add_up():
    """What processes that share a bank do: each has some rows, and products are summed."""
    deltas = [orthogonal(3, 1), orthogonal(5, 2)]
    parts = ComponentParts(ROWS * COLUMNS, 4)
    stack = LowRankStack((0, 1), (ROWS, COLUMNS), stacked_factors(deltas, parts))
    gradient = torch.randn(ROWS * COLUMNS, dtype=torch.float64)
    own = torch.randn(2, 4, dtype=torch.float64)
    whole = torch.zeros(ROWS * COLUMNS, dtype=torch.float64)
    stack.add_to(whole, own, parts)
    pieces, products = [], 0
    for start, stop in ((0, 5 * COLUMNS), (5 * COLUMNS, ROWS * COLUMNS)):
        piece = stack.cut(start, stop)
        out = torch.zeros(stop - start, dtype=torch.float64)
        piece.write_to(out, torch.zeros_like(out), own, parts)
        pieces.append(out)
        products = products + piece.dots(gradient[start:stop], parts)
    assert naive.close(torch.cat(pieces), whole, 1e-14)
    assert naive.close(products, stack.dots(gradient, parts), 1e-13)


# files


def test_coefficients_are_saved_and_loaded_exactly(svd_bank, tmp_path):
    model, bank = svd_bank
    comp = Composition(model, bank, Partition.components(3))
    naive.randomise(comp)
    comp.coefficients.save(tmp_path / "c.safetensors")
    loaded = Coefficients.load(tmp_path / "c.safetensors")
    assert loaded.partition == Partition.components(3)
    assert torch.equal(loaded.values, comp.values.detach())
    again = Composition.of(model, bank, loaded)
    assert all(torch.equal(t, comp.weights()[k]) for k, t in again.weights().items())
    fewer = Composition(model, bank, Partition.components(2))
    with pytest.raises(Exception, match="different partition"):
        fewer.load(loaded)


def test_baked_weights_are_the_composed_ones(svd_bank):
    model, bank = svd_bank
    comp = Composition(model, bank, Partition.components(3))
    naive.randomise(comp)
    baked = comp.bake()
    for key, tensor in comp.weights().items():
        assert naive.close(baked.read(key), tensor, 1e-6), key


def test_a_merged_adapter_has_the_composed_update(tmp_path):
    layer, bank = linear_bank({"a": low_rank(3, 1), "b": low_rank(2, 2)})
    comp = Composition(layer, bank, Partition.components(3))
    naive.randomise(comp)
    merged = merge_adapters(TensorMap(layer.state_dict()), bank, comp.coefficients)
    (update,) = merged.updates.values()
    assert update.rank == 5
    expected = comp.weights()["0.weight"] - layer[0].weight.detach()
    assert naive.close(update.b @ update.a, expected, 1e-5)
    smaller = merge_adapters(TensorMap(layer.state_dict()), bank, comp.coefficients, rank=2)
    assert 0 < smaller.error < 1


def test_nothing_scales_with_the_number_of_components(svd_bank):
    """The factors are held once, whatever the number of coefficients."""
    model, bank = svd_bank
    sizes = set()
    for k in (2, 3, 4):
        comp = Composition(model, bank, Partition.components(k)).prepare()
        store = comp._store
        assert isinstance(store, DeltaStore)
        stacks = (s for entry in comp.index.blocks for s in store.stacks(entry))
        sizes.add(sum(stack.nbytes for stack in stacks))
    assert len(sizes) == 1


# storage


@pytest.mark.parametrize("k", [1, 2, 5, 100])
def test_storage_svd_is_the_best_approximation_of_that_rank(k, tmp_path):
    base = net().state_dict()
    tuned = tiny.tuned(base, 3)
    bank = Bank.build(base, {"a": tuned}, to=tmp_path / "full")
    small = bank.save(tmp_path / "small", storage=f"svd:{k}")
    assert small.storage == f"svd:{k}" and small.storage_of("a") == f"svd:{k}"
    lost = whole = 0.0
    for block in bank["a"].blocks:
        dense, stored = bank["a"][block.name], small["a"][block.name]
        whole += dense.norm() ** 2
        if block.name not in ("conv.weight", "fc.weight"):
            assert isinstance(stored, Dense) and torch.equal(stored.values, dense.values), block.name
            continue
        assert isinstance(stored, LowRank) and stored.rank == min(k, *block.matrix_shape)
        u, s, vt = torch.linalg.svd(naive.dense(dense).reshape(len(dense.values), -1), full_matrices=False)
        expected = (u[:, :k] * s[:k]) @ vt[:k]
        assert naive.close(naive.dense(stored).reshape(len(expected), -1), expected, 1e-6)
        assert small["a"].norms[block.name] == pytest.approx(float(expected.norm()), rel=1e-6)
        lost += float(s[k:].square().sum())
    assert small["a"].relative_error == pytest.approx(math.sqrt(lost / whole), rel=1e-4, abs=1e-6)
    assert small.check() == []


def test_a_bank_in_storage_svd_is_stored_again_without_a_further_error(svd_bank, tmp_path):
    _, bank = svd_bank
    again = bank.save(tmp_path / "again", storage="svd:4")
    for name in bank:
        assert again[name].relative_error == bank[name].relative_error
        for block in bank[name].blocks:
            if isinstance(bank[name][block.name], LowRank):
                (old,), (new,) = (b[name][block.name].terms for b in (bank, again))
                assert torch.equal(old.b, new.b) and torch.equal(old.a, new.a)
    assert bank.add(net().state_dict(), {"w": tiny.tuned(net().state_dict(), 9)}).storage_of("w") == "svd:4"


def test_packed_vectors_and_adapters_can_be_stored_as_components(tmp_path):
    base = net().state_dict()
    lora = naive.low_rank(base, {"fc.weight": 6}, name="lora")
    bank = Bank.build(base, {"a": tiny.tuned(base, 1), "lora": lora}, to=tmp_path / "int8", storage="int8")
    small = bank.save(tmp_path / "svd", storage="svd:3")
    for name in bank:
        expected = sum(components_of(bank[name]["fc.weight"])[:3])
        assert naive.close(naive.dense(small[name]["fc.weight"]).view_as(expected), expected, 1e-5)
    assert small["lora"].relative_error > 0.01


def test_the_memory_plan_counts_the_factors(svd_bank):
    model, bank = svd_bank
    plan = Composition(model, bank, Partition.components(2)).plan
    assert plan.storage == ("svd:4",)
    assert "few-bit" not in str(plan)
    own = next(b for b in plan.blocks if b.block == "fc.weight")
    assert own.nbytes == 2 * 4 * 4 * (ROWS + COLUMNS)


@pytest.mark.parametrize(
    "name", ["svd", "svd:", "svd:0", "svd:-1", "svd:2.5", "svd:٣", "svd:123456", "SVD:4"]
)
def test_a_storage_that_does_not_exist_is_refused(name, refused, svd_bank, tmp_path):
    with refused("USAGE", 2, "svd:K"):
        svd_bank[1].save(tmp_path / "x", storage=name)
