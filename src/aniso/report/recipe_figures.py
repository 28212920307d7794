"""Figures of recipes: drawn from records by name, or from an analysis."""

from __future__ import annotations

from collections.abc import Sequence

from aniso.analysis_records import AnalysisRecord, MatrixRecord
from aniso.errors import UsageError
from aniso.records import Record
from aniso.report import figures
from aniso.report.figures import FeatureEllipse, Kind, MatrixPanel, MatrixStyle, feature_ellipses, matrix_map


def recipe_figure(name: str, records: Sequence[Record], kind: Kind) -> bytes:
    """Draw a figure by its name in a recipe; raises FIGURE if this version cannot draw it."""
    drawn = getattr(figures, "draw_figure", None)
    if drawn is not None:
        found: bytes = drawn(name, records, kind=kind)
        return found
    if name == "few-shot-curves":
        return figures.few_shot_curves(records, kind=kind)
    if name in ("coefficient-boxes-kind", "coefficient-boxes-depth"):
        return _boxes(records, name.rpartition("-")[2], kind)
    raise UsageError(
        "FIGURE",
        f"this version cannot draw the figure '{name}'",
        expected="few-shot-curves, coefficient-boxes-kind or coefficient-boxes-depth",
        fix="use the records: aniso report RECORDS -o DIR",
    )


def _boxes(records: Sequence[Record], by: str, kind: Kind) -> bytes:
    summaries = [record.coefficients for record in records if record.coefficients is not None]
    if not summaries:
        raise UsageError(
            "FIGURE", "no record has coefficients", fix="run the recipe's variants that learn coefficients"
        )
    found = summaries[0].kind if by == "kind" else summaries[0].depth
    return figures.boxes(found, f"{records[0].label}: coefficients by {by}", kind=kind)


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
