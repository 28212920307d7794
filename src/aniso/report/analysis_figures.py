"""Figures of a recipe's analyses."""

from __future__ import annotations

from aniso.analysis_records import AnalysisRecord, MatrixRecord
from aniso.report.figures import FeatureEllipse, Kind, MatrixPanel, MatrixStyle, feature_ellipses, matrix_map


def analysis_figures(found: AnalysisRecord, kind: Kind) -> dict[str, bytes]:
    """Return the figures of an analysis by name."""
    if found.analysis == "distributions":
        return {f"{size}-std": _ellipses(found, size, kind) for size in (1, 3)}
    if found.analysis == "significance":
        style = MatrixStyle("relative significance, %", -1.0, 1.0, "task", "vector", percent=True)
        panels = [_panel_with_means(matrix) for matrix in found.matrices]
        return {"matrix": matrix_map(panels, style, "Relative significance, 16 shots", kind=kind)}
    style = MatrixStyle("changed predictions, %", 0.0, 1.0, "images of", "added vector", percent=True)
    return {"matrix": matrix_map(_panels(found), style, "Disentanglement error", kind=kind)}


def _panels(found: AnalysisRecord) -> list[MatrixPanel]:
    panels = []
    for matrix in found.matrices:
        mean = "" if matrix.mean is None or not matrix.title else f": mean {matrix.mean:.1%}"
        panels.append(MatrixPanel(matrix.values, matrix.rows, matrix.columns, f"{matrix.title}{mean}"))
    return panels


def _panel_with_means(matrix: MatrixRecord) -> MatrixPanel:
    """Return a panel with the means of its columns in the last row."""
    values = (*matrix.values, matrix.column_means)
    return MatrixPanel(values, (*matrix.rows, "mean"), matrix.columns, has_mean=True)


def _ellipses(found: AnalysisRecord, size: int, kind: Kind) -> bytes:
    drawn = [FeatureEllipse(own.name, own.mean, own.covariance) for own in found.ellipses]
    title = f"Image features of data sets; ellipses: {size} x the standard deviation"
    return feature_ellipses(drawn, found.explained, title, deviations=float(size), kind=kind)
