"""A whole report: every table and figure of these records, and a page with all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from aniso.errors import UsageError
from aniso.records import Record
from aniso.report.budgets import budgets
from aniso.report.complementarity import gains
from aniso.report.drawing import Kind
from aniso.report.figures import bars, boxes, few_shot_curves, pareto
from aniso.report.groups import experiments, mixed
from aniso.report.html_page import Section, page
from aniso.report.out_of_domain import elsewhere
from aniso.report.results import Results, Row, details, results, table
from aniso.report.tables import Table, markdown_text


@dataclass(frozen=True)
class _Picture:
    """A figure that is yet to be drawn, in either format."""

    name: str
    caption: str
    draw: Callable[[Kind], bytes]
    heading: str = ""  # of those that stand alone


def build(records: Iterable[Record], title: str = "Report", *, figures: bool = True) -> dict[str, bytes]:
    """Content by file name: report.md, index.html, and tables and figures for each experiment."""
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
    origin = _origin(records)
    sections.append(Section("What went in", table=origin))
    text.append(origin.markdown())
    files["report.md"] = "\n".join(text).encode()
    files["index.html"] = page(title, sections).encode()
    return files


def _slugs(groups: dict[str, list[Record]]) -> Iterator[tuple[str, list[Record]]]:
    """Names that are safe on every file system, also for experiments called '../x' or 'CON'."""
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
    """The parts of the page and of report.md about one experiment; what they show goes into files."""
    found = results(records)
    tables = {"table": table(records), "details": details(records)}
    more = {
        "overlap": gains(records) if found.setting == "few-shot" else None,
        "elsewhere": elsewhere(records),
        "budgets": budgets(records),
    }
    tables |= {kind: made for kind, made in more.items() if made is not None}
    for kind, made in tables.items():
        files[f"{kind}-{slug}.md"] = made.markdown().encode()
        files[f"{kind}-{slug}.csv"] = made.csv().encode()
    pictures = list(_pictures(slug, found, records)) if figures else []
    main = [picture for picture in pictures if not picture.heading]
    yield _part(found.name, main[:1], files, tables["table"])
    yield _part(f"{found.name}: by task", main[1:], files, tables["details"])
    for kind in [kind for kind in tables if kind in more]:
        yield _part(tables[kind].title, [], files, tables[kind])
    for picture in pictures:
        if picture not in main:
            yield _part(picture.heading, [picture], files)


def _part(
    heading: str, pictures: Sequence[_Picture], files: dict[str, bytes], shown: Table | None = None
) -> tuple[Section, str]:
    markdown = [f"## {markdown_text(heading)}", ""]
    figures = []
    for picture in pictures:
        png, svg = picture.draw("png"), picture.draw("svg")
        files[f"{picture.name}.png"], files[f"{picture.name}.svg"] = png, svg
        figures.append(
            (png, picture.caption)
        )  # browsers disagree on how its policy binds the styles within an SVG
        markdown += [f"![{markdown_text(picture.caption)}]({picture.name}.png)", ""]
    if shown:
        markdown.append(shown.markdown())
    return Section(heading, table=shown, figures=tuple(figures)), "\n".join(markdown)


def _pictures(slug: str, found: Results, records: Sequence[Record]) -> Iterator[_Picture]:
    if found.setting == "negation":
        caption = "Means over targets, standard errors over seeds"
        yield _Picture(f"negation-{slug}", caption, lambda kind: pareto(records, kind=kind))
    elif found.setting in ("few-shot", "peft"):
        caption = "Means over all tasks (points that lack a task are left out), standard errors over seeds"
        yield _Picture(f"curves-{slug}", caption, lambda kind: few_shot_curves(records, kind=kind))
    if found.setting != "negation" and found.columns:
        yield _bars(slug, found)
    yield from _boxes(slug, found)


def _bars(slug: str, found: Results) -> _Picture:
    column = found.columns[0] if found.setting in ("addition", "finetune") else found.columns[-1]
    groups: dict[str, dict[str, float]] = {task: {} for task in found.tasks[column]}
    for task, group in groups.items():
        for row in found.rows:
            cell = found.cell(row, column, task)
            if cell:
                group[row.name] = cell.mean / 100
    caption = "By task" if found.setting == "addition" else f"By task, {column.name}"
    title = found.name if found.setting == "addition" else f"{found.name}, {column.name}"
    grey = [row.name for row in found.rows if row.fixed]
    return _Picture(f"tasks-{slug}", caption, lambda kind: bars(groups, title, baselines=grey, kind=kind))


def _boxes(slug: str, found: Results) -> Iterator[_Picture]:
    """Coefficients by kind of block and by depth, for every method that has any."""
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
                yield _Picture(
                    f"coefficients-{label}-{by}",
                    f"{of}: least, quartiles, greatest",
                    partial(_draw_boxes, summary, f"{found.name}: {row.name}"),
                    f"{found.name}: coefficients by {what}, {row.name}",
                )


def _draw_boxes(summary: dict[str, list[float]], title: str, kind: Kind) -> bytes:
    return boxes(summary, title, kind=kind)


def _largest(row: Row) -> list[Record]:
    """The runs with most pictures: coefficients learned from few are another distribution."""
    sizes = {id(r): (r.spec.shots or 0, r.spec.fraction or 0.0) for r in row.records}
    most = max(sizes.values(), default=(0, 0.0))
    return [record for record in row.records if sizes[id(record)] == most]


def _mean_summary(runs: Sequence[Record], by: str) -> dict[str, list[float]]:
    """Runs count the same: each of the five numbers is a mean over the runs that have it."""
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
    said = [
        f"{count:,} run{'' if count == 1 else 's'} in {len(names)} "
        f"experiment{'' if len(names) == 1 else 's'}: {', '.join(names)}.",
        f"Model{'' if len(models) == 1 else 's'}: {', '.join(models)}. "
        f"Seeds: {', '.join(map(str, sorted({r.seed for r in records})))}.",
    ]
    if spent:
        time = f"{spent / 3600:.1f} hours" if spent >= 3600 else f"{spent:.0f} s"
        said.append(f"Computing time: {time}.")
    said += [f"Careful: {note}." for note in mixed(records)]
    return Section("Overview", tuple(said))


def _origin(records: Sequence[Record]) -> Table:
    """Fingerprints and versions: enough to tell whether another report is about the same things."""
    rows: dict[tuple[str, str, str], None] = {}
    for record in records:
        inputs = record.inputs
        rows["model", record.spec.model, inputs.model or "unknown"] = None
        if inputs.bank:
            rows["bank", record.spec.bank or "", inputs.bank] = None
        for task, manifest in inputs.data.items():
            rows["data", task, manifest] = None
        for name, version in record.versions.items():
            rows["version", name, str(version)] = None
    order = ("model", "bank", "data", "version")
    found = sorted(rows, key=lambda row: (order.index(row[0]), *row[1:]))
    return Table(
        "Fingerprints of what the runs used", ("what", "name", "fingerprint or version"), tuple(found)
    )
