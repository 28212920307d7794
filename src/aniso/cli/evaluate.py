"""``aniso eval``: the accuracy of a model, a fine-tuned model or a composition."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import UsageError

if TYPE_CHECKING:
    from aniso.data import Task
    from aniso.experiments.model_evaluation import Subject, TaskEvaluation, TextEvaluation
    from aniso.models import Encoder, Wrapped

    _Added = tuple[str | None, str | None, Path | None, Path | None]


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="An open_clip name, a directory (CLIP, classifier or sentence encoder), a hub id, or mini."
        ),
    ],
    task: Annotated[
        list[str] | None, typer.Option("--task", help="A known task or a directory; may be repeated.")
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("--texts", help="For a language model: a file of examples or plain text; repeatable."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Texts: maximal tokens per row.", min=2)] = None,
    data: options.DataRoot = None,
    weights: Annotated[str | None, typer.Option(help="A tag such as openai, a file or a directory.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    bank: Annotated[str | None, typer.Option("--bank", help="A bank: a directory, or mini.")] = None,
    vector: Annotated[str | None, typer.Option(help="Add this whole vector of the bank.")] = None,
    coefficients: Annotated[
        Path | None, typer.Option(help="Compose with these coefficients: a file, or a run.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Add this LoRA adapter: a directory of PEFT's, or a run.")
    ] = None,
    linearised: Annotated[
        bool, typer.Option("--linearised", help="The vectors are linearised ones.")
    ] = False,
    head: Annotated[
        Path | None, typer.Option("--head", help="Classify with this head instead of class weights.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Replaces the task's prompts; may be repeated.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Batch size; default 256 images, or 16 rows of text.", min=1)
    ] = None,
    workers: options.Workers = 0,
    on_bad_image: options.OnBadImage = "error",
    seed: options.SplitSeed = 0,
    record: Annotated[Path | None, typer.Option(help="Directory for a JSON record per task.")] = None,
    predictions: Annotated[
        Path | None,
        typer.Option("--predictions", help="CSV file for every item's label, prediction and probability."),
    ] = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Evaluate a model on tasks, or on texts: the base, the base with one vector of a bank, or composed."""
    if (not task) == (not texts):
        raise UsageError("USAGE", "give --task or --texts, and only one of them", fix="--task NAME")
    if task and length is not None:
        raise UsageError("USAGE", "--length applies to --texts only", fix="leave out --length")
    images_only = {
        "head": head,
        "prompt": prompt,
        "record": record,
        "predictions": predictions,
        "data": data,
        "linearised": linearised,
        "split": split != "test",
        "on-bad-image": on_bad_image != "error",
        "split-seed": seed,
        "overwrite": overwrite,
    }
    if texts and (given := [f"--{name}" for name, value in images_only.items() if value]):
        raise UsageError("USAGE", f"{', '.join(given)}: not supported with --texts", fix="leave it out")
    _require_choice(bank, vector, coefficients, linearised)
    checks.free_file(predictions, overwrite=overwrite)
    if adapter is not None and bank is not None:
        raise UsageError("USAGE", "give --bank or --adapter, and only one of them", fix="leave one out")
    checks.one_of("--split", split, checks.SPLITS)
    policy = options.bad_images(on_bad_image)
    for path in (coefficients, head, adapter, *(Path(file) for file in texts or ())):
        checks.existing_file(path)
    from aniso.experiments.run_files import ADAPTER, COEFFICIENTS, HEAD, WEIGHTS, file_of, run_file

    coefficients = None if coefficients is None else file_of(coefficients, COEFFICIENTS)
    head = None if head is None else file_of(head, HEAD)
    adapter = None if adapter is None else Path(run_file(adapter, ADAPTER))
    weights = weights if weights is None else str(run_file(weights, WEIGHTS))
    for name in task or ():
        checks.existing_task(name)
    if texts:
        added = (bank, vector, coefficients, adapter)
        _evaluate_texts(model, weights, texts, length, added, batch, workers, json)
        return
    from aniso.data import load_task
    from aniso.models import load_model

    encoder = load_model(model, weights)
    subject = _subject(encoder, (bank, vector, coefficients, adapter), linearised)
    subject = subject if head is None else subject.with_head(head)
    with show.item_progress() as progress:
        tasks = [
            load_task(name, data, prompts=prompt or (), seed=seed, on_bad_image=policy, progress=progress)
            for name in task or ()
        ]
    sizes = (batch or 256, workers)
    _print(_evaluate_tasks(encoder, subject, tasks, split, sizes, (record, predictions), overwrite), json)


def _evaluate_tasks(
    encoder: Encoder,
    subject: Subject,
    tasks: list[Task],
    split: str,
    sizes: tuple[int, int],
    out: tuple[Path | None, Path | None],
    overwrite: bool,
) -> list[TaskEvaluation]:
    """Evaluate tasks; ``sizes`` are the batch's and the number of workers, ``out`` what is written."""
    from aniso.experiments.model_evaluation import evaluate_task, record_name, require_free

    (batch, workers), (record, predictions) = sizes, out
    for task in tasks:
        task.split(split)  # a missing split, or an existing record, is an error now, not after an hour
    if record is not None:
        names = [record_name(encoder.name, task.name, split, subject.what) for task in tasks]
        require_free(record, names, overwrite=overwrite)
    records, measured = [], []
    for task in tasks:
        with show.item_progress() as progress:
            made, notes, found = evaluate_task(
                encoder, subject, task, split, batch=batch, workers=workers, progress=progress
            )
        show.notes([*(show.note_of(task.name, note) for note in task.notes), *notes])
        if record is not None:
            made.save(record, overwrite=overwrite)
        records.append(made)
        measured.append(found)
    if predictions is not None:
        from aniso.experiments.prediction.measured import write_evaluation_predictions

        write_evaluation_predictions(predictions, records, measured, overwrite=overwrite)
        show.notes([f"wrote {predictions}: {sum(r.total for r in records):,} predictions"])
    return records


def _require_choice(
    bank: str | None, vector: str | None, coefficients: Path | None, linearised: bool
) -> None:
    if bank is None:
        if vector or coefficients or linearised:
            message = "--vector, --coefficients and --linearised need a bank"
            raise UsageError("USAGE", message, fix="add --bank DIR")
        return
    if (vector is None) == (coefficients is None):
        message = "--bank needs --vector or --coefficients, and only one of them"
        raise UsageError("USAGE", message, fix="--vector NAME or --coefficients FILE")
    checks.existing_bank(bank)


def _subject(model: Wrapped, added: _Added, linearised: bool) -> Subject:
    from aniso.experiments.model_evaluation import Subject

    bank, vector, coefficients, adapter = added
    if adapter is not None:
        return Subject.with_adapter(model, adapter)
    if bank is None:
        return Subject.base(model)
    opened = options.open_bank(bank, model.weight_source())
    if coefficients is not None:
        return Subject.composed(model, opened, coefficients, linearised=linearised)
    return Subject.with_vector(model, opened, vector or "", linearised=linearised)


def _evaluate_texts(
    name: str,
    weights: str | None,
    files: list[str],
    length: int | None,
    added: _Added,
    batch: int | None,
    workers: int,
    json: bool,
) -> None:
    from aniso.data import read_examples
    from aniso.experiments.model_evaluation import Subject, evaluate_texts
    from aniso.learn import text_dataset
    from aniso.models import load_language_model

    model = load_language_model(name, weights)
    subject = _subject(model, added, linearised=False)
    subject = Subject("the base", model) if subject.model is model else subject
    datasets = [text_dataset(model, read_examples(f), Path(f).name, "test", length=length) for f in files]
    records = []
    for dataset in datasets:
        with show.item_progress() as progress:
            records.append(
                evaluate_texts(model, subject, dataset, batch=batch, workers=workers, progress=progress)
            )
    _print_texts(records, json)


def _print(records: list[TaskEvaluation], json: bool) -> None:
    if json:
        show.as_json([record.content() for record in records])
        return
    rows = []
    for r in records:
        low, high = r.interval or (r.accuracy, r.accuracy)
        chance, accuracy = f"{1 / r.classes:.1%}", f"{r.accuracy:.1%}"
        rows.append((r.task, r.split, r.classes, r.total, chance, accuracy, f"{low:.1%} to {high:.1%}"))
    columns = ("task", "split", "classes", "items", "chance", "accuracy", "95 % interval")
    show.table(columns, rows, title=f"{records[0].model}: {records[0].what}")
    if len(records) > 1:
        show.line(f"mean over {len(rows)} tasks: {sum(r.accuracy for r in records) / len(rows):.1%}")


def _print_texts(records: list[TextEvaluation], json: bool) -> None:
    if json:
        show.as_json([record.content() for record in records])
        return
    for r in records:
        show.notes([f"{r.texts}: {note}" for note in r.notes])
    rows = [
        (r.texts, r.tokens, f"{r.loss:.3f}", f"{r.perplexity:.2f}", f"{r.right / r.tokens:.1%}")
        for r in records
    ]
    columns = ("texts", "tokens", "loss", "perplexity", "next-token accuracy")
    show.table(columns, rows, title=f"{records[0].model}: {records[0].what}")
