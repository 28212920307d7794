"""Figures of experiments and of coefficients, as the bytes of a PNG or SVG file."""

from aniso.report.figures.bars import bars
from aniso.report.figures.canvas import Kind
from aniso.report.figures.coefficients import boxes, heat_map
from aniso.report.figures.curves import few_shot_curves
from aniso.report.figures.pareto import pareto

__all__ = ["Kind", "few_shot_curves", "bars", "heat_map", "boxes", "pareto"]
