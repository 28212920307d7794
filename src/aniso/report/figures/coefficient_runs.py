"""Coefficients of runs from their records: means by cell, and groups by type of block or layer."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from aniso.coefficient_matrix import BlockLabel
from aniso.records import Record

FiveNumbers = Sequence[float]
_NORM_LETTERS = ("\N{GREEK SMALL LETTER GAMMA}", "\N{GREEK SMALL LETTER BETA}")
_NUMBER = re.compile(r"^\d+\.")
_PARAMETER = re.compile(r"(?P<owner>.+)[._](?P<end>weight|bias)")


def main_runs(records: Sequence[Record]) -> list[Record]:
    """Return the runs with coefficients of one label, at the largest number of labelled images.

    Of several labels it is one whose runs keep all coefficients, without a head, and with most coefficients;
    coefficients learned from few images have another distribution than those learned from many.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.ended_well and record.coefficients:
            groups[record.label].append(record)
    if not groups:
        return []
    chosen = max(groups.values(), key=_preference)
    sizes = {id(r): (r.spec.shots or 0, r.spec.fraction or 0.0) for r in chosen}
    most = max(sizes.values())
    return [record for record in chosen if sizes[id(record)] == most]


def _preference(runs: Sequence[Record]) -> tuple[bool, bool, int]:
    headless = all(record.spec.head is None for record in runs)
    return keep_all(runs), headless, max(record.metrics.trainable or 0 for record in runs)


def keep_all(runs: Sequence[Record]) -> bool:
    """True if every run keeps all of its coefficients, not only their five numbers."""
    return all(record.coefficients and record.coefficients.matrix for record in runs)


def data_set(record: Record) -> str:
    """Return the data set that a run is about; several are one text."""
    spec = record.spec
    return spec.target or spec.task or " + ".join(record.measured) or record.label


def described_runs(runs: Sequence[Record]) -> str:
    """Return how many runs there are, with what the matrices of theirs stand for."""
    notes = {r.coefficients.matrix.note for r in runs if r.coefficients and r.coefficients.matrix} - {""}
    count = "one run" if len(runs) == 1 else f"mean over {len(runs)} runs"
    return "; ".join((count, *sorted(notes)))


@final
@dataclass(frozen=True)
class MeanCoefficients:
    """The mean of each cell over the runs that have it, with vectors and blocks in the order of the runs."""

    vectors: tuple[str, ...]
    blocks: tuple[BlockLabel, ...]
    cells: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, runs: Sequence[Record]) -> MeanCoefficients:
        """Average the matrices of runs that keep all coefficients."""
        vectors: dict[str, None] = {}
        blocks: dict[str, BlockLabel] = {}
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for record in runs:
            matrix = record.coefficients and record.coefficients.matrix
            if not matrix:
                continue
            columns = matrix.blocks
            vectors |= dict.fromkeys(matrix.vectors)
            blocks |= {b.name: b for b in columns if b.name not in blocks}
            for vector, row in zip(matrix.vectors, matrix.rows, strict=True):
                for block, value in zip(columns, row, strict=True):
                    if not math.isnan(value):
                        found[vector, block.name].append(value)
        means = {cell: fmean(values) for cell, values in found.items()}
        return cls(tuple(vectors), tuple(blocks.values()), means)

    def rows(self) -> list[list[float]]:
        """Return a row per vector; NaN where no run has the cell."""
        return [[self.cells.get((v, b.name), math.nan) for b in self.blocks] for v in self.vectors]

    def grouped(
        self, key: Callable[[BlockLabel], str | None], vector: str | None = None
    ) -> dict[str, list[float]]:
        """Return the coefficients of all vectors, or of one, by a property of their blocks."""
        groups: dict[str, list[float]] = defaultdict(list)
        for block in self.blocks:
            name = key(block)
            own = [self.cells.get((v, block.name)) for v in (self.vectors if vector is None else (vector,))]
            if name is not None:
                groups[name] += [value for value in own if value is not None]
        return {name: values for name, values in groups.items() if values}


def block_type(block: BlockLabel) -> str | None:
    """Return the type of a layer's block, such as "W attn.in_proj"; None outside of layers.

    Weights are W and biases b, those of norms are the Greek gamma and beta. A CLIP's layer has twelve types.
    Numbered parts of a stage, as convolutional networks have them, are one type if they have the same name.
    """
    if block.depth is None:
        return None
    name = _NUMBER.sub("", block_in_layer(block))
    found = _PARAMETER.fullmatch(name)
    if not found:
        return name
    letters = _NORM_LETTERS if block.kind == "norm" else ("W", "b")
    return f"{letters[found['end'] == 'bias']} {found['owner']}"


def block_in_layer(block: BlockLabel) -> str:
    """Return the name of a block within its layer; the whole name outside of layers."""
    if block.depth is None:
        return block.name
    parts = re.split(rf"(?:^|\.)(?:layer)?{block.depth}\.", block.name, maxsplit=1)
    return parts[-1] or block.name


def layer(block: BlockLabel) -> str | None:
    return None if block.depth is None else str(block.depth)


def five_numbers(values: Sequence[float]) -> list[float]:
    """Return minimum, quartiles and maximum, interpolated linearly."""
    ordered = sorted(values)
    places = [share * (len(ordered) - 1) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    out = []
    for place in places:
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        out.append(ordered[low] + (place - low) * (ordered[high] - ordered[low]))
    return out


def mean_summary(runs: Sequence[Record], by: str) -> dict[str, list[float]]:
    """Return the mean of each of the five numbers by kind or depth over the runs that have it."""
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for record in runs:
        for name, numbers in getattr(record.coefficients, by).items():
            found[name].append(numbers)
    return {name: [fmean(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
