"""Composed models against the naive sum of dense deltas and autograd, in float64."""

from __future__ import annotations

import functools

import naive
import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

from aniso.compose import Composition, Partition, Runtime, plan
from aniso.compose._engine import block_partition, delta_stack, delta_store, weight_buffer
from aniso.compose._layers.cached_linear import CachedLinear
from aniso.compose._layers.layer_weight import LayerWeight
from aniso.compose._layers.low_rank_linear import LowRankUpdate
from aniso.vectors import Bank, BlockSource
from aniso.weights import TensorMap


class Plain(nn.Module):
    """One of each: convolution, embedding, norm, linear, a scalar; sizes that fill no group of 64."""

    def __init__(self, width: int = 65) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.embed = nn.Embedding(71, width)
        self.ln = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 77)
        self.fc2 = nn.Linear(77, 5, bias=False)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        image = self.conv(x).flatten(2)
        words = self.embed(torch.arange(image.shape[-1]) * 3)
        h = self.ln(words + self.gate * image.mean(1, keepdim=True).transpose(1, 2))
        return self.fc2(torch.tanh(self.fc1(h)))


def call(m, x):
    return m(x)


def encode(m, x):
    return m.encode_image(x)


def encode_hf(m, x):
    return m.visual_projection(m.vision_model(x).pooler_output)


def plain_model():
    torch.manual_seed(0)
    return Plain().eval()


IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LARGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
SMALL = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
FAMILIES = {
    "plain": (plain_model, call, SMALL, lambda key: True),
    "open_clip": (tiny.open_clip_vit, encode, IMAGE, tiny.is_open_clip_vision),
    "hugging face": (tiny.hf_clip, encode_hf, IMAGE, tiny.is_hf_vision),
    "resnet": (tiny.open_clip_resnet, encode, LARGE, tiny.is_open_clip_vision),
}
PARTITIONS = [
    Partition.whole(),
    Partition.blocks(),
    Partition.kinds("weight"),
    Partition.rows(),
    Partition.columns(),
    Partition.random(7, 0),
    Partition.random(1 << 20, 0),
]


@functools.cache
def family(name):
    """Model, call, input and a bank that is not on disk."""
    make, run, x, is_vision = FAMILIES[name]
    model = make()
    base = model.state_dict()
    tuned = {f"v{i}": tiny.tuned_vision(base, is_vision, i + 1) for i in range(3)}
    return model, run, x, Bank.build(base, tuned)


def check(model, bank, run, x, partition=None, runtime=None):
    """Zero is the base bit for bit; elsewhere outputs and gradients are the naive ones."""
    wide, x = naive.double(model), naive.doubled(x)
    comp = Composition(wide, bank, partition, runtime=runtime)
    with torch.no_grad(), comp.composed() as m:
        assert torch.equal(run(m, x), run(wide, x))
    with comp.composed() as m:
        y = run(m, x)
        layers = [t._layer for t in comp._installer.installed.values() if isinstance(t, LayerWeight)]
    kept = all(isinstance(layer, CachedLinear) for layer in layers)
    # torch's own layers round differently when their weights take no gradient
    assert torch.equal(y, run(wide, x)) if kept else naive.close(y, run(wide, x), 1e-14)
    naive.randomise(comp)
    with comp.composed() as m:
        y = run(m, x)
    naive.probe(y).backward()
    expected, gradient = naive.gradient(comp, model, run, x)
    assert naive.close(y.detach(), expected)
    assert gradient.abs().max() > 0
    assert naive.close(comp.values.grad, gradient)
    return comp


# models and partitions


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_the_naive_ones(name, partition):
    if name == "resnet" and partition.rule in ("whole", "columns"):
        pytest.skip("large, and the same code as for the others")
    model, run, x, bank = family(name)
    check(model, bank, run, x, partition)


@pytest.mark.parametrize("name", ["open_clip", "hugging face"])
@pytest.mark.parametrize("partition", PARTITIONS[:2] + PARTITIONS[3:6], ids=str)
def test_query_key_and_value_may_be_blocks_of_their_own(name, partition):
    model, run, x, _ = family(name)
    is_vision = FAMILIES[name][3]
    base = BlockSource(TensorMap(model.state_dict()), split=True)
    tuned = {f"v{i}": tiny.tuned_vision(model.state_dict(), is_vision, i + 1) for i in range(2)}
    bank = Bank.build(base, tuned)
    comp = check(model, bank, run, x, partition)
    assert any(slot.block.name.endswith("in_proj_weight.k") for slot in comp.index.blocks)


@pytest.mark.parametrize("split", [False, True])
def test_a_bank_fits_both_namings(split):
    """The same model under both names, one bank, the same coefficients: the same output."""
    from aniso.vectors.convert import renamed

    model = tiny.hf_clip()
    state = model.state_dict()
    ours = {k: read() for k, read in renamed(TensorMap(state), "open_clip").tensors.items()}
    other = tiny.open_clip_vit()
    other.load_state_dict(ours, strict=False)
    source = BlockSource(TensorMap(state), split=split)
    bank = Bank.build(source, {f"v{i}": tiny.tuned_vision(state, tiny.is_hf_vision, i) for i in range(2)})
    a, b = Composition(model.double(), bank), Composition(other.double(), bank)
    naive.randomise(a)
    b.load_state_dict(a.state_dict())
    x = IMAGE.double()
    with a.composed() as m, b.composed() as n:
        ya, yb = encode_hf(m, x), encode(n, x)
    assert torch.allclose(ya, yb, rtol=1e-9, atol=1e-12)
    naive.probe(ya).backward()
    naive.probe(yb).backward()
    assert naive.close(b.values.grad, a.values.grad, 1e-9)


# storage


@functools.cache
def stored(name, storage, directory):
    return family(name)[3].save(directory / f"{name}-{storage}", storage=storage, overwrite=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("banks")


STORAGES = ["fp32", "fp16", "bf16", "int8", "int4", "residual4", "residual2"]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stream", [False, True])
def test_weights_composed_in_passing(name, partition, stream, directory, monkeypatch):
    if name == "resnet" and partition.rule in ("whole", "columns"):
        pytest.skip("large, and the same code as for the others")
    naive.compose_in_passing(monkeypatch)
    model, run, x, bank = family(name)
    if stream:
        bank = stored(name, "fp32", directory)
    comp = check(model, bank, run, x, partition, Runtime(stream=stream))
    kept = {k for k, w in comp._installer.installed.items() if not isinstance(w, LayerWeight)}
    linear = {k for k, m in comp.model.named_modules() if isinstance(m, nn.Linear)}
    # three tensors of one block; and one that lies the other way round in its block
    linear -= {k for k in linear if k.endswith(("q_proj", "k_proj", "v_proj", "visual_projection"))}
    moved = {f"{k}.weight" for k in linear} & set(comp._installer.installed)
    assert moved and not moved & kept


RUNTIMES = {"resident": Runtime(), "streamed": Runtime(stream=True), "not compiled": Runtime(fast=False)}


@pytest.mark.parametrize("partition", [PARTITIONS[i] for i in (0, 1, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_is_read_exactly(storage, partition, directory):
    model, run, x, _ = family("plain")
    bank = stored("plain", storage, directory)
    for runtime in RUNTIMES.values() if partition.rule in ("blocks", "rows") else [Runtime()]:
        comp = check(model, bank, run, x, partition, runtime)
        assert bool(comp.plan.resident) != runtime.stream


CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a graphics card")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CARD)])
@pytest.mark.parametrize("way", ["resident", "streamed", "in passing"])
@pytest.mark.parametrize("storage", ["fp32", "int8", "residual4"])
def test_any_device_gives_the_naive_numbers(storage, way, device, directory, monkeypatch):
    model, run, x, _ = family("open_clip")
    bank = stored("open_clip", storage, directory)
    if way == "in passing":
        naive.compose_in_passing(monkeypatch)
    runtime = Runtime(stream=way == "streamed")
    comps = [
        Composition(naive.double(model).to(place), bank, Partition.random(7, 0), runtime=runtime)
        for place in ("cpu", device)
    ]
    for comp in comps:
        naive.randomise(comp)
    with comps[1].composed() as m:
        y = run(m, x.double().to(device))
    naive.probe(y).backward()
    found = comps[1].values.grad
    assert y.device.type == found.device.type == device
    expected, gradient = naive.gradient(comps[0], model, run, x.double())
    assert naive.close(y.detach().cpu(), expected) and naive.close(found.cpu(), gradient)


@pytest.mark.parametrize("storage", ["fp32", "int4", "residual2"])
@pytest.mark.parametrize("name", ["open_clip", "hugging face"])
def test_packed_query_key_and_value(name, storage, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "WIDTH", 64)  # large enough to be packed
    make, run, x, is_vision = FAMILIES[name]
    model = make()
    base = model.state_dict()
    tuned = {f"v{i}": tiny.tuned_vision(base, is_vision, i + 1) for i in range(3)}
    for split in (False, True):
        source = BlockSource(TensorMap(base), split=split)
        bank = Bank.build(source, tuned, to=tmp_path / f"bank{split}", storage=storage)
        for runtime in (Runtime(), Runtime(stream=True)):
            check(model, bank, run, x, Partition.blocks(), runtime)
    check(model, bank, run, x, Partition.random(5, 1))


@pytest.mark.parametrize("storage", ["fp32", "int4", "residual2"])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_small_tiles_runs_and_chunks_change_nothing(storage, partition, directory, monkeypatch):
    monkeypatch.setattr(delta_stack, "_TILE", 700)
    monkeypatch.setattr(block_partition, "_RUN", 300)
    monkeypatch.setattr(plan, "CHUNK", 1000)
    monkeypatch.setattr(delta_store, "CHUNK", 1000)
    model, run, x, _ = family("plain")
    bank = stored("plain", storage, directory)
    for runtime in (Runtime(), Runtime(stream=True)):
        check(model, bank, run, x, partition, runtime)


@pytest.mark.parametrize("storage", ["fp32", "int8"])
@pytest.mark.parametrize("chunk", [1000, plan.CHUNK])
def test_some_blocks_in_memory_and_some_on_disk(storage, chunk, directory, monkeypatch):
    monkeypatch.setattr(plan, "CHUNK", chunk)
    monkeypatch.setattr(delta_store, "CHUNK", chunk)
    model, run, x, _ = family("plain")
    bank = stored("plain", storage, directory)
    roomy = Composition(naive.double(model), bank).plan
    comp = check(model, bank, run, x, runtime=Runtime(memory=roomy.memory - 5000))
    assert 0 < len(comp.plan.resident) < len(comp.plan.blocks)
    assert comp.plan.memory <= comp.plan.budget


def test_a_weights_gradient_does_not_wait_for_the_rest_of_the_backward_pass(directory, monkeypatch):
    model, run, x, _ = family("plain")
    comp = Composition(model, stored("plain", "fp32", directory))
    order = []
    gradients = weight_buffer.WeightBuffer.gradients

    def noted(self, grads):
        order.append(self.views[0].key)
        return gradients(self, grads)

    monkeypatch.setattr(weight_buffer.WeightBuffer, "gradients", noted)
    comp.model.ln.register_full_backward_hook(lambda *_: order.append("through ln"))
    run(comp, x).sum().backward()
    assert order.index("fc2.weight") < order.index("fc1.weight") < order.index("through ln")


@pytest.mark.parametrize("streams", [False, True])
def test_dense_packed_and_low_rank_in_one_bank(streams, tmp_path):
    model, run, x, _ = family("plain")
    base = model.state_dict()
    lora = naive.low_rank(base, {"fc1.weight": 3, "conv.weight": 2, "embed.weight": 4}, name="lora")
    only = tiny.tuned(base, 5)
    partly = {k: only[k] if k.startswith(("fc1", "gate")) else v for k, v in base.items()}
    bank = Bank.build(base, {"a": tiny.tuned(base, 1), "lora": lora}, to=tmp_path / "bank", storage="bf16")
    bank = bank.add(base, {"b": tiny.tuned(base, 2), "partly": partly}, storage="int4")
    bank = bank.add(base, {"c": tiny.tuned(base, 3)}, storage="int8")
    bank = bank.add(base, {"d": tiny.tuned(base, 4)}, storage="fp32")
    kinds = {type(d).__name__ for d in bank.read_block("fc1.weight").values()}
    assert kinds == {"Dense", "Packed", "LowRank"}
    for partition in PARTITIONS:
        check(model, bank, run, x, partition, Runtime(stream=streams))
    check(model, bank.without("a", "c"), run, x, runtime=Runtime(stream=streams))


def test_vectors_of_packed_banks_scaled_and_summed(directory):
    """What is computed from vectors on disk has factors, or deltas that are no longer in a file."""
    model, run, x, _ = family("plain")
    a, b = stored("plain", "residual2", directory), stored("plain", "int8", directory)
    bank = Bank({"x": 0.5 * a["v0"], "y": a["v1"] - b["v2"], "z": -b["v0"], "w": a["v2"]})
    for partition in PARTITIONS[:6]:
        check(model, bank, run, x, partition)


# special values


@pytest.mark.parametrize("name", FAMILIES)
def test_zero_is_the_base_bit_for_bit_in_float32(name):
    model, run, x, _ = family(name)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    for v in base.values():  # negative zeros are the first to go when zeros are added
        if v.is_floating_point() and v.numel() > 4:
            v.view(-1)[::5] = -0.0
    torch.manual_seed(0)
    model = FAMILIES[name][0]()
    model.load_state_dict(base)
    tuned = {f"v{i}": tiny.tuned_vision(base, FAMILIES[name][3], i + 1) for i in range(2)}
    bank = Bank.build(base, tuned)
    for partition in PARTITIONS:
        comp = Composition(model, bank, partition)
        with comp.composed() as m:
            assert torch.equal(run(m, x), run(model, x))
        for key, t in comp.weights().items():
            assert torch.equal(t.view(torch.int32), base[key].view(torch.int32)), key


@pytest.mark.parametrize("name", FAMILIES)
def test_a_unit_vector_is_the_tuned_model(name):
    model, _, _, bank = family(name)
    base = model.state_dict()
    for partition in (Partition.blocks(), Partition.random(7, 0)):
        narrow, wide = (Composition(m, bank, partition) for m in (model, naive.double(model)))
        for i, vector in enumerate(bank):
            tuned = tiny.tuned_vision(base, FAMILIES[name][3], i + 1)
            for comp in (narrow, wide):
                with torch.no_grad():
                    comp.values.zero_()
                    for slot in comp.index.blocks:
                        comp.values[comp.index.cell(vector, slot.block.name)] = 1
            expected = naive.weights(wide, model, wide.values.detach())
            for key, t in narrow.weights().items():
                assert torch.allclose(t, tuned[key], rtol=1e-6, atol=1e-6), key
            for key, t in wide.weights().items():
                assert torch.allclose(t, expected[key], rtol=1e-12, atol=1e-15), key


# low-rank vectors


def low_rank_bank(name):
    """Vectors of different ranks that touch different layers, and one that touches some of q, k and v."""
    model = FAMILIES[name][0]()
    source = BlockSource(TensorMap(model.state_dict()))
    layer = "visual.transformer.resblocks.{}."
    every = {
        layer.format(i) + key: 4 - i
        for i in range(tiny.LAYERS)
        for key in ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight")
    }
    attention = {layer.format(i) + "attn.in_proj_weight": 3 for i in range(tiny.LAYERS)}
    vectors = {
        "every": naive.low_rank(source, every, name="every", seed=1),
        "ends": naive.low_rank(source, {"visual.proj": 2, "visual.conv1.weight": 3}, name="ends", seed=2),
        "q and v": naive.low_rank(source, attention, name="q and v", seed=3, thirds=(0, 2)),
        "q": naive.low_rank(source, attention, name="q", seed=4, thirds=(0,)),
    }
    return model, Bank.build(source, {k.replace(" ", "-"): v for k, v in vectors.items()})


WAYS = {"beside the base": (0, 1, 1), "composed and watched": (1, 0, 1), "ordinary": (1, 1, 0)}


def force(monkeypatch, way):
    monkeypatch.setattr(LowRankUpdate, "costs", lambda self, tokens: WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["open_clip", "hugging face"])
def test_low_rank_vectors_in_every_way(name, way, monkeypatch):
    force(monkeypatch, way)
    model, bank = low_rank_bank(name)
    for partition in (Partition.whole(), Partition.blocks()):
        check(model, bank, FAMILIES[name][1], IMAGE, partition)
    check(model, bank.only("q-and-v", "ends"), FAMILIES[name][1], IMAGE)


@pytest.mark.parametrize("name", ["open_clip", "hugging face"])
def test_low_rank_vectors_over_parts_and_from_disk(name, tmp_path):
    model, bank = low_rank_bank(name)
    for partition in PARTITIONS[2:]:
        check(model, bank, FAMILIES[name][1], IMAGE, partition)
    bank = bank.save(tmp_path / "bank", storage="int4")
    for runtime in (Runtime(), Runtime(stream=True)):
        check(model, bank, FAMILIES[name][1], IMAGE, runtime=runtime)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_peft(way, split, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    force(monkeypatch, way)
    targets = [r"vision_model.*\.(q_proj|fc1)", r"vision_model.*\.(k_proj|v_proj|out_proj)|visual_projection"]
    for i, target in enumerate(targets):
        wrapped = peft.get_peft_model(
            tiny.hf_clip(), peft.LoraConfig(r=2 + 2 * i, lora_alpha=8, target_modules=target)
        )
        torch.manual_seed(i)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        wrapped.save_pretrained(tmp_path / f"lora{i}")
    model = tiny.hf_clip()
    source = BlockSource(TensorMap(model.state_dict()), split=split)
    bank = Bank.build(source, {f"lora{i}": tmp_path / f"lora{i}" for i in range(2)})
    check(model, bank, encode_hf, IMAGE)
    check(model, bank, encode_hf, IMAGE, Partition.whole())


def test_few_tokens_go_beside_the_base_and_many_do_not(monkeypatch):
    """The choice by cost, as it is made: one token of a wide layer against many of a narrow one."""
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    vector = naive.low_rank(layer.state_dict(), {"0.weight": 2}, name="a")
    bank = Bank.build(layer.state_dict(), {"a": vector})
    used = []
    beside = LowRankUpdate.beside
    monkeypatch.setattr(LowRankUpdate, "beside", lambda *a: used.append(1) or beside(*a))
    check(layer, bank, call, torch.randn(4096, 64))
    assert not used
    check(layer, bank, call, torch.randn(1, 64))
    assert used


class Odd(nn.Module):
    """Uses of a weight other than in a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8) * 0.3)
        self.bias = nn.Parameter(torch.randn(12) * 0.3)

    def forward(self, x):
        return USES[self.use](self.weight, x, self.bias)


USES = {
    "linear": lambda w, x, b: F.linear(x, w, b),
    "linear by keywords": lambda w, x, b: F.linear(input=x, weight=w, bias=b),
    "linear in three dimensions": lambda w, x, b: F.linear(x.view(5, 1, 8), w),
    "linear of one row": lambda w, x, b: F.linear(x[0], w, b),
    "linear of its own rows": lambda w, x, b: F.linear(w, w) * x.sum(),
    "linear of its own rows, transposed": lambda w, x, b: F.linear(x @ w.T, w.T),
    "used twice": lambda w, x, b: F.linear(F.linear(x, w, b)[:, :8].tanh(), w, b),
    "in two ways": lambda w, x, b: F.linear(x, w) + x @ w.T * w.norm(),
    "operator": lambda w, x, b: x @ w.T,
    "operator from the right": lambda w, x, b: w @ x.T,
    "matmul": lambda w, x, b: torch.matmul(x, w.t()),
    "transposed property": lambda w, x, b: x @ w.mT,
    "addmm": lambda w, x, b: torch.addmm(b, x, w.T),
    "einsum": lambda w, x, b: torch.einsum("ni,oi->no", x, w),
    "norm": lambda w, x, b: x.sum() * w.norm(dim=1),
    "normalised": lambda w, x, b: F.linear(x, F.normalize(w)),
    "functional norm": lambda w, x, b: torch.linalg.norm(w) * x,
    "arithmetic": lambda w, x, b: F.linear(x, 2 * w + w * w - w / 3),
    "convolution": lambda w, x, b: F.conv1d(x.T[None], w[:, :, None], b),
    "chunks": lambda w, x, b: torch.cat([F.linear(x, part) for part in w.chunk(3)], -1),
    "split": lambda w, x, b: F.linear(x, w.split([4, 8])[1]),
    "rows": lambda w, x, b: F.linear(x, w[2:7]),
    "fancy rows": lambda w, x, b: w[torch.tensor([1, 1, 3])] * x[:3],
    "embedding": lambda w, x, b: F.embedding(torch.tensor([0, 3, 3]), w) * x[:3],
    "stacked": lambda w, x, b: torch.stack([w, w]).sum(0) @ x.T,
    "reshaped": lambda w, x, b: w.view(4, 3, 8).mean(1) @ x.T,
    "cast": lambda w, x, b: F.linear(x.float(), w.float()).double(),
    "cloned": lambda w, x, b: F.linear(x, w.clone()),
    "changed in place after cloning": lambda w, x, b: F.linear(x, w.clone().mul_(2)),
    "contiguous": lambda w, x, b: F.linear(x, w.contiguous()),
    "bilinear": lambda w, x, b: F.bilinear(x, x[:, :4], w[:, :, None] * w[:, None, :4]),
    "checked": lambda w, x, b: F.linear(x, w) * (w.shape[0] + w.ndim + w.numel() + len(w)),
    "where": lambda w, x, b: F.linear(x, torch.where(w > 0, w, 0.1 * w)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_low_rank_weight_has_the_right_gradient(use, way, monkeypatch):
    force(monkeypatch, way)
    torch.manual_seed(0)
    model = Odd()
    model.use = use
    state = model.state_dict()
    bank = Bank.build(
        state,
        {n: naive.low_rank(state, {"weight": r}, name=n, seed=r) for n, r in (("a", 2), ("b", 3))},
    )
    wide = naive.double(model)
    x = torch.randn(5, 8, dtype=torch.float64)
    comp = Composition(wide, bank)
    assert torch.allclose(comp(x), wide(x), rtol=1e-14, atol=1e-15)
    tolerance = 1e-6 if use == "cast" else 1e-10
    for seed in (1, 2, 3):
        naive.randomise(comp, seed)
        comp.values.grad = None
        x.requires_grad_(seed == 3)
        y = comp(x)
        naive.probe(y).backward()
        expected, gradient = naive.gradient(comp, model, call, x)
        assert naive.close(y.detach(), expected, tolerance)
        assert naive.close(comp.values.grad, gradient, tolerance)
    other = x.detach().clone().requires_grad_()
    naive.probe(naive.run(comp, wide, call, other, comp.values.detach())).backward()
    assert naive.close(x.grad, other.grad, tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_changing_a_low_rank_weight_in_place_never_reaches_the_base(way, monkeypatch):
    force(monkeypatch, way)
    torch.manual_seed(0)
    model = Odd()
    model.use = "linear"
    state = model.state_dict()
    bank = Bank.build(state, {"a": naive.low_rank(state, {"weight": 2}, name="a")})
    comp = Composition(model, bank)
    x = torch.randn(5, 8)
    before = model(x)
    comp(x)
    naive.randomise(comp)
    good = comp(x).detach()
    with comp.composed() as m:
        assert isinstance(m.weight, LayerWeight)
        try:
            with torch.no_grad():
                m.weight.mul_(2)
        except RuntimeError:
            pass  # refusing is right, too
    assert torch.equal(model(x), before)
    naive.randomise(comp, 9)
    comp(x)
    naive.randomise(comp)
    assert torch.allclose(comp(x), good, rtol=1e-6)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_attention_with_low_rank_vectors(need_weights, masked, batch_first):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 3, batch_first=batch_first)
            nn.init.normal_(self.attn.in_proj_bias)

        def forward(self, x):
            mask = torch.ones(4, 4).triu(1).bool() if masked else None
            return self.attn(x, x, x, need_weights=need_weights, attn_mask=mask)[0] + self.cross(x)

        def cross(self, x):
            other = x.flip(0)
            return self.attn(x, other, other, need_weights=False)[0]

    torch.manual_seed(0)
    model = Attention()
    state = model.state_dict()
    keys = {"attn.in_proj_weight": 2, "attn.out_proj.weight": 3}
    bank = Bank.build(state, {f"v{i}": naive.low_rank(state, keys, name="a", seed=i) for i in range(2)})
    for mode in (True, False):
        check(model.train(mode), bank, call, torch.randn(4, 4, 12))


def test_low_rank_recurrent_layers():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 8, num_layers=2)

        def forward(self, x):
            return self.lstm(x)[0]

    torch.manual_seed(0)
    model = Recurrent()
    state = model.state_dict()
    keys = {"lstm.weight_ih_l0": 2, "lstm.weight_hh_l1": 3}
    bank = Bank.build(state, {"a": naive.low_rank(state, keys, name="a")})
    check(model, bank, call, torch.randn(5, 2, 6))
