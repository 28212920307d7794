"""Starts of learning against closed forms, in runs, and when they do not fit."""

from __future__ import annotations

import colours
import merges
import numpy as np
import pytest
import torch

from aniso import merge, starts
from aniso.compose import Coefficients, Composition, Partition
from aniso.learn import CrossEntropy, Lowest, Schedule, StayNear, Trainable, evaluate, evolve, fit
from aniso.start_text import StartText, parse_start
from aniso.vectors import TaskVector

SHAPES = {
    "embed.weight": (9, 4),
    "layers.0.fc.weight": (6, 4),
    "layers.0.fc.bias": (6,),
    "layers.1.fc.weight": (6, 4),
    "layers.2.fc.weight": (6, 4),
}
MATRIX = "layers.1.fc.weight"
SCHEDULE = Schedule(epochs=2, lr=0.05, batch_size=16, warmup_steps=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def bank():
    return merges.random_bank(SHAPES, ("a", "b", "c"))


# text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.3", StartText("constant", numbers=(0.3,))),
        ("-1e-2", StartText("constant", numbers=(-0.01,))),
        ("depth:0.1,0.5", StartText("depth", numbers=(0.1, 0.5))),
        ("depth:0, 1, 0", StartText("depth", numbers=(0.0, 1.0, 0.0))),
        ("least-squares", StartText("least-squares", numbers=(0.1,))),
        ("least-squares:0", StartText("least-squares", numbers=(0.0,))),
        ("iso-c", StartText("rule", "iso-c")),
        ("./run", StartText("file", "./run")),
        ("c.safetensors", StartText("file", "c.safetensors")),
    ],
)
def test_starts_are_read_from_text(text, expected):
    assert parse_start(text) == expected


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        *(("tvs", "--start tsv"), ("", "a number"), ("nan", "a number"), ("1e999", "finite")),
        *(("depth:1", "two numbers"), ("depth:a,b", "numbers"), ("depth:", "numbers")),
        *(("least-squares:-1", "ridge"), ("least-squares:1,2", "ridge"), ("\0", "a number")),
    ],
)
def test_other_text_is_refused_with_a_remedy(text, mention, refused):
    with refused("START", 2, mention):
        parse_start(text)


# closed forms


@pytest.mark.parametrize("partition", [Partition.blocks(), Partition.whole(), Partition.rows()])
def test_a_constant_is_the_value_of_every_coefficient(bank, partition):
    start = starts.constant(bank, 0.25, partition)
    assert set(start.coefficients.values.tolist()) == {0.25} and start.coefficients.partition == partition
    assert set(start.scaled(-2).coefficients.values.tolist()) == {-0.5}


def test_a_profile_is_linear_in_depth_and_starts_outside_of_layers(bank):
    found = starts.depth_profile(bank, (0.1, 0.5)).coefficients
    expected = {
        "embed.weight": 0.1,
        "layers.0.fc.weight": 0.1,
        "layers.0.fc.bias": 0.1,
        "layers.1.fc.weight": 0.3,
        "layers.2.fc.weight": 0.5,
    }
    for vector in bank:
        for block, value in expected.items():
            assert float(found.of(vector, block)) == pytest.approx(value)
    bent = starts.depth_profile(bank, (0, 1, 0)).coefficients
    assert [float(bent.of("a", f"layers.{i}.fc.weight")) for i in range(3)] == [0, 1, 0]


def test_a_profile_needs_coefficients_of_blocks(bank, refused):
    with refused("START", 2, "every block", "--partition blocks"):
        starts.depth_profile(bank, (0.1, 0.5), Partition.whole())
    with refused("START", 2, "two finite"):
        starts.depth_profile(bank, (0.1,))


def least_squares_by_definition(taus, ridge):
    """T x T system of the definition, every covariance on its own, in float64."""
    covariances = [tau.T @ tau / (tau**2).sum() for tau in taus]
    a = np.array([[sum(np.trace(x @ c @ y.T) for c in covariances) for y in taus] for x in taus])
    b = np.array([sum(np.trace(x @ c @ t.T) for c, t in zip(covariances, taus, strict=True)) for x in taus])
    pull = ridge * np.trace(a) / len(taus)
    return np.linalg.solve(a + pull * np.eye(len(taus)), b + pull / len(taus))


@pytest.mark.parametrize("ridge", [0.0, 0.1, 3.0])
def test_least_squares_is_the_solution_of_its_definition(bank, ridge):
    found = starts.least_squares(bank, ridge=ridge).coefficients
    taus = [bank[name][MATRIX].dense().double().numpy() for name in bank]
    values = [float(found.of(name, MATRIX)) for name in bank]
    np.testing.assert_allclose(values, least_squares_by_definition(taus, ridge), rtol=1e-5)


def test_least_squares_keeps_vectors_of_orthogonal_inputs_whole():
    one, two = torch.zeros(6, 4), torch.zeros(6, 4)
    one[:, :2], two[:, 2:] = merges.random_delta((6, 2), 1), merges.random_delta((6, 2), 2)
    bank = merges.bank_of({"a": {MATRIX: one}, "b": {MATRIX: two}}, SHAPES)
    assert starts.least_squares(bank, ridge=0).coefficients.values.tolist() == pytest.approx([1, 1])


def test_least_squares_is_the_mean_for_equal_vectors_and_without_inputs(bank):
    same = {MATRIX: merges.random_delta((6, 4), 3)}
    equal = merges.bank_of({name: dict(same) for name in "abcd"}, SHAPES)
    for ridge in (0.0, 0.1):
        found = starts.least_squares(equal, ridge=ridge).coefficients
        assert found.values.tolist() == pytest.approx([0.25] * 4)
    found = starts.least_squares(bank).coefficients
    for block in ("layers.0.fc.bias", "embed.weight"):
        assert [float(found.of(name, block)) for name in bank] == pytest.approx([1 / 3] * 3)


def test_least_squares_of_one_vector_is_the_vector_and_of_shared_coefficients_the_sum_of_systems(bank):
    assert starts.least_squares(bank.only("a"), ridge=0).coefficients.values.tolist() == pytest.approx(
        [1] * 5
    )
    shared = starts.least_squares(bank, Partition.whole(), ridge=0).coefficients
    cells = {name: {MATRIX: bank[name][MATRIX]} for name in bank}
    alone = merges.bank_of(cells, SHAPES)
    by_block, by_vector = (
        starts.least_squares(alone, partition, ridge=0).coefficients.values
        for partition in (Partition.blocks(), Partition.whole())
    )
    assert by_vector.tolist() == pytest.approx(by_block.tolist())
    assert len(shared) == 3 and shared.partition.is_shared


def test_least_squares_with_absent_and_zero_blocks():
    cells = {"a": {MATRIX: merges.random_delta((6, 4), 1)}, "b": {"layers.0.fc.bias": torch.ones(6)}}
    cells["b"][MATRIX] = torch.zeros(6, 4)
    found = starts.least_squares(merges.bank_of(cells, SHAPES)).coefficients
    assert float(found.of("a", MATRIX)) == pytest.approx(1) and float(found.of("b", MATRIX)) == 0
    assert float(found.of("b", "layers.0.fc.bias")) == pytest.approx(1)


# coefficients of another run


def test_coefficients_start_finer_ones_and_missing_vectors_start_at_zero(bank):
    two = bank.only("a", "c")
    known = starts.constant(two, 0.5, Partition.whole()).coefficients
    found = starts.from_coefficients(bank, known, Partition.blocks()).coefficients
    assert [float(found.of(name, MATRIX)) for name in bank] == [0.5, 0, 0.5]
    profile = starts.depth_profile(two, (0, 1)).coefficients
    rows = starts.from_coefficients(bank, profile, Partition.rows()).coefficients
    assert rows.of("c", MATRIX).tolist() == [0.5] * 6 and rows.of("b", MATRIX).tolist() == [0] * 6
    again = starts.from_coefficients(bank, rows).coefficients
    assert again.partition == Partition.rows() and torch.equal(again.values, rows.values)


def test_coefficients_of_finer_parts_or_other_vectors_are_refused(bank, refused):
    rows = starts.constant(bank, 1, Partition.rows()).coefficients
    with refused("COEF-PARTITION", 3, "coarser"):
        starts.from_coefficients(bank, rows, Partition.blocks())
    blocks = starts.constant(bank, 1).coefficients
    with refused("COEF-PARTITION", 3):
        starts.from_coefficients(bank, blocks, Partition.whole())
    with refused("COEF-BANK", 3, "'c'"):
        starts.from_coefficients(bank.without("c"), blocks)


# merge rules


def test_sums_are_coefficients_and_other_rules_one_more_vector(bank):
    assert starts.from_rule(bank, merge.Mean()).coefficients.values.tolist() == pytest.approx([1 / 3] * 15)
    arithmetic = starts.from_rule(bank, merge.TaskArithmetic())
    assert arithmetic.bank.names == ("a", "b", "c")
    assert arithmetic.coefficients.values.tolist() == pytest.approx([0.3] * 15)
    tsv = starts.from_rule(bank, merge.TSV(), small="mean")
    assert tsv.bank.names == ("a", "b", "c", "tsv") and "tsv(scale=1.0" in tsv.description
    assert [float(tsv.coefficients.of(name, MATRIX)) for name in tsv.bank] == [0, 0, 0, 1]


def test_a_name_that_the_bank_has_is_refused(bank, refused):
    vector = merge.mean(bank, name="a")
    with refused("BANK-NAME", 2, "'a'"):
        starts.from_vector(bank, vector)


def test_a_composition_starts_at_the_merge_and_is_the_base_at_zero(world):
    vector = merge.tsv(world.bank, small="mean")
    start = starts.from_vector(world.bank, vector)
    composition = start.composition(world.encoder)
    merged = vector.apply(world.encoder)
    for key, tensor in composition.weights().items():
        torch.testing.assert_close(tensor, merged[key], rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        composition.values.zero_()
    base = world.encoder.state_dict()
    assert all(torch.equal(tensor, base[key]) for key, tensor in composition.weights().items())


def test_coefficients_with_another_merge_of_the_same_name_are_refused(world, refused):
    one = starts.from_vector(world.bank, merge.iso_c(world.bank, name="merged")).coefficients
    other = world.bank.with_vectors({"merged": merge.iso_c(world.bank, scale=2.0, name="merged")})
    with refused("COEF-BANK", 3, "'merged'"):
        one.for_bank(other)


def test_a_joined_bank_is_not_pickled_without_its_vector(world, tmp_path, refused):
    saved = world.bank.save(tmp_path / "bank")
    joined = saved.with_vectors({"mean": merge.mean(saved)})
    assert joined.whole_hash == saved.content_hash != joined.content_hash
    with refused("BANK-MANIFEST", 2, "not on disk"):
        joined.__reduce__()


# objective


def test_stay_near_is_half_the_mean_squared_distance(bank):
    start = starts.constant(bank, 0.5).coefficients
    values = torch.full_like(start.values, 0.7).requires_grad_()
    loss = StayNear(start).loss(values, start.index)
    assert float(loss.detach()) == pytest.approx(3 * 0.2**2 / 2)  # three vectors in every block
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.2 / 5] * 15)  # five blocks
    assert float(StayNear(start).loss(start.values, start.index)) == 0


def test_stay_near_refuses_another_partition(bank, refused):
    start = starts.constant(bank, 0.5).coefficients
    whole = starts.constant(bank, 0.5, Partition.whole()).coefficients
    with refused("OBJECTIVE", 2, "another partition"):
        StayNear(start).loss(whole.values, whole.index)


def test_a_heavy_weight_keeps_coefficients_at_their_start(world):
    start = starts.constant(world.bank, 0.2)
    schedule = Schedule(epochs=5, lr=0.1, batch_size=16, warmup_steps=0, optimiser="sgd", weight_decay=0.0,
                        max_grad_norm=1e6)  # fmt: skip
    moved = {}
    for weight in (0.0, 200.0):  # a step takes back the whole distance: 0.1 * 200 / 20 blocks
        composition = world.composition()
        fit(composition, CrossEntropy(world.target.train) + weight * StayNear(start.coefficients), schedule,
            start=start)  # fmt: skip
        moved[weight] = float((composition.values.detach() - 0.2).abs().max())
    assert 0 < moved[200.0] < moved[0.0] / 2


# runs


def test_a_run_begins_at_its_start(world):
    composition, control = world.composition(), world.control.val
    keep = Lowest(world.target.val, control, floor=0)
    done = fit(composition, CrossEntropy(world.target.train), SCHEDULE, start=0.3, keep=keep)
    same = starts.constant(world.bank, 0.3).composition(world.encoder)
    assert done.history[0].accuracy[control.name] == evaluate(same, control).value


def test_the_floor_is_a_share_of_the_bases_accuracy_whatever_the_start(world, refused):
    base = evaluate(world.encoder, world.control.val).value
    keep = Lowest(world.target.val, world.control.val, floor=1.0)
    rows = [{keep.target.name: 0.5, keep.control.name: base - 0.1}]
    assert keep.choose(rows) == 0  # the first row is taken for the base
    known = Lowest(keep.target, keep.control, floor=1.0, reference=base)
    with refused("KEEP", 2, "already", "--start-scale"):
        known.choose(rows)
    assert known.ends(rows) and known.identity()["reference"] == base and "reference" not in keep.identity()


class BrokenOffError(Exception):
    pass


def test_a_run_with_a_start_is_resumed_bit_for_bit_and_with_another_refused(world, tmp_path, refused):
    vector = tmp_path / "tsv.safetensors"
    merge.tsv(world.bank, small="mean", to=vector)

    def run(name, scale=1.0, **more):
        start = starts.from_vector(world.bank, TaskVector.load(vector)).scaled(scale)
        composition = start.composition(world.encoder)
        done = fit(composition, CrossEntropy(world.target.train), SCHEDULE, start=start,
                   directory=tmp_path / name, **more)  # fmt: skip
        return composition.values.detach().numpy().tobytes(), done.history

    def stop(row):
        if row.epoch == 1:
            raise BrokenOffError

    whole = run("whole")
    with pytest.raises(BrokenOffError):
        run("parts", epoch_done=stop)
    with refused("RUN-CHANGED", 3, "start"):
        run("parts", 0.5, resume=True)
    assert run("parts", resume=True) == whole


def test_weights_have_no_start(world, refused):
    with refused("START", 2, "weights"):
        fit(Trainable.weights(world.encoder), CrossEntropy(world.target.train), SCHEDULE, start=0.3)


def test_gradient_free_runs_search_around_their_start(world):
    pytest.importorskip("nevergrad")
    composition = Composition(world.encoder, world.bank, Partition.whole())
    done = evolve(composition, CrossEntropy(world.target.train), evaluations=4, bound=1e-6, start=0.4)
    assert isinstance(done.coefficients, Coefficients)
    assert done.coefficients.values.tolist() == pytest.approx([0.4, 0.4], abs=1e-5)
