"""Predictions of a stream of items, and what a user should know about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol, final

from aniso.data import Items
from aniso.data.images import FileImages
from aniso.data.items import Texts
from aniso.data.task import OnBadImage
from aniso.errors import AnisoError, InputError, printable
from aniso.experiments.prediction.classifier import LoadedClassifier
from aniso.experiments.prediction.tables import InputItem, ItemKind
from aniso.learn.calibration import Calibration
from aniso.learn.item_predictions import ItemClassifier
from aniso.prediction_files import PredictedItem, PredictionHeader, prediction_columns
from aniso.progress import ProgressCallback

_CHUNK = {"images": 4096, "texts": 1024}
"""Items whose names, or texts, are held at once; texts of a chunk are computed in order of their length."""
_LONGEST_CHUNK = 16 << 20  # characters of texts
_NAMED = 10  # unreadable images


class Output(Protocol):
    """Where predictions go."""

    def write(self, item: PredictedItem) -> None: ...


@final
@dataclass
class PredictionCounts:
    """What was predicted in one call."""

    items: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Predictions of each class."""
    unreadable: list[str] = field(default_factory=list)
    """The first items that could not be read."""
    unreadable_count: int = 0


def prediction_header(
    loaded: LoadedClassifier, calibration: Calibration, kind: ItemKind, top: int
) -> PredictionHeader:
    """Return the header of predictions: what makes them, their calibration and columns."""
    return PredictionHeader(
        made_by="aniso predict",
        model=printable(f"{loaded.label}: {loaded.subject.what}"),
        identity=loaded.identity,
        calibration=str(calibration),
        columns=prediction_columns(top=min(top, len(loaded.classifier.names)), text=kind == "texts"),
    )


def require_kind(loaded: LoadedClassifier, kind: ItemKind, first: str) -> None:
    """Raise DATA-ITEM if the model takes other items."""
    wanted = loaded.encoder.transforms.kind
    if wanted != kind:
        raise InputError(
            "DATA-ITEM",
            f"'{printable(loaded.encoder.name)}' takes {wanted}, and the inputs are {kind}",
            found=printable(first),
            fix=f"name {wanted}, or another model",
        )


def predict_inputs(
    classifier: ItemClassifier,
    items: Iterator[InputItem],
    output: Output,
    *,
    kind: ItemKind,
    on_bad_image: OnBadImage = "error",
    start: tuple[int, int] = (0, 0),
    total: int | None = None,
    progress: ProgressCallback | None = None,
) -> PredictionCounts:
    """Predict items in chunks and write each to ``output``; memory does not grow with their number.

    ``start`` are the items of an earlier call, and how many of them could not be read. An unreadable image
    is an error; with ``on_bad_image`` "skip", or a number of them, it gets a row without a prediction.
    """
    done, bad = start
    summary = PredictionCounts(unreadable_count=bad)
    for chunk in _chunks(items, kind):
        found = classifier.predict(_opened(chunk, kind), tolerant=on_bad_image != "error")
        for item, ranked in zip(chunk, found, strict=True):
            if isinstance(ranked, AnisoError):
                _count_unreadable(summary, item, on_bad_image)
                output.write(PredictedItem(item.id, text=item.text, error=ranked.message))
            else:
                summary.counts[ranked[0][0]] += 1
                output.write(PredictedItem(item.id, ranked, text=item.text))
            summary.items += 1
            done += 1
            if progress and (done % classifier.batch_size == 0 or done == total):
                progress("predictions", done, total or done)
    return summary


def _count_unreadable(summary: PredictionCounts, item: InputItem, policy: OnBadImage) -> None:
    summary.unreadable_count += 1
    if len(summary.unreadable) < _NAMED:
        summary.unreadable.append(item.id)
    if isinstance(policy, int) and summary.unreadable_count > policy:
        raise InputError(
            "IMAGE-READ",
            f"more than {policy} images cannot be read",
            found=[printable(name) for name in summary.unreadable],
            fix="replace them, or raise --on-bad-image",
        )


def _chunks(items: Iterator[InputItem], kind: ItemKind) -> Iterator[list[InputItem]]:
    while first := next(items, None):
        chunk, length = [first], len(first.text)
        for item in islice(items, _CHUNK[kind] - 1):
            chunk.append(item)
            length += len(item.text)
            if length > _LONGEST_CHUNK:
                break
        yield chunk


def _opened(chunk: list[InputItem], kind: ItemKind) -> Items:
    ids = [item.id for item in chunk]
    if kind == "texts":
        return Texts([item.text for item in chunk], ids, ids)
    return FileImages(Path(), [item.path for item in chunk])
