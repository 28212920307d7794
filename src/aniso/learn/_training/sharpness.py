"""Looking for flat minima: gradients are taken where the loss is worst nearby, and collapse is undone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from aniso.learn.objectives import SAR, DataTerm, Seen
from aniso.learn.objectives.unlabelled import entropy

_MEMORY = 0.9  # of the moving average


@final
class Sharpness:
    """SAR's part of a step: up to the worst point within a radius, and back; and when to begin anew.

    A step has two passes. Which pictures are reliable is noticed in the first, and holds for the second.
    """

    def __init__(self, tensors: Sequence[Tensor], radius: float, floor: float) -> None:
        self._tensors = tensors
        self._radius = radius
        self._floor = floor
        self._before: list[Tensor] = []
        self._reliable: dict[int, Tensor] = {}  # by term, for every picture of its split
        self._found: list[float] = []
        self._second = False
        self.average: float | None = None
        """Of the entropy of reliable answers, as seen from the worst point."""

    # the two passes

    def reliable(self, which: int, places: Sequence[int]) -> Tensor | None:
        """Whether these pictures of a term counted in the first pass; None while it lasts."""
        found = self._reliable.get(which) if self._second else None
        return None if found is None else found[list(places)]

    @torch.no_grad()
    def notice(self, which: int, term: DataTerm, places: Sequence[int], seen: Seen) -> None:
        if not isinstance(term, SAR):
            return
        if seen.reliable is not None:
            self._found += entropy(seen.logits[0])[term.reliable(seen) & seen.reliable].tolist()
            return
        marks = self._reliable.setdefault(which, torch.zeros(len(term.split), dtype=torch.bool))
        marks[list(places)] = term.reliable(seen).cpu()

    @torch.no_grad()
    def climb(self) -> None:
        """Along the gradient, by the radius; nowhere if there is none. The second pass begins."""
        self._before = [tensor.detach().clone() for tensor in self._tensors]
        gradients = [tensor.grad for tensor in self._tensors]
        norm = torch.stack([torch.zeros(()), *(g.norm().cpu() for g in gradients if g is not None)]).norm()
        for tensor, gradient in zip(self._tensors, gradients, strict=True):
            if gradient is not None and 0 < norm < math.inf:
                tensor.add_(gradient * (self._radius / norm).to(gradient.device))
        self._second = True

    @torch.no_grad()
    def back(self) -> None:
        """To the very numbers from before."""
        for tensor, before in zip(self._tensors, self._before, strict=True):
            tensor.copy_(before)
        self._before = []

    # after a step

    def collapsed(self) -> bool:
        """Whether the moving average, with this step's entropy, fell below the floor; it then begins anew."""
        found, self._found, self._reliable, self._second = self._found, [], {}, False
        if not found:
            return False
        value = sum(found) / len(found)
        self.average = value if self.average is None else _MEMORY * self.average + (1 - _MEMORY) * value
        if self.average >= self._floor:
            return False
        self.average = None
        return True
