"""Merge rules against closed forms, and against their definitions written again in numpy; in float64."""

from __future__ import annotations

import merges
import numpy as np
import pytest
import torch
from torch import Tensor

from aniso.merge import (
    TSV,
    Aswudi,
    Cart,
    Dare,
    Deltas,
    IsoC,
    IsoCTS,
    Mean,
    MergeRule,
    Swudi,
    TaskArithmetic,
    Ties,
)
from aniso.vectors.singular import components

SHAPES = ((12, 20), (20, 12), (16, 16))
SPECTRAL = (TSV(), IsoC(), IsoCTS(), Cart(rank=0.25), Aswudi(), Swudi())
HOMOGENEOUS = (*SPECTRAL, Mean(), TaskArithmetic(), Ties(keep=0.3), Ties(keep=0.3, form="mergekit"))


def matrices(shape=(12, 20), count=3, seed=0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(count)]


def merged(rule: MergeRule, taus: list[Tensor], vectors: int | None = None) -> Tensor:
    """A matrix merged by a rule that has seen all of the vectors, which are this one matrix."""
    deltas = Deltas.of(taus, vectors=vectors)
    return rule.prepared([deltas]).matrix(deltas)


def close(found: Tensor, expected: Tensor | np.ndarray, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def orthogonal(size: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64)).Q


# the definitions


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "definition"),
    [
        (TSV(), merges.tsv),
        (IsoC(), merges.iso_c),
        (IsoCTS(), merges.iso_cts),
        (IsoCTS(common=0.5), lambda taus: merges.iso_cts(taus, 0.5)),
        (Cart(), merges.cart),
        (Cart(rank=0.5, factor=0.7), lambda taus: merges.cart(taus, 0.5, 0.7)),
        (Aswudi(), merges.aswudi),
        (Swudi(time=2.0, top=1.0), lambda taus: merges.soft_swudi(taus, 2.0)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_matrices_are_merged_as_defined(rule, definition, shape, count):
    taus = matrices(shape, count)
    close(merged(rule, taus), definition([tau.numpy().copy() for tau in taus]), 1e-8)


@pytest.mark.parametrize("keep", [0.05, 0.2, 0.77, 1.0])
def test_ties_keeps_the_largest_elements_of_the_whole_vector(keep):
    taus = [tau.float().double() for tau in matrices(count=5)]
    close(merged(Ties(keep=keep), taus).view(-1), merges.ties([t.numpy().copy() for t in taus], keep))


def test_the_thresholds_of_ties_are_those_of_all_blocks_together():
    large, small = matrices((8, 9), 3), [0.1 * tau for tau in matrices((5, 7), 3, 1)]
    flat = [torch.cat([a.view(-1), b.view(-1)]).float().double() for a, b in zip(large, small, strict=True)]
    expected = merges.ties([t.numpy().copy() for t in flat], 0.3)
    blocks = [Deltas.of([t.float().double() for t in taus]) for taus in (large, small)]
    rule = Ties(keep=0.3).prepared(blocks)
    close(torch.cat([rule.matrix(block).view(-1) for block in blocks]), expected)


def test_ties_as_mergekit_trims_every_tensor_and_elects_plus():
    taus = [tau.float().double() for tau in matrices(count=2)]
    taus.append(-taus[1])
    expected = merges.ties([t.numpy().copy() for t in taus], 0.4, tie=1)
    close(merged(Ties(keep=0.4, form="mergekit"), taus).view(-1), expected)


def test_elements_that_cancel_get_the_sign_of_the_majority():
    one = torch.tensor([[2.0, 1.0, 3.0, -1.0]], dtype=torch.float64)
    two = torch.tensor([[-2.0, 1.0, 3.0, -1.0]], dtype=torch.float64)
    close(merged(Ties(keep=1.0), [one, two]), torch.tensor([[2.0, 1.0, 3.0, -1.0]], dtype=torch.float64))
    close(merged(Ties(keep=1.0), [-one, -two]), torch.tensor([[-2.0, -1.0, -3.0, 1.0]], dtype=torch.float64))


def test_opposite_vectors_have_no_majority_and_cancel():
    (tau,) = matrices(count=1)
    close(merged(Ties(keep=0.5), [tau, -tau]), torch.zeros(12, 20, dtype=torch.float64))


def test_the_sign_is_that_of_the_sum_and_not_of_the_count():
    columns = [torch.tensor([[x]], dtype=torch.float64) for x in (5.0, -1.0, -2.0)]
    assert float(merged(Ties(keep=1.0), columns)) == 5.0


# closed forms


@pytest.mark.parametrize("shape", SHAPES)
def test_all_singular_values_of_iso_are_equal(shape):
    taus = matrices(shape, 3)
    mean = torch.linalg.svdvals(sum(taus)).mean()
    close(torch.linalg.svdvals(merged(IsoC(), taus)), mean.expand(min(shape)))
    values = torch.linalg.svdvals(merged(IsoCTS(common=0.5), taus))
    close(values, values.mean().expand(min(shape)), 1e-8)


def test_iso_of_a_singular_sum_has_the_rank_of_the_sum():
    (tau,) = matrices(count=1)
    low = torch.from_numpy(merges.truncated(tau.numpy(), 3))
    values = torch.linalg.svdvals(merged(IsoC(), [low, low]))
    close(values[:3], (2 * torch.linalg.svdvals(low)[:3].mean()).expand(3), 1e-8)
    assert float(values[3:].abs().max()) < 1e-12


def test_tsv_of_orthogonal_vectors_is_the_sum_of_their_truncations():
    taus = []
    for i in range(3):  # rows and columns of their own
        tau = torch.zeros(12, 24, dtype=torch.float64)
        tau[4 * i : 4 * i + 4, 8 * i : 8 * i + 8] = matrices((4, 8), 1, i)[0]
        taus.append(tau)
    close(merged(TSV(), taus), sum(taus))
    taus = [tau[:9] for tau in taus]  # rank 3 is left for each of three vectors
    close(merged(TSV(), taus), sum(merges.truncated(tau.numpy(), 3) for tau in taus))


@pytest.mark.parametrize("rule", [TSV(), Cart(), Aswudi(), Swudi(), Mean()], ids=lambda rule: rule.kind)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_vector_is_returned_as_it_is(rule, shape):
    (tau,) = matrices(shape, 1)
    close(merged(rule, [tau]), tau, 1e-8)


def test_wudi_of_vectors_with_orthogonal_rows_is_their_sum():
    q = orthogonal(20, 3)
    taus = [matrices((12, 5), 1, i)[0] @ q[:, 5 * i : 5 * i + 5].T for i in range(4)]
    for rule in (Aswudi(), Swudi()):
        close(merged(rule, taus), sum(taus), 1e-8)


def test_aswudi_lets_vectors_act_on_their_main_inputs_as_if_alone():
    """Where all of C is solved, the gradient of WUDI's objective is zero."""
    taus = [orthogonal(8, i) for i in range(3)]  # C is a multiple of 1: all eigenvalues are equal and kept
    found = merged(Aswudi(), taus)
    gradient = sum((found - tau) @ tau.T @ tau / tau.square().sum() for tau in taus)
    close(gradient, torch.zeros(8, 8, dtype=torch.float64))
    close(found, sum(taus) / 3)


def test_swudi_runs_from_the_sum_to_the_minimum():
    taus = matrices((12, 8), 3)
    c, d = merges.wudi_terms([tau.numpy() for tau in taus])
    close(merged(Swudi(time=1e-9, top=1.0), taus), sum(taus), 1e-7)
    close(merged(Swudi(time=1e9, top=1.0), taus), d @ np.linalg.inv(c), 1e-7)


def test_the_share_of_swudi_limits_what_is_solved():
    taus = matrices((12, 8), 3)
    c, _ = merges.wudi_terms([tau.numpy() for tau in taus])
    small = torch.from_numpy(np.linalg.eigh(c)[1][:, :4].copy())  # eigh sorts upwards
    close(merged(Swudi(time=1e9, top=0.5), taus) @ small, sum(taus) @ small)


def test_cart_with_all_ranks_moves_nothing_from_the_mean():
    """The differences to the mean add up to zero, unless they are truncated."""
    taus = matrices(count=4)
    close(merged(Cart(rank=1.0), taus), sum(taus) / 4, 1e-8)
    close(merged(Cart(rank=0.25, factor=0.0), taus), sum(taus) / 4)


@pytest.mark.parametrize("ratio", [1.0, 1e-6])
def test_kept_components_hold_no_more_memory_than_their_own(ratio):
    """Memory must not grow with the number of vectors, of which each keeps a few directions."""
    (tau,) = matrices((30, 50), 1)
    tau[4:] *= ratio  # the smallest singular values need a decomposition instead of a Gram matrix
    for count, matrix in ((5, tau), (3, tau.T)):
        kept = components(matrix, count)
        for part in (kept.u, kept.s, kept.v):
            assert part.untyped_storage().nbytes() == 8 * part.numel()
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        close(kept.matrix(), (u[:, :count] * s[:count]) @ v[:count], 1e-7)


# what holds for many rules


@pytest.mark.parametrize("rule", HOMOGENEOUS, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("factor", [3.0, 1e-6, -0.5])
def test_scaled_vectors_give_the_scaled_merge(rule, factor):
    taus = [tau.float().double() for tau in matrices()]
    scaled = merged(rule, [factor * tau for tau in taus])
    close(scaled / factor, merged(rule, taus), 1e-7)


@pytest.mark.parametrize("rule", SPECTRAL, ids=lambda rule: rule.kind)
def test_turned_vectors_give_the_turned_merge(rule):
    taus, left, right = matrices(), orthogonal(12, 1), orthogonal(20, 2)
    turned = merged(rule, [left @ tau @ right for tau in taus])
    close(turned, left @ merged(rule, taus) @ right, 1e-7)


@pytest.mark.parametrize("rule", [TSV(), IsoC(), Cart(rank=0.25)], ids=lambda rule: rule.kind)
def test_transposed_vectors_give_the_transposed_merge(rule):
    """Iso-CTS and WUDI treat inputs and outputs differently."""
    taus = matrices()
    close(merged(rule, [tau.T for tau in taus]), merged(rule, taus).T, 1e-8)


@pytest.mark.parametrize("rule", [*HOMOGENEOUS, Dare()], ids=lambda rule: rule.kind)
def test_the_order_of_vectors_changes_no_bit(rule):
    taus = dict(zip("abc", matrices(), strict=True))

    def of(names: str) -> Tensor:
        readers = [(name, taus[name].clone) for name in names]
        deltas = Deltas("block", (12, 20), readers, 3)
        return rule.prepared([deltas]).matrix(deltas)

    assert torch.equal(of("abc"), of("cab"))


def test_dare_keeps_what_it_is_told_to_and_its_expectation():
    ones = [torch.ones(400, 500, dtype=torch.float64)]
    for keep in (0.1, 0.5):
        found = merged(Dare(keep=keep), ones)
        assert set(found.unique().tolist()) == {0.0, 1 / keep}
        deviation = ((1 - keep) / keep / found.numel()) ** 0.5
        assert abs(float(found.mean()) - 1) < 4 * deviation


def test_dare_depends_on_seed_vector_and_block_alone():
    (tau,) = matrices(count=1)
    rule = Dare()
    assert torch.equal(rule.dropped(tau, "a", "x"), rule.dropped(tau, "a", "x"))
    others = (rule.dropped(tau, "b", "x"), rule.dropped(tau, "a", "y"), Dare(seed=1).dropped(tau, "a", "x"))
    assert not any(torch.equal(rule.dropped(tau, "a", "x"), other) for other in others)


def test_dare_as_mergekit_restores_the_sum_of_absolute_values():
    (tau,) = matrices(count=1)
    found = Dare(keep=0.3, form="mergekit").dropped(tau, "a", "x")
    assert float(found.abs().sum()) == pytest.approx(float(tau.abs().sum()), rel=1e-12)
    kept = found != 0
    ratio = found[kept] / tau[kept]
    close(ratio, ratio[0].expand(ratio.shape))


def test_dare_with_signs_averages_what_agrees():
    taus = matrices()
    rule = Dare(keep=1.0, signs=True)
    close(merged(rule, taus).view(-1), merges.ties([tau.numpy().copy() for tau in taus], 1.0))


def test_tsv_of_nearly_parallel_vectors_is_finite_and_orthogonal():
    (tau, noise) = matrices(count=2)
    found = merged(TSV(), [tau, tau + 1e-9 * noise])
    kept = torch.linalg.svdvals(tau)[:6]
    assert bool(found.isfinite().all())
    assert float(torch.linalg.matrix_norm(found)) <= float((2 * kept.square().sum()).sqrt()) * (1 + 1e-6)


def test_equal_directions_of_two_vectors_are_counted_once():
    (tau,) = matrices(count=1)
    close(merged(TSV(), [tau, tau]), merges.truncated(tau.numpy(), 6), 1e-8)
