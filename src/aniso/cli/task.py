"""``aniso task``: ls, show, check, fetch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import InputError
from aniso.json_value import JsonObject

if TYPE_CHECKING:
    from aniso.data import Labelled, Task
    from aniso.data.card import Card

app = typer.Typer(no_args_is_help=True, help="Look at tasks: known ones, and folders of your own.")


@app.command()
def ls(json: show.Json = False) -> None:
    """List the known tasks."""
    from aniso.data.card import known_card, known_tasks

    cards = {name: known_card(name) for name in known_tasks()}
    if json:
        show.as_json({name: _card(card) for name, card in cards.items()})
        return
    rows = [(name, card.title, len(card.classes), card.licence) for name, card in cards.items()]
    show.table(("task", "title", "classes", "licence"), rows, one_line=True)


@app.command("show")
def show_task(
    task: options.TaskName,
    data: options.DataRoot = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="Write a contact sheet of sample images: FILE.png.")
    ] = None,
    split: Annotated[str, typer.Option(help="The split of the sample images.")] = "train",
    seed: options.SplitSeed = 0,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Show a task's splits, classes and prompts; images are decoded with --images only."""
    checks.existing_task(task)
    checks.one_of("--split", split, checks.SPLITS)
    from aniso.data import load_task

    found = load_task(task, data, seed=seed)
    if images is not None:
        _write_sheet(found.split(split), images, overwrite)
    if json:
        show.as_json(_task(found))
        return
    show.notes(found.notes)
    _print(found)
    if images is not None:
        show.line(f"sample images of {found.name} {split}: {images}")


@app.command()
def check(
    task: options.TaskName,
    data: options.DataRoot = None,
    seed: options.SplitSeed = 0,
    json: show.Json = False,
) -> None:
    """Open every image or text, and look for those that are in two splits."""
    checks.existing_task(task)
    from aniso.data import load_task
    from aniso.data.audit import audit

    found = load_task(task, data, seed=seed)
    with show.item_progress() as progress:
        result = audit(found, progress)
    if json:
        show.as_json({**_task(found), **result.as_dict()})
    else:
        show.notes(found.notes)
        _print(found)
        show.table(("split", "items", "unreadable", "kinds"), result.rows())
        show.notes(result.warnings())
    if result.unreadable:
        raise InputError(
            "IMAGE-READ",
            f"{len(result.unreadable)} images of {found.name} cannot be decoded",
            found=result.unreadable[:10],
            fix="replace them, or evaluate without them: aniso eval --on-bad-image skip",
        )


@app.command()
def fetch(
    task: Annotated[str, typer.Argument(help="A known task, or the hub id of a data set: owner/name.")],
    data: options.DataRoot = None,
    json: show.Json = False,
) -> None:
    """Download data with torchvision's or the hub's downloader, or show where to get them."""
    from aniso.data.fetch import fetch_task
    from aniso.data.task import data_root

    root = data_root(data)
    loaded_by = fetch_task(task, root)
    if json:
        show.as_json({"task": loaded_by, "root": str(root)})
        return
    show.line(f"downloaded; show it with: aniso task show {loaded_by} --data {root}")


def _write_sheet(split: Labelled, path: Path, overwrite: bool) -> None:
    import io

    from aniso.data.contact_sheet import contact_sheet
    from aniso.weights.atomic import atomic_file

    buffer = io.BytesIO()
    contact_sheet(split).save(buffer, "PNG")
    with atomic_file(path, overwrite=overwrite) as out:
        out.stream.write(buffer.getvalue())


def _print(task: Task) -> None:
    rows = []
    for role, split in task.splits.items():
        counts = list(split.counts.values())
        rows.append((role, len(split), sum(n > 0 for n in counts), min(counts), max(counts)))
    show.table(
        ("split", "items", "classes", "min per class", "max per class"),
        rows,
        title=task.card.title or task.name,
    )
    names = ", ".join(task.classes.names[:12]) + (" …" if len(task.classes) > 12 else "")
    show.line(f"{len(task.classes)} classes: {names}")
    show.line(f"{len(task.classes.prompts)} prompts: {' | '.join(task.classes.prompts[:3])}")
    if task.card.notes:
        show.line(task.card.notes)


def _task(task: Task) -> JsonObject:
    return {
        "task": task.name,
        **_card(task.card),
        "classes": list(task.classes.names),
        "prompts": list(task.classes.prompts),
        "splits": {
            role: {"images": len(split), "manifest": split.manifest, "counts": split.counts}
            for role, split in task.splits.items()
        },
        "reading": list(task.notes),
    }


def _card(card: Card) -> JsonObject:
    return {
        "title": card.title,
        "classes": len(card.classes),
        "prompts": len(card.prompts),
        "reader": card.kind,
        "licence": card.licence,
        "homepage": card.homepage,
        "metric": card.metric,
        "notes": card.notes,
    }
