"""The least-squares start: coefficients of the vectors that interfere least, without data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aniso.compose import Partition
from aniso.errors import UsageError
from aniso.learn.starts.start import Start, filled_coefficients
from aniso.start_text import RIDGE
from aniso.vectors import Bank, Block, Delta, Kind


def least_squares(bank: Bank, partition: Partition | None = None, *, ridge: float = RIDGE) -> Start:
    """Return the start that keeps every vector's effect on its own inputs, in the span of the vectors.

    For every block it minimises over the coefficients λ the sum over tasks t of
    tr((Σᵢ λᵢτᵢ - τₜ) Cₜ (Σᵢ λᵢτᵢ - τₜ)ᵀ), where Cₜ = τₜᵀτₜ / |τₜ|² stands for the covariance of the layer's
    inputs: fine-tuning changes a layer along the inputs that it sees. That is a T x T system A λ = b with
    A = [tr(τᵢ C τⱼᵀ)], C = Σₜ Cₜ and bᵢ = Σₜ tr(τᵢ Cₜ τₜᵀ); ``ridge`` pulls λ to 1/T, as a share of A's mean
    diagonal. Biases, norms and embeddings have inputs that do not depend on the task, Cₜ = 1, which gives
    1/T. T counts the vectors that change the block. With one coefficient per vector the systems of all blocks
    are added.
    """
    chosen = partition or Partition.blocks()
    if ridge < 0:
        raise UsageError(
            "START", f"a ridge cannot be {ridge:g}", expected="0 or more", fix=f"ridge={RIDGE:g}"
        )
    systems = {block.name: _system(bank, block) for block in bank.layout.blocks if chosen.covers(block)}
    if chosen.is_shared:
        solved = _solved(_sum_of_systems(list(bank), systems), ridge)
        found = filled_coefficients(bank, chosen, lambda vector, block: solved[vector])
    else:
        by_block = {name: _solved(system, ridge) for name, system in systems.items()}
        found = filled_coefficients(bank, chosen, lambda vector, block: by_block[block.name].get(vector, 0.0))
    return Start(bank, found, f"least squares, ridge {ridge:g}")


_System = tuple[list[str], Tensor, Tensor]
"""Names of vectors, matrix and right-hand side."""


def _system(bank: Bank, block: Block) -> _System:
    """Return the system of one block over the vectors that change it."""
    deltas = {name: d for name, d in bank.read_block(block.name, exact=False).items() if d.norm() > 0}
    names = sorted(deltas)
    if block.kind is Kind.EMBEDDING or len(block.shape) < 2:
        return names, *_plain_system([_matrix(deltas[name], block) for name in names])
    return names, *_covariance_system({name: deltas[name] for name in names}, block)


def _plain_system(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The system for covariances of 1: A = T Gram, b = row sums of the Gram matrix."""
    gram = torch.tensor([[float((x * y).sum()) for y in rows] for x in rows], dtype=torch.float64)
    gram = gram.reshape(len(rows), len(rows))
    return len(rows) * gram, gram.sum(1)


def _covariance_system(deltas: Mapping[str, Delta], block: Block) -> tuple[Tensor, Tensor]:
    """The system for Cₜ = τₜᵀτₜ / |τₜ|²; deltas are made dense one at a time."""
    rows, columns = block.matrix_shape
    covariance = torch.zeros(columns, columns, dtype=torch.float64)
    target = torch.zeros(rows, columns, dtype=torch.float64)
    for delta in deltas.values():
        tau = _matrix(delta, block)
        own = tau.T @ tau / tau.square().sum()
        covariance += own
        target += tau @ own
    count = len(deltas)
    a, b = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for i, delta in enumerate(deltas.values()):
        tau = _matrix(delta, block)
        b[i] = (tau * target).sum()
        weighted = tau @ covariance
        for j, other in enumerate(deltas.values()):
            if j <= i:
                a[i, j] = a[j, i] = (weighted * _matrix(other, block)).sum()
    return a, b


def _matrix(delta: Delta, block: Block) -> Tensor:
    return delta.dense().double().reshape(block.matrix_shape)


def _sum_of_systems(names: list[str], systems: Mapping[str, _System]) -> _System:
    """Add the systems of all blocks: the one of coefficients that all blocks share."""
    a, b = torch.zeros(len(names), len(names), dtype=torch.float64), torch.zeros(len(names)).double()
    for own, block_a, block_b in systems.values():
        places = torch.tensor([names.index(name) for name in own], dtype=torch.long)
        a[places[:, None], places] += block_a
        b[places] += block_b
    return names, a, b


def _solved(system: _System, ridge: float) -> dict[str, float]:
    """Solve (A + r I) λ = b + r / T, r = ridge times A's mean diagonal; of several solutions the smallest."""
    names, a, b = system
    if not names:
        return {}
    pull = ridge * float(a.diagonal().mean())
    a = a + pull * torch.eye(len(names), dtype=torch.float64)
    found = torch.linalg.lstsq(a, (b + pull / len(names)).unsqueeze(1), driver="gelsd").solution
    return dict(zip(names, found.flatten().tolist(), strict=True))
