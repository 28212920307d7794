"""Calibration rules against closed forms and least squares solved in another way; in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aniso.errors import UsageError
from aniso.learn import CALIBRATION_RULES, CalibrationRule, FeatCal, RegMean, RegMeanPlusPlus
from aniso.learn.calibration_rules import Affine, Moments, System

WIDTH, OUTPUTS = 6, 4
Task = tuple[Tensor, Tensor, Affine]
"""Inputs of the student and of the teacher, and the teacher's layer."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(seed: int, *, bias: bool = True) -> Affine:
    return Affine(drawn(OUTPUTS, WIDTH, seed=seed), drawn(OUTPUTS, seed=seed + 50) if bias else None)


def tasks(count: int = 3, rows: int = 40, *, same_inputs: bool = False) -> list[Task]:
    made = []
    for seed in range(count):
        own = drawn(rows + seed, WIDTH, seed=seed) + 0.3
        other = own if same_inputs else own + 0.2 * drawn(rows + seed, WIDTH, seed=seed + 20)
        made.append((own, other, layer(seed + 100)))
    return made


def calibrated(rule: CalibrationRule, given: list[Task], start: Affine, base: Affine) -> Affine:
    system = System()
    for student, teacher, own in given:
        moments = Moments()
        both = [student] * rule.uses_student + [teacher] * rule.uses_teachers
        half = len(both[0]) // 2
        for part in (slice(half), slice(half, None)):  # sums do not depend on batches
            moments.add(*rule.inputs([rows[part] for rows in both]))
        gram, cross = rule.moment(moments.gram), rule.moment(moments.cross)
        system.add(rule.task_weight(gram), gram, cross, moments, [own])
    (found,) = rule.linear(system, [start], [base])
    return found


def close(found: Tensor | None, expected: Tensor | None, tolerance: float = 1e-10) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


START, BASE = layer(7), layer(8)


# FeatCal


def test_featcal_is_the_least_squares_solution_of_stacked_rows() -> None:
    rule, given = FeatCal(ridge=0.07, rho=1.7, alpha=0.4), tasks()
    found = calibrated(rule, given, START, BASE)
    anchor = Affine(1.7 * START.weight - 0.7 * BASE.weight, 1.7 * START.bias - 0.7 * BASE.bias)
    left, right, known, total = [], [], torch.zeros(OUTPUTS, dtype=torch.float64), 0.0
    for student, teacher, own in given:
        targets = (0.4 * teacher + 0.6 * student) @ own.weight.T
        weight = 1 / (student.T @ student / len(student)).norm()
        left.append((weight / len(student)).sqrt() * student)
        right.append((weight / len(student)).sqrt() * targets)
        total += float(weight)
    left.append(0.07**0.5 * torch.eye(WIDTH, dtype=torch.float64))
    right.append(0.07**0.5 * anchor.weight.T)
    expected = torch.linalg.lstsq(torch.cat(left), torch.cat(right)).solution.T
    close(found.weight, expected)
    for student, teacher, own in given:
        weight = 1 / (student.T @ student / len(student)).norm()
        mixed = 0.4 * teacher + 0.6 * student
        known += weight * (own.bias + (mixed @ own.weight.T).mean(0) - (student @ expected.T).mean(0))
    close(found.bias, (known + 0.07 * anchor.bias) / (total + 0.07))


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_teachers_that_are_the_student_change_nothing_at_rho_1(alpha: float) -> None:
    given = [(own, own, START) for own, _, _ in tasks()]
    found = calibrated(FeatCal(rho=1.0, alpha=alpha), given, START, BASE)
    close(found.weight, START.weight)
    close(found.bias, START.bias)


def test_beyond_rho_1_equal_teachers_leave_only_the_pull_of_the_anchor() -> None:
    given = [(own, own, START) for own, _, _ in tasks()]
    found = calibrated(FeatCal(rho=2.2), given, START, BASE)
    moved = (found.weight - START.weight).norm()
    assert 1e-3 < moved < (1.2 * (START.weight - BASE.weight)).norm()
    nearly = calibrated(FeatCal(ridge=1e-9, rho=2.2), given, START, BASE)
    close(nearly.weight, START.weight, 1e-6)


def test_a_large_ridge_gives_the_anchor() -> None:
    found = calibrated(FeatCal(ridge=1e12, rho=0.3), tasks(), START, BASE)
    close(found.weight, 0.3 * START.weight + 0.7 * BASE.weight, 1e-9)
    close(found.bias, 0.3 * START.bias + 0.7 * BASE.bias, 1e-9)


def test_one_task_and_no_ridge_give_that_task() -> None:
    given = tasks(1, same_inputs=True)
    found = calibrated(FeatCal(ridge=1e-12), given, START, BASE)
    close(found.weight, given[0][2].weight, 1e-9)
    close(found.bias, given[0][2].bias, 1e-9)


def test_inputs_of_zero_give_the_anchor() -> None:
    given = [(torch.zeros_like(own), torch.zeros_like(own), one) for own, _, one in tasks()]
    found = calibrated(FeatCal(rho=2.0), given, START, BASE)
    close(found.weight, 2 * START.weight - BASE.weight)
    close(found.bias, 2 * START.bias - BASE.bias)


def test_featcal_without_biases() -> None:
    given = [(a, b, Affine(own.weight, None)) for a, b, own in tasks()]
    found = calibrated(FeatCal(), given, Affine(START.weight, None), Affine(BASE.weight, None))
    assert found.bias is None
    close(found.weight, calibrated(FeatCal(), tasks(), START, BASE).weight)


def test_the_scale_of_a_tasks_inputs_and_outputs_cancels() -> None:
    """Tasks are divided by ||C||, so that long inputs do not outweigh short ones."""
    given = tasks()
    longer = [(10 * a, 10 * b, own) if i == 0 else (a, b, own) for i, (a, b, own) in enumerate(given)]
    found, other = (calibrated(FeatCal(), some, START, BASE) for some in (given, longer))
    close(found.weight, other.weight)


# layer norms


def norm_moments(rows: Tensor) -> Moments:
    moments = Moments(by_dimension=True)
    moments.add(rows)
    return moments


def test_a_layer_norm_is_the_least_squares_solution_of_each_dimension() -> None:
    rule, start, base = FeatCal(ridge=0.2, rho=1.5), layer(1), layer(2)
    start, base = Affine(start.bias, start.bias * 2), Affine(base.bias, base.bias * 3)
    given = [(drawn(30, OUTPUTS, seed=s), Affine(drawn(OUTPUTS, seed=s), drawn(OUTPUTS, seed=s + 9)))
             for s in range(3)]  # fmt: skip
    found = rule.norm([(norm_moments(rows), own) for rows, own in given], start, base)
    anchor = [1.5 * a - 0.5 * b for a, b in zip(start, base, strict=True)]
    for i in range(OUTPUTS):
        left, right = [], []
        for rows, own in given:
            one = torch.stack([rows[:, i], torch.ones(len(rows), dtype=torch.float64)], 1)
            left.append(one / len(rows) ** 0.5)
            right.append((rows[:, i] * own.weight[i] + own.bias[i]) / len(rows) ** 0.5)
        left.append(0.2**0.5 * torch.eye(2, dtype=torch.float64))
        right.append(0.2**0.5 * torch.stack([anchor[0][i], anchor[1][i]]))
        expected = torch.linalg.lstsq(torch.cat(left), torch.cat(right).unsqueeze(1)).solution.squeeze()
        close(torch.stack([found.weight[i], found.bias[i]]), expected)


def test_equal_layer_norms_stay_at_rho_1_and_zero_inputs_are_finite() -> None:
    start = Affine(drawn(OUTPUTS, seed=1), drawn(OUTPUTS, seed=2))
    rows = drawn(20, OUTPUTS, seed=3)
    found = FeatCal(rho=1.0).norm([(norm_moments(rows), start)] * 3, start, Affine(*(2 * t for t in start)))
    close(found.weight, start.weight)
    close(found.bias, start.bias)
    zero = FeatCal(rho=1.0).norm([(norm_moments(0 * rows), start)], start, start)
    close(zero.weight, start.weight)


# RegMean


@pytest.mark.parametrize("rule", [RegMean(), RegMeanPlusPlus(), RegMean(off_diagonal=0.0)], ids=str)
def test_regmean_of_one_task_is_that_task(rule: CalibrationRule) -> None:
    given = tasks(1)
    found = calibrated(rule, given, START, BASE)
    close(found.weight, given[0][2].weight)
    close(found.bias, given[0][2].bias)


def test_regmean_solves_its_normal_equations() -> None:
    given = tasks()
    for rule, which in ((RegMean(), 1), (RegMeanPlusPlus(), 0)):
        left, right = torch.zeros(WIDTH, WIDTH).double(), torch.zeros(WIDTH, OUTPUTS).double()
        for task in given:
            gram = task[which].T @ task[which] / len(task[which])
            shrunk = torch.where(torch.eye(WIDTH) > 0, gram, 0.95 * gram)
            left, right = left + shrunk, right + shrunk @ task[2].weight.T
        found = calibrated(rule, given, START, BASE)
        close(found.weight, torch.linalg.solve(left, right).T)
        close(found.bias, sum(own.bias for _, _, own in given) / 3)


def test_without_off_diagonals_regmean_is_a_mean_weighed_by_second_moments() -> None:
    given = tasks()
    moments = torch.stack([student.square().mean(0) for student, _, _ in given])
    weights = torch.stack([own.weight for _, _, own in given])
    found = calibrated(RegMeanPlusPlus(off_diagonal=0.0), given, START, BASE)
    close(found.weight, (weights * moments.unsqueeze(1)).sum(0) / moments.sum(0))


def test_regmean_does_not_depend_on_the_merge() -> None:
    found, other = (calibrated(RegMean(), tasks(), start, BASE) for start in (START, layer(31)))
    assert torch.equal(found.weight, other.weight)


def test_inputs_that_are_always_zero_have_averaged_weights() -> None:
    given = tasks()
    given = [(own * (torch.arange(WIDTH) != 2), own, one) for own, _, one in given]
    found = calibrated(RegMeanPlusPlus(), given, START, BASE)
    mean = sum(one.weight for _, _, one in given) / 3
    close(found.weight[:, 2], mean[:, 2])
    none = [(0 * own, own, one) for own, _, one in given]
    close(calibrated(RegMeanPlusPlus(), none, START, BASE).weight, mean)


# all of them


@pytest.mark.parametrize("rule", [kind() for kind in CALIBRATION_RULES.values()], ids=str)
def test_the_order_of_the_tasks_changes_nothing(rule: CalibrationRule) -> None:
    found = calibrated(rule, tasks(), START, BASE)
    again = calibrated(rule, tasks()[::-1], START, BASE)
    close(found.weight, again.weight, 1e-12)
    close(found.bias, again.bias, 1e-12)


@pytest.mark.parametrize("rule", [kind() for kind in CALIBRATION_RULES.values()], ids=str)
@pytest.mark.parametrize("rows", [1, 2, WIDTH - 1])
def test_fewer_rows_than_inputs_give_finite_weights(rule: CalibrationRule, rows: int) -> None:
    found = calibrated(rule, [(a[:rows], b[:rows], own) for a, b, own in tasks()], START, BASE)
    assert found.weight.isfinite().all() and found.weight.norm() < 100


@pytest.mark.parametrize("rule", [kind() for kind in CALIBRATION_RULES.values()], ids=str)
def test_equal_teachers_on_equal_inputs_are_kept(rule: CalibrationRule) -> None:
    rule = replace(rule, rho=1.0) if isinstance(rule, FeatCal) else rule
    given = [(own, own, START) for own, _, _ in tasks()]
    close(calibrated(rule, given, START, BASE).weight, START.weight)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FeatCal, {"ridge": 0.0}),
        (FeatCal, {"ridge": float("nan")}),
        (FeatCal, {"rho": -1.0}),
        (FeatCal, {"alpha": 1.1}),
        (RegMean, {"off_diagonal": 1.0}),
        (RegMeanPlusPlus, {"off_diagonal": -0.1}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[CalibrationRule], options: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**options)
    text = str(caught.value)
    assert kind.name in text and f"--calibrate-option {next(iter(options))}=" in text
