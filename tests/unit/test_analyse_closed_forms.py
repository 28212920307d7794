"""Cosines, disentanglement, significance and principal components with known values."""

from __future__ import annotations

from unittest import mock

import colours
import numpy as np
import pytest
import tiny
import torch

from aniso.compose import Composition, Partition
from aniso.learn import evaluate
from aniso.learn.analysis import (
    FeatureDistribution,
    LabelledMatrix,
    cosine_similarity,
    disentanglement_matrix,
    feature_distribution,
    project_distributions,
    similarity,
    vector_significance,
)
from aniso.learn.features import features
from aniso.report.figures import FeatureEllipse, MatrixPanel, MatrixStyle, feature_ellipses, matrix_map
from aniso.vectors import Bank

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


def toy_bank(**deltas):
    """A bank over two matrices, from the deltas of each vector."""
    base = {"fc1.weight": torch.zeros(2, 3), "fc2.weight": torch.zeros(2, 3)}
    tuned = {
        name: {key: base[key] + torch.tensor(own.get(key, 0.0)) for key in base}
        for name, own in deltas.items()
    }
    return Bank.build(base, tuned, allow_distant=True)


# similarity


def test_orthogonal_vectors_have_cosine_0_and_a_vector_with_itself_1():
    one, two = [[1.0, 0, 0], [0, 0, 0]], [[0.0, 2, 0], [0, 0, 0]]
    bank = toy_bank(a={"fc1.weight": one}, b={"fc1.weight": two}, c={"fc2.weight": one})
    found = cosine_similarity(bank).whole
    assert found.values == ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    assert found.mean_off_diagonal == 0


def test_opposite_vectors_have_cosine_minus_1():
    one = torch.arange(6.0).view(2, 3)
    bank = toy_bank(a={"fc1.weight": one.tolist()}, b={"fc1.weight": (-3 * one).tolist()})
    assert cosine_similarity(bank).whole.of("a", "b") == pytest.approx(-1)


def test_cosines_agree_with_those_of_task_vectors(world):
    found = cosine_similarity(world.bank).whole
    assert found.of("one", "two") == pytest.approx(world.bank["one"].cosine(world.bank["two"]), abs=1e-6)
    assert found.of("two", "one") == found.of("one", "two")


def test_cosines_do_not_depend_on_the_number_of_deltas_in_memory(world):
    whole = cosine_similarity(world.bank).whole
    with mock.patch.object(similarity, "_DENSE", 1), mock.patch.object(similarity, "_CHUNK", 7):
        small = cosine_similarity(world.bank).whole
    np.testing.assert_allclose(small.values, whole.values, atol=1e-12)


def test_the_bank_is_read_one_block_at_a_time(world):
    read = []
    real = Bank.read_block

    def noted(self, block, **options):
        read.append(block)
        return real(self, block, **options)

    with mock.patch.object(Bank, "read_block", noted):
        cosine_similarity(world.bank)
    assert read == [block.name for block in world.bank.layout.blocks]


def test_cosines_by_kind_use_the_blocks_of_that_kind(world):
    found = cosine_similarity(world.bank).by_kind
    assert set(found) == {str(block.kind) for block in world.bank.layout.blocks}
    for kind, own in found.items():
        names = [block.name for block in world.bank.layout.blocks if str(block.kind) == kind]
        one, two = (world.bank[name].within(names) for name in ("one", "two"))
        assert own.of("one", "two") == pytest.approx(one.cosine(two), abs=1e-6)


def test_a_vector_that_is_zero_in_a_kind_of_block_has_no_cosine_there(world):
    norms = [b.name for b in world.bank.layout.blocks if str(b.kind) == "norm"]
    cells = {n: [b.name for b in world.bank[n].blocks] for n in world.bank}
    cells["two"] = [name for name in cells["two"] if name not in norms]
    found = cosine_similarity(world.bank.only_cells(cells))
    assert found.by_kind["norm"].values == ((1.0, None), (None, None))
    assert found.whole.of("one", "two") is not None


# disentanglement


def test_a_zero_vector_changes_no_prediction(world):
    composition = Composition(world.encoder, world.bank, Partition.whole())
    with torch.no_grad():
        composition.values.copy_(torch.tensor([1.0, 0.0]))
    splits = {"one": world.target.test, "two": world.control.test}
    found = disentanglement_matrix(world.encoder, composition, splits)
    assert found.of("one", "two") == 0
    assert found.of("one", "one") is None


def test_progress_counts_the_images_of_all_evaluations(world):
    seen = []
    splits = {"one": world.target.test, "two": world.control.test}
    disentanglement_matrix(world.encoder, world.composition(), splits, progress=lambda *own: seen.append(own))
    total = 2 * sum(map(len, splits.values()))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("disentanglement: images", total, total)


# significance


@pytest.fixture(scope="module")
def gains(world):
    """A bank with a vector that changes the accuracy on the target task."""
    state = world.encoder.state_dict()
    for seed in range(20):
        moved = {k: v if tiny.is_hf_vision(k) else state[k] for k, v in tiny.tuned(state, seed, 1.5).items()}
        half = {k: (v + state[k]) / 2 if v.is_floating_point() else v for k, v in moved.items()}
        bank = Bank.build(world.encoder, {"target": moved, "half": half}, allow_distant=True)
        composition = Composition(world.encoder, bank.only("target"), Partition.whole())
        composition.values.data.fill_(1.0)
        before, after = (evaluate(m, world.target.test).value for m in (world.encoder, composition))
        if before != after:
            return bank
    raise AssertionError("no vector changes the accuracy")


def test_the_significance_of_the_own_vector_is_1(world, gains):
    found = vector_significance(world.encoder, gains, {"target": world.target.test})
    assert found.matrix.of("target", "target") == 1
    assert found.tuned["target"] == found.accuracy.of("target", "target")
    zero, tuned = found.zero_shot["target"], found.tuned["target"]
    share = (found.accuracy.of("target", "half") - zero) / (tuned - zero)
    assert found.matrix.of("target", "half") == pytest.approx(share)
    assert found.matrix.column_means == found.matrix.values[0]


def test_scaled_vectors_are_compared_with_the_fine_tuned_model(world, gains):
    splits = {"target": world.target.test}
    whole = vector_significance(world.encoder, gains, splits)
    none = vector_significance(world.encoder, gains, splits, scale=0.0)
    assert none.tuned == whole.tuned
    assert none.matrix.values == ((0.0, 0.0),)
    double = vector_significance(world.encoder, gains, splits, scale=2.0)
    assert double.accuracy.of("target", "half") == whole.accuracy.of("target", "target")


def test_significance_is_undefined_where_the_own_vector_changes_nothing(world):
    state = world.encoder.state_dict()
    slight = {k: v if tiny.is_hf_vision(k) else state[k] for k, v in tiny.tuned(state, 1, 1e-6).items()}
    bank = Bank.build(world.encoder, {"target": slight})
    found = vector_significance(world.encoder, bank, {"target": world.target.test})
    assert found.matrix.values == ((None,),)
    assert found.matrix.column_means == (None,)
    assert "undefined" in found.notes[0]


def test_significance_needs_the_own_vector_of_each_task(world, refused):
    with refused("BANK-NAME", 2, "three"):
        vector_significance(world.encoder, world.bank, {"three": world.target.test})


# distributions


def toy_features(count, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(3 * i, 1 + i, (20, 5)) for i in range(count)]


def test_principal_components_agree_with_numpy():
    rows = toy_features(4)
    found = project_distributions(
        [FeatureDistribution.of(str(i), torch.tensor(x)) for i, x in enumerate(rows)]
    )
    means = np.stack([x.mean(0) for x in rows])
    centred = means - means.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    values, axes = values[::-1], vectors.T[::-1][:2]
    np.testing.assert_allclose(found.explained, values[:2] / values.sum(), rtol=1e-9)
    points = np.array([task.mean for task in found.tasks])
    np.testing.assert_allclose(np.abs(points), np.abs(centred @ axes.T), atol=1e-9)
    for task, own in zip(found.tasks, rows, strict=True):
        covariance = axes @ np.cov(own.T) @ axes.T
        np.testing.assert_allclose(np.abs(task.covariance), np.abs(covariance), atol=1e-9)
        assert task.images == 20


def test_the_means_of_two_tasks_lie_on_the_first_axis():
    rows = toy_features(2)
    found = project_distributions(
        [FeatureDistribution.of(str(i), torch.tensor(x)) for i, x in enumerate(rows)]
    )
    assert found.explained == (pytest.approx(1), 0)
    assert [task.mean[1] for task in found.tasks] == pytest.approx([0, 0], abs=1e-9)
    assert all(task.covariance[1][1] > 0.1 for task in found.tasks)


def test_equal_means_have_no_variance_to_explain():
    mean = torch.ones(3)
    found = project_distributions([FeatureDistribution("a", mean), FeatureDistribution("b", mean)])
    assert found.explained == (0, 0)
    assert [task.mean for task in found.tasks] == [(0, 0), (0, 0)]


def test_the_distribution_of_a_split_is_that_of_its_features(world):
    split = world.target.train
    found = feature_distribution(world.encoder, split, "target")
    rows = features(world.encoder, split)[0].double().numpy()
    np.testing.assert_allclose(found.mean, rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(found.covariance, np.cov(rows.T), atol=1e-6)


def test_principal_components_need_two_tasks(refused):
    with refused("USAGE", 2, "two tasks or more"):
        project_distributions([FeatureDistribution("a", torch.ones(3))])


# matrices and figures


def test_a_matrix_needs_a_value_for_each_row_and_column():
    with pytest.raises(ValueError, match="each row and column"):
        LabelledMatrix(("a",), ("b", "c"), ((1.0,),))


def test_means_leave_out_undefined_values():
    matrix = LabelledMatrix(("a", "b"), ("a", "b"), ((None, 0.5), (-0.75, None)))
    assert matrix.mean_off_diagonal == -0.125
    assert matrix.column_means == (-0.75, 0.5)
    assert matrix.largest_off_diagonal == 0.75


@pytest.mark.parametrize("size", [1, 3, 12, 40])
@pytest.mark.parametrize("panels", [1, 4])
def test_matrices_of_any_size_are_drawn(size, panels):
    names = [f"vector {i}" for i in range(size)]
    values = [[None if i == j else (i - j) / size for j in range(size)] for i in range(size)]
    panel = MatrixPanel(values, names, names, "kind")
    assert matrix_map([panel] * panels, MatrixStyle("cosine", -1, 1), "title").startswith(PNG)


def test_a_matrix_that_does_not_fit_its_names_is_refused(refused):
    with refused("RECORD", 2, "does not fit its names"):
        MatrixPanel([[1.0]], ["a"], ["b", "c"])


def test_ellipses_have_the_same_bytes_every_time():
    tasks = [
        FeatureEllipse("a", (0.0, 1.0), ((1.0, 0.3), (0.3, 0.5))),
        FeatureEllipse("$b_1$", (0.0, 1.0)),
        FeatureEllipse("flat", (2.0, 1.0), ((0.0, 0.0), (0.0, 0.0))),
    ]
    for kind, begin in (("png", PNG), ("svg", b"<?xml")):
        one, two = (feature_ellipses(tasks, (0.7, 0.3), "t", deviations=3, kind=kind) for _ in range(2))
        assert one == two
        assert one.startswith(begin)
