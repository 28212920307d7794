"""``aniso select``: choose the vectors, or cells of them, that help a task most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import UsageError
from aniso.registry import SELECTION_RULES

if TYPE_CHECKING:
    from aniso.learn.objectives import Objective
    from aniso.learn.selection import Choice
    from aniso.models import Wrapped
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
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="For a language model, in place of --task: a file of examples or text."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Texts: maximal tokens per row.", min=2)] = None,
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
    from aniso.learn.selection import Budget, GradientCache, SelectionInputs, new_selection_rule
    from aniso.vectors.bank_output import require_writable

    Budget.of(budget)
    SELECTION_RULES.require(strategy, option="--strategy")
    _require_one_source(bank, shelf, strategy)
    _require_one_kind(task, texts, shots, length)
    if out is not None:
        require_writable(out, storage=storage or "fp32", overwrite=overwrite)
    wrapped: Wrapped
    if texts is not None:
        wrapped, objective, own = _texts(model, weights, texts, length)
    else:
        wrapped, objective, own = _images(model, weights, task, data, shots, seed)
    opened = _opened(wrapped, bank, shelf, skip_unfit)
    opened = _without(opened, own, leave_out or [])
    with show.item_progress() as progress:
        cache = None
        if gradients is not None and objective is not None and SELECTION_RULES.get(strategy).needs_gradient:
            cache = GradientCache.of(gradients, wrapped, objective, seed)
        inputs = SelectionInputs(wrapped, objective, budget, seed, workers, progress, cache)
        chosen = new_selection_rule(strategy, inputs).choose(opened)
    if out is not None:
        total = sum(4 * b.numel for name in chosen.bank for b in chosen.bank[name].blocks)
        with show.progress("writing", total) as advance:
            chosen.bank.save(out, storage=storage or opened.storage, overwrite=overwrite, progress=advance)
    _print(chosen, len(opened), out, json)


def _require_one_source(bank: str | None, shelf: Path | None, strategy: str) -> None:
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


def _require_one_kind(task: str | None, texts: Path | None, shots: int | None, length: int | None) -> None:
    if task is not None and texts is not None:
        raise UsageError("USAGE", "give --task or --texts, and only one of them", fix="leave one out")
    if texts is None and length is not None:
        raise UsageError("USAGE", "--length applies to --texts only", fix="leave out --length")
    if texts is not None and shots is not None:
        raise UsageError("USAGE", "--shots applies to --task only", fix="leave out --shots")
    checks.existing_file(texts)


def _texts(
    name: str, weights: str | None, file: Path, length: int | None
) -> tuple[Wrapped, Objective | None, str]:
    """The language model, and its loss on the texts to select by; no vector is left out."""
    from aniso.data import read_examples
    from aniso.learn import LanguageLoss, text_dataset
    from aniso.models import load_language_model

    model = load_language_model(name, weights)
    dataset = text_dataset(model, read_examples(file), file.name, "train", length=length)
    show.notes(dataset.notes)
    return model, LanguageLoss(dataset) * 1.0, ""


def _images(
    model: str, weights: str | None, task: str | None, data: Path | None, shots: int | None, seed: int
) -> tuple[Wrapped, Objective | None, str]:
    """The encoder, its loss on the items to select by, and the name of the task's own vector."""
    from aniso.models import load_model

    encoder = load_model(model, weights)
    if task is None:
        return encoder, None, ""
    from aniso.data import load_task
    from aniso.experiments.problem import require_split
    from aniso.learn import CrossEntropy

    with show.item_progress() as progress:
        found = load_task(task, data, progress=progress)
    show.notes(found.notes)
    train = require_split(found, "train", "vectors are selected by")
    return encoder, CrossEntropy(train if shots is None else train.shots(shots, seed)) * 1.0, found.name


def _opened(model: Wrapped, bank: str | None, shelf: Path | None, skip_unfit: bool) -> Bank:
    if bank is not None:
        return options.open_bank(bank)
    from aniso.vectors import load_adapter_directory

    assert shelf is not None
    with show.item_progress() as progress:
        found, notes = load_adapter_directory(
            model.weight_source(), shelf, skip_unfit=skip_unfit, progress=progress
        )
    show.notes(notes)
    return found


def _without(bank: Bank, own: str, leave_out: list[str]) -> Bank:
    from aniso.experiments.problem import other_vectors

    names = other_vectors(bank.names, own, leave_out)
    if not names:
        raise UsageError("BANK-NAME", "no vector is left to select from", fix="leave fewer out")
    return bank.only(*names)


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
