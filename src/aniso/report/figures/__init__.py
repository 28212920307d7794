"""Figures of experiments, coefficients and analyses, as the bytes of a PNG or SVG file."""

from aniso.report.figures.bars import bars
from aniso.report.figures.canvas import Kind
from aniso.report.figures.coefficients import boxes, heat_map
from aniso.report.figures.curves import few_shot_curves
from aniso.report.figures.distributions import FeatureEllipse, feature_ellipses
from aniso.report.figures.matrix import MatrixPanel, MatrixStyle, matrix_map
from aniso.report.figures.pareto import pareto

__all__ = [
    "Kind",
    "few_shot_curves",
    "bars",
    "heat_map",
    "boxes",
    "pareto",
    "MatrixPanel",
    "MatrixStyle",
    "matrix_map",
    "FeatureEllipse",
    "feature_ellipses",
]
