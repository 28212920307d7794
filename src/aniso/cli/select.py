"""``aniso select``: the vectors, or cells of them, that a task needs most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aniso.cli import options, show
from aniso.errors import UsageError

if TYPE_CHECKING:
    from aniso.data import Labelled
    from aniso.learn.selection import Choice, Strategy
    from aniso.models import Encoder
    from aniso.vectors import Bank

_STRATEGIES = "random, features, gradient, blockwise-gradient or pursuit"


def select(
    model: Annotated[str, typer.Option(help="The base: mini, an open_clip name, a hub id or a directory.")],
    budget: Annotated[str, typer.Option(help="Vectors, or cells of each block, to keep; or bytes: 200MB.")],
    bank: Annotated[str | None, typer.Option(help="The bank to choose from: a directory, or mini.")] = None,
    shelf: Annotated[
        Path | None,
        typer.Option("--from", help="Or a directory of adapters and models that are no bank yet."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="The task to choose for; random needs none.")] = None,
    strategy: Annotated[str, typer.Option(help=f"{_STRATEGIES}.")] = "blockwise-gradient",
    shots: Annotated[
        int | None, typer.Option(help="Pictures of each class to choose by; all.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the smaller bank there.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Of that bank; as it is in the one chosen from.")
    ] = None,
    gradients: Annotated[
        Path | None,
        typer.Option(
            help="Keep gradients in this file: what is interrupted goes on, another budget is free."
        ),
    ] = None,
    skip_unfit: Annotated[
        bool, typer.Option("--skip-unfit", help="Leave out what does not fit the base, and list it.")
    ] = False,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="A vector to leave out; the task's own is, always.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights of the model, if its name does not say.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws shots, views and vectors at random.", min=0)] = 0,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Choose the vectors that a task needs most, from a bank or from a directory of adapters."""
    from aniso.learn.selection import Budget
    from aniso.models import load_model
    from aniso.vectors.bank import require_writable

    Budget.of(budget)
    if (bank is None) == (shelf is None):
        raise UsageError("USAGE", "say what to choose from", fix="--bank BANK, or --from DIRECTORY")
    if shelf is not None and strategy == "pursuit":
        raise UsageError(
            "USAGE", "pursuit compares all vectors with each other", fix="aniso bank build first, then --bank"
        )
    if out is not None:
        require_writable(out, storage=storage or "fp32", overwrite=overwrite)
    encoder = load_model(model, weights)
    pictures, own = _pictures(task, data, shots, seed)
    opened = _opened(encoder, bank, shelf, skip_unfit)
    opened = _without(opened, own, leave_out or [])
    with show.telling() as progress:
        chooser = _strategy(strategy, encoder, pictures, budget, seed, workers, gradients, progress)
        chosen = chooser.choose(opened)
    if out is not None:
        total = sum(4 * b.numel for name in chosen.bank for b in chosen.bank[name].blocks)
        with show.progress("writing", total) as advance:
            chosen.bank.save(out, storage=storage or opened.storage, overwrite=overwrite, progress=advance)
    _print(chosen, len(opened), out, json)


def _pictures(
    task: str | None, data: Path | None, shots: int | None, seed: int
) -> tuple[Labelled | None, str]:
    """What to choose by, and the name of a vector that would give the answer away."""
    if task is None:
        return None, ""
    from aniso.data import load_task
    from aniso.experiments.settings.setting import require_split

    with show.telling() as progress:
        found = load_task(task, data, progress=progress)
    show.notes(found.notes)
    train = require_split(found, "train", "vectors are chosen by")
    return (train if shots is None else train.shots(shots, seed)), found.name


def _opened(encoder: Encoder, bank: str | None, shelf: Path | None, skip_unfit: bool) -> Bank:
    if bank is not None:
        return options.open_bank(bank)
    from aniso.vectors import load_adapter_directory

    assert shelf is not None
    with show.telling() as progress:
        found, notes = load_adapter_directory(
            encoder.weight_source(), shelf, skip_unfit=skip_unfit, progress=progress
        )
    show.notes(notes)
    return found


def _without(bank: Bank, own: str, leave_out: list[str]) -> Bank:
    from aniso.experiments.settings.setting import others

    names = others(bank.names, own, leave_out)
    if not names:
        raise UsageError("BANK-NAME", "no vector is left to choose from", fix="leave fewer out")
    return bank.only(*names)


def _strategy(
    kind: str,
    encoder: Encoder,
    pictures: Labelled | None,
    budget: str,
    seed: int,
    workers: int,
    gradients: Path | None,
    progress: Any,
) -> Strategy:
    from aniso.data import content_hash
    from aniso.learn import CrossEntropy, selection

    if kind == "random":
        return selection.Random(budget, seed=seed, progress=progress)
    by_gradient: dict[str, Any] = {
        "gradient": selection.WholeGradient,
        "blockwise-gradient": selection.BlockwiseGradient,
        "pursuit": selection.Pursuit,
    }
    if kind not in (*by_gradient, "features"):
        raise UsageError(
            "USAGE", f"there is no strategy '{kind}'", expected=_STRATEGIES, fix="--strategy gradient"
        )
    if pictures is None:
        raise UsageError("USAGE", f"strategy '{kind}' chooses for a task", fix="--task TASK")
    if kind == "features":
        return selection.FeatureSimilarity(encoder, pictures, budget, workers=workers, progress=progress)
    objective = CrossEntropy(pictures) * 1.0
    remembered = None
    if gradients is not None:
        what = {**encoder.identity(), "config": encoder.config_words, "seed": seed}
        what |= {"objective": objective.identity(), "pictures": content_hash(pictures)}
        remembered = selection.GradientCache(gradients, what)
    made: Strategy = by_gradient[kind](
        encoder, objective, budget, seed=seed, workers=workers, remembered=remembered, progress=progress
    )
    return made


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
