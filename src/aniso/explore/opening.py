"""Opens a desk from what a command names: a run, a file of coefficients or a bank, and maybe a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import final

from aniso.compose import Coefficients
from aniso.data import Labelled
from aniso.data.images import FileImages
from aniso.data.items import Items, Texts
from aniso.errors import UsageError, printable
from aniso.experiments.assignments import require_one_part
from aniso.experiments.banks import load_coefficients, open_bank
from aniso.experiments.device import find_device
from aniso.experiments.prediction.classifier import LoadedClassifier, load_classifier, load_task_of
from aniso.experiments.prediction.inputs import find_inputs
from aniso.experiments.prediction.model_files import ModelFiles, ModelOptions, find_model
from aniso.experiments.prediction.tables import InputItem, ItemKind
from aniso.experiments.run_files import COEFFICIENTS, SPEC, file_of, is_run
from aniso.explore.desk import Desk, DeskFiles
from aniso.explore.items import MOST
from aniso.explore.predictor import Predictor, random_sample
from aniso.explore.table import CoefficientTable
from aniso.models import base_weights
from aniso.progress import ProgressCallback
from aniso.vectors import Bank
from aniso.vectors.bundled import is_bundled
from aniso.weights import Ref

SHOWN = 6
"""Items of the task that are shown if no others are named."""


@final
@dataclass(frozen=True)
class DeskOptions:
    """What to explore, with which model and on which data."""

    source: str
    """The directory of a run, a file of coefficients, or a bank."""
    bank: str | None = None
    base: str | None = None
    task: str | None = None
    data: Path | None = None
    classes: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    """Images or texts, as ``aniso predict`` takes them."""
    sample: int = 128
    """Items of the validation split that accuracy is measured on."""
    out: Path | None = None
    device: str | None = None


@final
@dataclass(frozen=True, eq=False)
class _Opened:
    """The bank, coefficients and model files that options name."""

    title: str
    bank: Bank
    """With a merged vector that lies beside the coefficients."""
    files: DeskFiles
    start: Coefficients | None
    model: ModelFiles | None
    joined: bool = False
    """True if the bank has a vector that its directory does not have."""


def open_desk(options: DeskOptions, progress: ProgressCallback | None = None) -> Desk:
    """Open a desk; its model is loaded only if there are classes to predict."""
    opened = _opened(options)
    start, whole = opened.start, opened.bank
    bank = whole if start is None else start.chosen(whole)
    families = start.partition.families if start is not None else ()
    predictor, notes = None, ["without --task or --classes there are no predictions"]
    if opened.model is not None:
        loaded = load_classifier(
            opened.model, options.data, device=find_device(options.device), progress=progress
        )
        predictor, notes = _predictor(
            loaded, opened.model, bank, CoefficientTable.of(bank, families), options
        )
    partial = any(len(bank[name].blocks) < len(whole[name].blocks) for name in bank)
    return Desk(
        opened.title,
        bank,
        whole,
        opened.files,
        start,
        predictor,
        only_over_start=opened.joined or partial or bool(families),
        notes=notes,
    )


def _opened(options: DeskOptions) -> _Opened:
    path = Path(options.source).expanduser()
    if (path / SPEC).is_file() or (path.is_dir() and is_run(path)):
        return _opened_run(path, options)
    if path.is_file():
        return _opened_file(path, options)
    if options.bank is not None:
        raise UsageError(
            "USAGE", "--bank names the bank of coefficients, and the source is a bank", fix="leave it out"
        )
    base = options.base or ("mini" if is_bundled(options.source) else None)
    bank = open_bank(options.source)
    files = DeskFiles(options.source, base=base, weights=_weights(base), out=options.out)
    title = path.resolve().name if path.is_dir() else options.source
    return _Opened(f"Bank {title}", bank, files, None, _model(options, base, None))


def _opened_file(path: Path, options: DeskOptions) -> _Opened:
    if options.bank is None:
        raise UsageError("USAGE", "coefficients need the bank that they were learned on", fix="--bank DIR")
    base = options.base or ("mini" if is_bundled(options.bank) else None)
    bank, start, joined = _started(open_bank(options.bank), path)
    files = DeskFiles(options.bank, str(path), base, _weights(base), options.out)
    return _Opened(f"Coefficients {path.name}", bank, files, start, _model(options, base, path), joined)


def _opened_run(path: Path, options: DeskOptions) -> _Opened:
    file_of(path, COEFFICIENTS)
    chosen = ModelOptions(
        str(path), options.base, None, options.bank, classes=options.classes, task=options.task
    )
    model: ModelFiles | None = None
    try:
        model = found = find_model(chosen, _kind(options))
    except UsageError as e:
        if e.code != "DATA-CLASS" or options.task or options.classes:
            raise
        # of several tasks none was named: the desk opens without predictions
        found = find_model(replace(chosen, classes=("any", "other")), "images")
    bank, start, joined = _started(open_bank(found.bank or "", seed=found.seed), path / COEFFICIENTS)
    files = DeskFiles(found.bank or "", str(path), found.base, _weights(found.base), options.out)
    return _Opened(f"Run {path.resolve().name}", bank, files, start, model, joined)


def _started(bank: Bank, file: Path) -> tuple[Bank, Coefficients, bool]:
    joined, found = load_coefficients(bank, file)
    require_one_part(found)
    return joined, found.for_bank(found.chosen(joined)), joined is not bank


def _model(options: DeskOptions, base: str | None, coefficients: Path | None) -> ModelFiles | None:
    if not (options.task or options.classes):
        return None
    if base is None:
        raise UsageError("USAGE", "predictions need the base of the bank", fix="--base BASE")
    # a head beside the base belongs to the base's features: class weights are used
    bank = options.bank if coefficients is not None else None
    chosen = ModelOptions(base, None, None, bank, coefficients, classes=options.classes, task=options.task)
    return find_model(chosen, _kind(options))


def _kind(options: DeskOptions) -> ItemKind:
    return find_inputs(options.items).kind if options.items else "images"


def _weights(base: str | None) -> Ref | None:
    return None if base is None else base_weights(base)


def _predictor(
    loaded: LoadedClassifier, files: ModelFiles, bank: Bank, table: CoefficientTable, options: DeskOptions
) -> tuple[Predictor, list[str]]:
    sample, notes = _sample(loaded, files, options)
    predictor = Predictor(loaded.encoder, loaded.classifier, bank, table, sample)
    if options.items:
        inputs = find_inputs(options.items)
        chosen = list(islice(inputs.items(), MOST))
        items = _items(chosen, inputs.kind)
        for i, item in enumerate(chosen):
            predictor.items.add(items, i, Path(item.path).name or item.id)
        if inputs.total is None or inputs.total > len(chosen):
            notes.append(f"the first {len(chosen)} items are shown")
    elif sample is not None:
        predictor.items.add_all(sample, SHOWN)
    return predictor, [*notes, *loaded.classifier.notes]


def _items(chosen: list[InputItem], kind: str) -> Items:
    ids = [item.id for item in chosen]
    if kind == "texts":
        return Texts([item.text for item in chosen], ids, ids)
    return FileImages(Path(), [item.path for item in chosen])


def _sample(
    loaded: LoadedClassifier, files: ModelFiles, options: DeskOptions
) -> tuple[Labelled | None, list[str]]:
    """Return the validation items to measure on, and notes if there are none."""
    name = options.task or files.validation_task
    if name is None:
        return None, ["without --task no accuracy is measured"]
    split = load_task_of(name, files, options.data).split("val")
    if split.classes.names != loaded.classifier.names:
        return None, [f"no accuracy: the classifier has other classes than {printable(split.name)}"]
    return random_sample(split, options.sample), []
