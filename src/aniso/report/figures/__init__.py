"""Figures of experiments, coefficients and analyses, as the bytes of a PNG or SVG file."""

from aniso.report.figures.bars import bars
from aniso.report.figures.canvas import Kind, Plot
from aniso.report.figures.catalogue import FIGURES, Figure, draw_figure, find_figure, plan_figure
from aniso.report.figures.coefficient_figures import block_label
from aniso.report.figures.coefficients import box_panels, boxes, heat_map
from aniso.report.figures.curves import few_shot_curves
from aniso.report.figures.distributions import FeatureEllipse, feature_ellipses
from aniso.report.figures.matrix import MatrixPanel, MatrixStyle, matrix_map
from aniso.report.figures.pareto import pareto

__all__ = [
    "FIGURES",
    "draw_figure",
    "plan_figure",
    "find_figure",
    "Figure",
    "Plot",
    "Kind",
    "few_shot_curves",
    "bars",
    "heat_map",
    "block_label",
    "boxes",
    "box_panels",
    "pareto",
    "MatrixPanel",
    "MatrixStyle",
    "matrix_map",
    "FeatureEllipse",
    "feature_ellipses",
]
