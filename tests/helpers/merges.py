"""Banks of given deltas, and merge rules written again in numpy from their definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from aniso.vectors import Bank, BlockSource, Delta, Dense, LowRank, Provenance, TaskVector
from aniso.vectors.delta import Term
from aniso.weights import TensorMap

Shapes = Mapping[str, tuple[int, ...]]
Array = np.ndarray


def random_delta(shape: Sequence[int], seed: int, scale: float = 0.01) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=g) * scale


def low_rank(
    shape: tuple[int, int], rank: int, seed: int, start: int = 0, rows: int | None = None
) -> LowRank:
    """A LoRA update of some rows of a matrix."""
    rows = rows if rows is not None else shape[0]
    b, a = random_delta((rows, rank), 2 * seed, 0.1), random_delta((rank, shape[1]), 2 * seed + 1, 0.1)
    return LowRank(shape, (Term(b, a, 0.5, start),))


def bank_of(
    vectors: Mapping[str, Mapping[str, Tensor | Delta | Callable[[], Delta]]], shapes: Shapes
) -> Bank:
    """A bank in memory whose vectors have exactly these deltas over a base of these shapes."""
    base = {name: random_delta(shape, i, 1.0) for i, (name, shape) in enumerate(shapes.items())}
    blocks = BlockSource(TensorMap(base), scheme="plain")
    info = blocks.identity()
    made = {}
    for name, deltas in vectors.items():
        cells = {block: _cell(delta) for block, delta in deltas.items()}
        made[name] = TaskVector(name, blocks.layout, lambda: info, cells, Provenance(name, "test"))
    return Bank(made)


def _cell(delta: Tensor | Delta | Callable[[], Delta]) -> Callable[[], Delta]:
    if isinstance(delta, Tensor):
        return lambda: Dense(delta)
    return (lambda: delta) if isinstance(delta, Delta) else delta


def random_bank(shapes: Shapes, names: Sequence[str]) -> Bank:
    vectors = {
        name: {block: random_delta(shape, 100 * i + j) for j, (block, shape) in enumerate(shapes.items())}
        for i, name in enumerate(names)
    }
    return bank_of(vectors, shapes)


# The definitions, on lists of matrices, in float64


def truncated(matrix: Array, rank: int) -> Array:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] @ np.diag(s[:rank]) @ v[:rank]


def nearest_orthogonal(matrix: Array) -> Array:
    p, _, q = np.linalg.svd(matrix, full_matrices=False)
    return p @ q


def tsv(taus: Sequence[Array]) -> Array:
    """TSV-M; a matrix of lower rank than its share keeps what it has: other directions are arbitrary."""
    us, ss, vs = [], [], []
    for tau in taus:
        u, s, v = np.linalg.svd(tau, full_matrices=False)
        k = min(min(tau.shape) // len(taus), np.linalg.matrix_rank(tau))
        us.append(u[:, :k])
        ss.extend(s[:k])
        vs.append(v[:k].T)
    return nearest_orthogonal(np.hstack(us)) @ np.diag(ss) @ nearest_orthogonal(np.hstack(vs)).T


def iso_c(taus: Sequence[Array]) -> Array:
    u, s, v = np.linalg.svd(sum(taus), full_matrices=False)
    return s.mean() * (u @ v)


def iso_cts(taus: Sequence[Array], common: float = 0.8) -> Array:
    q, n = min(taus[0].shape), len(taus)
    own = round((q - int(common * q)) / n)
    k = q - own * n
    u, s, v = np.linalg.svd(sum(taus), full_matrices=False)
    us, ss, vs = [], [], []
    for tau in taus:
        rest = tau - u[:, :k] @ u[:, :k].T @ tau
        x, y, z = np.linalg.svd(rest, full_matrices=False)
        us.append(x[:, :own])
        ss.extend(y[:own])
        vs.append(z[:own].T)
    us.append(u[:, :k])
    ss.extend(s[:k])
    vs.append(v[:k].T)
    return np.mean(ss) * nearest_orthogonal(np.hstack(us)) @ nearest_orthogonal(np.hstack(vs)).T


def cart(taus: Sequence[Array], rank: float = 0.12, factor: float = 2.0) -> Array:
    mean = sum(taus) / len(taus)
    kept = int(rank * min(mean.shape))
    return mean + factor * sum(truncated(tau - mean, kept) for tau in taus)


def wudi_terms(taus: Sequence[Array]) -> tuple[Array, Array]:
    """C and D of the closed form."""
    weights = [1 / np.linalg.norm(tau) ** 2 for tau in taus]
    c = sum(w * tau.T @ tau for w, tau in zip(weights, taus, strict=True))
    d = sum(w * tau @ tau.T @ tau for w, tau in zip(weights, taus, strict=True))
    return c, d


def aswudi(taus: Sequence[Array]) -> Array:
    c, d = wudi_terms(taus)
    values, vectors = np.linalg.eigh(c)
    roots = np.sqrt(np.maximum(values, 0))
    k = int(np.ceil(roots.sum() ** 2 / values.sum() - 1e-9))
    top = vectors[:, -k:]
    return d @ top @ np.diag(1 / values[-k:]) @ top.T + sum(taus) @ (np.eye(len(c)) - top @ top.T)


def soft_swudi(taus: Sequence[Array], time: float) -> Array:
    """The gradient flow of WUDI's objective from the sum, by a matrix exponential."""
    c, d = wudi_terms(taus)
    left = torch.linalg.matrix_exp(torch.from_numpy(-c * time)).numpy()
    return sum(taus) @ left + d @ np.linalg.pinv(c, rcond=1e-12) @ (np.eye(len(c)) - left)


def ties(taus: Sequence[Array], keep: float, *, tie: float | None = None) -> Array:
    """TIES on flat vectors; ``tie`` is the sign of elements that cancel, by default that of the majority."""
    flat = np.stack([tau.reshape(-1) for tau in taus])
    kept = max(1, int(keep * flat.shape[1]))
    for row in flat:
        row[np.abs(row) < np.sort(np.abs(row))[-kept]] = 0
    sign = np.sign(flat.sum(0))
    sign[sign == 0] = np.sign(sign.sum()) if tie is None else tie
    agrees = np.sign(flat) == sign
    agrees &= flat != 0
    return (flat * agrees).sum(0) / np.maximum(agrees.sum(0), 1)
