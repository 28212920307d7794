"""Making task vectors: an encoder fine-tuned on a task, in its weights or in its tangent space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from aniso.compose import Tangent
from aniso.data import Labelled
from aniso.learn._training.loop import Row
from aniso.learn._training.trainable import Trainable
from aniso.learn.fit import fit
from aniso.learn.objectives import CrossEntropy
from aniso.learn.schedule import Schedule
from aniso.models import Encoder, Wrapped
from aniso.progress import ProgressCallback
from aniso.vectors.block import tied_names
from aniso.weights import TensorMap

PAPER = Schedule(epochs=10, lr=1e-5)
"""The paper's recipe for CLIP; epochs differ by data set, see ``epochs`` in the cards."""


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model's weights under the base's names, and the mean loss of every epoch."""

    weights: TensorMap
    losses: tuple[float, ...]
    model: nn.Module
    """The model itself: for a linearised one its output is not that of its weights."""


def finetune(
    encoder: Encoder,
    split: Labelled,
    schedule: Schedule = PAPER,
    *,
    linearised: bool = False,
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    allow_env_change: bool = False,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    epoch_done: Callable[[Row], None] | None = None,
) -> Tuned:
    """Train the image encoder, with class weights from prompts as a frozen head; the last epoch is kept.

    The other options are those of ``fit``.
    """
    trained = Trainable.weights(encoder, linearised=linearised)
    done = fit(
        trained,
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
    return Tuned(
        tuned_weights(encoder, trained), tuple(row["loss"] for row in done.history[1:]), trained.model
    )


def tuned_weights(encoder: Wrapped, trained: Trainable) -> TensorMap:
    """All of the model's weights, those that were trained as they are now."""
    moved = trained.model.tuned() if isinstance(trained.model, Tangent) else trained.copied()
    tied = tied_names(encoder.weight_source())  # all names of a tensor get what was trained under one
    weights = {name: moved.get(tied.get(name, name), old) for name, old in encoder.state_dict().items()}
    return TensorMap(weights, encoder.name, config=encoder.model_config)
