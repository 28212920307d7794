"""aniso eval: how good a model, a fine-tuned one or a composition is on tasks."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aniso.cli import options, show
from aniso.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from aniso.data import Task
    from aniso.learn import Accuracy
    from aniso.models import Encoder


def evaluate(
    model: Annotated[str, typer.Argument(help="An open_clip name, a directory, a hub id, or mini.")],
    task: Annotated[list[str], typer.Option("--task", help="A known task or a directory; may be repeated.")],
    data: options.DataRoot = None,
    weights: Annotated[str | None, typer.Option(help="A tag, a file or a directory; openai, say.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    bank: Annotated[str | None, typer.Option("--bank", help="A bank: a directory, or mini.")] = None,
    vector: Annotated[str | None, typer.Option(help="Add this vector of the bank, whole.")] = None,
    coefficients: Annotated[Path | None, typer.Option(help="Compose with these coefficients.")] = None,
    linearised: Annotated[
        bool, typer.Option("--linearised", help="The vectors are linearised ones.")
    ] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="Instead of the task's; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(help="Pictures at once.", min=1)] = 256,
    workers: Annotated[int, typer.Option(help="Processes that decode pictures.", min=0)] = 0,
    on_bad_image: options.OnBadImage = "error",
    seed: options.SplitSeed = 0,
    record: Annotated[Path | None, typer.Option(help="Write a JSON record for each task there.")] = None,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Evaluate a model on tasks: zero-shot, with one vector of a bank, or composed."""
    from aniso.data import load_task
    from aniso.learn import evaluate as run
    from aniso.models import load_model

    encoder = load_model(model, weights)
    what, subject = _subject(encoder, bank, vector, coefficients, linearised)
    policy = options.bad_images(on_bad_image)
    rows = []
    for name in task:
        with show.telling() as told:
            found = load_task(name, data, prompts=prompt or (), seed=seed, on_bad_image=policy, told=told)
            result = run(subject, found.split(split), batch=batch, workers=workers, told=told)
        made = _record(encoder, what, found, split, result)
        show.notes([*(f"{found.name}: {note}" for note in found.notes), *result.notes])
        if record is not None:
            _write(record, made, overwrite)
        rows.append(made)
    if json:
        show.as_json(rows)
        return
    show.table(
        ("task", "split", "classes", "pictures", "chance", "accuracy", "95 % interval"),
        [_row(r) for r in rows],
        title=f"{encoder.name}: {what}",
    )
    if len(rows) > 1:
        show.line(f"mean over {len(rows)} tasks: {sum(r['accuracy'] for r in rows) / len(rows):.1%}")


def _row(record: dict[str, Any]) -> tuple[object, ...]:
    low, high = record["interval"]
    chance, accuracy = f"{1 / record['classes']:.1%}", f"{record['accuracy']:.1%}"
    seen = (record["task"], record["split"], record["classes"], record["total"])
    return (*seen, chance, accuracy, f"{low:.1%} to {high:.1%}")


def _subject(
    encoder: Encoder, bank: str | None, vector: str | None, coefficients: Path | None, linearised: bool
) -> tuple[str, nn.Module]:
    """What is evaluated, in words and as a model."""
    if bank is None:
        if vector or coefficients or linearised:
            raise UsageError("USAGE", "vectors and coefficients belong to a bank", fix="add --bank DIR")
        return "zero-shot", encoder
    if (vector is None) == (coefficients is None):
        raise UsageError(
            "USAGE", "say what to do with the bank", fix="--vector NAME or --coefficients FILE, one of them"
        )
    from aniso.compose import Coefficients, Composition, Linearised, Partition

    opened = options.open_bank(bank)
    base: Any = Linearised(encoder) if linearised else encoder
    if coefficients is not None:
        return f"composed with {coefficients.name}", Composition.of(
            base, opened, Coefficients.load(coefficients)
        )
    assert vector is not None
    made = Composition(base, opened.only(vector), Partition.whole())
    made.values.data.fill_(1.0)
    return f"with {'linearised ' if linearised else ''}vector {vector}", made


def _record(encoder: Encoder, what: str, task: Task, split: str, result: Accuracy) -> dict[str, Any]:
    """Everything needed to tell whether another result is comparable; no paths, no dates, no host."""
    from aniso import __version__

    return {
        "model": encoder.name,
        "fingerprint": encoder.fingerprint,
        "what": what,
        "task": task.name,
        "split": split,
        "manifest": task.split(split).manifest,
        "class_list": task.classes.key,
        "classes": len(task.classes),
        "correct": result.correct,
        "total": result.total,
        "accuracy": result.value,
        "per_class_accuracy": result.per_class,
        "interval": list(result.interval),
        "aniso": __version__,
    }


def _write(directory: Path, record: dict[str, Any], overwrite: bool) -> None:
    from aniso.weights.atomic import write_text

    directory.mkdir(parents=True, exist_ok=True)
    name = (
        "-".join(str(record[part]) for part in ("task", "split", "what")).replace(" ", "-").replace("/", "-")
    )
    text = json_text.dumps(record, indent=1, sort_keys=True) + "\n"
    write_text(directory / f"{name}.json", text, overwrite=overwrite)
