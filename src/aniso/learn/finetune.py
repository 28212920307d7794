"""Making task vectors: an encoder fine-tuned on a task, in its weights or in its tangent space."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from aniso.compose import Tangent
from aniso.data import Labelled
from aniso.learn.loop import train
from aniso.learn.schedule import Schedule
from aniso.models import Encoder
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
    workers: int = 0,
    told: Callable[[int, float], None] | None = None,
) -> Tuned:
    """Train the image encoder, with class weights from prompts as a frozen head; the last epoch is kept.

    ``told`` is called after every epoch with its number, counted from 1, and its mean loss.
    """
    head = encoder.class_weights(split.classes)
    model, trained = _trainable(encoder, linearised)
    view = encoder.transforms.train
    losses = train(
        model, list(trained.values()), split, head, view, schedule, seed=seed, workers=workers, told=told
    )
    return Tuned(_weights(encoder, model, trained), losses, model)


def _trainable(encoder: Encoder, linearised: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of its own, and its trained tensors by name: those that are blocks, so not the text tower."""
    names = [part.key for block in encoder.layout.blocks for part in block.parts]
    if linearised:
        tangent = Tangent(encoder, names)
        return tangent, dict(zip(names, tangent.tau, strict=True))
    own = copy.deepcopy(encoder)
    parameters = dict(own.named_parameters())
    return own, {name: parameters[name].requires_grad_() for name in names}


def _weights(encoder: Encoder, model: nn.Module, trained: dict[str, Tensor]) -> TensorMap:
    moved = model.tuned() if isinstance(model, Tangent) else {n: t.detach() for n, t in trained.items()}
    state = {**encoder.state_dict(), **moved}
    return TensorMap(state, encoder.name, config=encoder.model_config)
