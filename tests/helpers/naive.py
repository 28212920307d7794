"""The method without any cleverness: a Python sum of scaled dense deltas in float64, and autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aniso.compose import Composition, plan
from aniso.compose._engine.block_partition import BlockPartition, ComponentParts
from aniso.vectors import BlockSource, Delta, Dense, LowRank, Packed, Provenance, TaskVector
from aniso.vectors.delta import Term
from aniso.weights import TensorMap

Call = Callable[[nn.Module, Any], Tensor]


def dense(delta: Delta) -> Tensor:
    """A delta in float64, from what is stored and not by the library's own expansion."""
    if isinstance(delta, Dense):
        return delta.values.double()
    if isinstance(delta, LowRank):
        out = torch.zeros(delta.shape[0], math.prod(delta.shape[1:]), dtype=torch.float64)
        for t in delta.terms:
            out[t.start : t.start + len(t.b)] += t.scale * (t.b.double() @ t.a.double())
        return out.view(delta.shape)
    assert isinstance(delta, Packed)
    bits = delta.packing.bits
    codes = torch.stack([(delta.codes.long() >> shift) % 2**bits for shift in range(0, 8, bits)], dim=1)
    steps = codes.view(-1, 64).double() - {8: 128, 4: 8, 2: 1.5}[bits]
    out = (steps * delta.scales.double().view(-1, 1)).view(-1)[: math.prod(delta.shape)].view(delta.shape)
    return (out if delta.mean is None else out + delta.mean.double().view(delta.shape)) * delta.factor


def part_scaled(delta: Tensor, own: Tensor, partition: BlockPartition) -> Tensor:
    """One delta with its coefficients: each over its elements, or over its singular components."""
    if not isinstance(partition, ComponentParts):
        return (own[partition.part_of()] * delta.reshape(-1)).view(delta.shape)
    u, s, vt = torch.linalg.svd(delta.reshape(len(delta), -1), full_matrices=False)
    each = [own[min(r, len(own) - 1)] * s[r] * torch.outer(u[:, r], vt[r]) for r in range(len(s))]
    return torch.stack(each).sum(0).view(delta.shape)


def weights(composition: Composition, model: nn.Module, values: Tensor) -> dict[str, Tensor]:
    """base + sum of coefficient * delta by the model's names, in float64, as a function of the values."""
    slots, bank, layout = composition.index, composition.bank, composition.layout
    sums: dict[str, Tensor] = {}
    for slot, own in zip(slots.blocks, slots.divided(values.double()), strict=True):
        deltas = [dense(bank[v][slot.block.name]) for v in slot.vectors]
        scaled = [part_scaled(delta, own[i], slot.partition) for i, delta in enumerate(deltas)]
        sums[slot.block.name] = sum(scaled, torch.zeros(()).double()).view(slot.block.shape)
    out, base = {}, model.state_dict()
    for key, places in layout.places.items():
        if not any(place.block.name in sums for place in places):
            continue
        pieces = []
        for place in places:
            none = torch.zeros(place.block.shape, dtype=torch.float64)
            block, part = sums.get(place.block.name, none), place.part
            rows = block[part.start : part.stop] if block.ndim else block
            pieces.append(rows.T if part.transposed else rows)
        out[key] = base[key].double() + (pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    return out


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.m = model
        self.call = call

    def forward(self, x: Any) -> Tensor:
        return self.call(self.m, x)


def run(composition: Composition, model: nn.Module, call: Call, x: Any, values: Tensor) -> Tensor:
    """The output of a float64 model at these values."""
    tensors = {f"m.{k}": t for k, t in weights(composition, model, values).items()}
    return torch.func.functional_call(_Called(model, call), tensors, (x,))


def gradient(composition: Composition, model: nn.Module, call: Call, x: Any) -> tuple[Tensor, Tensor]:
    """Output and the gradient of ``probe`` of it, at the composition's present values."""
    values = composition.values.detach().double().clone().requires_grad_()
    y = run(composition, double(model), call, doubled(x), values)
    (found,) = torch.autograd.grad(probe(y), values)
    return y.detach(), found


def probe(y: Tensor) -> Tensor:
    """A number to differentiate, in which every output counts differently."""
    g = torch.Generator().manual_seed(5)
    return (y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(y)).sum()


def double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def randomise(composition: Composition, seed: int = 3, scale: float = 0.5) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        new = torch.randn(composition.values.shape, generator=g, dtype=torch.float64) * scale
        composition.values.copy_(new)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Equal up to a share of the largest number."""
    size = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    return found.shape == expected.shape and bool(((found - expected).abs() <= tolerance * size).all())


def compose_in_passing(monkeypatch: Any) -> None:
    """Let there be room for vectors and none for composed weights, however small the model."""
    monkeypatch.setattr(plan, "_composed_bytes", lambda *_: (2**60, 0))  # all kept, and all recomputed


def low_rank(
    base: Mapping[str, Tensor] | BlockSource,
    ranks: Mapping[str, int],
    *,
    name: str,
    seed: int = 0,
    thirds: tuple[int, ...] = (),
) -> TaskVector:
    """A vector of random factors over some blocks; with ``thirds`` only those of q, k and v get one."""
    blocks = base if isinstance(base, BlockSource) else BlockSource(TensorMap(base))
    g = torch.Generator().manual_seed(seed)
    cells = {}
    for key, rank in ranks.items():
        block = blocks.layout.by_name[key]
        rows, columns = block.matrix_shape
        places = [(i * rows // 3, rows // 3) for i in thirds] or [(0, rows)]
        terms = tuple(
            Term(
                torch.randn(height, rank, generator=g) * 0.1,
                torch.randn(rank, columns, generator=g) * 0.1,
                0.5 + i,
                start,
            )
            for i, (start, height) in enumerate(places)
        )
        delta = LowRank(block.shape, terms)
        cells[key] = lambda delta=delta: delta
    return TaskVector(name, blocks.layout, blocks.identity, cells, Provenance(name, "made by hand"))
