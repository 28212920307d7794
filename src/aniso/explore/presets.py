"""Presets: coefficients to begin with, from the base to learned ones, and merge rules that are sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.compose import Coefficients
from aniso.errors import UsageError, printable
from aniso.explore.table import CoefficientTable
from aniso.learn.starts import least_squares
from aniso.registry import MERGE_RULES
from aniso.vectors import Bank

BASE, LEARNED, LEAST_SQUARES = "base", "learned", "least-squares"
_ONE = "vector:"


@final
@dataclass(frozen=True)
class Preset:
    """A preset by its name, and its label on the page."""

    name: str
    label: str
    group: str


@final
@dataclass(frozen=True, eq=False)
class Presets:
    """The presets of a bank; merge rules are among them if they are sums with one coefficient for all."""

    bank: Bank
    table: CoefficientTable
    learned: Coefficients | None = None

    def all(self) -> Iterator[Preset]:
        """Yield the presets in the order of the page."""
        yield Preset(BASE, "base: all 0", "Start")
        if self.learned is not None:
            yield Preset(LEARNED, "coefficients as opened", "Start")
        for name, value in self._linear().items():
            yield Preset(name, f"{name.replace('-', ' ')}: all {value:.3g}", "Merge rules")
        yield Preset(LEAST_SQUARES, "least squares, without data", "Merge rules")
        for name in self.table.vectors:
            yield Preset(f"{_ONE}{name}", f"{name}: 1, others 0", "One vector")

    def values(self, name: str) -> Tensor:
        """Return the table of a preset."""
        linear = self._linear()
        if name == BASE:
            return self.table.filled(0.0)
        if name == LEARNED and self.learned is not None:
            return self.table.of_coefficients(self.learned)
        if name in linear:
            return self.table.filled(linear[name])
        if name == LEAST_SQUARES:
            return self.table.of_coefficients(
                least_squares(self.bank, self.table.index.partition).coefficients
            )
        if name.startswith(_ONE) and name.removeprefix(_ONE) in self.table.vectors:
            row = torch.tensor([v == name.removeprefix(_ONE) for v in self.table.vectors]).float()
            return torch.where(self.table.exists, row[:, None], torch.nan)
        raise UsageError("USAGE", f"there is no preset '{printable(name)}'", fix="reload the page")

    def _linear(self) -> dict[str, float]:
        """Return the one coefficient of merge rules that are sums of scaled vectors."""
        count = len(self.table.vectors)
        found = {name: MERGE_RULES.get(name)().coefficient(count) for name in MERGE_RULES.names}
        return {name: value for name, value in found.items() if value is not None}
