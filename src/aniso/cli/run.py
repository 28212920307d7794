"""``aniso run``: run an experiment from its spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import options, show
from aniso.errors import CellsError, InputError, UsageError, printable

if TYPE_CHECKING:
    from aniso.experiments.spec import Cell


def run(
    spec: Annotated[Path, typer.Argument(help="A spec: a YAML file.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Directory of records; default: beside the spec."),
    ] = None,
    data: options.DataRoot = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE replaces a value of the spec; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run only cells with this label; may be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Cells run at the same time.", min=1)] = 1,
    workers: options.Workers = 0,
    device: options.Device = None,
    engine: Annotated[
        str, typer.Option(help="Where cells run: local, ray (extra 'ray') or slurm (extra 'slurm').")
    ] = "local",
    engine_option: Annotated[
        list[str] | None,
        typer.Option("--engine-option", help="KEY=VALUE, such as gpus=1 or partition=long; may be repeated."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Run one of N parts of the cells, such as 2/8; for job arrays."),
    ] = None,
    claim: Annotated[
        bool,
        typer.Option(
            "--claim", help="Share the cells with other processes or machines that run the same command."
        ),
    ] = False,
    lease: Annotated[
        float,
        typer.Option(help="With --claim: seconds until the cell of a worker that died is taken over.", min=1),
    ] = 600,
    timeout: Annotated[float | None, typer.Option(help="Time limit per cell, in seconds.", min=1)] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again.")] = False,
    rerun_changed: Annotated[
        bool,
        typer.Option("--rerun-changed", help="Run cells again whose images or texts have changed."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List cells and status; run nothing.")] = False,
    json: show.Json = False,
) -> None:
    """Run every cell of an experiment that has no record yet; each writes one JSON record."""
    from aniso.addresses import Shard
    from aniso.experiments.claims import Claims
    from aniso.experiments.strict_yaml import read_yaml, validated, with_values
    from aniso.registry import ENGINES

    ENGINES.require(engine, option="--engine")
    own = Shard.parse(shard or "1/1")
    if claim and engine != "local":
        raise UsageError(
            "USAGE",
            f"--claim shares cells between workers, which --engine {engine} does itself",
            fix="leave out one of the two",
        )
    if rerun_changed and (claim or shard):
        raise UsageError(
            "USAGE",
            "--rerun-changed replaces records, which workers that share them would see as done",
            fix="run the changed cells again without --claim and --shard",
        )
    document = with_values(read_yaml(spec), set_ or [])
    from aniso.experiments import runner
    from aniso.experiments.engines import GridRun, make_engine
    from aniso.experiments.grid import Grid
    from aniso.experiments.spec import Experiment, cells
    from aniso.experiments.worker import CellOptions
    from aniso.registry import SETTINGS

    experiment = validated(Experiment, document)
    bases = (experiment.base, *(variant.base for variant in experiment.variants))
    used = {str(base.get("setting")) for base in bases}
    show.notes(SETTINGS.alias_note(name) for name in sorted(used) if name in SETTINGS.aliases)
    found = cells(experiment, document)
    chosen = [cell for cell in _chosen(found, only or []) if own.has(cell.setting.id)]
    grid = Grid(chosen, out or spec.parent / "records")
    compared = grid.compare(data)
    changed = compared.files
    if compared.missing:
        show.notes([f"{len(compared.missing)} recorded cells were not compared: their data are missing"])
    before = ["changed" if cell.setting.id in changed else grid.status(cell) for cell in chosen]
    if dry_run:
        _print(chosen, before, json)
        return
    if changed and not rerun_changed:
        raise _changed(chosen, changed)
    wanted = {"missing", "changed", *(["failed"] if retry_failed else [])}
    todo = sum(status in wanted for status in before)
    done = 0

    def happened(cell: Cell, what: str, seconds: float) -> None:
        nonlocal done
        done += 1
        show.progress_line(f"[{done}/{todo}] {_name(cell)}: {what} ({seconds:.0f} s)")

    def waiting(count: int) -> None:
        show.progress_line(f"waiting for {count} cells of other workers")

    claims = Claims(grid.directory, lease) if claim else None
    count = runner.run(
        grid,
        GridRun(CellOptions(data, workers, device), jobs, timeout, happened),
        engine=make_engine(engine, engine_option or ()),
        retry_failed=retry_failed,
        again=changed,
        sharing=runner.Sharing(claims, waiting) if claim or shard else None,
    )
    if json:
        show.as_json({"cells": len(chosen), **count, "records": str(grid.directory)})
    else:
        show.line(f"{len(chosen)} cells: {', '.join(f'{n} {what}' for what, n in count.items() if n)}")
    if count["failed"] or count["missing"]:
        raise CellsError(
            "CELLS",
            f"{count['failed']} of {len(chosen)} cells failed, {count['missing']} are missing",
            found=[_name(cell) for cell in chosen if grid.status(cell) == "failed"][:8],
            fix=f"look at *.failed.json in '{grid.directory}', then run again with --retry-failed",
        )


def _changed(cells: list[Cell], changed: Mapping[str, list[str]]) -> InputError:
    return InputError(
        "RUN-CHANGED",
        f"{len(changed)} of {len(cells)} cells were recorded with other images or texts",
        changed=list(dict.fromkeys(file for files in changed.values() for file in files))[:8],
        cells=[_name(cell) for cell in cells if cell.setting.id in changed][:8],
        fix="restore these files, or replace the records with --rerun-changed",
    )


def _chosen(cells: list[Cell], only: list[str]) -> list[Cell]:
    labels = list(dict.fromkeys(cell.label for cell in cells))
    unknown = [label for label in only if label not in labels]
    if unknown:
        raise UsageError(
            "USAGE",
            f"there is no variant '{printable(unknown[0])}'",
            expected=", ".join(labels),
            fix="name one of these with --only",
        )
    return [cell for cell in cells if not only or cell.label in only]


def _name(cell: Cell) -> str:
    spec = cell.setting.spec()
    words = [str(spec[key]) for key in ("task", "target") if key in spec]
    words += [f"{key} {spec[key]}" for key in ("shots", "fraction", "seed") if key in spec]
    return f"{cell.label}, {', '.join(words)}"


def _print(chosen: list[Cell], status: Sequence[str], json: bool) -> None:
    rows = [(cell.label, _name(cell), cell.setting.id[:8], s) for cell, s in zip(chosen, status, strict=True)]
    if json:
        show.as_json([{"label": a, "cell": b, "id": c, "status": d} for a, b, c, d in rows])
        return
    show.table(("cell", "id", "status"), [row[1:] for row in rows])
    show.line(f"{len(rows)} cells, {status.count('recorded')} recorded")
