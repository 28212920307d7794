"""SAR: sharpness-aware entropy minimisation of reliable predictions, with resets after a collapse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from aniso.data import Unlabelled
from aniso.errors import UsageError, printable
from aniso.learn.objectives.companion import Companion, Losses, RunContext
from aniso.learn.objectives.entropy import prediction_entropy
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES

MEANS = ("reliable", "batch")
_MOMENTUM = 0.9  # of the moving average of the entropy


@OBJECTIVES.register("sar")
@final
@dataclass(frozen=True)
class SAR(UnlabelledTerm):
    """Sharpness-aware entropy of reliable predictions (Niu et al. 2023).

    An image is reliable if the entropy of its prediction is below ``margin`` times the largest possible. The
    gradient is taken where the loss is highest within ``radius``. If a moving average of the entropy falls
    below a floor, the predictions have collapsed and the parameters are reset to their start. ``floor`` is
    that of a thousand classes; for fewer it is lower, as their largest entropy is. The loss is the mean over
    the reliable images of a batch, and zero if there is none.
    """

    loss_name = "reliable entropy"
    selective = True
    averages_counted = True

    split: Unlabelled
    margin: float = 0.4
    radius: float = 0.05
    floor: float = 0.2
    mean_over: str = "reliable"
    """The mean is over ``reliable`` images, or over the whole ``batch``, to which others add zero."""

    def __post_init__(self) -> None:
        self._require_unlabelled()
        if self.mean_over not in MEANS:
            raise UsageError(
                "OBJECTIVE",
                f"SAR cannot take the mean over '{printable(self.mean_over)}'",
                expected=" or ".join(MEANS),
                fix="mean_over='reliable'",
            )
        finite = math.isfinite(self.margin + self.radius + self.floor)
        if not (finite and self.margin > 0 and self.radius >= 0):
            raise UsageError(
                "OBJECTIVE",
                f"SAR cannot have margin {self.margin}, radius {self.radius} and floor {self.floor}",
                expected="a margin above 0, a radius of 0 or more",
                fix="margin=0.4, radius=0.05",
            )

    @classmethod
    def companion(cls, terms: Mapping[int, Self], run: RunContext) -> Companion | None:
        return SharpnessAware(terms, run)

    def settings(self) -> dict[str, JsonValue]:
        own = {"margin": self.margin, "radius": self.radius, "floor": self.floor}
        return {**own, "mean_over": self.mean_over}

    @property
    def collapse(self) -> float:
        """The mean entropy below which predictions have collapsed."""
        return self.floor * math.log(len(self.split.classes)) / math.log(1000)

    def reliable(self, inputs: TermInputs) -> Tensor:
        """Return for every image whether it counts, given the first pass if this is the second."""
        below = prediction_entropy(inputs.logits[0]) < self.margin * math.log(len(self.split.classes))
        return below & inputs.marks["reliable"] if "reliable" in inputs.marks else below

    def counted(self, inputs: TermInputs) -> int:
        """Return the number of reliable images, or of all if the mean is over the batch."""
        if self.mean_over == "batch":
            return len(inputs.logits[0])
        return int(self.reliable(inputs).sum())

    def loss(self, inputs: TermInputs) -> Tensor:
        """Return the mean entropy of reliable images, zero if there is none."""
        total = (prediction_entropy(inputs.logits[0]) * self.reliable(inputs)).sum()
        return total / max(1, self.counted(inputs))


@final
class SharpnessAware(Companion):
    """Companion of SAR: takes gradients at the worst point nearby, and resets after a collapse.

    A step has two passes. Which images are reliable is recorded in the first, and holds for the second.
    """

    name = "sharpness"

    def __init__(self, terms: Mapping[int, SAR], run: RunContext) -> None:
        options = {(term.radius, term.floor) for term in terms.values()}
        if len(options) > 1:
            raise UsageError(
                "OBJECTIVE",
                "the SAR terms of an objective differ in radius or floor",
                found=sorted(options),
                fix="give all of them the same radius and floor",
            )
        self._terms = terms
        self._run = run
        self._perturbation = Perturbation(list(run.tensors.values()), next(iter(options))[0])
        self._floor = min(term.collapse for term in terms.values())  # classes may differ in number
        self._start = {name: tensor.detach().clone() for name, tensor in run.tensors.items()}
        self._reliable: dict[int, Tensor] = {}  # by term: a mark for every image of its split
        self._second = False
        self._entropies: list[float] = []
        self.average: float | None = None
        """Moving average of the entropy of reliable images, as seen from the worst point."""
        self.resets = 0

    def marks(self, term: int, items: Sequence[int]) -> Mapping[str, Tensor]:
        if not self._second or term not in self._reliable:
            return {}
        return {"reliable": self._reliable[term][list(items)]}

    @torch.no_grad()
    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        if term not in self._terms:
            return
        own = self._terms[term]
        reliable = own.reliable(inputs)
        if self._second:
            self._entropies += prediction_entropy(inputs.logits[0])[reliable].tolist()
            return
        marks = self._reliable.setdefault(term, torch.zeros(len(own.split), dtype=torch.bool))
        marks[list(items)] = reliable.cpu()

    def around_step(self, backward: Callable[[], Losses]) -> Losses:
        losses = backward()
        self._perturbation.climb()
        self._second = True
        try:
            self._run.optimiser.zero_grad(set_to_none=True)
            backward()
        finally:
            self._perturbation.undo()
            self._second = False
        return losses

    def after_step(self) -> None:
        if self._collapsed():
            self._reset()

    def _collapsed(self) -> bool:
        """Update the moving average; True if it fell below the floor, after which it begins again."""
        entropies, self._entropies, self._reliable = self._entropies, [], {}
        if not entropies:
            return False
        value = sum(entropies) / len(entropies)
        self.average = value if self.average is None else _MOMENTUM * self.average + (1 - _MOMENTUM) * value
        if self.average >= self._floor:
            return False
        self.average = None
        return True

    @torch.no_grad()
    def _reset(self) -> None:
        for name, tensor in self._run.tensors.items():
            tensor.copy_(self._start[name])
        self._run.optimiser.state.clear()
        self.resets += 1

    def metrics(self) -> Mapping[str, int]:
        return {"forgotten": self.resets}

    def state_dict(self) -> dict[str, Tensor | JsonValue]:
        start = {f"start.{name}": tensor for name, tensor in self._start.items()}
        return {"average": self.average, "resets": self.resets, **start}

    def load_state_dict(self, state: Mapping[str, Tensor | JsonValue]) -> None:
        average, resets = state["average"], state["resets"]
        assert average is None or isinstance(average, float)
        assert isinstance(resets, int)
        self.average, self.resets = average, resets
        for name, tensor in self._start.items():
            start = state[f"start.{name}"]
            assert isinstance(start, Tensor)
            self._start[name] = start.to(tensor.device)


@final
class Perturbation:
    """Moves tensors along their gradient, by a radius, and back to the very bits they had."""

    def __init__(self, tensors: Sequence[Tensor], radius: float) -> None:
        self._tensors = tensors
        self._radius = radius
        self._before: list[Tensor] = []

    @torch.no_grad()
    def climb(self) -> None:
        """Move all tensors by radius * gradient / norm; nowhere if the norm is zero or not finite."""
        self._before = [tensor.detach().clone() for tensor in self._tensors]
        gradients = [tensor.grad for tensor in self._tensors]
        norm = torch.stack([torch.zeros(()), *(g.norm().cpu() for g in gradients if g is not None)]).norm()
        for tensor, gradient in zip(self._tensors, gradients, strict=True):
            if gradient is not None and 0 < norm < math.inf:
                tensor.add_(gradient * (self._radius / norm).to(gradient.device))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the values from before ``climb``."""
        for tensor, before in zip(self._tensors, self._before, strict=True):
            tensor.copy_(before)
        self._before = []
