"""What comparisons of all settings print and write once there is a winner."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aniso.cli import show
from aniso.cli.setting_options import generated_options

if TYPE_CHECKING:
    from aniso.experiments.comparison.winner import AnyComparison, AnyResult
    from aniso.experiments.result import RunOptions
    from aniso.experiments.settings import Setting
    from aniso.records import Record


def written(comparison: AnyComparison, result: AnyResult, run_options: RunOptions, out: Path) -> Record:
    """Run the winner in a directory, and return its record."""
    from aniso.experiments.comparison.winner import write_winner

    with show.item_progress() as progress:
        record, notes = write_winner(comparison, result, run_options, out, progress)
    show.notes(notes)
    return record


def print_run(record: Record, run: Any) -> None:
    """Print the test accuracy of the winner's run, and its files."""
    for name, score in record.metrics.accuracy.items():
        low, high = score.interval or (0.0, 1.0)
        show.line(
            f"{name}, test: {score.accuracy:.1%} ({low:.1%} to {high:.1%}), which was not used for choosing"
        )
    show.line(f"wrote {run.path}: {', '.join(run.outputs())}")


def command_line(setting: Setting, data: Path | None = None) -> str:
    """Return the ``aniso fit`` command of a setting, without options that have their default."""
    method = setting.method
    given = setting.model_dump(exclude_defaults=True, exclude={"method", "compare"})
    given |= {"method": method.name} if method.name != "coefficients" else {}
    own = method.model_dump(exclude_defaults=True)
    given |= {**own, **(own.pop("schedule", None) or {})}
    given.pop("schedule", None)
    known, words = generated_options(setting.name), ["aniso", "fit", setting.name]
    for name, value in given.items():
        flag = known[name].flags[-1].split("/")[0]
        values = value if isinstance(value, list | tuple) else [value]
        for one in values:
            words += [flag] if one is True else [flag, shlex.quote(str(one))]
    words += [] if data is None else ["--data", shlex.quote(str(data))]
    return " ".join(words)
