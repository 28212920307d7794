"""``aniso analyse``: similarity, disentanglement, significance, distributions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aniso.cli import checks, options, show
from aniso.cli.analysis_output import Figure, Overwrite, matrix_table, require_figure, write_figure
from aniso.errors import UsageError, printable

if TYPE_CHECKING:
    from aniso.compose import Composition
    from aniso.data import Task
    from aniso.json_value import JsonObject
    from aniso.learn.analysis import FeatureDistribution, LabelledMatrix, Significance
    from aniso.models import Encoder
    from aniso.vectors import Bank

app = typer.Typer(
    help="Analyse a bank and its tasks: similarity, disentanglement, significance, distributions.",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Option(help="The base: mini, an open_clip name, a hub id or a directory.")]
Tasks = Annotated[
    list[str],
    typer.Option("--task", help="TASK, or NAME=TASK for the task of vector NAME; two or more, repeated."),
]
Weights = Annotated[str | None, typer.Option(help="Weights of the model, if its name does not imply them.")]
Split = Annotated[str, typer.Option(help="train, val or test.")]


@app.command()
def similarity(
    bank: options.Bank,
    by: Annotated[str | None, typer.Option(help="kind: also one matrix for each kind of block.")] = None,
    out: Figure = None,
    overwrite: Overwrite = False,
    json: show.Json = False,
) -> None:
    """Show the cosine similarity of all pairs of a bank's vectors, over all blocks or by kind of block."""
    if by not in (None, "kind"):
        raise UsageError("USAGE", f"invalid value '{printable(by)}' for --by: choose kind", fix="--by kind")
    checks.existing_bank(bank)
    require_figure(out, overwrite)
    from aniso.learn.analysis import cosine_similarity

    opened = options.open_bank(bank)
    with show.progress("reading", sum(opened.block_bytes(b.name) for b in opened.layout.blocks)) as advance:
        found = cosine_similarity(opened, progress=advance)
    matrices = {"all blocks": found.whole, **(found.by_kind if by else {})}
    if out is not None:
        from aniso.report.figures import MatrixPanel, MatrixStyle, matrix_map

        panels = [
            MatrixPanel(m.values, m.rows, m.columns, title if by else "") for title, m in matrices.items()
        ]
        limit = max(matrix.largest_off_diagonal for matrix in matrices.values()) or 1.0
        style = MatrixStyle("cosine", -limit, limit)
        write_figure(out, overwrite, lambda kind: matrix_map(panels, style, "Cosine similarity", kind=kind))
    if json:
        content: JsonObject = {"vectors": list(opened), **_cosines(found.whole)}
        if by:
            content["by_kind"] = {kind: _cosines(own) for kind, own in found.by_kind.items()}
        show.as_json({**content, "figure": None if out is None else str(out)})
        return
    for title, matrix in matrices.items():
        matrix_table("vector", matrix, title=f"cosine, {title}")
        if (mean := matrix.mean_off_diagonal) is not None:
            show.line(f"mean over pairs of different vectors: {mean:.3f}")
    _line_on_figure(out)


def _cosines(matrix: LabelledMatrix) -> JsonObject:
    return {"cosine": [list(row) for row in matrix.values], "mean": matrix.mean_off_diagonal}


@app.command()
def disentanglement(
    model: Model,
    bank: options.Bank,
    task: Tasks,
    coefficients: Annotated[
        Path | None, typer.Option(help="Scale vectors by these coefficients, such as those of task addition.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="One coefficient for all vectors; default 1.")] = None,
    split: Split = "test",
    weights: Weights = None,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    out: Figure = None,
    overwrite: Overwrite = False,
    json: show.Json = False,
) -> None:
    """Show the share of each task's images whose prediction changes when another task's vector is added.

    Row 1, column 2: images of task 1 whose prediction differs between base + vector 1 and base + vector 1 +
    vector 2. Low errors mean that the vectors can be added without interference.
    """
    if coefficients is not None and scale is not None:
        raise UsageError("USAGE", "give --coefficients or --scale, not both", fix="leave out --scale")
    _require_finite(scale)
    _require_tasks(task)
    checks.one_of("--split", split, checks.SPLITS)
    checks.existing_file(coefficients)
    checks.existing_bank(bank)
    require_figure(out, overwrite)
    from aniso.experiments.run_files import COEFFICIENTS, file_of
    from aniso.learn.analysis import disentanglement_matrix
    from aniso.models import load_model

    tasks = _loaded(task, data, split)
    opened = options.open_bank(bank)
    opened.only(*tasks)  # a task without a vector is an error before the model is loaded
    encoder = load_model(model, weights)
    coefficients = coefficients and file_of(coefficients, COEFFICIENTS)
    composition = _composition(encoder, opened, tuple(tasks), coefficients, scale)
    splits = {name: own.split(split) for name, own in tasks.items()}
    with show.item_progress() as progress:
        found = disentanglement_matrix(encoder, composition, splits, workers=workers, progress=progress)
    what = coefficients.name if coefficients else f"coefficient {1.0 if scale is None else scale:g}"
    if out is not None:
        from aniso.report.figures import MatrixPanel, MatrixStyle, matrix_map

        panel = MatrixPanel(found.values, found.rows, found.columns)
        style = MatrixStyle("changed predictions, %", 0.0, 1.0, "images of", "added vector", percent=True)
        title = f"Disentanglement error, {what}: mean {found.mean_off_diagonal:.1%}"
        write_figure(out, overwrite, lambda kind: matrix_map([panel], style, title, kind=kind))
    if json:
        show.as_json(
            {
                "model": encoder.name,
                "split": split,
                "coefficients": None if coefficients is None else str(coefficients),
                "scale": None if coefficients else 1.0 if scale is None else scale,
                "tasks": list(tasks),
                "images": {name: len(own) for name, own in splits.items()},
                "error": found.values,
                "mean": found.mean_off_diagonal,
                "figure": None if out is None else str(out),
            }
        )
        return
    title = f"changed predictions on {split} images, by added vector ({what})"
    matrix_table("task", found, percent=True, title=title)
    show.line(f"mean over {len(tasks) * (len(tasks) - 1)} ordered pairs: {found.mean_off_diagonal:.1%}")
    _line_on_figure(out)


@app.command()
def significance(
    model: Model,
    bank: options.Bank,
    task: Annotated[
        list[str], typer.Option("--task", help="TASK, or NAME=TASK for the task of vector NAME; repeatable.")
    ],
    scale: Annotated[float, typer.Option(help="The coefficient of each single vector.")] = 1.0,
    split: Split = "test",
    weights: Weights = None,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    out: Figure = None,
    overwrite: Overwrite = False,
    json: show.Json = False,
) -> None:
    """Show how much of fine-tuning's gain on each task every single vector of a bank gives.

    A cell is (accuracy with the vector - zero-shot) / (accuracy with the task's own vector - zero-shot),
    where the own vector has coefficient 1. The paper learns coefficients of each single vector from 16 shots;
    this command uses one coefficient, --scale, and does not learn any.
    """
    _require_finite(scale)
    _require_tasks(task, at_least=1)
    checks.one_of("--split", split, checks.SPLITS)
    checks.existing_bank(bank)
    require_figure(out, overwrite)
    from aniso.learn.analysis import vector_significance
    from aniso.models import load_model

    tasks = _loaded(task, data, split)
    opened = options.open_bank(bank)
    opened.only(*tasks)
    encoder = load_model(model, weights)
    splits = {name: own.split(split) for name, own in tasks.items()}
    with show.item_progress() as progress:
        found = vector_significance(encoder, opened, splits, scale=scale, workers=workers, progress=progress)
    show.notes(found.notes)
    if out is not None:
        _draw_significance(found, scale, out, overwrite)
    if json:
        show.as_json(
            {
                "model": encoder.name,
                "split": split,
                "scale": scale,
                "tasks": list(tasks),
                "vectors": list(opened),
                "significance": found.matrix.values,
                "mean": found.matrix.column_means,
                "accuracy": found.accuracy.values,
                "zero_shot": found.zero_shot,
                "fine_tuned": found.tuned,
                "notes": list(found.notes),
                "figure": None if out is None else str(out),
            }
        )
        return
    title = f"relative significance of single vectors on {split} images, % (coefficient {scale:g})"
    before = [(found.zero_shot[name], found.tuned[name]) for name in tasks]
    leading = [(f"{zero:.1%}", f"{tuned:.1%}") for zero, tuned in before]
    matrix_table(
        "task", found.matrix, percent=True, title=title, means=True,
        leading=(("zero-shot", "own vector"), leading),
    )  # fmt: skip
    _line_on_figure(out)


def _draw_significance(found: Significance, scale: float, out: Path, overwrite: bool) -> None:
    from aniso.report.figures import MatrixPanel, MatrixStyle, matrix_map

    values = (*found.matrix.values, found.matrix.column_means)
    panel = MatrixPanel(values, (*found.matrix.rows, "mean"), found.matrix.columns, has_mean=True)
    style = MatrixStyle("relative significance, %", -1.0, 1.0, "task", "vector", percent=True)
    title = f"Relative significance, coefficient {scale:g}"
    write_figure(out, overwrite, lambda kind: matrix_map([panel], style, title, kind=kind))


@app.command()
def distributions(
    model: Annotated[
        str | None, typer.Option(help="The model that computes features: mini, a name or a directory.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="TASK or NAME=TASK; may be repeated.")
    ] = None,
    bank: Annotated[
        Path | None,
        typer.Option(help="Also show the mean features that aniso bank features stored in this bank."),
    ] = None,
    split: Split = "train",
    deviations: Annotated[
        float, typer.Option(help="Size of ellipses in standard deviations.", min=0.0)
    ] = 1.0,
    weights: Weights = None,
    data: options.DataRoot = None,
    workers: options.Workers = 0,
    out: Figure = None,
    overwrite: Overwrite = False,
    json: show.Json = False,
) -> None:
    """Show tasks in the plane of the first two principal components of their mean features.

    Tasks of --task have ellipses from the covariance of their images' features; a bank stores means only.
    """
    if bank is None or task:
        if model is None:
            raise UsageError("USAGE", "features of tasks need a model", fix="--model MODEL, or --bank alone")
        _require_tasks(task or [], at_least=2 if bank is None else 1)
    checks.one_of("--split", split, checks.SPLITS)
    checks.existing_bank(bank)
    require_figure(out, overwrite)
    from aniso.learn.analysis import project_distributions

    known = {own.name: own for own in _stored(bank)} if bank is not None else {}
    if model is not None and task:
        known |= _computed(model, weights, _loaded(task, data, split), split, workers, bank)
    found = project_distributions(list(known.values()))
    if out is not None:
        from aniso.report.figures import FeatureEllipse, feature_ellipses

        drawn = [FeatureEllipse(own.name, own.mean, own.covariance) for own in found.tasks]
        title = f"Mean features of tasks; ellipses: {deviations:g} x the standard deviation"
        write_figure(
            out,
            overwrite,
            lambda kind: feature_ellipses(
                drawn, found.explained, title if task else "Mean features of tasks", deviations=deviations,
                kind=kind,
            ),
        )  # fmt: skip
    if json:
        rows = [
            {"name": own.name, "mean": own.mean, "covariance": own.covariance, "images": own.images}
            for own in found.tasks
        ]
        figure = None if out is None else str(out)
        show.as_json({"tasks": rows, "explained_variance": found.explained, "figure": figure})
        return
    table = []
    for own in found.tasks:
        spread = [show.UNDEFINED] * 2
        if own.covariance is not None:
            spread = [f"{max(0.0, own.covariance[i][i]) ** 0.5:.3f}" for i in (0, 1)]
        images = show.UNDEFINED if own.images is None else f"{own.images:,}"
        table.append((own.name, images, *(f"{x:.3f}" for x in own.mean), *spread))
    show.table(("task", "images", "PC1", "PC2", "std of PC1", "std of PC2"), table)
    first, second = found.explained
    show.line(
        f"explained variance of the {len(table)} means: PC1 {first:.1%}, PC2 {second:.1%}, "
        f"together {first + second:.1%}"
    )
    _line_on_figure(out)


def _stored(bank: Path) -> list[FeatureDistribution]:
    """Return the mean features that a bank stores."""
    from aniso.learn.analysis import FeatureDistribution

    features = options.open_bank(bank).features
    if not features:
        raise UsageError(
            "BANK-FEATURES",
            f"the bank '{printable(bank)}' stores no features",
            fix=f"aniso bank features '{printable(bank)}' --model MODEL --task TASK …",
        )
    return [FeatureDistribution(name, mean) for name, mean in features.items()]


def _computed(
    model: str, weights: str | None, tasks: dict[str, Task], split: str, workers: int, bank: Path | None
) -> dict[str, FeatureDistribution]:
    from aniso.learn.analysis import feature_distribution
    from aniso.models import load_model

    encoder = load_model(model, weights)
    if bank is not None:
        options.open_bank(bank).over(encoder.weight_source())  # other models have other features
    with show.item_progress() as progress:
        return {
            name: feature_distribution(encoder, own.split(split), name, workers=workers, progress=progress)
            for name, own in tasks.items()
        }


def _composition(
    encoder: Encoder, bank: Bank, names: tuple[str, ...], coefficients: Path | None, scale: float | None
) -> Composition:
    from aniso.compose import Composition, Partition
    from aniso.experiments.banks import load_coefficients
    from aniso.learn.starts import constant

    if coefficients is not None:
        return Composition.of(encoder, *load_coefficients(bank, coefficients))
    return constant(bank.only(*names), 1 if scale is None else scale, Partition.whole()).composition(encoder)


def _require_finite(scale: float | None) -> None:
    if scale is not None and not math.isfinite(scale):
        raise UsageError("USAGE", f"invalid value '{scale}' for --scale: give a number", fix="--scale 1")


def _require_tasks(items: list[str], at_least: int = 2) -> None:
    """Check the tasks before torch is imported."""
    if len(items) < at_least:
        count = "two tasks or more" if at_least == 2 else "a task"
        raise UsageError(
            "USAGE",
            f"this analysis compares {count}",
            found=printable(", ".join(items)) or "no task",
            fix="--task TASK1 --task TASK2",
        )
    for _, ref in map(_named, items):
        checks.existing_task(ref)


def _named(item: str) -> tuple[str, str]:
    """Split NAME=TASK; an equals sign may also be part of a path."""
    name, equals, ref = item.partition("=")
    if not equals or "/" in name or Path(item).exists():
        return "", item
    return name, ref


def _loaded(items: list[str], data: Path | None, split: str) -> dict[str, Task]:
    """Load tasks by the names of their vectors; a missing split is an error now, not after an hour."""
    from aniso.data import load_task

    out: dict[str, Task] = {}
    for item in items:
        name, ref = _named(item)
        with show.item_progress() as progress:
            task = load_task(ref, data, progress=progress)
        task.split(split)
        name = name or task.name
        if name in out:
            raise UsageError(
                "USAGE", f"task '{printable(name)}' is given twice", fix="--task NAME=TASK for another name"
            )
        out[name] = task
        show.notes(show.note_of(name, note) for note in task.notes)
    return out


def _line_on_figure(out: Path | None) -> None:
    if out is not None:
        show.line(f"figure written to {out}")
