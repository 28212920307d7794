"""``aniso verify-removal``: what a negation has left of its target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import checks, options, show


def verify_removal(
    run: Annotated[Path, typer.Argument(help="The directory of a run of fit negation.")],
    related: Annotated[
        list[str] | None,
        typer.Option(
            "--related", help="A data set that should be affected, too, such as other digits; repeatable."
        ),
    ] = None,
    probe_shots: Annotated[
        int, typer.Option("--probe-shots", help="Labelled items of each class for probes.", min=1)
    ] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Seeds the shots.", min=0)] = 0,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    device: options.Device = None,
    json: show.Json = False,
) -> None:
    """Measure what is left of a negated target: by probes, by neighbours, by learning it again."""
    checks.existing_file(run)
    for name in related or ():
        if not (name.startswith("./") and data is not None):
            checks.existing_task(name)
    from aniso.experiments.removal import verify_removal as verify
    from aniso.experiments.result import RunOptions

    with show.item_progress() as progress:
        how = RunOptions(data=data, workers=workers, device=device, progress=progress)
        report = verify(run, related or (), probe_shots, how, seed)
    if json:
        show.as_json(report.content())
        return
    rows = []
    for row in report.rows:
        numbers = (f"{row.chance:.1%}", f"{row.before:.1%}", f"{row.after:.1%}")
        rows.append((row.data, row.role, row.measure, "" if row.shots is None else row.shots, *numbers))
    show.table(("data", "role", "measure", "shots", "chance", "before", "after"), rows)
    for line in report.findings:
        show.line(line)
