"""What work needs to know beside its setting, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from aniso.compose import Coefficients, MergedAdapter, Runtime
from aniso.experiments.content import Content
from aniso.learn import EpochRow
from aniso.learn.heads import Head
from aniso.learn.lora import Adapter
from aniso.progress import ProgressCallback
from aniso.weights import TensorMap


@final
@dataclass(frozen=True)
class RunOptions:
    """How work is carried out; the result does not depend on it."""

    data: Path | None = None
    """Where data sets lie, and what tasks that begin with ./ are below."""
    workers: int = 0
    device: str | None = None
    """The graphics card if there is one, unless said otherwise."""
    runtime: Runtime = field(default_factory=Runtime)
    directory: Path | None = None
    """For states to go on from."""
    resume: bool = False
    allow_env_change: bool = False
    progress: ProgressCallback | None = None
    epoch_done: Callable[[EpochRow], None] | None = None
    coefficients: Path | None = None
    """Where coefficients are kept that the same settings without a head have come to."""


@final
@dataclass(frozen=True)
class RunResult:
    """What came out."""

    metrics: dict[str, Any]
    inputs: dict[str, Any]
    names: dict[str, str]
    """What tasks are called that the setting gives by their place."""
    coefficients: Coefficients | None = None
    weights: TensorMap | None = None
    """All of the model's weights, if they were trained."""
    adapter: Adapter | MergedAdapter | None = None
    """What was trained in their place."""
    head: Head | None = None
    head_of: Mapping[str, str] = field(default_factory=dict)
    """What the head's features come from."""
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    content: Content | None = None
    """The files that it was made from."""
