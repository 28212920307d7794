"""``aniso select``: choose the vectors, or cells of them, that help a task most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import options, show
from aniso.errors import UsageError
from aniso.registry import SELECTION_RULES

if TYPE_CHECKING:
    from aniso.data import Labelled
    from aniso.learn.selection import Choice, GradientCache
    from aniso.models import Encoder
    from aniso.vectors import Bank


def select(
    model: Annotated[str, typer.Option(help="The base: mini, an open_clip name, a hub id or a directory.")],
    budget: Annotated[str, typer.Option(help="Vectors, or cells of each block, to keep; or bytes: 200MB.")],
    bank: Annotated[str | None, typer.Option(help="The bank to select from: a directory, or mini.")] = None,
    shelf: Annotated[
        Path | None,
        typer.Option("--from", help="Or a directory of adapters and models that are not in a bank yet."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="The task to select for; random needs none.")] = None,
    strategy: Annotated[
        str, typer.Option(help=f"Selection rule: {', '.join(SELECTION_RULES.names)}.")
    ] = "blockwise-gradient",
    shots: Annotated[
        int | None, typer.Option(help="Images of each class to select by; default: all.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the smaller bank here.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Storage of that bank; default: that of the bank selected from.")
    ] = None,
    gradients: Annotated[
        Path | None,
        typer.Option(help="Cache gradients in this file: interrupted runs continue, another budget is free."),
    ] = None,
    skip_unfit: Annotated[
        bool, typer.Option("--skip-unfit", help="Leave out what does not fit the base, and list it.")
    ] = False,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="A vector to leave out; the task's own always is.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights of the model, if its name does not include them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random shots, views and vectors.", min=0)] = 0,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Select the vectors that help a task most, from a bank or from a directory of adapters."""
    from aniso.learn import CrossEntropy
    from aniso.learn.selection import Budget, SelectionInputs, new_selection_rule
    from aniso.models import load_model
    from aniso.vectors.bank import require_writable

    Budget.of(budget)
    SELECTION_RULES.require(strategy, option="--strategy")
    if (bank is None) == (shelf is None):
        raise UsageError(
            "USAGE", "name one bank or directory to select from", fix="--bank BANK, or --from DIRECTORY"
        )
    if shelf is not None and SELECTION_RULES.get(strategy).compares_vectors:
        raise UsageError(
            "USAGE",
            f"selection rule '{strategy}' compares all vectors with each other, and needs a bank",
            fix="aniso bank build first, then --bank",
        )
    if out is not None:
        require_writable(out, storage=storage or "fp32", overwrite=overwrite)
    encoder = load_model(model, weights)
    images, own = _images(task, data, shots, seed)
    opened = _opened(encoder, bank, shelf, skip_unfit)
    opened = _without(opened, own, leave_out or [])
    objective = None if images is None else CrossEntropy(images) * 1.0
    with show.item_progress() as progress:
        cache = None
        if gradients is not None and images is not None and SELECTION_RULES.get(strategy).needs_gradient:
            cache = _gradient_cache(gradients, encoder, images, seed)
        inputs = SelectionInputs(encoder, objective, budget, seed, workers, progress, cache)
        chosen = new_selection_rule(strategy, inputs).choose(opened)
    if out is not None:
        total = sum(4 * b.numel for name in chosen.bank for b in chosen.bank[name].blocks)
        with show.progress("writing", total) as advance:
            chosen.bank.save(out, storage=storage or opened.storage, overwrite=overwrite, progress=advance)
    _print(chosen, len(opened), out, json)


def _images(task: str | None, data: Path | None, shots: int | None, seed: int) -> tuple[Labelled | None, str]:
    """The images to select by, and the name of the task's own vector, which is left out."""
    if task is None:
        return None, ""
    from aniso.data import load_task
    from aniso.experiments.problem import require_split

    with show.item_progress() as progress:
        found = load_task(task, data, progress=progress)
    show.notes(found.notes)
    train = require_split(found, "train", "vectors are selected by")
    return (train if shots is None else train.shots(shots, seed)), found.name


def _opened(encoder: Encoder, bank: str | None, shelf: Path | None, skip_unfit: bool) -> Bank:
    if bank is not None:
        return options.open_bank(bank)
    from aniso.vectors import load_adapter_directory

    assert shelf is not None
    with show.item_progress() as progress:
        found, notes = load_adapter_directory(
            encoder.weight_source(), shelf, skip_unfit=skip_unfit, progress=progress
        )
    show.notes(notes)
    return found


def _without(bank: Bank, own: str, leave_out: list[str]) -> Bank:
    from aniso.experiments.problem import other_vectors

    names = other_vectors(bank.names, own, leave_out)
    if not names:
        raise UsageError("BANK-NAME", "no vector is left to select from", fix="leave fewer out")
    return bank.only(*names)


def _gradient_cache(path: Path, encoder: Encoder, images: Labelled, seed: int) -> GradientCache:
    """The cache in a file, for everything that gradients depend on."""
    from aniso.data import content_hash
    from aniso.learn import CrossEntropy
    from aniso.learn.selection import GradientCache

    what = {**encoder.identity(), "config": encoder.config_words, "seed": seed}
    what |= {"objective": (CrossEntropy(images) * 1.0).identity(), "pictures": content_hash(images)}
    return GradientCache(path, what)


def _print(chosen: Choice, among: int, out: Path | None, json: bool) -> None:
    blocks = len(chosen.bank.layout.blocks)
    totals = {name: sum(abs(x) for x in own.values()) for name, own in chosen.scores.items()}
    kept = chosen.cells
    show.notes(chosen.notes)
    if json:
        rows = [{"vector": n, "blocks": list(kept[n]), "score": totals[n]} for n in kept]
        show.as_json({**chosen.summary(), "chosen": rows, "path": None if out is None else str(out)})
        return
    order = sorted(kept, key=lambda name: (-len(kept[name]), -totals[name]))
    show.table(
        ("vector", "blocks kept", "score"),
        [(name, f"{len(kept[name])}/{blocks}", f"{totals[name]:.4g}") for name in order],
        title=chosen.words,
    )
    place = "" if out is None else f", written to {out}"
    show.line(f"{len(kept)} of {among} vectors, {show.size(chosen.nbytes)}{place}")
