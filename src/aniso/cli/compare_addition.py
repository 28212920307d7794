"""``aniso compare addition``: which merge rule, or which learned coefficients, for several tasks at once?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aniso.cli import checks, show
from aniso.cli.compare_output import command_line, print_run, written
from aniso.cli.run_options import RuntimeOptions
from aniso.cli.run_setting import setting_from_options, taken
from aniso.cli.setting_commands import generated_command
from aniso.experiments.comparison.addition_candidates import LEARNED, AdditionComparisonOptions
from aniso.experiments.input_files import check_input_files
from aniso.experiments.options import OptionInfo, Options, option, options_of
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.settings.addition import Addition

if TYPE_CHECKING:
    from aniso.experiments.comparison.addition import AdditionResult
    from aniso.experiments.comparison.addition_choice import AdditionRow

ADDITION = "addition"
_SETTING = (
    *("model", "tasks", "bank", "weights", "split_seed", "on_bad_image", "held_out"),
    *("seed", "linearised", "norm"),
)
_RUNTIME = ("data", "workers", "device", "memory")


class CompareOutput(Options):
    """What the command writes and prints."""

    out: Path | None = option(
        None,
        help="Learn the recommended one, as a run directory; the same command continues it.",
        group="Output",
        flags=("-o", "--out"),
    )
    json_: bool = option(False, help="Print JSON for programs.", group="Output", flags=("--json",))


def addition_command() -> Any:
    """Return the command; its options are those of the setting, the comparison and the optimiser."""
    return generated_command(
        ADDITION,
        "Compare merge rules and learned coefficients for one model of several tasks, and recommend one.",
        _options(),
        _compare,
        (Addition, LEARNED),
    )


def _options() -> dict[str, OptionInfo]:
    setting, runtime = options_of(Addition), options_of(RuntimeOptions)
    found = {name: setting[name] for name in _SETTING}
    found |= options_of(AdditionComparisonOptions) | options_of(ScheduleOptions)
    return found | {name: runtime[name] for name in _RUNTIME} | options_of(CompareOutput)


def _compare(values: dict[str, Any]) -> None:
    runtime, output = taken(RuntimeOptions, values), taken(CompareOutput, values)
    how = taken(AdditionComparisonOptions, values)
    _ = how.chosen
    setting: Any = setting_from_options(ADDITION, values)
    checks.existing_bank(setting.bank)
    check_input_files(setting, runtime.data)
    from aniso.compose import Runtime
    from aniso.experiments.comparison.addition import AdditionComparison
    from aniso.experiments.result import RunOptions
    from aniso.experiments.run_directory import RunDirectory

    out = output.out
    if out is not None:
        RunDirectory(out).require_ours()
    with show.item_progress() as progress:
        run_options = RunOptions(
            data=runtime.data,
            workers=runtime.workers,
            device=runtime.device,
            runtime=Runtime(memory=runtime.memory, keep_freed=True),
            progress=progress,
        )
        comparison = AdditionComparison(setting, how, run_options, done=_Printer(), directory=out)
        result = comparison.run()
    show.notes(result.notes)
    if not output.json_:
        _print(result)
    record = None if out is None else written(comparison, result, run_options, out)
    if output.json_:
        show.as_json({**result.content(), "record": None if record is None else record.content()})
    elif record is not None and out is not None:
        print_run(record, RunDirectory(out))
    else:
        show.line(f"to learn it: {command_line(result.chosen.setting, runtime.data)} -o RUN")


class _Printer:
    """Prints a line of progress for every candidate."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, row: AdditionRow) -> None:
        found = f"{row.share:.1%}" if row.measured else "failed"
        show.progress_line(f"{row.candidate.label} {found} ({time.monotonic() - self._begun:.0f} s)")


def _print(result: AdditionResult) -> None:
    chosen = result.recommendation.chosen
    rows = []
    for row in result.rows:
        share = f"{row.share:.1%} ± {100 * row.error:.1f}" if row.measured else "failed"
        relative = f"{100 * row.score:.1f}" if row.measured else ""
        scale = "" if row.scale is None else f"{row.scale:g}"
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        mark = "*" if row.candidate is chosen.candidate else ""
        numbers = (scale, seconds, row.trainable)
        rows.append((mark, row.candidate.label, row.candidate.data, share, relative, *numbers))
    show.line(f"{', '.join(result.tasks)}: {result.chosen_by}")
    columns = ("", "method", "data", result.measure, "relative", "scale", "seconds", "numbers learned")
    show.table(columns, rows)
    show.line("data: what the method needs beside the vectors; relative: % of the tasks' own vectors")
    show.line(f"recommended: {chosen.candidate.label}")
    show.line(f"reason: {result.recommendation.reason}")
