"""How a run is executed, what a method plans and produces, and what a run results in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from aniso.compose import Coefficients, Composition, MergedAdapter, Plan, Runtime
from aniso.experiments.content import Content
from aniso.learn import Adapter, CalibratedModel, Fit, ItemFeatures
from aniso.learn.heads import Head
from aniso.progress import ProgressCallback
from aniso.records import EpochRow, Inputs, Metrics, SelectionSummary
from aniso.weights import TensorMap

if TYPE_CHECKING:
    from aniso.classes import ClassList
    from aniso.experiments.evaluation import MeasuredPredictions
    from aniso.experiments.session import Session


@final
@dataclass(frozen=True)
class RunOptions:
    """How a run is executed; its result does not depend on it."""

    data: Path | None = None
    """Directory of known data sets, and of tasks whose name begins with ./"""
    workers: int = 0
    device: str | None = None
    """Default: the GPU if there is one."""
    runtime: Runtime = field(default_factory=Runtime)
    mesh: DeviceMesh | None = None
    """The processes that share the run, if there are several."""
    directory: Path | None = None
    """Where checkpoints are written."""
    resume: bool = False
    allow_env_change: bool = False
    progress: ProgressCallback | None = None
    epoch_done: Callable[[EpochRow], None] | None = None
    coefficients: Path | None = None
    """Directory of coefficients that the same settings without a head have learned."""
    features: ItemFeatures | None = None
    """Features that several sessions share."""


@final
@dataclass(frozen=True)
class MethodPlan:
    """What a method will train, in numbers."""

    trainable: int | None = None
    vectors: tuple[str, ...] | None = None
    memory: Plan | None = None
    selection: SelectionSummary | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of_composition(cls, session: Session, composition: Composition) -> MethodPlan:
        """Return the plan of a composition whose coefficients are learned or searched."""
        return cls(
            composition.values.numel(),
            tuple(composition.bank.names),
            composition.plan,
            session.selection_summary,
            tuple(composition.index.notes),
        )


@final
@dataclass(frozen=True)
class RunPlan:
    """What a run will read, train, evaluate and write, in numbers."""

    method: str
    trained: MethodPlan
    evaluated_on: Mapping[str, int]
    unit: str
    """What is counted: images, or rows."""
    learned_from: Mapping[str, int]
    chosen_by: Mapping[str, int]
    steps: int | None = None
    head: str | None = None


@final
@dataclass(frozen=True)
class MethodResult:
    """What a method produced: a model for each task, and the parts that hold what was learned."""

    model_for: Callable[[str], nn.Module]
    """The model for a task, by the task's name."""
    metrics: Metrics = field(default_factory=Metrics)
    coefficients: Coefficients | None = None
    weights: TensorMap | None = None
    adapter: Adapter | MergedAdapter | None = None
    head: Head | None = None
    fit: Fit | None = None
    calibrated: CalibratedModel | None = None
    """The calibrated model, if ``coefficients`` are those of its vector alone."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how it was made."""
        calibrated = self.calibrated.notes if self.calibrated is not None else ()
        return (*(self.fit.notes if self.fit is not None else ()), *calibrated)

    def completed(self, inputs: Inputs) -> Inputs:
        """Return what a run was made from, with how the calibrated vector was made."""
        if self.calibrated is None:
            return inputs
        vector = self.calibrated.vector
        return inputs.with_values(merged={**inputs.merged, vector.name: vector.provenance.formula})


@final
@dataclass(frozen=True)
class RunResult:
    """What a run results in: metrics, what was learned, and what it was made from."""

    metrics: Metrics
    inputs: Inputs
    names: Mapping[str, str]
    """What records call the data that the setting names by their place on disk."""
    coefficients: Coefficients | None = None
    weights: TensorMap | None = None
    """All weights of the model, if they were trained."""
    adapter: Adapter | MergedAdapter | None = None
    """An adapter, if one was trained or composed."""
    head: Head | None = None
    head_of: Mapping[str, str] = field(default_factory=dict)
    """Identity of the features that the head was learned on."""
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    content: Content | None = None
    """The files that it was made from."""
    predictions: tuple[MeasuredPredictions, ...] = ()
    """The predictions that metrics were computed from."""
    classes: Mapping[str, ClassList] = field(default_factory=dict)
    """The classes that are predicted, by the name of the data."""
