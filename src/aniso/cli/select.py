"""``aniso select``: choose the vectors, or cells of them, that help a task most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.addresses import Shard
from aniso.cli import checks, options, select_inputs, select_many, show
from aniso.cli.select_output import print_choice
from aniso.errors import UsageError
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget

if TYPE_CHECKING:
    from aniso.models import Wrapped
    from aniso.vectors import Bank


def select(
    model: Annotated[str, typer.Option(help="The base: mini, an open_clip name, a hub id or a directory.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Vectors, or cells of each block, to keep; or bytes: 200MB. Not with --shard."),
    ] = None,
    bank: Annotated[str | None, typer.Option(help="The bank to select from: a directory, or mini.")] = None,
    shelf: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Or a directory of adapters and models that are not in a bank yet, or an address "
            "of adapters (s3://, gs://, hf://, https://), which may be repeated.",
        ),
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(help="With --from: a parquet file about its adapters, built or refreshed."),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh/--no-refresh", help="List --from again, or use the catalogue as it is.")
    ] = True,
    scores: Annotated[
        Path | None,
        typer.Option(help="With --from: keep the gradient and all scores in this directory, and resume."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(help="i/N: only write the scores of the i-th of N parts to --scores.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Choose by the scores in --scores; score none.")
    ] = False,
    connections: Annotated[int, typer.Option(help="Requests to remote stores at once.", min=1, max=256)] = 8,
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
    many = select_many.Options(
        tuple(shelf or ()),
        catalogue,
        refresh,
        scores,
        Shard.parse(shard) if shard else None,
        merge,
        connections,
    )
    if budget is not None:
        Budget.of(budget)
    elif shard is None:
        raise UsageError("USAGE", "--budget is missing", fix="--budget 20")
    SELECTION_RULES.require(strategy, option="--strategy")
    _require_one_kind(task, texts, shots, length)
    many.check(local_options=gradients or skip_unfit)
    _require_one_source(bank, many.addresses, strategy)
    many.check_rule(strategy, has_task=task is not None or texts is not None)
    from aniso.learn.selection import GradientCache, SelectionInputs, new_selection_rule
    from aniso.vectors.bank_output import require_writable

    if out is not None:
        require_writable(out, storage=storage or "fp32", overwrite=overwrite)

    def loaded(of_texts: bool) -> select_inputs.Inputs:
        if texts is not None or of_texts:
            return select_inputs.texts(model, weights, texts, length)
        return select_inputs.images(model, weights, task, data, shots, seed)

    if many.applies:
        order = select_many.Order(
            strategy, budget, seed, workers, tuple(leave_out or ()), out, storage, overwrite
        )
        many.run(loaded, order, json)
        return
    assert budget is not None
    wrapped, objective, own = loaded(False)
    opened = _opened(wrapped, bank, many.addresses, skip_unfit)
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
    print_choice(chosen, len(chosen.bank.layout.blocks), len(opened), out, json)


def _require_one_source(bank: str | None, addresses: tuple[str, ...], strategy: str) -> None:
    if (bank is None) == (not addresses):
        raise UsageError(
            "USAGE", "name one bank or directory to select from", fix="--bank BANK, or --from DIRECTORY"
        )
    if addresses and SELECTION_RULES.get(strategy).compares_vectors:
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


def _opened(model: Wrapped, bank: str | None, addresses: tuple[str, ...], skip_unfit: bool) -> Bank:
    if bank is not None:
        return options.open_bank(bank)
    from aniso.vectors import load_adapter_directory

    with show.item_progress() as progress:
        found, notes = load_adapter_directory(
            model.weight_source(), addresses[0], skip_unfit=skip_unfit, progress=progress
        )
    show.notes(notes)
    return found


def _without(bank: Bank, own: str, leave_out: list[str]) -> Bank:
    from aniso.experiments.problem import other_vectors

    names = other_vectors(bank.names, own, leave_out)
    if not names:
        raise UsageError("BANK-NAME", "no vector is left to select from", fix="leave fewer out")
    return bank.only(*names)
