"""Rules that calibrate the layers of a merged model by its and its teachers' inputs, in closed form.

Every rule solves one least-squares problem for each linear layer. The matrices of second moments of a task t
are ``C = X'X / n`` and ``K = X'Y / n`` for inputs X of the layer and Y of the teacher's layer, both with n
rows. A rule chooses X and Y, weighs the tasks and regularises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from aniso.errors import UsageError, printable


class Affine(NamedTuple):
    """Weight and bias of one layer in float64: matrices outputs x inputs, vectors for a layer norm."""

    weight: Tensor
    bias: Tensor | None


@final
class Moments:
    """Mean and second moments of a layer's inputs on one task, summed in float64."""

    def __init__(self, *, by_dimension: bool = False) -> None:
        """``by_dimension`` leaves out products of different dimensions."""
        self.rows = 0
        self._by_dimension = by_dimension
        self._sums: tuple[Tensor, ...] = ()

    def add(self, own: Tensor, target: Tensor | None = None) -> None:
        """Add inputs as rows; products are those of the inputs' dtype. Without a target it is the input."""
        new = [own.square().sum(0) if self._by_dimension else own.T @ own, own.sum(0)]
        if target is not None:
            new += [own.T @ target, target.sum(0)]
        wide = [_float64(value) for value in new]
        self._sums = tuple(a + b for a, b in zip(self._sums, wide, strict=True)) if self.rows else (*wide,)
        self.rows += len(own)

    @property
    def is_finite(self) -> bool:
        return all(bool(value.isfinite().all()) for value in self._sums)

    @property
    def gram(self) -> Tensor:
        """X'X / n; its diagonal alone if moments are by dimension."""
        return self._sums[0] / self.rows

    @property
    def mean(self) -> Tensor:
        return self._sums[1] / self.rows

    @property
    def cross(self) -> Tensor:
        """X'Y / n."""
        return self._sums[-2] / self.rows

    @property
    def target_mean(self) -> Tensor:
        return self._sums[-1] / self.rows


def _float64(value: Tensor) -> Tensor:
    """Devices without float64 leave it to the CPU."""
    return (value.cpu() if value.device.type == "mps" else value).double()


@final
@dataclass
class System:
    """Sums over tasks that decide a group of linear layers with one input; the task's weight is w."""

    matrix: Tensor | None = None
    """Sum of w C."""
    mean: Tensor | None = None
    """Sum of w times the mean input."""
    total: float = 0.0
    """Sum of w."""
    tasks: int = 0
    right: list[Tensor] = field(default_factory=list)
    """For every layer the sum of w K W'."""
    outputs: list[Tensor | None] = field(default_factory=list)
    """For every layer the sum of w times the teacher's mean output."""
    sums: list[Affine] = field(default_factory=list)
    """For every layer the sum of teachers' weights and biases."""

    def add(
        self, weight: float, gram: Tensor, cross: Tensor, moments: Moments, layers: Sequence[Affine]
    ) -> None:
        """Add a task: its second moments, and the teacher's layers."""
        right = [weight * cross @ layer.weight.T for layer in layers]
        outputs = [
            None if layer.bias is None else weight * (layer.bias + layer.weight @ moments.target_mean)
            for layer in layers
        ]
        if self.matrix is None or self.mean is None:
            self.matrix, self.mean = weight * gram, weight * moments.mean
            self.right, self.outputs, self.sums = right, outputs, list(layers)
        else:
            self.matrix += weight * gram
            self.mean += weight * moments.mean
            self.right = [a + b for a, b in zip(self.right, right, strict=True)]
            self.outputs = [_sum(a, b) for a, b in zip(self.outputs, outputs, strict=True)]
            self.sums = [
                Affine(a.weight + b.weight, _sum(a.bias, b.bias))
                for a, b in zip(self.sums, layers, strict=True)
            ]
        self.total += weight
        self.tasks += 1


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class CalibrationRule(ABC):
    """How layers are calibrated. Subclasses are frozen dataclasses whose fields are their options."""

    name: ClassVar[str]
    uses_student: ClassVar[bool] = True
    """Whether inputs of the model that is calibrated are needed, lower layers first."""
    uses_teachers: ClassVar[bool] = True
    """Whether inputs of the teachers are needed."""
    uses_start: ClassVar[bool] = True
    """Whether the result depends on the model that is calibrated. If not, parameters that are no matrix of a
    linear layer are the mean of the teachers'."""

    def inputs(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return X and Y from rows of the student, the teacher or both; None if Y is X."""
        return rows[0], None

    def task_weight(self, gram: Tensor) -> float:
        """Return the weight of a task with these second moments."""
        return 1.0

    def moment(self, values: Tensor) -> Tensor:
        """Return C or K as it enters the sums."""
        return values

    @abstractmethod
    def linear(self, system: System, start: Sequence[Affine], base: Sequence[Affine]) -> list[Affine]:
        """Return the calibrated layers of a group; ``start`` are the merged ones, ``base`` the base's."""

    def norm(self, tasks: Sequence[tuple[Moments, Affine]], start: Affine, base: Affine) -> Affine | None:
        """Return a calibrated layer norm from the moments of its normalised input; None to leave it."""
        return None

    def require(self, option: str, fine: bool, expected: str) -> None:
        """Raise UsageError unless the value of an option is in its range."""
        if not fine:
            default = next(own.default for own in fields(self) if own.name == option)
            raise UsageError(
                "USAGE",
                f"invalid value {printable(getattr(self, option))} for option '{option}' of calibration "
                f"rule '{self.name}'",
                expected=expected,
                fix=f"--calibrate-option {option}={default}",
            )

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value:g}" for key, value in asdict(self).items())
        return f"{self.name}({options})"


@final
@dataclass(frozen=True)
class FeatCal(CalibrationRule):
    """Calibrate a merged model towards its teachers' outputs, regularised towards an extrapolated merge.

    With student inputs X and teacher inputs E of a task, the targets' inputs are Y = alpha E + (1 - alpha) X,
    and tasks are weighed by 1 / ||C||. The weights solve

        (sum w C + ridge I) W' = sum w K W_t' + ridge (rho W_merged + (1 - rho) W_base)'.
    """

    name: ClassVar[str] = "featcal"
    ridge: float = 0.05
    """Weight of the anchor, lambda in the paper; above 0."""
    rho: float = 2.2
    """Where the anchor is: 0 the base, 1 the merged model, above 1 beyond it."""
    alpha: float = 0.25
    """Share of the teachers' inputs in the targets, from 0 to 1."""

    def __post_init__(self) -> None:
        self.require("ridge", 0 < self.ridge < math.inf, "a number above 0")
        self.require("rho", 0 <= self.rho < math.inf, "a number, 0 or more")
        self.require("alpha", 0 <= self.alpha <= 1, "from 0 to 1")

    def inputs(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        student, teacher = rows
        return student, self.alpha * teacher + (1 - self.alpha) * student

    def task_weight(self, gram: Tensor) -> float:
        size = float(gram.norm())
        return 1 / size if size > 0 else 0.0  # a task whose inputs are all zero says nothing

    def linear(self, system: System, start: Sequence[Affine], base: Sequence[Affine]) -> list[Affine]:
        assert system.matrix is not None and system.mean is not None
        anchors = [self._anchor(one, other) for one, other in zip(start, base, strict=True)]
        right = [r + self.ridge * a.weight.T for r, a in zip(system.right, anchors, strict=True)]
        matrix = system.matrix + self.ridge * torch.eye(len(system.matrix)).to(system.matrix)
        out = []
        for weight, outputs, anchor in zip(_solved(matrix, right), system.outputs, anchors, strict=True):
            bias = anchor.bias
            if outputs is not None and bias is not None:
                known = outputs - weight @ system.mean + self.ridge * bias
                bias = known / (system.total + self.ridge)
            out.append(Affine(weight, bias))
        return out

    def norm(self, tasks: Sequence[tuple[Moments, Affine]], start: Affine, base: Affine) -> Affine:
        """Least squares of each dimension's outputs: gamma z + beta against those of the teachers.

        Both unknowns of a dimension are decided by two equations, in which every task weighs the same.
        """
        anchor = self._anchor(start, base)
        assert anchor.bias is not None
        squares = torch.full_like(anchor.weight, self.ridge)
        means = torch.zeros_like(anchor.weight)
        right, right_bias = self.ridge * anchor.weight, self.ridge * anchor.bias
        count = len(tasks) + self.ridge
        for moments, (gamma, beta) in tasks:
            assert beta is not None
            square, mean = moments.gram, moments.mean
            squares, means = squares + square, means + mean
            right = right + square * gamma + mean * beta
            right_bias = right_bias + mean * gamma + beta
        determinant = squares * count - means**2  # positive: mean squares are at least squared means
        weight = (count * right - means * right_bias) / determinant
        return Affine(weight, (squares * right_bias - means * right) / determinant)

    def _anchor(self, start: Affine, base: Affine) -> Affine:
        weight = self.rho * start.weight + (1 - self.rho) * base.weight
        if start.bias is None or base.bias is None:
            return Affine(weight, None)
        return Affine(weight, self.rho * start.bias + (1 - self.rho) * base.bias)


@dataclass(frozen=True)
class RegMean(CalibrationRule):
    """Merge linear layers by least squares on the teachers' own inputs; average everything else.

    Off-diagonal entries of C are multiplied by ``off_diagonal``; W' = (sum C)^-1 sum C W_t'.
    """

    name: ClassVar[str] = "regmean"
    uses_student: ClassVar[bool] = False
    uses_start: ClassVar[bool] = False
    off_diagonal: float = 0.95
    """Factor of the off-diagonal entries of C, from 0 to below 1."""

    def __post_init__(self) -> None:
        self.require("off_diagonal", 0 <= self.off_diagonal < 1, "from 0 to below 1")

    def moment(self, values: Tensor) -> Tensor:
        diagonal = values.diagonal()
        return self.off_diagonal * values + torch.diag((1 - self.off_diagonal) * diagonal)

    def linear(self, system: System, start: Sequence[Affine], base: Sequence[Affine]) -> list[Affine]:
        assert system.matrix is not None
        matrix, dead = system.matrix.clone(), system.matrix.diagonal() <= 0
        matrix[dead, dead] = 1.0  # an input that is always zero says nothing: its weights are averaged
        count, right = system.tasks, []
        for known, total in zip(system.right, system.sums, strict=True):
            right.append(torch.where(dead.unsqueeze(1), total.weight.T / count, known))
        solved = _solved(matrix, right)
        biases = [None if total.bias is None else total.bias / count for total in system.sums]
        return [Affine(weight, bias) for weight, bias in zip(solved, biases, strict=True)]


@final
@dataclass(frozen=True)
class RegMeanPlusPlus(RegMean):
    """Merge linear layers by least squares on the merged model's own inputs; average everything else."""

    name: ClassVar[str] = "regmean++"
    uses_student: ClassVar[bool] = True
    uses_teachers: ClassVar[bool] = False


CALIBRATION_RULES: dict[str, type[CalibrationRule]] = {
    rule.name: rule for rule in (FeatCal, RegMean, RegMeanPlusPlus)
}
"""Calibration rules by name."""


def _solved(matrix: Tensor, right: Sequence[Tensor]) -> list[Tensor]:
    """Return the solutions W of matrix W' = right, for a matrix that is symmetric and positive."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    joined = torch.cat(list(right), dim=1)
    if int(failed):  # rounding; the inverse then leaves out directions that the inputs do not have
        found = torch.linalg.pinv(matrix, hermitian=True) @ joined
    else:
        found = torch.cholesky_solve(joined, factor)
    return [part.T.contiguous() for part in found.split([len(one.T) for one in right], dim=1)]
