"""Results of analyses on disk: matrices of named rows and columns, and distributions of features."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict, ValidationError

from aniso.errors import InputError, printable


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MatrixRecord(_Content):
    """A matrix of shares; None where a number is not defined."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]

    @property
    def mean(self) -> float | None:
        """The mean of all numbers that are defined."""
        found = [value for row in self.values for value in row if value is not None]
        return fmean(found) if found else None

    @property
    def column_means(self) -> tuple[float | None, ...]:
        """The mean of the defined numbers of every column."""
        columns = (
            [value for value in column if value is not None] for column in zip(*self.values, strict=True)
        )
        return tuple(fmean(found) if found else None for found in columns)


class EllipseRecord(_Content):
    """The features of one task in the plane of two principal components."""

    name: str
    mean: tuple[float, float]
    covariance: tuple[tuple[float, float], tuple[float, float]] | None = None
    images: int | None = None


class AnalysisRecord(_Content):
    """The result of one analysis."""

    analysis: str
    model: str
    matrices: tuple[MatrixRecord, ...] = ()
    ellipses: tuple[EllipseRecord, ...] = ()
    explained: tuple[float, float] = (0.0, 0.0)
    """Share of the variance of the tasks' means along either component."""
    notes: tuple[str, ...] = ()


def read_analysis(path: Path) -> AnalysisRecord:
    """Read an analysis; a file that is none raises RECORD."""
    try:
        return AnalysisRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as e:
        raise InputError(
            "RECORD",
            f"'{printable(path)}' is not the result of an analysis",
            reason=printable(str(e).splitlines()[0]),
            fix="remove it, and run the analysis again",
        ) from None
