"""The report of one recipe: measured numbers beside published ones, as Markdown and CSV, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from aniso.analysis_records import AnalysisRecord
from aniso.errors import UsageError
from aniso.published import PublishedTable
from aniso.records import Record
from aniso.report.analysis_figures import analysis_figures
from aniso.report.figures import Kind, draw_figure
from aniso.report.published import ComparedNumber, RecordedRuns, comparison_rows, comparison_table
from aniso.report.tables import Table, markdown_text

_KINDS: tuple[Kind, ...] = ("png", "svg")


@final
@dataclass(frozen=True)
class FigureRequest:
    """A figure to draw: its file name, its name in the recipe, and its records."""

    file: str
    figure: str
    records: Sequence[Record]


@final
@dataclass(frozen=True)
class RecipeReport:
    """Everything that a report of a recipe is made from."""

    name: str
    """File name without an ending."""
    title: str
    published: Sequence[PublishedTable]
    runs: Mapping[str, RecordedRuns]
    """By backbone; published tables of others are left out."""
    figures: Sequence[FigureRequest] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def compared(self) -> list[tuple[str, list[ComparedNumber]]]:
        """Return the published tables of backbones that were run, with the measured numbers."""
        return [
            (table.heading, self.runs[table.backbone].compare(table))
            for table in self.published
            if table.backbone in self.runs
        ]

    @property
    def _analyses(self) -> dict[str, AnalysisRecord]:
        return {name: runs.analysis for name, runs in self.runs.items() if runs.analysis is not None}

    def tables(self) -> list[Table]:
        """Return a table for every published one, and one for every matrix of an analysis."""
        found = self.compared()
        made = [comparison_table(f"{self.title}: {heading}", numbers) for heading, numbers in found]
        for found_analysis in self._analyses.values():
            made += _matrix_tables(found_analysis)
        return made

    def files(self, *, figures: bool = True) -> tuple[dict[str, bytes], list[str]]:
        """Return contents by file name, and notes on figures that could not be drawn."""
        drawn: dict[str, bytes] = {}
        lost: list[str] = []
        if figures:
            drawn, lost = self._figures()
        text = [f"# {markdown_text(self.title)}", ""]
        text += [table.markdown() for table in self.tables()]
        text += [f"![{name}]({name})\n" for name in drawn if name.endswith(".png")]
        text += [f"- {markdown_text(note)}" for note in (*self.notes, *lost)]
        out = {f"{self.name}.md": ("\n".join(text) + "\n").encode()}
        if self.published:
            out[f"{self.name}.csv"] = comparison_rows(self.compared()).csv().encode()
        return out | drawn, lost

    def _figures(self) -> tuple[dict[str, bytes], list[str]]:
        out: dict[str, bytes] = {}
        lost: list[str] = []
        for request in self.figures:
            if not request.records:
                lost.append(f"{request.file}: not drawn, since it has no records")
                continue
            try:
                for kind in _KINDS:
                    out[f"{request.file}.{kind}"] = draw_figure(request.figure, request.records, kind=kind)
            except UsageError as e:
                lost.append(f"{request.file}: not drawn: {e.message}")
        for analysis in self._analyses.values():
            for kind in _KINDS:
                found = analysis_figures(analysis, kind)
                out |= {f"{self.name}-{analysis.model}-{part}.{kind}": drawn for part, drawn in found.items()}
        return out, lost


def _matrix_tables(found: AnalysisRecord) -> list[Table]:
    out = []
    for matrix in found.matrices:
        rows = tuple(
            (name, *(None if value is None else f"{value:.1%}" for value in values))
            for name, values in zip(matrix.rows, matrix.values, strict=True)
        )
        out.append(Table(f"{found.analysis} {matrix.title}".strip(), ("", *matrix.columns), rows))
    if found.ellipses:
        ellipses = tuple((own.name, f"{own.mean[0]:.3f}", f"{own.mean[1]:.3f}") for own in found.ellipses)
        out.append(Table("Mean features", ("data set", "PC1", "PC2"), ellipses))
    return out
