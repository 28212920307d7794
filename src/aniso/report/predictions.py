"""Predictions of runs in reports: accuracy by class, confusions, and the most confident errors."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from aniso.errors import InputError, printable
from aniso.prediction_files import PredictedItem, PredictionFile
from aniso.record_files import read_record
from aniso.records import Record
from aniso.report.html_page import GalleryItem, Section
from aniso.report.tables import Cell, Estimate, Table, markdown_text

PREDICTIONS = "predictions.csv"
MOST_ERRORS = 24
"""Errors in the gallery of one task."""
MOST_BYTES = 4 << 20
"""Bytes of the images in all galleries of a page."""
_RECORD = "record.json"
_MATRIX = 20  # classes of a whole confusion matrix; of more classes, the most frequent confusions are listed
_PAIRS = 30

ErrorItem = bytes | str
"""A thumbnail as JPEG, or a text."""


@final
@dataclass(frozen=True)
class TaskPredictions:
    """The predictions of one run on the test items of one task, counted."""

    directory: Path
    record: Record
    task: str
    confusion: Mapping[tuple[str, str], int]
    """Items by label and prediction."""
    errors: tuple[PredictedItem, ...]
    """The most confident ones, the first most."""

    @property
    def heading(self) -> str:
        return f"{self.directory.resolve().name}: {self.task}"

    @property
    def classes(self) -> list[str]:
        """Labels, then classes that are only predicted."""
        labels = dict.fromkeys(label for label, _ in self.confusion)
        return [*labels, *dict.fromkeys(p for _, p in self.confusion if p not in labels)]


def run_predictions(
    paths: Iterable[Path], records: Sequence[Record]
) -> tuple[list[TaskPredictions], list[str]]:
    """Return the labelled predictions of the run directories below these paths, and notes on odd ones.

    Predictions count only if they belong to the record beside them: by its id and its accuracies.
    """
    known = {record.id for record in records}
    found: list[TaskPredictions] = []
    notes: list[str] = []
    for directory in _directories(paths):
        try:
            record = read_record(directory / _RECORD)
            if record.id in known:
                found += _counted(directory, record)
        except (InputError, ValueError) as e:
            message = e.message if isinstance(e, InputError) else str(e)
            notes.append(f"predictions in '{printable(directory)}' are left out: {message}")
    return found, notes


def _directories(paths: Iterable[Path]) -> list[Path]:
    """Return the directories of runs with predictions, in order and each once."""
    out: dict[Path, None] = {}
    for path in map(Path, paths):
        files = sorted(path.rglob(PREDICTIONS)) if path.is_dir() else [path.parent / PREDICTIONS]
        out |= dict.fromkeys(f.parent for f in files if f.is_file() and (f.parent / _RECORD).is_file())
    return list(out)


def _counted(directory: Path, record: Record) -> list[TaskPredictions]:
    file = PredictionFile.open(directory / PREDICTIONS)
    if file.header.record != record.id:
        raise ValueError("they are of another run")
    if "label" not in file.header.columns:
        return []
    confusion: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    errors: dict[str, list[tuple[float, int, PredictedItem]]] = defaultdict(list)
    only = next(iter(record.metrics.accuracy), "")
    for number, item in enumerate(file.items()):
        task = item.task or only
        confusion[task][item.label, item.prediction] += 1
        if item.label != item.prediction:
            entry = (item.probability, -number, item)
            heap = errors[task]
            (heapq.heappush if len(heap) < MOST_ERRORS else heapq.heappushpop)(heap, entry)
    for task, counts in confusion.items():
        score = record.metrics.accuracy.get(task)
        right = sum(count for (label, prediction), count in counts.items() if label == prediction)
        if score is None or (score.correct, score.total) != (right, sum(counts.values())):
            raise ValueError(f"they do not give the accuracy on {printable(task)} that the record states")
    return [
        TaskPredictions(
            directory, record, task, counts, tuple(item for *_, item in sorted(errors[task], reverse=True))
        )
        for task, counts in confusion.items()
    ]


# tables


def class_table(found: TaskPredictions) -> Table:
    """Return accuracy by class, the worst first, and what each class is most often mistaken for."""
    totals: Counter[str] = Counter()
    mistakes: dict[str, Counter[str]] = defaultdict(Counter)
    for (label, prediction), count in found.confusion.items():
        totals[label] += count
        if label != prediction:
            mistakes[label][prediction] += count
    rows: list[tuple[Cell, ...]] = []
    for label, total in totals.items():
        wrong = mistakes[label].most_common(1)
        mistaken = f"{wrong[0][0]} ({wrong[0][1]:,})" if wrong else ""
        share = 100 * found.confusion.get((label, label), 0) / total
        rows.append((label, Estimate(total, digits=0), Estimate(share), mistaken))
    ordered = sorted(rows, key=lambda row: row[2].mean if isinstance(row[2], Estimate) else 0.0)
    title = f"{found.heading}: accuracy by class, %"
    return Table(title, ("class", "items", "accuracy", "most often mistaken for"), tuple(ordered))


def confusion_table(found: TaskPredictions) -> Table:
    """Return the confusion matrix, labels by predictions; of many classes, the most frequent confusions."""
    names = found.classes
    if len(names) <= _MATRIX:
        rows: list[tuple[Cell, ...]] = [
            (label, *(Estimate(found.confusion.get((label, p), 0), digits=0) for p in names))
            for label in names
        ]
        title = f"{found.heading}: confusion matrix, items by label (rows) and prediction (columns)"
        return Table(title, ("label", *names), tuple(rows))
    wrong = Counter({pair: count for pair, count in found.confusion.items() if pair[0] != pair[1]})
    pairs = tuple((a, b, Estimate(count, digits=0)) for (a, b), count in wrong.most_common(_PAIRS))
    title = f"{found.heading}: most frequent confusions"
    note = f"{len(wrong):,} pairs of classes are confused; the {len(pairs)} most frequent ones are listed"
    return Table(title, ("label", "prediction", "items"), pairs, (note,))


# the page


def prediction_sections(
    found: Sequence[TaskPredictions], items: Mapping[tuple[Path, str, str], ErrorItem]
) -> list[Section]:
    """Return the sections of the page: accuracy by class, confusions and a gallery of errors of every run.

    ``items`` are thumbnails or texts of errors by directory, task and id; images beyond ``MOST_BYTES`` in
    all are left out.
    """
    out: list[Section] = []
    room = MOST_BYTES
    for one in found:
        out += [Section(t.title, table=t) for t in (class_table(one), confusion_table(one))]
        gallery: list[GalleryItem] = []
        for item in one.errors:
            content = items.get((one.directory, one.task, item.id))
            size = len(content) if isinstance(content, bytes) else 0
            if content is not None and size <= room:
                room -= size
                caption = f"{item.label} → {item.prediction} {item.probability:.0%}: {item.id}"
                gallery.append(GalleryItem(content, caption))
        if gallery:
            wrong = sum(count for (a, b), count in one.confusion.items() if a != b)
            text = f"{len(gallery)} of {wrong:,} errors, by the probability of the wrong class."
            heading = f"{one.heading}: most confident errors"
            out.append(Section(heading, (text,), gallery=tuple(gallery)))
    return out


def section_markdown(section: Section) -> str:
    """Return a section as Markdown: its table, or the captions of its gallery."""
    lines = [f"## {markdown_text(section.heading)}", ""]
    if section.table is not None:
        lines.append(section.table.markdown())
    lines += [f"- {markdown_text(picture.caption)}" for picture in section.gallery]
    return "\n".join([*lines, ""])
