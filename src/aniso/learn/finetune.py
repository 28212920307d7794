"""Fine-tune an encoder on a task, in its weights or in its tangent space, to make a task vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from aniso.compose import Tangent
from aniso.data import Labelled
from aniso.learn._training.trainable import Trainable
from aniso.learn.fit import fit
from aniso.learn.objectives import CrossEntropy
from aniso.models import Encoder, Wrapped
from aniso.progress import ProgressCallback
from aniso.records import EpochRow
from aniso.schedule import Schedule
from aniso.vectors.block import tied_names
from aniso.weights import TensorMap

PAPER = Schedule(epochs=10, lr=1e-5)
"""The paper's schedule for CLIP; epochs differ by dataset, see ``epochs`` in the catalogue."""


@dataclass(frozen=True)
class Tuned:
    """Result of ``finetune``: weights under the base's names, and the mean loss of every epoch."""

    weights: TensorMap
    losses: tuple[float, ...]
    model: nn.Module
    """The fine-tuned model; if linearised, its outputs are not those of ``weights``."""


def finetune(
    encoder: Encoder,
    split: Labelled,
    schedule: Schedule = PAPER,
    *,
    linearised: bool = False,
    decay: Literal["weights", "change"] = "weights",
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    allow_env_change: bool = False,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    epoch_done: Callable[[EpochRow], None] | None = None,
) -> Tuned:
    """Fine-tune an encoder with frozen class weights from prompts; the last epoch is kept.

    Args:
        linearised: train the model's linearisation at its weights.
        decay: what weight decay acts on in a linearised model, the ``weights`` or only their ``change``.

    The other options are those of ``fit``.
    """
    trainable = Trainable.weights(encoder, linearised=linearised, decay=decay)
    done = fit(
        trainable,
        CrossEntropy(split),
        schedule,
        seed=seed,
        directory=directory,
        resume=resume,
        allow_env_change=allow_env_change,
        workers=workers,
        progress=progress,
        epoch_done=epoch_done,
    )
    losses = tuple(row.loss for row in done.history if row.loss is not None)
    return Tuned(tuned_weights(encoder, trainable), losses, trainable.model)


def tuned_weights(encoder: Wrapped, trainable: Trainable) -> TensorMap:
    """Return all weights of the model, with the current values of those that are trained."""
    model = trainable.model
    moved = model.tuned() if isinstance(model, Tangent) else trainable.copied()
    tied = tied_names(encoder.weight_source())  # tied names share one trained tensor
    weights = {name: moved.get(tied.get(name, name), old) for name, old in encoder.state_dict().items()}
    return TensorMap(weights, encoder.name, config=encoder.model_config)
