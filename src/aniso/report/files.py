"""The files of a report: tables and figures of every experiment, and one page with all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from aniso.errors import UsageError
from aniso.records import Record
from aniso.report.accuracy import details, table
from aniso.report.budgets import budgets
from aniso.report.complementarity import gains
from aniso.report.figures import Kind, bars, boxes, few_shot_curves, pareto
from aniso.report.groups import experiments, mixed
from aniso.report.html_page import Section, page
from aniso.report.layouts import layout_for
from aniso.report.out_of_domain import out_of_domain
from aniso.report.results import Column, Results, Row
from aniso.report.rows import results
from aniso.report.tables import Table, markdown_text


@dataclass(frozen=True)
class _Figure:
    """A figure that has not been drawn yet, in either format."""

    name: str
    caption: str
    draw: Callable[[Kind], bytes]
    heading: str = ""  # for figures with a section of their own


def build(records: Iterable[Record], title: str = "Report", *, figures: bool = True) -> dict[str, bytes]:
    """Return contents by file name: report.md, index.html, and tables and figures of every experiment."""
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
    inputs = _inputs(records)
    sections.append(Section("Inputs", table=inputs))
    text.append(inputs.markdown())
    files["report.md"] = "\n".join(text).encode()
    files["index.html"] = page(title, sections).encode()
    return files


def _slugs(groups: dict[str, list[Record]]) -> Iterator[tuple[str, list[Record]]]:
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
    yield _part(found.name, main[:1], files, tables["table"])
    yield _part(f"{found.name}: by task", main[1:], files, tables["details"])
    for kind in [kind for kind in tables if kind in more]:
        yield _part(tables[kind].title, [], files, tables[kind])
    for figure in pending:
        if figure not in main:
            yield _part(figure.heading, [figure], files)


def _part(
    heading: str, pending: Sequence[_Figure], files: dict[str, bytes], shown: Table | None = None
) -> tuple[Section, str]:
    markdown = [f"## {markdown_text(heading)}", ""]
    figures = []
    for figure in pending:
        png, svg = figure.draw("png"), figure.draw("svg")
        files[f"{figure.name}.png"], files[f"{figure.name}.svg"] = png, svg
        # PNG, because browsers disagree on how the page's policy applies to styles within an SVG
        figures.append((png, figure.caption))
        markdown += [f"![{markdown_text(figure.caption)}]({figure.name}.png)", ""]
    if shown:
        markdown.append(shown.markdown())
    return Section(heading, table=shown, figures=tuple(figures)), "\n".join(markdown)


def _figures(slug: str, found: Results, records: Sequence[Record]) -> Iterator[_Figure]:
    layout = layout_for(found.setting)
    if layout.figure == "target-control":
        caption = "Means over targets, standard errors over seeds"
        yield _Figure(f"negation-{slug}", caption, lambda kind: pareto(records, kind=kind))
    elif layout.figure == "curves":
        caption = "Means over all tasks (points that lack a task are left out), standard errors over seeds"
        yield _Figure(f"curves-{slug}", caption, lambda kind: few_shot_curves(records, kind=kind))
    if shown := layout.bars(found.columns):
        yield _bars(slug, found, *shown)
    yield from _boxes(slug, found)


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


def _boxes(slug: str, found: Results) -> Iterator[_Figure]:
    """Yield box plots of coefficients by kind of block and by depth, for every method that has any."""
    taken: set[str] = set()
    for row in found.rows:
        runs = [r for r in _largest(row) if r.coefficients]
        if not runs:
            continue
        label = _free(f"{slug}-{_plain(row.name) or 'method'}", taken)
        for by, what in (("kind", "kind of block"), ("depth", "depth")):
            summary = _mean_summary(runs, by)
            if summary:
                of = (
                    "One run"
                    if len(runs) == 1
                    else f"Each of a box's five numbers is a mean over {len(runs)} runs"
                )
                yield _Figure(
                    f"coefficients-{label}-{by}",
                    f"{of}: minimum, quartiles, maximum",
                    partial(_draw_boxes, summary, f"{found.name}: {row.name}"),
                    f"{found.name}: coefficients by {what}, {row.name}",
                )


def _draw_boxes(summary: dict[str, list[float]], title: str, kind: Kind) -> bytes:
    return boxes(summary, title, kind=kind)


def _largest(row: Row) -> list[Record]:
    """Return the runs with most labels: coefficients learned from few have another distribution."""
    sizes = {id(r): (r.spec.shots or 0, r.spec.fraction or 0.0) for r in row.records}
    most = max(sizes.values(), default=(0, 0.0))
    return [record for record in row.records if sizes[id(record)] == most]


def _mean_summary(runs: Sequence[Record], by: str) -> dict[str, list[float]]:
    """Return the mean of each of the five numbers over the runs that have it."""
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for record in runs:
        for name, numbers in getattr(record.coefficients, by).items():
            found[name].append(numbers)
    return {name: [fmean(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}


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
