"""An experiment: settings, the values to try, and variants of the method, as a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, final

from pydantic import Field

from aniso.errors import UsageError, printable
from aniso.experiments.options import Options
from aniso.experiments.parsing import parse_setting
from aniso.experiments.settings import Setting
from aniso.experiments.strict_yaml import Document
from aniso.json_value import JsonObject

Values = dict[str, list[Any]]
_MOST_CELLS = 100_000


class Variant(Options):
    """One row of the results: what it is called, and how it differs."""

    label: str
    base: dict[str, Any] = Field(default_factory=dict)
    grid: Values = Field(default_factory=dict)
    """Values to try instead of the experiment's."""


class Experiment(Options):
    """Every variant, at every combination of the grid's values, is a cell."""

    version: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]{0,60}$")
    base: dict[str, Any]
    grid: Values = Field(default_factory=dict)
    variants: list[Variant] = Field(min_length=1)


@final
@dataclass(frozen=True)
class Cell:
    experiment: str
    label: str
    setting: Setting


def cells(experiment: Experiment, document: Document) -> list[Cell]:
    """All cells, each checked as a setting of its own; two that are the same are an error."""
    _require_values(experiment, document)
    found: dict[str, Cell] = {}
    _require_few(experiment, document)
    for i, variant in enumerate(experiment.variants):
        lines = _lines(document, i)
        shared = _keys(experiment.base, experiment.grid) - _keys(variant.base, variant.grid)
        for point in _points({**experiment.grid, **variant.grid}):
            merged = _merged(_merged(experiment.base, variant.base), point)
            setting = parse_setting(Document(document.label, merged, lines), shared=shared)
            cell = Cell(experiment.name, variant.label, setting)
            if cell.setting.id in found:
                raise UsageError(
                    "SPEC",
                    f"{document.label}: variants '{printable(found[cell.setting.id].label)}' and "
                    f"'{printable(variant.label)}' are the same",
                    line=document.lines.get(("variants", i), ""),
                    fix="leave one of them out, or say how it differs",
                )
            found[cell.setting.id] = cell
    return list(found.values())


def _require_values(experiment: Experiment, document: Document) -> None:
    """An empty list would leave out cells without a word."""
    grids: dict[tuple[str | int, ...], Values] = {("grid",): experiment.grid}
    grids |= {("variants", i, "grid"): variant.grid for i, variant in enumerate(experiment.variants)}
    for place, grid in grids.items():
        for key, values in grid.items():
            if not values:
                raise UsageError(
                    "SPEC",
                    f"{document.label}: '{printable(key)}' has no values to try",
                    line=document.lines.get((*place, key), ""),
                    fix=f"leave '{printable(key)}' out, or name a value",
                )


def _require_few(experiment: Experiment, document: Document) -> None:
    """A few hundred letters can ask for more cells than there is memory or time."""
    count = 0
    for variant in experiment.variants:
        grid = {**experiment.grid, **variant.grid}
        count += math.prod(len(values) for values in grid.values())
    if count > _MOST_CELLS:
        raise UsageError(
            "SPEC",
            f"{document.label}: the grid has {count:,} cells",
            expected=f"at most {_MOST_CELLS:,}",
            fix="divide it into several experiments",
        )


def _lines(document: Document, variant: int) -> dict[tuple[str | int, ...], int]:
    """Where a cell's keys were said: by the experiment's base, its grid, or the variant."""
    whole = document.lines.get(("variants", variant))
    out: dict[tuple[str | int, ...], int] = {} if whole is None else {(): whole}
    for start in (("base",), ("grid",), ("variants", variant, "base"), ("variants", variant, "grid")):
        size = len(start)
        found = {path[size:]: line for path, line in document.lines.items() if path[:size] == start}
        out |= {_undotted(path): line for path, line in found.items() if path}
    return out


def _keys(*mappings: Mapping[str, object]) -> set[str]:
    """The first parts of all keys."""
    return {key.partition(".")[0] for mapping in mappings for key in mapping}


def _undotted(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """As the cell has it: a dotted key reaches into a mapping."""
    first, *rest = path
    return (*first.split("."), *rest) if isinstance(first, str) else path


def _points(grid: Values) -> Iterator[JsonObject]:
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> JsonObject:
    """``over`` wins; mappings within are merged, and a dotted key reaches into them."""
    out = dict(base)
    for key, value in over.items():
        first, dot, rest = key.partition(".")
        value = {rest: value} if dot else value
        inner = out.get(first)
        nested = isinstance(value, Mapping) and isinstance(inner, Mapping | None)
        out[first] = _merged(inner or {}, value) if nested else value
    return out
