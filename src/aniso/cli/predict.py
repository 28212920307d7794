"""``aniso predict``: the classes of images or texts, as a file, as lines, or as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import InputError, UsageError

if TYPE_CHECKING:
    from aniso.data.task import OnBadImage as OnBad
    from aniso.experiments.prediction.classifier import LoadedClassifier
    from aniso.experiments.prediction.inputs import Inputs
    from aniso.experiments.prediction.model_files import ModelFiles
    from aniso.experiments.prediction.run import PredictionCounts
    from aniso.learn.calibration import Calibration
    from aniso.learn.item_predictions import ItemClassifier
    from aniso.prediction_files import FileFormat, PredictedItem, PredictionHeader

_FORMATS = ("csv", "jsonl", "table")
_SUFFIXES: dict[str, FileFormat] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="The directory of a run, a baked directory, or a base: an open_clip name, a hub id, mini."
        ),
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Images, folders, patterns such as '*.jpg', tables (.csv, .tsv, .jsonl) with a column of "
            "texts or paths, .txt files with a text per line, or - for lines on standard input."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write, .csv or .jsonl; a second call continues it."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="csv, jsonl or table; default: the file's, a table on a terminal, else csv."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Classes listed for every item.", min=1)] = 1,
    column: Annotated[
        str | None, typer.Option("--column", help="Column of a table that holds texts or paths.")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option("--classes", help="A text file with a class per line, or a class; repeatable."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Prompt with {} for the class; repeatable.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Predict the classes of this task: a name or a directory.")
    ] = None,
    data: options.DataRoot = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Replaces the base of a run, if it was moved.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Weights of a base: a tag, a file or a directory.")
    ] = None,
    bank: Annotated[
        str | None, typer.Option("--bank", help="The bank of --coefficients, or of a run, if it was moved.")
    ] = None,
    coefficients: Annotated[
        Path | None, typer.Option("--coefficients", help="Compose the base with these coefficients.")
    ] = None,
    head: Annotated[
        Path | None, typer.Option("--head", help="Classify with this head instead of class weights.")
    ] = None,
    linearised: Annotated[
        bool, typer.Option("--linearised", help="The vectors are linearised ones.")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            help="Fit the temperature on this task's validation split; default: on that of the run's task.",
        ),
    ] = None,
    no_calibrate: Annotated[bool, typer.Option("--no-calibrate", help="Do not fit a temperature.")] = False,
    on_bad_image: options.OnBadImage = "error",
    batch: Annotated[int, typer.Option("--batch", help="Batch size.", min=1)] = 256,
    workers: options.Workers = 0,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Predict the classes of images or texts with a run, a baked model, or a base and coefficients."""
    kind = _format(format_, out, json)
    policy = options.bad_images(on_bad_image)
    if calibrate is not None and no_calibrate:
        raise UsageError("USAGE", "--calibrate and --no-calibrate exclude each other", fix="leave out one")
    for path in (coefficients, head):
        checks.existing_file(path)
    checks.existing_bank(bank)
    if calibrate is not None:
        checks.existing_task(calibrate)
    from aniso.experiments.input_files import read_names
    from aniso.experiments.prediction.inputs import find_inputs
    from aniso.experiments.prediction.model_files import ModelOptions, find_model

    found = find_inputs(inputs, column)
    chosen = ModelOptions(
        model,
        base,
        weights,
        bank,
        coefficients,
        head,
        linearised,
        tuple(read_names(classes or ())),
        tuple(prompt or ()),
        task,
    )
    files = find_model(chosen, found.kind)
    if task is not None and files.task == task:  # none of the run's own
        checks.existing_task(task)
    from aniso.experiments.device import find_device
    from aniso.experiments.prediction.classifier import load_classifier
    from aniso.experiments.prediction.run import prediction_header, require_kind
    from aniso.learn.item_predictions import ItemClassifier

    with show.item_progress() as progress:
        loaded = load_classifier(files, data, device=find_device(device), progress=progress)
    require_kind(loaded, found.kind, inputs[0])
    calibration = _calibration(loaded, files, data, calibrate, no_calibrate, workers)
    header = prediction_header(loaded, calibration, found.kind, top)
    show.notes([*found.notes, *loaded.classifier.notes, f"probabilities: {calibration}"])
    classifier = ItemClassifier(
        loaded.subject.model, loaded.classifier, header.top, calibration.temperature, batch, workers
    )
    if out is None:
        _to_stream(classifier, found, header, kind, policy)
    else:
        _to_file(classifier, found, header, kind, policy, out, overwrite, json)


def _format(given: str | None, out: Path | None, json: bool) -> str:
    """Return the format that was asked for, or the usual one for the output."""
    checks.one_of("--format", given, _FORMATS)
    if out is None:
        return given or ("jsonl" if json else "table" if sys.stdout.isatty() else "csv")
    kind = given or _SUFFIXES.get(out.suffix.lower())
    if kind is None or kind == "table":
        raise UsageError(
            "USAGE",
            f"the format of '{out}' is not known" if kind is None else "a table is for the terminal",
            fix="--format csv, or --format jsonl",
        )
    return kind


def _calibration(
    loaded: LoadedClassifier,
    files: ModelFiles,
    data: Path | None,
    task: str | None,
    off: bool,
    workers: int,
) -> Calibration:
    from aniso.experiments.prediction.classifier import calibrated
    from aniso.learn.calibration import Calibration

    if off:
        return Calibration()
    with show.item_progress() as progress:
        return calibrated(loaded, files, data, task=task, workers=workers, progress=progress)


def _to_stream(
    classifier: ItemClassifier, found: Inputs, header: PredictionHeader, kind: str, policy: OnBad
) -> None:
    from aniso.experiments.prediction.output import StreamOutput
    from aniso.experiments.prediction.run import predict_inputs

    output = (
        _TerminalTable(header)
        if kind == "table"
        else StreamOutput(sys.stdout, header, "jsonl" if kind == "jsonl" else "csv")
    )
    with show.item_progress() as progress:
        counts = predict_inputs(
            classifier,
            found.items(),
            output,
            kind=found.kind,
            on_bad_image=policy,
            total=found.total,
            progress=progress,
        )
    _require_some(counts)
    show.notes(_unreadable_notes(counts))


def _to_file(
    classifier: ItemClassifier,
    found: Inputs,
    header: PredictionHeader,
    kind: str,
    policy: OnBad,
    out: Path,
    overwrite: bool,
    json: bool,
) -> None:
    from aniso.experiments.prediction.output import FileOutput
    from aniso.experiments.prediction.run import predict_inputs

    output = FileOutput(out, header, "jsonl" if kind == "jsonl" else "csv", overwrite=overwrite)
    try:
        items = output.skip(found.items())
        before = output.done
        with show.item_progress() as progress:
            counts = predict_inputs(
                classifier,
                items,
                output,
                kind=found.kind,
                on_bad_image=policy,
                start=(before, output.unreadable),
                total=found.total,
                progress=progress,
            )
        if not before:
            _require_some(counts)
        output.finish()
    finally:
        output.close()
    show.notes(_unreadable_notes(counts))
    if json:
        show.as_json(
            {
                "out": str(out),
                "items": output.done,
                "continued_from": before,
                "unreadable": counts.unreadable_count,
                "counts": dict(counts.counts),
                "calibration": header.calibration,
            }
        )
        return
    more = f", {before:,} of them before" if before else ""
    show.line(f"wrote {out}: {output.done:,} {found.kind}{more}")


def _require_some(counts: PredictionCounts) -> None:
    if not counts.items:
        raise InputError("DATA-EMPTY", "there are no items on standard input", fix="write one per line")


def _unreadable_notes(counts: PredictionCounts) -> list[str]:
    if not counts.unreadable_count:
        return []
    named = ", ".join(counts.unreadable)
    first = f", of this call: {named}" if named else ""
    return [f"warning: {counts.unreadable_count:,} images cannot be read and have no prediction{first}"]


class _TerminalTable:
    """Predictions as lines of a table, each printed when it is known."""

    def __init__(self, header: PredictionHeader) -> None:
        self._width = show.terminal_width()
        self._has_text = "text" in header.columns

    def write(self, item: PredictedItem) -> None:
        ranked = "  ".join(f"{probability:6.1%} {name}" for name, probability in item.ranked)
        ending = ranked or f"unreadable: {item.error}"
        room = max(16, self._width - len(ending) - 2)
        shown = item.text if self._has_text else item.id
        show.line(f"{show.shortened(shown, room):<{room}}  {ending}")
