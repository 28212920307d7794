"""Composes LoRA adapters factor by factor: (sum of b_i B_i)(sum of a_i A_i).

The published numbers for LoRAs were made this way. It differs from composing the updates B_i A_i: one
adapter's B is multiplied with all others' A, and the result has the rank of a single adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from aniso.compose.composition import Composition
from aniso.compose.lora.adapter_base import AdapterBase
from aniso.compose.lora.merged_adapter import LayerUpdate, MergedAdapter, inputs_first, layers_of
from aniso.compose.model_source import source_of
from aniso.compose.partition import Partition
from aniso.compose.runtime import Runtime
from aniso.errors import InputError, printable
from aniso.vectors import Bank, Block, BlockSource, Dense, LowRank, TaskVector
from aniso.vectors.delta import Term
from aniso.weights import TensorMap


@final
@dataclass(frozen=True)
class _FactorPair:
    """The factors of one block's update.

    Pieces of its rows, such as query, key and value, have factors of their own, one below the other.
    """

    block: Block
    rank: int
    starts: tuple[int, ...]
    """The first row of every piece."""

    @property
    def names(self) -> tuple[str, str]:
        """The parameter names of A and B, which cannot have dots."""
        name = self.block.name.replace(".", "/")
        return f"A/{name}", f"B/{name}"

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        rows, columns = self.block.matrix_shape
        return (self.rank * len(self.starts), columns), (rows, self.rank)

    def update(self, a: Tensor, b: Tensor) -> Tensor:
        ends = (*self.starts[1:], self.block.matrix_shape[0])
        pieces = zip(self.starts, ends, torch.split(a, self.rank), strict=True)
        return torch.cat([b[low:high] @ own for low, high, own in pieces])

    def of(self, vector: TaskVector, which: int) -> Dense:
        """Return a vector's A (``which`` 0) or its scaled B (1)."""
        delta = vector[self.block.name]
        assert isinstance(delta, LowRank)  # _factor_pair has checked it
        if which == 0:
            return Dense(torch.cat([term.a.float() for term in _pieces(delta)]))
        return Dense(torch.cat([term.b.float() * term.scale for term in _pieces(delta)]))


def _pieces(delta: LowRank) -> list[Term]:
    return sorted(delta.terms, key=lambda term: term.start)


def _factor_pair(block: Block, bank: Bank) -> _FactorPair | None:
    """Return the rank and pieces that all vectors share in a block; None if no vector changes it."""
    found: dict[tuple[int, tuple[int, ...]], str] = {}
    for name in bank:
        if block.name not in bank[name]:
            continue
        delta = bank[name][block.name]
        ranks = {term.rank for term in delta.terms} if isinstance(delta, LowRank) else set()
        if not isinstance(delta, LowRank) or len(ranks) != 1 or not _covers(delta):
            raise _not_composable(
                block, f"vector '{printable(name)}' is not one product of factors of one rank"
            )
        found.setdefault((ranks.pop(), tuple(term.start for term in _pieces(delta))), name)
    if len(found) > 1:
        ranks_found = ", ".join(
            f"{printable(n)}: rank {rank}, {len(starts)} pieces" for (rank, starts), n in found.items()
        )
        raise _not_composable(block, f"adapters differ ({ranks_found})")
    return _FactorPair(block, *next(iter(found))) if found else None


def _covers(delta: LowRank) -> bool:
    """Return True if the pieces cover all rows without gaps."""
    ends = [0, *(term.stop for term in _pieces(delta))]
    starts = [*(term.start for term in _pieces(delta)), delta.shape[0]]
    return starts == ends


def _not_composable(block: Block, why: str) -> InputError:
    return InputError(
        "LORA-KIND",
        f"factors cannot be added up: {why}",
        key=block.name,
        expected="adapters of one rank",
        fix="leave --factors out: coefficients of whole updates take any adapters",
    )


@final
class FactorModel(nn.Module):
    """A model with one adapter, B A beside some of its weights; both factors are zero."""

    def __init__(self, model: nn.Module, pairs: Sequence[_FactorPair], layout: Mapping[str, Block]) -> None:
        super().__init__()
        self.model = model
        self._pairs = tuple(pairs)
        self._layout = dict(layout)
        self.training = model.training
        for pair in pairs:
            for name, shape in zip(pair.names, pair.shapes, strict=True):
                self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.model.parameters()).device.type
        with torch.autocast(
            device, enabled=False
        ):  # weights are composed in full precision, whatever dtype layers run in
            weights = self._weights()
        return functional_call(self.model, weights, args, kwargs)

    def _weights(self) -> dict[str, Tensor]:
        """Return the tensors that the adapter changes, with the adapter added."""
        base = dict(self.model.named_parameters(remove_duplicate=False))
        out: dict[str, Tensor] = {}
        for pair in self._pairs:
            a, b = (getattr(self, name) for name in pair.names)
            update = pair.update(a, b)
            for part in self._layout[pair.block.name].parts:
                own = update[part.start : part.stop]
                tensor = out.get(part.key, base[part.key])
                own = (own.T if part.transposed else own).to(tensor.dtype)
                rows = slice(part.offset, part.offset + own.shape[0])
                if own.shape == tensor.shape:
                    out[part.key] = tensor + own
                else:  # some rows of a fused tensor
                    out[part.key] = torch.cat([tensor[: rows.start], tensor[rows] + own, tensor[rows.stop :]])
        return out

    def weight_source(self) -> TensorMap:
        """Return the factors alone: they are what is composed."""
        own = {name: getattr(self, name) for pair in self._pairs for name in pair.names}
        return TensorMap(own, f"factors over {type(self.model).__name__}")


@final
@dataclass(frozen=True)
class FactorComposition:
    """A composition of adapters' factors, and how it becomes one adapter."""

    composition: Composition
    """The composition over a ``FactorModel``; it starts at the mean of all A and zero B, the base."""
    pairs: tuple[_FactorPair, ...]
    base: BlockSource
    bank: Bank
    """The bank of whole updates."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        bank: Bank,
        partition: Partition | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> FactorComposition:
        """Compose the factors of a bank of adapters; ``partition`` divides A and B, each as a block."""
        blocks = bank.over(source_of(model))
        found = [_factor_pair(block, bank) for block in bank.layout.blocks]
        pairs = tuple(pair for pair in found if pair is not None)
        for pair in pairs:  # fail now if the result could not be written as an adapter
            layers_of(blocks, blocks.layout.by_name[pair.block.name])
        factors = FactorModel(model, pairs, blocks.layout.by_name).to(next(model.parameters()).device)
        composition = Composition(factors, _factor_bank(factors, pairs, bank), partition, runtime=runtime)
        with torch.no_grad():
            for entry in composition.index.blocks:
                if entry.block.name.startswith("A/"):
                    composition.values[entry.start : entry.start + entry.size] = 1 / len(entry.vectors)
        return cls(composition, pairs, blocks, bank)

    def adapter(self) -> MergedAdapter:
        """Return the current composition as an adapter of the same rank; exact."""
        weights = self.composition.weights()
        updates: dict[str, LayerUpdate] = {}
        for pair in self.pairs:
            a, b = (weights[name].float().cpu() for name in pair.names)
            block = self.base.layout.by_name[pair.block.name]
            for module, part in layers_of(self.base, block):
                piece = max(i for i, start in enumerate(pair.starts) if start <= part.start)
                own = LayerUpdate(b[part.start : part.stop], torch.split(a, pair.rank)[piece])
                updates[module] = own.oriented(self.base, module, part)
        turned = any(inputs_first(self.base, module) for module in updates)
        return MergedAdapter(
            updates, 0.0, turned, AdapterBase.of(self.base, self.bank.base.label), None, self.bank
        )


def _factor_bank(factors: FactorModel, pairs: Sequence[_FactorPair], bank: Bank) -> Bank:
    """Return a bank of the adapters' factors over zeros; they are read when they are needed."""
    blocks = BlockSource(factors.weight_source())
    identity = blocks.identity()
    vectors = {}
    for name in bank:
        own = [pair for pair in pairs if pair.block.name in bank[name]]
        cells = {pair.names[which]: partial(pair.of, bank[name], which) for pair in own for which in (0, 1)}
        vectors[name] = TaskVector(name, blocks.layout, lambda: identity, cells, bank[name].provenance)
    return Bank(vectors)
