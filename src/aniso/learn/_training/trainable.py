"""What a run trains: a composition's coefficients, or a model's own weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from aniso.compose import CoefficientIndex, Composition, Tangent
from aniso.errors import UsageError
from aniso.learn.heads import Head
from aniso.learn.unwrap import model_of
from aniso.models import Wrapped
from aniso.records import JsonValue
from aniso.vectors import Kind
from aniso.weights.fingerprint import combined_hash, tensor_hash


@final
@dataclass(frozen=True)
class Trainable:
    """A model, and those of its tensors that are trained, by name."""

    model: nn.Module
    tensors: dict[str, Tensor]
    identity: Mapping[str, JsonValue]
    """Everything the model's outputs depend on beside these tensors, as JSON data."""
    slots: CoefficientIndex | None = None
    """Which vector and block every coefficient belongs to, if coefficients are trained."""
    head: Head | None = None
    """The classifier (default: class weights from prompts)."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of tensors that have their own, and no weight decay."""
    decayed_offsets: Mapping[str, Tensor] = field(default_factory=dict)
    """Added to tensors of the same name for weight decay: a linearised model decays theta0 + tau, not tau."""

    @classmethod
    def coefficients(cls, composition: Composition) -> Trainable:
        """Train the coefficients of a composition."""
        identity = {
            **model_of(composition).identity(),
            "bank": composition.bank.content_hash,
            "partition": composition.partition.as_dict(),
            "linearised": composition.linearised,
        }
        return cls(composition, {"values": composition.values}, identity, composition.index)

    @classmethod
    def weights(
        cls, encoder: Wrapped, *, linearised: bool = False, decay: Literal["weights", "change"] = "weights"
    ) -> Trainable:
        """Train the weights of a copy of the model: the tensors of its blocks, so not the text tower.

        ``decay`` is for linearised models, theta0 + tau: weight decay acts on the ``weights`` theta, as it
        does without linearisation, or only on their ``change`` tau.
        """
        own = dict(encoder.named_parameters(remove_duplicate=False))  # a block may be a buffer: BART's bias
        names = [part.key for block in encoder.layout.blocks for part in block.parts if part.key in own]
        identity = {**encoder.identity(), "trained": "weights", "linearised": linearised}
        if linearised:
            tangent = Tangent(encoder, names)
            offsets = tangent.tuned() if decay == "weights" else {}  # tau is zero: theta0
            tensors = dict(zip(names, tangent.tau, strict=True))
            return cls(tangent, tensors, {**identity, "decay": decay}, decayed_offsets=offsets)
        copied = copy.deepcopy(encoder)
        parameters = dict(copied.named_parameters(remove_duplicate=False))
        return cls(copied, {name: parameters[name].requires_grad_() for name in names}, identity)

    @classmethod
    def layer_norms(cls, encoder: Wrapped, *, without_last: int = 3) -> Trainable:
        """Train the layer norms of a copy of the model, except those of its last layers."""
        norms = [block for block in encoder.layout.blocks if block.kind is Kind.NORM]
        deepest = max((block.depth for block in norms if block.depth is not None), default=-1)
        names = [
            part.key
            for block in norms
            if block.depth is None or block.depth <= deepest - without_last
            for part in block.parts
        ]
        if not names:
            raise UsageError(
                "MODEL-NAME",
                f"'{encoder.name}' has no norms that can be trained",
                fix="train coefficients instead",
            )
        own = copy.deepcopy(encoder)
        parameters = dict(own.named_parameters())
        identity = {**encoder.identity(), "trained": "norms", "without_last": without_last}
        return cls(own, {name: parameters[name].requires_grad_() for name in names}, identity)

    def with_head(self, head: Head) -> Trainable:
        """Train a head's parameters as well."""
        if not head.rates:
            raise UsageError(
                "HEAD-FEATURES",
                f"head '{head.kind}' cannot be trained jointly: the features it learns from must not change",
                fix="leave out --joint to train it afterwards, or use --head tip",
            )
        own = {f"head.{name}": parameter for name, parameter in head.named_parameters()}
        rates = {f"head.{name}": rate for name, rate in head.rates.items()}
        start = {name: tensor_hash(tensor) for name, tensor in head.tensors().items()}
        identity = {
            **self.identity,
            "head": {"kind": head.kind, **head.settings(), "start": combined_hash(start)},
        }
        return replace(self, tensors={**self.tensors, **own}, identity=identity, head=head, rates=rates)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def count(self) -> int:
        """Number of trained values."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the trained tensors."""
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])

    def copied(self) -> dict[str, Tensor]:
        """Return copies of the trained tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
