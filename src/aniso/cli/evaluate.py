"""aniso eval: how good a model, a fine-tuned one or a composition is on tasks."""

from __future__ import annotations

import json as json_text
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aniso.cli import options, show
from aniso.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from aniso.data import Labelled, Task
    from aniso.learn.heads import Head
    from aniso.models import Encoder, Wrapped
    from aniso.progress import ProgressCallback


def evaluate(
    model: Annotated[str, typer.Argument(help="An open_clip name, a directory, a hub id, or mini.")],
    task: Annotated[
        list[str] | None, typer.Option("--task", help="A known task or a directory; may be repeated.")
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("--texts", help="Of a language model: examples or a plain text; may be repeated."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Of texts: tokens at once, at most.", min=2)] = None,
    data: options.DataRoot = None,
    weights: Annotated[str | None, typer.Option(help="A tag, a file or a directory; openai, say.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    bank: Annotated[str | None, typer.Option("--bank", help="A bank: a directory, or mini.")] = None,
    vector: Annotated[str | None, typer.Option(help="Add this vector of the bank, whole.")] = None,
    coefficients: Annotated[Path | None, typer.Option(help="Compose with these coefficients.")] = None,
    linearised: Annotated[
        bool, typer.Option("--linearised", help="The vectors are linearised ones.")
    ] = False,
    head: Annotated[
        Path | None, typer.Option("--head", help="Answer with this head instead of class weights.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Instead of the task's; may be repeated.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Pictures at once, 256; or rows of text, 16.", min=1)
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that decode pictures.", min=0)] = 0,
    on_bad_image: options.OnBadImage = "error",
    seed: options.SplitSeed = 0,
    record: Annotated[Path | None, typer.Option(help="Write a JSON record for each task there.")] = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Evaluate a model on tasks, or on texts: as it is, with one vector of a bank, or composed."""
    if (not task) == (not texts):
        raise UsageError("USAGE", "say what to evaluate on", fix="--task NAME or --texts FILE, one of them")
    if task and length is not None:
        raise UsageError("USAGE", "--length: for texts alone", fix="leave it out")
    if texts:
        for_pictures = {
            "head": head,
            "prompt": prompt,
            "record": record,
            "data": data,
            "linearised": linearised,
            "split": split != "test",
            "on-bad-image": on_bad_image != "error",
            "split-seed": seed,
            "overwrite": overwrite,
        }
        said = [f"--{name}" for name, value in for_pictures.items() if value]
        if said:
            raise UsageError("USAGE", f"{', '.join(said)}: for pictures alone", fix="leave it out")
        _evaluate_texts(model, weights, texts, length, bank, vector, coefficients, batch, workers, json)
        return
    assert task is not None
    from aniso.data import load_task
    from aniso.models import load_model
    from aniso.weights.atomic import write_text

    encoder = load_model(model, weights)
    subject = _with_head(_subject(encoder, bank, vector, coefficients, linearised), head)
    policy = options.bad_images(on_bad_image)
    with show.telling() as progress:
        tasks = [
            load_task(name, data, prompts=prompt or (), seed=seed, on_bad_image=policy, progress=progress)
            for name in task
        ]
    splits = [found.split(split) for found in tasks]
    if record is not None:  # found out now, not after an hour
        _require_free(record, [_file_name(encoder, found, split, subject) for found in tasks], overwrite)
    rows = []
    for found, chosen in zip(tasks, splits, strict=True):
        with show.telling() as progress:
            made, notes = _measured(encoder, subject, found, chosen, split, batch or 256, workers, progress)
        show.notes([*(show.note_of(found.name, note) for note in found.notes), *notes])
        if record is not None:
            text = json_text.dumps(made, indent=1, sort_keys=True) + "\n"
            write_text(record / _file_name(encoder, found, split, subject), text, overwrite=overwrite)
        rows.append(made)
    _print(encoder, subject, rows, json)


def _evaluate_texts(
    name: str,
    weights: str | None,
    files: list[str],
    length: int | None,
    bank: str | None,
    vector: str | None,
    coefficients: Path | None,
    batch: int | None,
    workers: int,
    json: bool,
) -> None:
    from aniso.cli.evaluate_texts import measured, show_rows, texts_of
    from aniso.data import TextDataset
    from aniso.models import load_language_model

    model = load_language_model(name, weights)
    subject = _subject(model, bank, vector, coefficients, linearised=False)
    texts = texts_of(model, files, length)
    what = "the base" if subject.model is model else subject.what
    identity = {"what": what, **subject.identity}
    rows = measured(
        model, subject.model, identity, texts, batch=batch or TextDataset.default_batch_size, workers=workers
    )
    show_rows(model.name, what, rows, json=json)


def _print(encoder: Encoder, subject: _Subject, rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        show.as_json(rows)
        return
    show.table(
        ("task", "split", "classes", "pictures", "chance", "accuracy", "95 % interval"),
        [_row(r) for r in rows],
        title=f"{encoder.name}: {subject.what}",
    )
    if len(rows) > 1:
        show.line(f"mean over {len(rows)} tasks: {sum(r['accuracy'] for r in rows) / len(rows):.1%}")


def _row(record: dict[str, Any]) -> tuple[object, ...]:
    low, high = record["interval"]
    chance, accuracy = f"{1 / record['classes']:.1%}", f"{record['accuracy']:.1%}"
    seen = (record["task"], record["split"], record["classes"], record["total"])
    return (*seen, chance, accuracy, f"{low:.1%} to {high:.1%}")


@dataclass(frozen=True)
class _Subject:
    """What is evaluated: in words, as a model, and what identifies it beside the base."""

    what: str
    model: nn.Module
    identity: dict[str, str] = field(default_factory=dict)
    head: Head | None = None


def _subject(
    encoder: Wrapped, bank: str | None, vector: str | None, coefficients: Path | None, linearised: bool
) -> _Subject:
    if bank is None:
        if vector or coefficients or linearised:
            raise UsageError("USAGE", "vectors and coefficients belong to a bank", fix="add --bank DIR")
        return _Subject("zero-shot", encoder)
    if (vector is None) == (coefficients is None):
        raise UsageError(
            "USAGE", "say what to do with the bank", fix="--vector NAME or --coefficients FILE, one of them"
        )
    from aniso.compose import Coefficients, Composition, Linearised, Partition
    from aniso.weights.fingerprint import tensor_hash

    opened = options.open_bank(bank, encoder.weight_source())
    base: Any = Linearised(encoder) if linearised else encoder
    if coefficients is not None:
        learned = Coefficients.load(coefficients)
        identity = {"bank": opened.content_hash, "coefficients": tensor_hash(learned.values)}
        return _Subject(f"composed with {coefficients.stem}", Composition.of(base, opened, learned), identity)
    assert vector is not None
    only = opened.only(vector)
    made = Composition(base, only, Partition.whole())
    made.values.data.fill_(1.0)
    what = f"with {'linearised ' if linearised else ''}vector {vector}"
    return _Subject(what, made, {"bank": only.content_hash, "storage": only.storage})


def _with_head(subject: _Subject, path: Path | None) -> _Subject:
    """What is evaluated, with a head that was learned on its features."""
    if path is None:
        return subject
    from aniso.learn.features import identity
    from aniso.learn.heads import load_head
    from aniso.weights.fingerprint import combined_hash, tensor_hash

    saved = load_head(path)
    saved.require_features(identity(subject.model), str(path))
    content = combined_hash({name: tensor_hash(t) for name, t in saved.head.tensors().items()})
    what = f"{'base' if subject.what == 'zero-shot' else subject.what}, head {saved.head.kind}"
    return replace(subject, what=what, head=saved.head, identity={**subject.identity, "head": content})


def _measured(
    encoder: Encoder,
    subject: _Subject,
    task: Task,
    chosen: Labelled,
    split: str,
    batch: int,
    workers: int,
    progress: ProgressCallback,
) -> tuple[dict[str, Any], list[str]]:
    """A record with what is needed to tell whether another one is comparable; no paths, no dates, no host."""
    from aniso import __version__
    from aniso.learn import evaluate as run
    from aniso.learn.heads import RestrictedHead
    from aniso.weights.fingerprint import tensor_hash

    weights = encoder.class_weights(task.classes, progress=progress)
    head = weights if subject.head is None else RestrictedHead(subject.head, task.classes.names)
    result = run(subject.model, chosen, head=head, batch=batch, workers=workers, progress=progress)
    record = {
        "model": encoder.name,
        "fingerprint": encoder.fingerprint,
        "what": subject.what,
        **subject.identity,
        "task": task.name,
        "split": split,
        "manifest": chosen.manifest,
        "class_list": task.classes.key,
        "class_weights": tensor_hash(weights.weight),
        "classes": len(task.classes),
        "correct": result.correct,
        "total": result.total,
        "accuracy": result.value,
        "per_class_accuracy": result.per_class,
        "interval": list(result.interval),
        "notes": list(task.notes),
        "aniso": __version__,
    }
    notes = list(result.notes)
    if subject.head is not None and len(subject.head.names) > len(task.classes):
        notes.append(
            f"{task.name}: answers are among {len(task.classes)} of {len(subject.head.names)} classes"
        )
    if task.card.metric != "accuracy":
        notes.append(f"{task.name}: others report {task.card.metric}, which is {result.per_class:.1%}")
    return record, notes


def _file_name(encoder: Encoder, task: Task, split: str, subject: _Subject) -> str:
    words = f"{encoder.name} {task.name} {split} {subject.what}"
    return re.sub(r"[^\w.+-]+", "-", words) + ".json"


def _require_free(directory: Path, names: list[str], overwrite: bool) -> None:
    from aniso.weights.atomic import make_directory

    if directory.exists() and not directory.is_dir():
        raise UsageError("OUT-EXISTS", f"'{directory}' is a file", fix="name a directory with --record")
    there = [name for name in names if (directory / name).exists()]
    if there and not overwrite:
        raise UsageError(
            "OUT-EXISTS", f"'{directory / there[0]}' exists", fix="add --overwrite to replace it"
        )
    make_directory(directory)
