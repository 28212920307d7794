"""Analyses of recipes: disentanglement errors, relative significance and distributions of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aniso.analysis_records import AnalysisRecord, EllipseRecord, MatrixRecord
from aniso.experiments.grid import Grid
from aniso.experiments.paper.recipe import Recipe
from aniso.experiments.paper.smoke import smoke_tasks
from aniso.experiments.paper.workspace import Workspace
from aniso.experiments.spec import Cell
from aniso.experiments.worker import CellOptions
from aniso.records import Record

if TYPE_CHECKING:
    from aniso.compose import Composition
    from aniso.experiments.session import Session


def run_analysis(
    recipe: Recipe, place: Workspace, grids: Sequence[Grid], options: CellOptions
) -> AnalysisRecord:
    """Compute the analysis of a recipe from its recorded cells."""
    pairs = [(cell, record) for grid in grids for cell in grid.cells if (record := grid.record(cell))]
    if recipe.entry.analysis == "distributions":
        return _distributions(recipe, place, options)
    if recipe.entry.analysis == "significance":
        return _significance(place, [record for _, record in pairs])
    directories = {cell.setting.id: grid.directory for grid in grids for cell in grid.cells}
    matrices = []
    for cell, record in pairs:
        session = _session(cell, options)
        composition = _composition(session, record, directories[cell.setting.id])
        matrices.append(_disentanglement(cell.label, session, composition, options))
    return AnalysisRecord(analysis="disentanglement", model=place.model, matrices=tuple(matrices))


def _session(cell: Cell, options: CellOptions) -> Session:
    from aniso.experiments.result import RunOptions
    from aniso.experiments.session import Session

    how = RunOptions(data=options.data, workers=options.workers, device=options.device)
    return Session(cell.setting, how)


def _composition(session: Session, record: Record, directory: object) -> Composition:
    """Return the composition whose coefficients a cell has left beside its record."""
    from pathlib import Path

    from aniso.compose import Coefficients, Composition, Linearised
    from aniso.experiments.banks import coefficients_file

    file = Path(str(directory)) / "coefficients" / coefficients_file(session.setting, record.inputs)
    base = Linearised(session.encoder) if session.setting.is_linearised else session.model
    return Composition.of(base, session.bank, Coefficients.load(file).for_bank(session.bank))


def _disentanglement(
    label: str, session: Session, composition: Composition, options: CellOptions
) -> MatrixRecord:
    from aniso.learn.analysis import disentanglement_matrix

    _ = session.problem  # loads the tasks
    splits = {task.name: task.split("test") for task in session.tasks.values()}
    found = disentanglement_matrix(session.encoder, composition, splits, workers=options.workers)
    return MatrixRecord(title=label, rows=found.rows, columns=found.columns, values=found.values)


def _significance(place: Workspace, records: Sequence[Record]) -> AnalysisRecord:
    """Share of fine-tuning's gain that a single vector gives, tasks by vectors."""
    from aniso.learn.analysis import relative_significance

    zero: dict[str, float] = {}
    tuned: dict[str, float] = {}
    single: dict[tuple[str, str], float] = {}
    for record in records:
        (task,) = record.measured
        only = record.spec.model_dump().get("only") or ()
        if only:
            single[task, str(only[0])] = record.accuracy(task)
        elif record.spec.method == "vector":
            tuned[task] = record.accuracy(task)
        else:
            zero[task] = record.accuracy(task)
    rows = tuple(dict.fromkeys(task for task, _ in single))
    columns = tuple(dict.fromkeys(vector for _, vector in single))
    notes = tuple(
        f"{task}: undefined, since fine-tuning does not change the accuracy"
        for task in rows
        if task in zero and zero[task] == tuned.get(task)
    )

    def share(task: str, vector: str) -> float | None:
        known = task in zero and task in tuned and (task, vector) in single
        if not known or tuned[task] == zero[task]:
            return None
        return relative_significance(single[task, vector], zero[task], tuned[task])

    values = tuple(tuple(share(task, vector) for vector in columns) for task in rows)
    matrix = MatrixRecord(title="", rows=rows, columns=columns, values=values)
    return AnalysisRecord(analysis="significance", model=place.model, matrices=(matrix,), notes=notes)


def _distributions(recipe: Recipe, place: Workspace, options: CellOptions) -> AnalysisRecord:
    from aniso.data import load_task
    from aniso.learn.analysis import feature_distribution, project_distributions
    from aniso.models import load_model

    base = place.setup.base()
    weights = base.get("weights")
    encoder = load_model(str(base["model"]), None if weights is None else str(weights))
    if options.device is not None:
        encoder = encoder.to(options.device)
    names = smoke_tasks(recipe.file.tasks) if place.smoke else recipe.file.tasks
    found = []
    for name in names:
        ref = str(place.smoke_data / name) if place.smoke else name
        split = load_task(ref, options.data).split("train")
        found.append(feature_distribution(encoder, split, name, workers=options.workers))
    projected = project_distributions(found)
    ellipses = [
        EllipseRecord(name=own.name, mean=own.mean, covariance=own.covariance, images=own.images)
        for own in projected.tasks
    ]
    return AnalysisRecord(
        analysis="distributions",
        model=place.model,
        ellipses=tuple(ellipses),
        explained=projected.explained,
    )
