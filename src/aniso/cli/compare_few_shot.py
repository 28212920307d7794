"""``aniso compare few-shot``, also without its name: which method is best for a task, and worth its cost?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aniso.cli import checks, options, show
from aniso.cli.compare_output import command_line, print_run, written
from aniso.cli.run_setting import setting_from_options
from aniso.experiments.comparison.candidates import ALSO, RECIPE, parse_also
from aniso.experiments.input_files import check_input_files
from aniso.experiments.schedule_options import ScheduleOptions

if TYPE_CHECKING:
    from aniso.experiments.comparison.choice import Measured
    from aniso.experiments.comparison.comparison import ComparisonResult

_BY = ("auto", "folds", "val")


def few_shot(
    model: Annotated[
        str, typer.Option("--model", help="Base: an open_clip name, a directory, a hub id, or mini.")
    ],
    task: Annotated[str, typer.Option("--task", help="Task: a known name, a folder per class, a table.")],
    bank: Annotated[
        str | None, typer.Option("--bank", help="Task vectors; without them only heads are compared.")
    ] = None,
    shots: Annotated[int, typer.Option("--shots", help="Labelled items of each class.", min=1)] = 16,
    also: Annotated[
        str | None, typer.Option("--also", help=f"Slower methods to compare, too: {','.join(ALSO)}.")
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="Choose by folds of the shots, or by the validation split (val); "
            "auto takes the validation split if it has at least as many items as there are shots.",
        ),
    ] = "auto",
    folds: Annotated[int, typer.Option("--folds", help="Folds of the shots.", min=2)] = 4,
    test: Annotated[
        bool,
        typer.Option("--test", help="Show test accuracies, too; they are never used for choosing."),
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option("--budget", help="Vectors per block that selection keeps; default: a quarter.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seeds shots, folds and training.", min=0)] = 0,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help=f"Default: {RECIPE['epochs']}.", min=1)
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate of coefficients.")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help=f"Default: {RECIPE['batch_size']}.", min=1)
    ] = None,
    min_steps_per_epoch: Annotated[
        int | None,
        typer.Option("--min-steps-per-epoch", help=f"Default: {RECIPE['min_steps_per_epoch']}.", min=1),
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="Weights of the base.")] = None,
    view: Annotated[str, typer.Option("--view", help="Augmentation: few_shot, train or eval.")] = "few_shot",
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", help="A vector to leave out, beside the task's own; repeatable."),
    ] = None,
    allow_fewer_shots: Annotated[
        bool, typer.Option("--allow-fewer-shots", help="Take all items of a class that has fewer.")
    ] = False,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    device: options.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Learn the recommended one, as a run directory; the same command continues it.",
        ),
    ] = None,
    json: show.Json = False,
) -> None:
    """Compare heads, coefficients and both on a task, and recommend one by data that were held out.

    aniso compare addition --help: merge rules and learned coefficients for one model of several tasks.
    """
    checks.one_of("--by", by, _BY)
    chosen_also = parse_also(also)
    given: dict[str, Any] = {"model": model, "task": task, "bank": bank, "shots": shots, "seed": seed}
    given |= {"weights": weights, "view": view, "leave_out": leave_out, "method": "none"}
    given |= {"allow_fewer_shots": allow_fewer_shots}
    setting: Any = setting_from_options(
        "few-shot", {key: value for key, value in given.items() if value not in (None, [])}
    )
    schedule = ScheduleOptions.model_validate(
        {"epochs": epochs, "lr": lr, "batch_size": batch_size, "min_steps_per_epoch": min_steps_per_epoch}
    )
    check_input_files(setting, data)
    from aniso.experiments.comparison.comparison import Comparison, ComparisonOptions
    from aniso.experiments.result import RunOptions
    from aniso.experiments.run_directory import RunDirectory

    if out is not None:
        RunDirectory(out).require_ours()
    how = ComparisonOptions(schedule, by, folds, budget, chosen_also, test)  # type: ignore[arg-type]
    with show.item_progress() as progress:
        run_options = RunOptions(data=data, workers=workers, device=device, progress=progress)
        comparison = Comparison(setting, how, run_options, done=_Printer(), directory=out)
        result = comparison.run()
    show.notes(result.notes)
    if not json:
        _print(result)
    record = None if out is None else written(comparison, result, run_options, out)
    if json:
        show.as_json({**result.content(), "record": None if record is None else record.content()})
    elif record is not None and out is not None:
        print_run(record, RunDirectory(out))
    else:
        show.line(f"to learn it: {command_line(result.chosen.setting, data)} -o RUN")


class _Printer:
    """Prints a line of progress for every candidate."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, where: str, row: Measured) -> None:
        found = "failed" if row.accuracy is None else f"{row.accuracy:.1%} of {len(row.right):,}"
        spent = time.monotonic() - self._begun
        show.progress_line(f"{where}: {row.candidate.label} {found} ({spent:.0f} s)")


def _print(result: ComparisonResult) -> None:
    chosen = result.recommendation.chosen
    rows = []
    for row in result.rows:
        held_out = "" if row.accuracy is None else f"{row.accuracy:.1%} ± {100 * (row.error or 0):.1f}"
        held_out = "failed" if row.failure else held_out
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        test = "" if row.test_accuracy is None else f"{row.test_accuracy:.1%}"
        mark = "*" if row.candidate is chosen.candidate else ""
        trained = row.trainable if seconds else ""
        score = "" if row.accuracy is None else f"{100 * row.score:.1f}"
        rows.append((mark, row.candidate.label, held_out, score, seconds, trained, test))
    columns = ("", "method", "held-out accuracy", "score", "seconds", "numbers learned", "test (not used)")
    kept = [i for i in range(len(columns)) if any(row[i] != "" for row in rows)]
    title = f"{result.task}, {result.shots} shots; chosen by {result.chosen_by}"
    show.line(title)
    if any(row.seconds is not None for row in result.rows):
        show.table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows])
    show.line(f"recommended: {chosen.candidate.label}")
    show.line(f"reason: {result.recommendation.reason}")
