"""What a run changes: a composition's coefficients, or a model's own weights."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.compose import Composition, Tangent
from aniso.compose.slots import Slots
from aniso.learn.evaluate import encoder_of
from aniso.models import Encoder


@final
@dataclass(frozen=True)
class Trained:
    """A model that gives features, and the tensors in it that are trained, by name."""

    model: nn.Module
    tensors: dict[str, Tensor]
    identity: dict[str, Any]
    """What the model is apart from these tensors, as plain data."""
    slots: Slots | None = None
    """What coefficients belong to, if coefficients are trained."""

    @classmethod
    def coefficients(cls, composition: Composition) -> Trained:
        identity = {
            **encoder_identity(encoder_of(composition)),
            "bank": composition.bank.content_hash,
            "partition": composition.partition.as_dict(),
            "linearised": composition.linearised,
        }
        return cls(composition, {"values": composition.values}, identity, composition.slots)

    @classmethod
    def weights(cls, encoder: Encoder, *, linearised: bool = False) -> Trained:
        """A model of its own; those tensors are trained that are blocks, so not the text tower."""
        names = [part.key for block in encoder.layout.blocks for part in block.parts]
        identity = {**encoder_identity(encoder), "trained": "weights", "linearised": linearised}
        if linearised:
            tangent = Tangent(encoder, names)
            return cls(tangent, dict(zip(names, tangent.tau, strict=True)), identity)
        own = copy.deepcopy(encoder)
        parameters = dict(own.named_parameters())
        return cls(own, {name: parameters[name].requires_grad_() for name in names}, identity)

    @property
    def count(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])

    def copied(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}


def encoder_identity(encoder: Encoder) -> dict[str, Any]:
    """Its weights, what class weights are made of, and how it sees pictures."""
    pixels = asdict(encoder.transforms.pixels)
    return {"model": encoder.fingerprint, "text": encoder.text_fingerprint, "pixels": pixels}
