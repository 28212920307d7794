"""Predictions that accuracies were computed from, as files: of a run, and of ``aniso eval``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from aniso.data import Labelled
from aniso.experiments.evaluation import MeasuredPredictions
from aniso.experiments.model_evaluation import TaskEvaluation
from aniso.prediction_files import (
    PredictedItem,
    PredictionHeader,
    first_line,
    item_line,
    meta_path,
    meta_text,
    prediction_columns,
)
from aniso.records import Record
from aniso.weights.atomic import atomic_file, write_text


def write_run_predictions(path: Path, record: Record, measured: Sequence[MeasuredPredictions]) -> None:
    """Write the predictions of a run that has ended beside its record."""
    found = {"model": record.inputs.model, "bank": record.inputs.bank}
    spec = record.spec
    write_predictions(
        path,
        measured,
        PredictionHeader(
            made_by="aniso fit",
            model=f"{spec.setting}, {spec.method}, {spec.model}",
            identity={name: value for name, value in found.items() if value is not None},
            record=record.id,
            columns=measured_columns(measured),
        ),
        overwrite=True,
    )


def write_evaluation_predictions(
    path: Path,
    evaluations: Sequence[TaskEvaluation],
    measured: Sequence[MeasuredPredictions],
    *,
    overwrite: bool,
) -> None:
    """Write the predictions of ``aniso eval`` on one or more tasks."""
    first = evaluations[0]
    identity = {"model": first.fingerprint, **(first.model_extra or {})}
    header = PredictionHeader(
        made_by="aniso eval",
        model=f"{first.model}: {first.what}",
        identity=identity,
        columns=measured_columns(measured),
    )
    write_predictions(path, measured, header, overwrite=overwrite)


def measured_columns(measured: Sequence[MeasuredPredictions]) -> list[str]:
    """Return the columns that predictions need: a task if there are several, a label if there are labels."""
    labelled = any(isinstance(one.split, Labelled) for one in measured)
    return prediction_columns(task=len(measured) > 1, label=labelled)


def write_predictions(
    path: Path, measured: Iterable[MeasuredPredictions], header: PredictionHeader, *, overwrite: bool
) -> None:
    """Write predictions as CSV, and the header beside."""
    digest = hashlib.sha256()
    with atomic_file(path, overwrite=overwrite) as out:
        for line in _lines(measured, header):
            digest.update(line)
            out.stream.write(line)
        write_text(meta_path(path), meta_text(header, "csv", digest.hexdigest()), overwrite=True)


def _lines(measured: Iterable[MeasuredPredictions], header: PredictionHeader) -> Iterator[bytes]:
    yield first_line(header, "csv").encode()
    for one in measured:
        for item in _items(one):
            yield item_line(header, item, "csv").encode()


def _items(measured: MeasuredPredictions) -> Iterator[PredictedItem]:
    """Yield items by their own names, which learning without labels has not seen."""
    split, names = measured.split, measured.predictions.classes.names
    labels = measured.predictions.labels.tolist()
    shares = measured.predictions.confidence.tolist()
    for i, (label, share) in enumerate(zip(labels, shares, strict=True)):
        ranked = ((names[label], share),)
        if isinstance(split, Labelled):
            own = split.classes.names[split.labels[i]]
            yield PredictedItem(split.ids[i], ranked, label=own, task=measured.task)
        else:
            yield PredictedItem(split.items.revealed_id(i), ranked, task=measured.task)
