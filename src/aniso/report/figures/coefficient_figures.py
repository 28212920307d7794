"""Coefficients of runs from their records: a heat map, and boxes by type of block and by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from aniso.coefficient_matrix import BlockLabel
from aniso.records import Record
from aniso.report.figures.canvas import HeatMapData, Kind, Plot
from aniso.report.figures.coefficient_runs import (
    MeanCoefficients,
    block_in_layer,
    block_type,
    data_set,
    described_runs,
    five_numbers,
    keep_all,
    layer,
    main_runs,
    mean_summary,
)
from aniso.report.figures.coefficients import box_panels, heat_map

_MOST_NUMBERS = 50_000  # of a heat map on a page, about 300 kB: 21 vectors, 152 blocks and 14 seeds
_PANELS = 5  # data sets beside the panel of all
_Boxes = dict[str, list[float]]


def plan_heat_map(records: Sequence[Record]) -> Plot | None:
    """Plan a heat map over vectors and blocks; None if the records keep no matrix."""
    runs = main_runs(records)
    if not runs or not keep_all(runs):
        return None
    mean = MeanCoefficients.of(runs)
    title = f"{_title(runs)}; {described_runs(runs)}"
    columns = [block_label(block) for block in mean.blocks]

    def draw(kind: Kind) -> bytes:
        return heat_map(mean.rows(), mean.vectors, columns, title, kind=kind)

    caption = "Coefficients, vectors by blocks from input to output; grey cells do not exist"
    return Plot(caption, draw, _heat_map_data(mean, columns, runs))


def _heat_map_data(
    mean: MeanCoefficients, columns: Sequence[str], runs: Sequence[Record]
) -> HeatMapData | None:
    """Return the numbers of the mean and, if there are several seeds, of every seed; None if too many."""
    cells = len(mean.vectors) * len(mean.blocks)
    if cells > _MOST_NUMBERS:
        return None
    values = {"": mean.rows()}
    seeds = sorted({record.seed for record in runs})
    for seed in seeds if 1 < len(seeds) < _MOST_NUMBERS // cells else ():
        own = MeanCoefficients.of([record for record in runs if record.seed == seed])
        values[str(seed)] = MeanCoefficients(mean.vectors, mean.blocks, own.cells).rows()
    return HeatMapData(mean.vectors, tuple(zip(columns, mean.blocks, strict=True)), values)


def block_label(block: BlockLabel) -> str:
    """Return a block's layer and its name within the layer, such as "3 mlp.c_fc.weight"."""
    if block.depth is None:
        return block.name.removeprefix("visual.")
    return f"{block.depth} {block_in_layer(block)}"


def plan_boxes_by_kind(records: Sequence[Record]) -> Plot | None:
    """Plan boxes by type of block; by aniso's coarser kinds if records keep five numbers alone."""
    return _plan_boxes(records, "kind", block_type)


def plan_boxes_by_depth(records: Sequence[Record]) -> Plot | None:
    """Plan boxes by layer."""
    return _plan_boxes(records, "depth", layer)


def _plan_boxes(records: Sequence[Record], by: str, key: Callable[[BlockLabel], str | None]) -> Plot | None:
    runs = main_runs(records)
    if not runs:
        return None
    panels = _from_matrices(runs, key) if keep_all(runs) else {}
    whole = "the coefficients"
    if not panels.get("all"):
        panels = _from_summaries(runs, by)
        whole = "a run's coefficients" if len(runs) == 1 else f"means of the five numbers of {len(runs)} runs"
    if not panels["all"]:
        return None
    left_out = max(0, len(panels) - 1 - _PANELS)
    caption = f"Minimum, quartiles and maximum of {whole}, of all data sets and of each"
    if len(panels) <= 2:
        caption = f"Minimum, quartiles and maximum of {whole}"
    elif left_out:
        caption += f" (the first {_PANELS}; {left_out} more are in the records)"
    shown: Mapping[str, _Boxes] = dict(list(panels.items())[: 1 + _PANELS])
    if len(panels) == 2:  # the panel of the one data set is that of all
        shown = {name: boxes for name, boxes in panels.items() if name != "all"}
    title = f"{_title(runs)}; {described_runs(runs)}"
    return Plot(caption, lambda kind: box_panels(shown, title, kind=kind))


def _from_matrices(runs: Sequence[Record], key: Callable[[BlockLabel], str | None]) -> dict[str, _Boxes]:
    """Return boxes of all cells, and of each data set; of one model for several tasks, of each vector.

    Runs of one data set, such as seeds, are averaged cell by cell before.
    """
    by_data = _by_data_set(runs)
    means = {name: MeanCoefficients.of(own) for name, own in by_data.items()}
    parts = {name: mean.grouped(key) for name, mean in means.items()}
    pooled: dict[str, list[float]] = defaultdict(list)
    for groups in parts.values():
        for name, values in groups.items():
            pooled[name] += values
    if len(means) == 1:
        (only,) = means.values()
        if len(only.vectors) > 1:
            parts = {vector: only.grouped(key, vector) for vector in only.vectors}
    return {"all": _boxed(pooled), **{name: _boxed(groups) for name, groups in parts.items()}}


def _from_summaries(runs: Sequence[Record], by: str) -> dict[str, _Boxes]:
    parts = {name: mean_summary(own, by) for name, own in _by_data_set(runs).items()}
    return {"all": mean_summary(runs, by), **parts}


def _by_data_set(runs: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in runs:
        found[data_set(record)].append(record)
    return dict(sorted(found.items()))


def _boxed(groups: Mapping[str, Sequence[float]]) -> _Boxes:
    return {name: five_numbers(values) for name, values in groups.items()}


def _title(runs: Sequence[Record]) -> str:
    names = {f"{record.experiment}: {record.label}" for record in runs}
    return min(names)
