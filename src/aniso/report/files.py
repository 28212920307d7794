"""The files of a report: tables and figures of every experiment, and one page with all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from aniso.errors import UsageError
from aniso.records import Record
from aniso.report.accuracy import details, table
from aniso.report.budgets import budgets
from aniso.report.complementarity import gains
from aniso.report.figures import FIGURES, Kind, bars, find_figure, pareto, plan_figure
from aniso.report.figures.canvas import HeatMapData
from aniso.report.groups import experiments, mixed
from aniso.report.html_page import PageFigure, Section, page
from aniso.report.layouts import layout_for
from aniso.report.out_of_domain import out_of_domain
from aniso.report.predictions import (
    ErrorItem,
    TaskPredictions,
    class_table,
    confusion_table,
    prediction_sections,
    section_markdown,
)
from aniso.report.results import Column, Results
from aniso.report.rows import results
from aniso.report.tables import Table, markdown_text

T = TypeVar("T")
_MOST_SEEDS = 10  # each adds its tables to the page
_MAIN = ("few-shot-curves", "data-share-curves")  # figures that stand beside the table of their experiment


@dataclass(frozen=True)
class _Figure:
    """A figure that has not been drawn yet, in either format."""

    name: str
    caption: str
    draw: Callable[[Kind], bytes]
    heading: str = ""  # for figures with a section of their own
    method: str = ""  # for figures of one method
    data: HeatMapData | None = None


def build(
    records: Iterable[Record],
    title: str = "Report",
    *,
    figures: bool = True,
    predictions: Sequence[TaskPredictions] = (),
    errors: Mapping[tuple[Path, str, str], ErrorItem] | None = None,
) -> dict[str, bytes]:
    """Return contents by file name: report.md, index.html, and tables and figures of every experiment.

    ``predictions`` of runs add accuracy by class and confusions; ``errors``, thumbnails or texts by
    directory, task and id, add galleries.
    """
    records = list(records)
    if not records:
        raise UsageError("RECORD", "there is nothing to report", fix="run an experiment first")
    files: dict[str, bytes] = {}
    overview = _overview(records)
    sections = [overview]
    text = [f"# {markdown_text(title)}", "", *(markdown_text(p) + "\n" for p in overview.paragraphs)]
    for slug, group in _slugs(experiments(records)):
        for section, markdown in _experiment(slug, group, files, figures):
            sections.append(section)
            text.append(markdown)
    for section in prediction_sections(predictions, errors or {}):
        sections.append(section)
        text.append(section_markdown(section))
    files |= _prediction_files(predictions)
    inputs = _inputs(records)
    sections.append(Section("Inputs", table=inputs))
    text.append(inputs.markdown())
    files["report.md"] = "\n".join(text).encode()
    files["index.html"] = page(title, sections).encode()
    return files


def _prediction_files(predictions: Sequence[TaskPredictions]) -> dict[str, bytes]:
    """Return accuracy by class and confusions of every run and task as Markdown and CSV."""
    files: dict[str, bytes] = {}
    taken: set[str] = set()
    for one in predictions:
        slug = _free(_plain(one.heading) or "run", taken)
        for kind, made in (("classes", class_table(one)), ("confusion", confusion_table(one))):
            files[f"{kind}-{slug}.md"] = made.markdown().encode()
            files[f"{kind}-{slug}.csv"] = made.csv().encode()
    return files


def draw_figures(records: Iterable[Record], names: Iterable[str]) -> dict[str, bytes]:
    """Return the named figures as PNG and SVG by file name; of several experiments, each with its name."""
    records = list(records)
    files: dict[str, bytes] = {}
    for name in names:
        plots = plan_figure(name, records)
        for slug, plot in _slugs(plots):
            file = name if len(plots) == 1 else f"{name}-{slug}"
            files |= {f"{file}.png": plot.draw("png"), f"{file}.svg": plot.draw("svg")}
    return files


def _slugs(groups: dict[str, T]) -> Iterator[tuple[str, T]]:
    """Yield file names that are safe on every file system, also for experiments named '../x' or 'CON'."""
    taken: set[str] = set()
    for name, group in groups.items():
        yield _free(_plain(name) or "experiment", taken), group


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:60].strip("-")


def _free(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    taken.add(name)
    return name


def _experiment(
    slug: str, records: Sequence[Record], files: dict[str, bytes], figures: bool
) -> Iterator[tuple[Section, str]]:
    """Yield the sections of the page and of report.md about one experiment, and add its files."""
    found = results(records)
    tables = {"table": table(records), "details": details(records)}
    more = {
        "complementarity": gains(records) if found.setting == "few-shot" else None,
        "out-of-domain": out_of_domain(records),
        "budgets": budgets(records),
    }
    tables |= {kind: made for kind, made in more.items() if made is not None}
    for kind, made in tables.items():
        files[f"{kind}-{slug}.md"] = made.markdown().encode()
        files[f"{kind}-{slug}.csv"] = made.csv().encode()
    pending = list(_figures(slug, found, records)) if figures else []
    main = [figure for figure in pending if not figure.heading]
    names = tuple(row.name for row in found.rows)
    by_seed = _by_seed(found, records)
    parts = [
        (_part(found.name, main[:1], files, tables["table"]), by_seed(table)),
        (_part(f"{found.name}: by task", main[1:], files, tables["details"]), by_seed(details)),
    ]
    parts += [(_part(made.title, [], files, made), {}) for kind, made in tables.items() if kind in more]
    parts += [(_part(figure.heading, [figure], files), {}) for figure in pending if figure not in main]
    for (section, markdown), seeds in parts:
        yield replace(section, experiment=slug, methods=names, by_seed=seeds), markdown


def _by_seed(
    found: Results, records: Sequence[Record]
) -> Callable[[Callable[[Sequence[Record]], Table]], dict[int, Table]]:
    """Return a function that makes a table for each seed alone; methods without seeds are in all of them."""
    seeds = found.seeds if 1 < len(found.seeds) <= _MOST_SEEDS else ()
    everywhere = {record.id for row in found.rows if row.seedless for record in row.records}

    def tables(make: Callable[[Sequence[Record]], Table]) -> dict[int, Table]:
        return {s: make([r for r in records if r.seed == s or r.id in everywhere]) for s in seeds}

    return tables


def _part(
    heading: str, pending: Sequence[_Figure], files: dict[str, bytes], shown: Table | None = None
) -> tuple[Section, str]:
    markdown = [f"## {markdown_text(heading)}", ""]
    figures = []
    for figure in pending:
        png, svg = figure.draw("png"), figure.draw("svg")
        files[f"{figure.name}.png"], files[f"{figure.name}.svg"] = png, svg
        # PNG, because browsers disagree on how the page's policy applies to styles within an SVG
        figures.append(PageFigure(png, figure.caption, f"{figure.name}.png"))
        markdown += [f"![{markdown_text(figure.caption)}]({figure.name}.png)", ""]
    if shown:
        markdown.append(shown.markdown())
    method, data = (pending[0].method, pending[0].data) if pending else ("", None)
    section = Section(heading, table=shown, figures=tuple(figures), method=method, map_data=data)
    return section, "\n".join(markdown)


def _figures(slug: str, found: Results, records: Sequence[Record]) -> Iterator[_Figure]:
    """Yield the figures that these records allow; curves first, because the first stands beside the table."""
    layout = layout_for(found.setting)
    if layout.figure == "target-control":
        caption = "Means over targets, standard errors over seeds"
        yield _Figure(f"negation-{slug}", caption, lambda kind: pareto(records, kind=kind))
    named = [figure for name in FIGURES for figure in _named_figure(name, slug, found, records)]
    yield from (figure for figure in named if not figure.heading)
    if shown := layout.bars(found.columns):
        yield _bars(slug, found, *shown)
    yield from (figure for figure in named if figure.heading)


def _named_figure(name: str, slug: str, found: Results, records: Sequence[Record]) -> Iterator[_Figure]:
    """Yield a figure, or one for every method."""
    wanted = find_figure(name)
    title = f"{found.name}: {wanted.description[0].lower()}{wanted.description[1:]}"
    if not wanted.by_method:
        plot = wanted.plan(records)
        if plot:
            heading = "" if name in _MAIN else title
            yield _Figure(f"{name}-{slug}", plot.caption, plot.draw, heading, data=plot.data)
        return
    taken: set[str] = set()
    for row in found.rows:
        plot = wanted.plan(row.records)
        if plot:
            file = _free(f"{name}-{slug}-{_plain(row.name) or 'method'}", taken)
            yield _Figure(file, plot.caption, plot.draw, f"{title}: {row.name}", row.name, plot.data)


def _bars(slug: str, found: Results, column: Column, name: str) -> _Figure:
    groups: dict[str, dict[str, float]] = {task: {} for task in found.tasks[column]}
    for task, group in groups.items():
        for row in found.rows:
            cell = found.cell(row, column, task)
            if cell:
                group[row.name] = cell.mean / 100
    caption, title = (f"{text}, {name}" if name else text for text in ("By task", found.name))
    grey = [row.name for row in found.rows if row.fixed]
    return _Figure(f"tasks-{slug}", caption, lambda kind: bars(groups, title, baselines=grey, kind=kind))


def _overview(records: Sequence[Record]) -> Section:
    count = len(records)
    names = list(experiments(records))
    models = sorted({r.spec.model for r in records})
    spent = sum(record.seconds or 0.0 for record in records)
    paragraphs = [
        f"{count:,} run{'' if count == 1 else 's'} in {len(names)} "
        f"experiment{'' if len(names) == 1 else 's'}: {', '.join(names)}.",
        f"Model{'' if len(models) == 1 else 's'}: {', '.join(models)}. "
        f"Seeds: {', '.join(map(str, sorted({r.seed for r in records})))}.",
    ]
    if spent:
        time = f"{spent / 3600:.1f} hours" if spent >= 3600 else f"{spent:.0f} s"
        paragraphs.append(f"Computing time: {time}.")
    paragraphs += [f"Warning: {note}." for note in mixed(records)]
    return Section("Overview", tuple(paragraphs))


def _inputs(records: Sequence[Record]) -> Table:
    """Return hashes and versions: two reports on the same inputs have the same ones."""
    rows: dict[tuple[str, str, str], None] = {}
    for record in records:
        hashes = record.inputs
        rows["model", record.spec.model, hashes.model or "unknown"] = None
        if hashes.bank:
            rows["bank", record.spec.bank or "", hashes.bank] = None
        for task, manifest in hashes.data.items():
            rows["data", task, manifest] = None
        for name, version in record.versions.items():
            rows["version", name, str(version)] = None
    order = ("model", "bank", "data", "version")
    found = sorted(rows, key=lambda row: (order.index(row[0]), *row[1:]))
    return Table(
        "Hashes of models, banks and data, and versions", ("input", "name", "hash or version"), tuple(found)
    )
